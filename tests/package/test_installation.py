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
from aion.spark import NEWEST, OLDEST, numbers

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SPARK = PROJECT["optional-dependencies"]["spark"]
PACKAGES = ("aion", "state_backends", "policies")

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
def with_spark(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("spark") / "venv", wheel, ["spark"])


@pytest.fixture(scope="module")
def with_cli(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("cli") / "venv", wheel, ["cli"])


PANDAS_3 = """
import sys
from pathlib import Path

import pandas as pd
from pyspark.sql import SparkSession, functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import aion
from aion import aggregates as A


class Counts(StatefulProcessor):
    def init(self, handle):
        self.seen = handle.getValueState("seen", "n int")

    def handleInputRows(self, key, rows, times):
        before = self.seen.get()[0] if self.seen.exists() else 0
        self.seen.update((before + sum(map(len, rows)),))
        yield pd.DataFrame({"k": [key[0]], "n": [self.seen.get()[0]]})

    def close(self):
        pass


def come():
    rows = spark.range(120).select(F.timestamp_seconds("id").alias("ts"), F.when(F.col("id") % 2 == 0, "a").alias("k"))
    rows.coalesce(1).write.mode("append").parquet("events")


def written(result, name):
    writer = result.writeStream.format("parquet").option("path", name).option("checkpointLocation", f"{name}-cp")
    writer.trigger(availableNow=True).start().awaitTermination()
    return sorted(map(tuple, spark.read.parquet(name).select("k", "n").collect()), key=str)


builder = SparkSession.builder.master("local[1]").config("spark.sql.shuffle.partitions", "1")
builder = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
spark = aion.configure(builder, state_dir=str(Path("state").absolute())).getOrCreate()
come()
events = spark.readStream.schema("ts timestamp, k string").parquet("events")
counts = aion.group_by(events, "k").transformWithStateInPandas(Counts(), "k string, n int", "Update", "None")
print(written(counts, "counts"))
come()
print(written(counts, "counts"))
cars = aion.windowed(
    events.withWatermark("ts", "1 second"), key="k", time="ts", windows=aion.Tumbling("1 minute"),
    aggregates={"n": A.count()},
)
print(written(cars, "cars"))
print(pd.__version__.split(".")[0])
"""


@pytest.mark.proof
def test_queries_run_with_pandas_3(wheel: Path, tmp_path: Path) -> None:
    """pyspark warns, and all values are right, those of a null key included."""
    programs = environment(tmp_path / "venv", wheel, ["spark"])
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for other in site.glob("pandas*"):
        other.unlink()
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", "--quiet", "pandas>=3,<4"]
    installed = run(pip, tmp_path)
    assert installed.returncode == 0, installed.stderr
    done = run([programs / "python", "-c", PANDAS_3], tmp_path, PYSPARK_PYTHON=str(programs / "python"))
    assert "does not yet fully support pandas >= 3" in done.stderr
    once, twice = [("a", 60), (None, 60)], [("a", 120), ("a", 60), (None, 120), (None, 60)]
    assert done.stdout.splitlines() == [*map(str, (once, twice, once)), "3"], done.stderr[-3000:]


@pytest.mark.proof
def test_a_wheel_holds_all_packages_their_types_and_the_presets(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
    tracked = {str(p.relative_to(ROOT)) for package in PACKAGES for p in (ROOT / package).rglob("*") if p.is_file()}
    assert {name for name in tracked if "__pycache__" not in name} <= names
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert {"policies/standard.yaml", "policies/low_memory.yaml"} <= names
    assert not [name for name in names if name.startswith(("tests", "experiments"))]


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
    assert run([bare / "python", "-c", "import state_backends.server.main"], tmp_path).stderr == ""


@pytest.mark.proof
def test_an_executor_needs_spark_and_nothing_else(with_spark: Path, tmp_path: Path) -> None:
    works = (
        "import aion.spark.tasks.work, aion.spark.tasks.windows_task, aion.spark.api.stream, state_backends.server.main"
    )
    assert run([with_spark / "python", "-c", works], tmp_path).stderr == ""


NO_SPARK = "Aion on Spark needs the package 'pyspark', which is not installed: pip install 'aion[spark]'"


@pytest.mark.proof
def test_without_spark_what_needs_it_says_so(bare: Path, with_cli: Path, tmp_path: Path) -> None:
    for name in ("configure", "windowed", "read_files"):
        done = run([bare / "python", "-c", f"import aion; aion.{name}"], tmp_path)
        assert done.stderr.strip().splitlines()[-1] == f"aion.errors.MissingExtra: {NO_SPARK}"
    done = run([with_cli / "aion", "rescale", tmp_path, "2"], tmp_path)
    assert (done.returncode, done.stderr.strip()) == (2, NO_SPARK)
    done = run([with_cli / "aion", "inspect", tmp_path], tmp_path)
    assert (done.returncode, "pyspark" in done.stderr) == (2, False), "it needs no Spark to say that there is no state"


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize(("version", "ok"), [("3.5.1", False), ("4.0.0", False), ("4.1.0.dev1", True), ("4.4.0", True)])
def test_a_platforms_own_pyspark_must_be_new_enough(tmp_path: Path, version: str, ok: bool) -> None:
    """pip knows nothing of it."""
    package = tmp_path / "pyspark" / "__init__.py"
    package.parent.mkdir()
    package.write_text(f"__version__ = {version!r}")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    done = run([sys.executable, "-c", "import aion.spark"], tmp_path, PYTHONPATH=path)
    says = f"ConfigError: pyspark {version} ({package}) is too old: Aion needs Spark 4.1 to 4.3."
    assert (done.stderr == "") if ok else says in done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_pyspark_newer_than_all_that_were_tested_is_warned_of(tmp_path: Path) -> None:
    program = (
        "import pyspark; pyspark.__version__ = '4.9.0'; from pyspark.sql import SparkSession; import aion; "
        "aion.configure(SparkSession.builder)"
    )
    done = run([sys.executable, "-c", program], tmp_path, PYTHONPATH=str(ROOT))
    assert done.stderr == "pyspark 4.9.0 is newer than all that Aion was tested with, up to 4.3\n"


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
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["demo"], "pip install 'aion[demo]'"),
        (["experiment", "slicing", "--seed", "1"], "aion experiment needs the experiments, which are in a checkout"),
        (["tune", "--workload", "average"], "--workload needs the experiments, which are in a checkout of Aion"),
    ],
)
def test_what_cannot_run_here_says_so_at_once(with_cli: Path, tmp_path: Path, words: list[str], said: str) -> None:
    done = run([with_cli / "aion", *words], tmp_path)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
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
    for line in [*PROJECT["dependencies"], *SPARK]:
        requirement = Requirement(line)
        try:
            version = distribution(requirement.name).version
        except PackageNotFoundError:
            pytest.fail(f"{requirement.name} is not installed")
        assert version in requirement.specifier, line
    bounded = {Requirement(line).name for line in [*PROJECT["dependencies"], *SPARK] if "<" in line}
    assert {"pyspark", "pandas"} <= bounded


def test_the_versions_of_python_are_those_that_spark_carries_and_pages_name() -> None:
    ours, theirs = (
        sorted(minor for line in lines if (minor := line.rpartition("Python :: 3.")[2]).isdecimal())
        for lines in (PROJECT["classifiers"], distribution("pyspark").metadata.get_all("Classifier") or ())
    )
    assert ours == theirs
    for page in ("README.md", "docs/operate/deploy.md"):
        assert f"3.{ours[0]} to 3.{ours[-1]}" in (ROOT / page).read_text()
    assert PROJECT["requires-python"] == f">=3.{ours[0]}"


def test_the_versions_of_pyspark_are_those_of_the_extra() -> None:
    (line,) = SPARK
    allowed = Requirement(line).specifier
    (major, oldest), (_, newest) = map(numbers, (OLDEST, NEWEST))
    assert [minor for minor in range(20) if f"{major}.{minor}.1" in allowed] == list(range(oldest, newest + 1))


# -- a platform on which it cannot work -----------------------------------------------------------------

WINDOWS = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "pwd", "grp", "termios"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
sys.platform = "win32"
"""
"""What a Python on Windows does not have."""


@pytest.mark.parametrize(
    "words",
    [
        ["-c", "import aion"],
        ["-c", "from aion import LocalOperator"],
        ["-m", "aion", "--help"],
        ["-c", "from aion.__main__ import main; main()"],
        ["-c", "import state_backends.server.client"],
    ],
)
def test_on_windows_the_first_error_says_what_to_use_instead(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "sitecustomize.py").write_text(WINDOWS)
    done = run([sys.executable, *words], tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    *_, last = done.stderr.strip().splitlines()
    assert done.returncode == 1
    assert re.search(r"Error[^\n]*: Aion does not run on Windows, .*'fcntl'.*WSL2.*container", last), done.stderr
    assert last.count("Error") == 1, "nothing was raised while this was"


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


@pytest.mark.slow
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
