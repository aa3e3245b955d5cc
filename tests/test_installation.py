"""Aion as users have it: a wheel outside the checkout, with extras and without, beside modules of other people."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import aion
from aion.errors import DISTRIBUTION, EXTRAS, ConfigError

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("aion", "state_backends", "policies", "experiments")

LOCAL = """
import pyarrow as pa, aion
from aion import aggregates as A
ts = pa.array([1_000_000, 2_000_000], pa.timestamp("us", "UTC"))
with aion.LocalOperator(windows=aion.Tumbling("1 minute"), time="ts", key="k", aggregates={AGGREGATES}) as operator:
    operator.process(pa.table({"k": [7, 7], "ts": ts}))
    print(aion.__file__, operator.advance(60_000_000)["n"].to_pylist())
"""


def run(words: Sequence[str | Path], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In another folder, without what the tests' own environment says of Python's path."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        list(map(str, words)), cwd=folder, env=inherited | environment, capture_output=True, text=True, check=False
    )


# -- a wheel ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "--no-build-isolation", "--wheel-dir", folder]
    made = run([*build, "--quiet"], folder)
    assert made.returncode == 0, made.stderr
    (found,) = folder.glob("*.whl")
    return found


def requirements(name: str, extras: Sequence[str] = ()) -> Iterator[Distribution]:
    """The distributions that pip would install."""
    told = PROJECT["dependencies"] if name == DISTRIBUTION else distribution(name).requires or ()
    if name == DISTRIBUTION:
        told = [*told, *(line for extra in extras for line in PROJECT["optional-dependencies"][extra])]
    for line in told:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in (extras or ("",))):
            if requirement.name != DISTRIBUTION:
                yield distribution(requirement.name)
            yield from requirements(requirement.name, sorted(requirement.extras))


def environment(folder: Path, wheel: Path, extras: Sequence[str] = ()) -> Path:
    """A new environment with the wheel and links to what it requires, and nothing else; returns its programs."""
    made = run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    assert made.returncode == 0, made.stderr
    (site,) = (folder / "lib").glob("python*/site-packages")
    for required in {found.name: found for found in requirements(DISTRIBUTION, extras)}.values():
        for top in {file.parts[0] for file in required.files or () if file.parts[0] not in ("..", "__pycache__")}:
            target = Path(str(required.locate_file(top)))
            if target.exists() and not (site / top).exists():
                (site / top).symlink_to(target)
    programs = folder / "bin"
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "--no-deps", "--quiet", wheel]
    installed = run(pip, folder)
    assert installed.returncode == 0, installed.stderr
    return programs


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of an environment without extras, as an executor may have it."""
    return environment(tmp_path_factory.mktemp("bare") / "venv", wheel)


@pytest.fixture(scope="module")
def with_cli(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("cli") / "venv", wheel, ["cli"])


@pytest.mark.proof
def test_a_wheel_holds_all_packages_their_types_and_the_presets(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
    tracked = {str(p.relative_to(ROOT)) for package in PACKAGES for p in (ROOT / package).rglob("*") if p.is_file()}
    assert {name for name in tracked if "__pycache__" not in name} <= names
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert {"policies/standard.yaml", "policies/low_memory.yaml"} <= names
    assert not [name for name in names if name.startswith("tests")]


@pytest.mark.proof
def test_a_wheel_works_outside_the_checkout(with_cli: Path, tmp_path: Path) -> None:
    local = run([with_cli / "python", "-c", LOCAL.replace("{AGGREGATES}", "{'n': A.count()}")], tmp_path)
    assert local.stderr == ""
    place, panes = local.stdout.split(" ", 1)
    assert panes.strip() == "[2]"
    assert Path(place).is_relative_to(with_cli.parent)
    said = {
        f"aion {aion.__version__}": ["--version"],
        "low_memory: ok": ["policy", "check", "low_memory"],
        '"$defs"': ["policy", "schema"],
    }
    for text, words in said.items():
        done = run([with_cli / "aion", *words], tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert text in done.stdout


@pytest.mark.proof
def test_an_executor_needs_neither_plots_nor_a_command_line(bare: Path, tmp_path: Path) -> None:
    local = run([bare / "python", "-c", LOCAL.replace("{AGGREGATES}", "{'n': A.count()}")], tmp_path)
    assert (local.stderr, local.stdout.split(" ", 1)[1].strip()) == ("", "[2]")
    works = "import aion.spark.work, aion.spark.windows_task, aion.spark.stream, state_backends.server.main"
    assert run([bare / "python", "-c", works], tmp_path).stderr == ""


@pytest.mark.proof
@pytest.mark.parametrize("words", [["aion", "policy", "check", "standard"], ["python", "-m", "aion"]])
def test_without_the_command_lines_packages_the_command_says_so(bare: Path, tmp_path: Path, words: list[str]) -> None:
    done = run([bare / words[0], *words[1:]], tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"[^\n]*pip install 'aion\[cli\]'\n", done.stderr)


@pytest.mark.proof
@pytest.mark.parametrize("function", ["approx_count_distinct('k')", "approx_percentile('k', 0.5)"])
def test_an_aggregate_without_its_package_is_refused_with_the_first_table(
    bare: Path, tmp_path: Path, function: str
) -> None:
    done = run([bare / "python", "-c", LOCAL.replace("{AGGREGATES}", f"{{'n': A.{function}}}")], tmp_path)
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith("aion.errors.MissingExtra: approx_")
    assert last.endswith("needs the package 'datasketches', which is not installed: pip install 'aion[sketches]'")


@pytest.mark.proof
def test_a_metrics_port_without_its_package_is_logged(bare: Path, tmp_path: Path) -> None:
    program = (
        "from state_backends.server.endpoint import MetricsEndpoint; e = MetricsEndpoint(dict); e.serve(0); e.close()"
    )
    done = run([bare / "python", "-c", program], tmp_path)
    assert done.returncode == 0
    assert "pip install 'aion[metrics]'" in done.stderr


@pytest.mark.proof
@pytest.mark.parametrize("words", [["demo"], ["experiment", "slicing"]])
def test_what_draws_figures_says_at_once_that_it_cannot(with_cli: Path, tmp_path: Path, words: list[str]) -> None:
    done = run([with_cli / "aion", *words], tmp_path)
    assert done.returncode == 2
    assert re.search(r"pip install 'aion\[(demo|experiments)\]'", done.stderr)
    assert list(tmp_path.iterdir()) == []


MODULES = {"grpcio": "grpc", "grpcio_status": "grpc_status", "googleapis_common_protos": None}
"""The modules of distributions that are not called like them. None: it is a part of the package `google`."""


def test_the_extras_that_errors_name_are_those_that_can_be_installed() -> None:
    told = PROJECT["optional-dependencies"]
    assert PROJECT["name"] == DISTRIBUTION
    for extra, modules in EXTRAS.items():
        names = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in told[extra]}
        names = {MODULES.get(name, name) for name in names} - {None}
        assert names - {DISTRIBUTION} == set(modules), extra
    assert issubclass(aion.errors.MissingExtra, ConfigError | ImportError)


def test_versions_of_what_is_tested_are_within_the_bounds() -> None:
    for line in PROJECT["dependencies"]:
        requirement = Requirement(line)
        try:
            version = distribution(requirement.name).version
        except PackageNotFoundError:
            pytest.fail(f"{requirement.name} is not installed")
        assert version in requirement.specifier, line
    bounded = {Requirement(line).name for line in PROJECT["dependencies"] if "<" in line}
    assert {"pyspark", "pandas"} <= bounded


# -- other people's modules of the same name ------------------------------------------------------------


def plant(folder: Path, kind: str, name: str) -> Path:
    if kind == "module":
        file = folder / f"{name}.py"
    else:
        file = folder / name / "__init__.py"
        file.parent.mkdir()
    file.write_text("")
    return file


@pytest.mark.parametrize("kind", ["module", "package"])
@pytest.mark.parametrize("name", ["policies", "state_backends"])
def test_a_module_of_the_same_name_is_named_by_the_import(tmp_path: Path, kind: str, name: str) -> None:
    file = plant(tmp_path, kind, name)
    done = run([sys.executable, "-c", "import aion"], tmp_path, PYTHONPATH=str(ROOT))
    *_, last = done.stderr.strip().splitlines()
    # The base of all errors of Aion is in state_backends.
    error = "ImportError" if name == "state_backends" else "aion.errors.ShadowedPackage"
    assert last.startswith(f"{error}: {file} shadows Aion's own package {name!r}")
    assert str(ROOT / name) in last


def test_one_that_was_imported_before_is_named_as_well(tmp_path: Path) -> None:
    file = plant(tmp_path, "package", "policies")
    program = "import policies\ntry:\n    import aion\nexcept ImportError as error:\n    print(error)"
    done = run([sys.executable, "-c", program], tmp_path, PYTHONPATH=str(ROOT))
    assert done.stdout.startswith(f"{file} shadows")


def test_a_folder_of_that_name_without_code_is_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    done = run([sys.executable, "-c", "import aion, policies.sizing"], tmp_path, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stderr) == (0, "")


def test_experiments_of_the_users_own_are_only_in_the_command_lines_way(tmp_path: Path) -> None:
    file = plant(tmp_path, "package", "experiments")
    done = run([sys.executable, "-c", "import aion, experiments; aion.LocalOperator"], tmp_path, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stderr) == (0, "")
    done = run([sys.executable, "-m", "aion", "--version"], tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 2
    assert done.stderr.startswith(f"{file} shadows Aion's own package 'experiments'")


@pytest.mark.proof
def test_it_can_be_imported_from_a_zip_file(wheel: Path, tmp_path: Path) -> None:
    """As with spark-submit --py-files."""
    done = run(
        [sys.executable, "-c", "import aion, policies; print(policies.__file__)"], tmp_path, PYTHONPATH=str(wheel)
    )
    assert done.stderr == ""
    assert done.stdout.startswith(str(wheel))
