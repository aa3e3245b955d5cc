"""What is shipped of policies agrees with the model; what the command line prints, where, with which code."""

from __future__ import annotations

import json
import math
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
from aion import __main__ as program
from aion import cli, config
from aion.config import Policy, load_policy
from aion.config.reference import purpose
from aion.errors import MissingJava, PolicyError
from policies.destage import MemoryView, Suggestion, WindowView
from state_backends import backends

ROOT = Path(__file__).parents[2]
POLICIES = ROOT / "policies"
PRESETS = ["demo", "disk_only", "low_latency", "low_memory", "memory_only", "standard"]


# -- model, presets, comments and schema agree --------------------------------------------------------


def test_the_presets_are_those_that_are_promised() -> None:
    assert config.presets() == PRESETS
    assert config.differences("standard") == {}
    assert config.differences("memory_only") == {"state.backend": "memory"}
    assert config.differences("disk_only") == {"state.backend": "rocksdb"}
    assert config.differences("low_memory") == {
        "state.compression": "zstd", "memory.budget": "64MiB", "memory.bucket_limit": "8MiB",
        "memory.moderate": 0.6, "memory.scarce": 0.8,
        "destage.idle_after": "30 seconds", "io.codec_threads": 1, "apply.memory": "64MiB",
    }  # fmt: skip
    assert config.differences("low_latency") == {
        "memory.budget": "50%", "memory.bucket_limit": "256MiB", "memory.moderate": 0.85,
        "memory.scarce": 0.95, "memory.victim": "slowest", "destage.keep_fraction": 0.1, "io.codec_threads": 4,
        "trigger.kind": "every_batch",
    }  # fmt: skip
    assert config.differences("demo") == {
        "memory.budget": "256KiB", "memory.bucket_limit": "32KiB", "lateness.initial_bound": "3 days",
        "lateness.coverage": None,
        "trigger.kind": "every_batch",
    }  # fmt: skip


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "standard"])
def test_a_preset_is_what_differs_from_the_standard(name: str) -> None:
    written = yaml.safe_load((POLICIES / f"{name}.yaml").read_text())
    assert [f"{section}.{key}" for section, keys in written.items() for key in keys] == list(config.differences(name))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_shown_whole_with_a_comment_on_every_key(name: str, tmp_path: Path) -> None:
    shown = run("policy", "show", name).stdout
    (tmp_path / "mine.yaml").write_text(shown)
    assert load_policy(tmp_path / "mine.yaml") == load_policy(name)
    comments: dict[str, str] = {}
    section, comment = "", ""
    for line in shown.splitlines():
        if line.lstrip().startswith("#"):
            comment += line.lstrip(" #") + " "
            continue
        if line and not line.startswith(" "):
            section = line.rstrip(":")
        elif line:
            comments[f"{section}.{line.split(':')[0].strip()}"] = comment
        comment = ""
    assert list(comments) == [doc.key for doc in config.describe()]
    for key, text in comments.items():
        assert text, f"{key} has no comment"
        for choice in choices(key):
            assert re.search(rf"\b{choice}\b", text), f"the comment of {key} is silent on {choice}"


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
    assert (docs["destage.class"].default, docs["destage.arguments"].default) == (None, {})
    assert "3x" in docs["destage.idle_after"].type
    assert docs["lateness.initial_bound"].default == "10 minutes"
    assert docs["state.backend"].type == "tiered | memory | rocksdb"
    assert docs["state.shards"].type == "auto, or an integer from 1 to 32,768"


def test_the_standard_in_the_repository_is_the_one_of_the_model() -> None:
    regenerate = "python -m aion.cli policy show standard > policies/standard.yaml"
    assert (POLICIES / "standard.yaml").read_text() == config.policy_file("standard"), regenerate


def test_the_reference_has_each_key_and_each_preset() -> None:
    reference = config.policy_docs()
    for doc in config.describe():
        default = config.setting_text(doc.default)
        assert f"\n### {doc.key}\n\n{doc.type}; default: `{default}`\n\n{doc.doc[0]}\n" in reference
    for preset in config.presets():
        assert f"[`{preset}`](../policies/{preset}.yaml): {purpose(preset)}" in reference
        assert all(f"- `{key}: {config.setting_text(v)}`" in reference for key, v in config.differences(preset).items())


def test_the_page_on_policies_lists_the_presets() -> None:
    page = (ROOT / "docs/reference/policies.md").read_text()
    for preset in config.presets():
        assert f"| [`{preset}`](../../policies/{preset}.yaml) | {purpose(preset)} |" in page


def test_the_example_of_the_page_on_policies_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/reference/policies.md").read_text()
    module, yaml_text = re.findall(r"```(?:python\n# mine.py|yaml)(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text("#" + module)
    (tmp_path / "mine.yaml").write_text(yaml_text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    destage = load_policy(tmp_path / "mine.yaml").destage
    assert destage.class_path is not None
    policy = backends.build(destage.class_path, destage.arguments, methods=["suggest"])
    windows = [WindowView(name, 60, 0, 0, False, at_s, 1.0) for name, at_s in (("new", 9.0), ("old", 1.0))]
    view = MemoryView(10.0, 120, 150, 0.0, None, windows)
    assert policy.suggest(view) == [Suggestion("old", 0, "the oldest")]


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
            known = schema.get("properties")
            if known is None:
                return isinstance(value, dict)
            return isinstance(value, dict) and all(k in known and matches(v, known[k], root) for k, v in value.items())
        case "integer" | "number" as kind:
            kinds = (int,) if kind == "integer" else (int, float)
            return (
                type(value) in kinds
                and schema.get("minimum", value) <= value <= schema.get("maximum", value)
                and schema.get("exclusiveMinimum", -math.inf) < value < schema.get("exclusiveMaximum", math.inf)
            )
        case "string":
            return isinstance(value, str) and re.search(schema.get("pattern", ""), value) is not None
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
    raise AssertionError(schema)


@pytest.mark.parametrize("name", PRESETS)
def test_the_presets_fit_the_schema(name: str) -> None:
    assert matches(yaml.safe_load((POLICIES / f"{name}.yaml").read_text()), config.json_schema())


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("memory.budget", [0, 1 << 40, "64MiB", "64 mib", "1.5 GB", "1.5", "99999999999", "512m", "5 %", True, None]),
        (
            "memory.budget",
            ["25%", "0%", "0.0%", "00.10 %", "100%", "100.00%", "100.5%", "101%", "-5%", "%", ".5%", 0.25],
        ),
        ("memory.moderate", [0.75, 0, "0%", "75%", "75.5 %", 1.5, -0.5, "120%", "x", True, None]),
        ("memory.scarce", [0.75, 0, "0%", 1, 1.0, "100%", "80%", 1.01, None]),
        ("memory.victim", ["largest", "slowest", "oldest", None]),
        ("destage.keep_fraction", [0, 0.0, 1, 0.5, "0%", "0.5%", 2, "2x", None]),
        ("destage.idle_after", [None, "30s", "3x", "0.5 x", "0x", "0.0x", "x", "", 3, "3", -1, True]),
        ("destage.class", [None, "mine:Mine", "a.b:C.D", "mine", "mine:", ":Mine", "my-own:Mine", 5]),
        ("destage.arguments", [{}, 5, [1]]),
        ("prestage.mode", ["predictive", "on_late_event", "none", None, "always"]),
        ("io.codec_threads", [0, 1, 1024, 1025, -1, 1.5, True, None]),
        ("io.rate_limit", [None, 1, 0, "100MiB", "fast", True]),
        ("state.codec", ["arrow", "json", "pickle", None]),
        ("lateness.initial_bound", [0, 10, "10", "10m", "1 hour 30 minutes", "1.5h", "-5m", "", None, True]),
        ("state.shards", [0, 1, 32768, 32769, "auto", "all", None, True]),
        ("lateness.coverage", [None, 0, 0.5, 1, "0%", "99.9%", "100%"]),
        ("trigger.bound", [0, 1e-9, 1, "0.0%", "5%", "100%", None]),
        ("state.backend", ["tiered", "rocksdb", "Tiered", None]),
        ("state.dir", [None, "/x", "s3://x", 5]),
        ("state.unknown", [1]),
        ("unknown.key", [1]),
    ],
)
def test_the_schema_accepts_what_a_file_may_say(tmp_path: Path, key: str, values: list[object]) -> None:
    section, name = key.split(".")
    file, whole = tmp_path / "mine.yaml", config.json_schema()
    for value in values:
        tree = {section: {name: value}}
        try:
            file.write_text(yaml.safe_dump(tree))
            load_policy(file)
            accepted = True
        except PolicyError:
            accepted = False
        assert matches(tree, whole) == accepted, (key, value)


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
    assert second.startswith(f"{file}:3: memory.bucket_limit: '64 megs' is not possible: the unit 'megs' is unknown")
    assert third.startswith(f"{file}:4: lateness.initial_bound: '-5m' is not possible; write a duration")
    assert "Traceback" not in result.output


def test_check_of_a_file_that_is_not_there() -> None:
    result = run("policy", "check", "nowhere.yaml")
    assert result.exit_code == 1
    assert "'nowhere.yaml' is not a preset and cannot be read as a file (No such file" in result.stdout


# -- explain ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["check", "explain", "show"])
def test_an_invalid_policy_is_said_to_be_so_in_one_way(tmp_path: Path, command: str) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("state: {backend: '[red]redis'}")
    result = run("policy", command, str(file))
    assert (result.exit_code, result.stderr) == (1, "")
    assert "policy.yaml:1: state.backend: '[red]redis' is not possible; write 'tiered'" in result.stdout
    assert run("policy", command, str(tmp_path / "nowhere.yaml")).exit_code == 1


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
        "until the window's m-bucket has 32MiB, or all m-buckets of the host together have 96MiB "
        "(3 such windows fit at a time)",
        "committed to s3://bucket/state",
        "within the bound of 45 minutes",
        "the watermark reaches 2025-01-01T12:01:00Z, the window's end",
        "the watermark reaches 2025-01-01T12:46:00Z, the window's end plus the bound",
        "They go straight to the window's p-bucket",
    ):
        assert part in told, told


def test_explain_tells_of_merging_levels(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("distribution: {merge_levels: 2, fan_in: 8}\n")
    told = words(run("policy", "explain", str(file)).stdout)
    assert (
        "shuffled through 2 levels, which merge the blocks of up to 8 senders, to one shard per Spark partition" in told
    )


def test_explain_tells_of_pressure_idleness_prestaging_and_threads(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "memory: {budget: 100MiB, moderate: 0.5, scarce: 0.8, victim: slowest}\n"
        "destage: {keep_fraction: 0.125, idle_after: 2.5x}\n"
        "prestage: {mode: on_late_event}\n"
        "io: {codec_threads: 0, rate_limit: 20MiB}\n"
    )
    told = words(run("policy", "explain", str(file)).stdout)
    for part in (
        "50% of the budget (50 MiB), or of the machine's memory, is in use: moderate pressure",
        "move to disk one by one, except its first 12.5%: the one that gets the fewest bytes per second first, "
        "until 40% of the budget (40 MiB) is in use.",
        "80% of the budget (80 MiB), or of the machine's memory, is in use: memory is scarce",
        "the window gets no events and no watermark for 2.5 times the median time of an execution",
        "Then it moves from memory to RocksDB, except its first 12.5%.",
        "The first of them starts prestaging",
        "One thread does all reads and writes. Blocks are encoded by the thread that needs them. Destaging, late "
        "writes and maintenance move at most 20MiB per second.",
    ):
        assert part in told, told


def test_explain_tells_a_share_of_the_budget_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("state_backends.server.machine.memory_limit_bytes", lambda: 4 << 30)
    told = words(run("policy", "explain", "low_latency").stdout)
    assert (
        "m-buckets of the host together have 2 GiB, 50% of the 4 GiB of this host (8 such windows fit at a time)"
        in told
    )
    assert "85% of the budget (1.7 GiB)" in told


def test_explain_names_classes_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "destage: {class: mine:Mine, arguments: {above: 0.5}}\n"
        "prestage: {class: mine:Plan}\n"
        "lateness: {initial_bound: 90s}\n"
    )
    told = words(run("policy", "explain", str(file)).stdout)
    assert "is decided by your class mine:Mine(above=0.5), which is imported when the state server starts." in told
    assert "is decided by your class mine:Plan(), which is imported" in told
    assert "moderate pressure" not in told


@pytest.mark.parametrize(
    ("preset", "part"),
    [
        ("low_memory", "the window gets no events and no watermark for 30 seconds"),
        ("low_latency", "except its first 10%"),
        ("standard", "blocks that only RocksDB has are fetched while those in memory are processed"),
        ("memory_only", "All of them stay in memory"),
        ("disk_only", "All of them go to RocksDB"),
        ("low_memory", "compressed with zstd"),
        ("standard", "the shortest that covers 0.99 of the late events with confidence 0.95, at most 7 days"),
        ("standard", "completeness_low says how complete it is at least, with confidence 0.95"),
        ("standard", "as rarely as possible while its staleness stays within 0.05"),
        ("low_latency", "in each batch that brings it late events"),
        ("demo", "the watermark reaches 2025-01-04T12:01:00Z, the window's end plus the bound"),
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


def test_schema_prints_the_schema_as_json() -> None:
    result = run("policy", "schema")
    assert json.loads(result.stdout) == config.json_schema()


def test_docs_prints_the_reference() -> None:
    assert run("policy", "docs").stdout == config.policy_docs()


# -- errors, exit codes, start ------------------------------------------------------------------------


def test_an_error_of_aion_is_one_line_on_stderr(tmp_path: Path) -> None:
    result = run("inspect", str(tmp_path / "[red]state"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "[red]state: there is no such folder; give the folder of spark.aion.state.dir" in result.stderr


def test_the_console_script_ends_with_the_code_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["aion", "inspect", "nowhere"])
    with pytest.raises(SystemExit) as ended:
        program.main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "nowhere: there is no such folder" in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_what_the_system_refuses_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "tuned.yaml"

    def fake(flights: int, out: Path) -> int:
        out.mkdir(parents=True)
        return 0

    monkeypatch.setitem(sys.modules, "aion.demo.command", SimpleNamespace(run=fake))
    result = run("demo", "--out", str(place))
    assert (result.exit_code, result.stderr) == (2, f"{place}: Not a directory\n")


@pytest.mark.parametrize("equal", [True, False])
def test_demo_passes_on_its_options_and_the_conclusion(monkeypatch: pytest.MonkeyPatch, equal: bool) -> None:
    seen: list[object] = []

    def fake(flights: int, out: Path) -> int:
        seen.append((flights, out))
        return 0 if equal else 1

    monkeypatch.setitem(sys.modules, "aion.demo.command", SimpleNamespace(run=fake))
    assert run("demo", "--flights", "7", "--out", "there").exit_code == (0 if equal else 1)
    assert run("demo").exit_code == (0 if equal else 1)
    assert seen == [(7, Path("there")), (0, Path("out"))]


def test_demo_without_java_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(flights: int, out: Path) -> int:
        raise MissingJava("no Java found; install Java 17 or 21")

    monkeypatch.setitem(sys.modules, "aion.demo.command", SimpleNamespace(run=fake))
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
