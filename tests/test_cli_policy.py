"""What is shipped of policies agrees with the model; what the command line prints, where, with which code."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import yaml
from typer.testing import CliRunner, Result

import aion
from aion import cli, config
from aion.config import Policy, load_policy
from aion.errors import MissingJava, PolicyError

ROOT = Path(__file__).parent.parent
POLICIES = ROOT / "policies"
PRESETS = ["demo", "disk_only", "low_memory", "memory_only", "standard"]


# -- model, presets, comments and schema agree --------------------------------------------------------


def test_the_presets_are_those_that_are_promised() -> None:
    assert config.presets() == PRESETS
    loaded = {name: load_policy(name) for name in PRESETS}
    standard = config.policy_to_json(Policy())

    def differing(name: str) -> dict[str, object]:
        return {
            f"{section}.{key}": value
            for section, keys in config.policy_to_json(loaded[name]).items()
            for key, value in keys.items()
            if value != standard[section][key]
        }

    assert differing("standard") == {}
    assert differing("memory_only") == {"state.backend": "memory"}
    assert differing("disk_only") == {"state.backend": "rocksdb"}
    assert differing("low_memory") == {
        "state.compression": "zstd", "memory.budget": "64MiB", "memory.bucket_limit": "8MiB",
    }  # fmt: skip
    assert differing("demo") == {
        "memory.budget": "256KiB", "memory.bucket_limit": "32KiB", "lateness.initial_bound": "3 days",
    }  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_every_key_of_the_model_is_in_every_preset_with_a_comment(name: str) -> None:
    documented: dict[str, str] = {}
    section, comment = "", ""
    for line in (POLICIES / f"{name}.yaml").read_text().splitlines():
        if line.lstrip().startswith("#"):
            comment += line.lstrip(" #") + " "
            continue
        if line and not line.startswith(" "):
            section = line.rstrip(":")
        elif line:
            documented[f"{section}.{line.split(':')[0].strip()}"] = comment
        comment = ""
    assert list(documented) == [doc.key for doc in config.describe()]
    for key, text in documented.items():
        assert text, f"{key} has no comment in {name}.yaml"
        for choice in choices(key):
            assert re.search(rf"\b{choice}\b", text), f"the comment of {key} in {name}.yaml is silent on {choice}"


def choices(key: str) -> list[str]:
    section, name = key.split(".")
    field = {
        f.alias or n: f for n, f in type(getattr(Policy(), section)).model_fields.items()
    }[name]  # fmt: skip
    return [choice for choice in get_args(field.annotation) if isinstance(choice, str)]


def test_every_key_is_described() -> None:
    docs = {doc.key: doc for doc in config.describe()}
    assert all(doc.doc and doc.type for doc in docs.values())
    assert docs["memory.budget"].default == "512MiB"
    assert docs["lateness.initial_bound"].default == "10 minutes"
    assert docs["state.backend"].type == "tiered | memory | rocksdb"
    assert docs["state.shards"].type == "auto, or an integer from 1"


def test_the_schema_in_the_repository_is_the_one_of_the_model() -> None:
    regenerate = "python -m aion.cli policy schema > policies/schema.json"
    assert json.loads((POLICIES / "schema.json").read_text()) == config.json_schema(), regenerate


def matches(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None) -> bool:
    """The part of JSON schema that ours uses."""
    root = root or schema
    if "$ref" in schema:
        return matches(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    if "anyOf" in schema:
        return any(matches(value, option, root) for option in schema["anyOf"])
    if "const" in schema:
        return type(value) is type(schema["const"]) and value == schema["const"]
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "object":
            known = schema["properties"]
            return isinstance(value, dict) and all(k in known and matches(v, known[k], root) for k, v in value.items())
        case "integer":
            return type(value) is int and value >= schema.get("minimum", value)
        case "string":
            return isinstance(value, str) and re.search(schema.get("pattern", ""), value) is not None
        case "null":
            return value is None
    raise AssertionError(schema)


@pytest.mark.parametrize("name", PRESETS)
def test_the_presets_fit_the_schema(name: str) -> None:
    assert matches(yaml.safe_load((POLICIES / f"{name}.yaml").read_text()), config.json_schema())


@pytest.mark.parametrize(
    ("key", "values"),
    [
        (
            "memory.budget",
            [0, 1 << 40, "64MiB", "64 mib", "1.5 GB", "1.5", "99999999999", "512m", "5 %", True, None],
        ),
        ("lateness.initial_bound", [0, 10, "10", "10m", "1 hour 30 minutes", "1.5h", "-5m", "", None, True]),
        ("state.shards", [0, 1, "auto", "all", None, True]),
        ("state.backend", ["tiered", "rocksdb", "Tiered", None]),
        ("state.dir", [None, "/x", "s3://x", 5]),
        ("state.unknown", [1]),
        ("unknown.key", [1]),
    ],
)
def test_the_schema_accepts_what_a_file_may_say(tmp_path: Path, key: str, values: list[object]) -> None:
    section, name = key.split(".")
    file = tmp_path / "mine.yaml"
    for value in values:
        tree = {section: {name: value}}
        try:
            file.write_text(yaml.safe_dump(tree))
            load_policy(file)
            accepted = True
        except PolicyError:
            accepted = False
        assert matches(tree, config.json_schema()) == accepted, (key, value)


# -- the command line ---------------------------------------------------------------------------------


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def words(text: str) -> str:
    """What a table says, without its frame and its line breaks."""
    columns = [line.split("│")[1:-1] for line in text.splitlines() if "│" in line]
    return " | ".join(" ".join(" ".join(column).split()) for column in zip(*columns, strict=True))


def test_the_version() -> None:
    assert run("--version").stdout == f"aion {aion.__version__}\n"


def test_help_names_the_commands() -> None:
    for command in ("demo", "experiment", "policy"):
        assert command in run("--help").stdout


# -- check --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_check_of_what_is_right(preset: str) -> None:
    file = str(ROOT / "policies" / f"{preset}.yaml")
    for name in (preset, file):
        result = run("policy", "check", name)
        assert (result.exit_code, result.stdout) == (0, f"{name}: ok\n")


def test_check_tells_each_error_on_one_line_with_its_line_number(tmp_path: Path) -> None:
    file = tmp_path / "a rather long name, so that a narrow terminal would like to break the line.yaml"
    file.write_text("memory:\n  budgt: 1GiB\n  bucket_limit: 64 megs\nlateness: {initial_bound: -5m}\n")
    result = run("policy", "check", str(file))
    assert result.exit_code == 1
    first, second, third = result.stdout.splitlines()
    assert first.startswith(f"{file}:2: memory.budgt: unknown key; did you mean memory.budget?")
    assert second.startswith(f"{file}:3: memory.bucket_limit: '64 megs' has the unknown unit 'megs'")
    assert third.startswith(f"{file}:4: lateness.initial_bound: '-5m' is negative")
    assert "Traceback" not in result.output


def test_check_of_a_file_that_is_not_there() -> None:
    result = run("policy", "check", "nowhere.yaml")
    assert result.exit_code == 1
    assert "'nowhere.yaml' is no preset and cannot be read as a file (No such file" in result.stdout


# -- explain ------------------------------------------------------------------------------------------


def test_explain_has_the_numbers_of_the_policy(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "state: {compression: lz4, shards: 6, dir: s3://bucket/state}\n"
        "memory: {budget: 96MiB, bucket_limit: 32MiB}\n"
        "blocks: {target: 3MiB}\n"
        "lateness: {initial_bound: 45m}\n"
    )
    result = run("policy", "explain", str(file))
    told = words(result.stdout)
    assert result.exit_code == 0
    for part in (
        "blocks of about 3MiB, compressed with lz4, and shuffled to 6 shards",
        "until its m-bucket has 32MiB, or all m-buckets of the host 96MiB (3 such windows fit at a time)",
        "committed to s3://bucket/state",
        "within the bound of 45 minutes",
        "the watermark reaches 2025-01-01T12:01:00Z, its end",
        "the watermark reaches 2025-01-01T12:46:00Z, its end plus the bound",
        "They go straight to its p-bucket",
    ):
        assert part in told, told


@pytest.mark.parametrize(
    ("preset", "part"),
    [
        ("standard", "it is read from memory first, then from RocksDB"),
        ("memory_only", "All of them stay in memory"),
        ("disk_only", "All of them go to RocksDB"),
        ("low_memory", "compressed with zstd"),
        ("demo", "the watermark reaches 2025-01-04T12:01:00Z, its end plus the bound"),
    ],
)
def test_explain_of_the_presets(preset: str, part: str) -> None:
    assert part in words(run("policy", "explain", preset).stdout)


def test_without_a_bound_there_is_no_late_execution(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("lateness: {initial_bound: 0}")
    told = words(run("policy", "explain", str(tmp_path / "mine.yaml")).stdout)
    assert "at once, because the bound is 0" in told
    assert "kind late" not in told


# -- schema -------------------------------------------------------------------------------------------


def test_schema_prints_the_file_in_the_repository() -> None:
    result = run("policy", "schema")
    assert json.loads(result.stdout) == config.json_schema()
    assert result.stdout == (ROOT / "policies" / "schema.json").read_text()


# -- errors, exit codes, start ------------------------------------------------------------------------


def test_an_error_of_aion_is_one_line_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("state: {backend: '[red]redis'}")
    result = run("policy", "explain", str(tmp_path / "mine.yaml"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "mine.yaml:1: state.backend: '[red]redis' is not possible; write 'tiered'" in result.stderr


def test_the_console_script_ends_with_the_code_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["aion", "policy", "explain", "nowhere"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "'nowhere' is no preset" in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


@pytest.mark.parametrize("equal", [True, False])
def test_demo_passes_on_its_options_and_the_verdict(monkeypatch: pytest.MonkeyPatch, equal: bool) -> None:
    seen: list[object] = []

    def fake(flights: int, out: Path) -> int:
        seen.append((flights, out))
        return 0 if equal else 1

    monkeypatch.setitem(sys.modules, "experiments.demo", SimpleNamespace(run=fake))
    assert run("demo", "--flights", "7", "--out", "there").exit_code == (0 if equal else 1)
    assert run("demo").exit_code == (0 if equal else 1)
    assert seen == [(7, Path("there")), (0, Path("out"))]


def test_demo_without_java_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(flights: int, out: Path) -> int:
        raise MissingJava("no Java found; install Java 17 or 21")

    monkeypatch.setitem(sys.modules, "experiments.demo", SimpleNamespace(run=fake))
    result = run("demo")
    assert (result.exit_code, result.stderr) == (2, "no Java found; install Java 17 or 21\n")


def test_a_negative_number_of_flights_is_a_usage_error() -> None:
    assert run("demo", "--flights", "-1").exit_code == 2


def test_experiments_are_a_command() -> None:
    result = run("experiment", "--help")
    assert result.exit_code == 0
    assert "ingest" in result.stdout


def test_the_command_line_starts_without_what_is_heavy() -> None:
    code = (
        "import sys, aion.cli; "
        "heavy = {'pyspark', 'pandas', 'matplotlib', 'pydantic', 'scipy'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
