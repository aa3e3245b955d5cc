"""Every code block and every command of the documents is run by a test, or at least really parsed; see ACCOUNTED.

Most Python needs Spark, and is run in ``test_documents.py`` and ``test_recipes.py`` of ``tests/spark``. A block that
is not known fails by name.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
import typer
import yaml
from pyspark.sql.types import StringType
from typer.testing import CliRunner

import aion
from aion import aggregates as A
from aion.cli import app
from aion.config import Policy, describe, load_policy, resolve
from aion.sinks.database import MARKS
from aion.sinks.dropped import BATCH, QUERY
from aion.tools.tune.disk import Machine
from state_backends.server.endpoint import LOOPBACK
from state_backends.server.metrics import METRICS
from state_backends.versions.manifest import Identity, dump_operator
from tests import documents, pictures
from tests.documents import PAGES, ROOT, SHELLS, Block, Command
from tests.state_folders import Writer
from tests.tools.test_inspect_key import schema, write

SECTIONS = set(Policy.model_fields)
COMMAND: Any = typer.main.get_command(app)
ERRORS = r"\w+Error|\w+Unreachable|\w+Superseded|ForeignState|CorruptState|CorruptBlock"
INDEX = "docs/site/index.md"
"""The front page of the site, which is no page of its own."""
NAMING = {".py", ".yaml", ".json", ".ipynb", ".md", ".toml"}
INVENTED = {"docs/page.md", "docs/how-to/page.md", INDEX}
"""Pages that only tests have, and the one that is none."""
PROGRAMS = ("aion", "make", ".venv/bin/python", "python", "spark-submit")

# What runs an experiment of the command line in small.
RUN_SMALL = {
    "chaos": "tests/chaos/test_chaos.py::test_every_row_is_that_of_an_undisturbed_run_and_of_the_events",
    "cleanup": "tests/experiments/test_cleanup.py::test_a_run_compares_what_was_learnt_with_oracle_and_fixed_bounds",
    "completeness": "tests/experiments/test_completeness.py::test_the_command_judges_what_was_said",
    "compare": "tests/experiments/test_memory_verdicts.py::"
    "test_a_comparison_names_what_was_set_differently_and_nothing_else",
    "hosts": "tests/spark/state/test_two_executors.py::test_an_executor_that_is_killed_takes_nothing_along",
    "ingest": "tests/experiments/test_commands.py::test_ingest",
    "joins": "tests/experiments/test_commands.py::test_joins",
    "latency": "tests/experiments/test_commands.py::test_latency",
    "late-keys": "tests/experiments/test_late_keys.py::test_the_command_prints_and_writes_what_it_found",
    "limits": "tests/experiments/test_limits.py::test_the_command_measures_and_says_what_it_found",
    "memory-pressure": "tests/experiments/test_sweep.py::test_a_sweep_that_was_stopped_goes_on_with_what_is_missing",
    "network": "tests/spark/pages/test_experiments.py::test_hops_of_central_and_distributed_queries_are_counted",
    "nexmark": "tests/experiments/test_commands.py::test_nexmark",
    "overhead": "tests/experiments/test_commands.py::test_overhead",
    "prestage": "tests/experiments/test_prestage.py::test_a_run_in_miniature",
    "planned": "tests/experiments/test_planned.py::test_modes_yield_the_same_panes_and_find_different_things_in_memory",
    "restart": "tests/experiments/test_commands.py::test_restart",
    "restore": "tests/experiments/test_restore.py::test_the_command_prints_and_writes_what_it_found",
    "slicing": "tests/experiments/test_slicing.py::test_designs_agree_and_their_costs_are_counted",
    "staleness": "tests/experiments/test_staleness.py::test_the_command",
    "sessions": "tests/experiments/test_commands.py::test_sessions",
    "sinks": "tests/sinks/test_experiment.py::test_the_command_measures_each_database",
    "stateful": "tests/experiments/test_commands.py::test_stateful",
    "store": "tests/experiments/test_store.py::test_ingest_in_a_process_of_its_own",
    "tune-check": "tests/package/test_documents.py::test_commands_that_are_cheap_do_what_is_said",
    "windows": "tests/experiments/test_commands.py::test_windows",
}


# -- blocks -------------------------------------------------------------------------------------------


def check_yaml(block: Block) -> None:
    """A policy, if it has a policy's sections; else the settings of Prometheus."""
    told = yaml.safe_load(block.text)
    if set(told) <= SECTIONS:
        load_policy(told)
        return
    assert set(told) == {"scrape_configs"}, f"{block}: neither a policy nor prometheus.yml: {sorted(told)}"
    ports = {
        load_policy(policy).metrics.port
        for other in documents.read(block.page)[0]
        if other.language == "yaml" and set(policy := yaml.safe_load(other.text)) <= SECTIONS
    }
    (job,) = told["scrape_configs"]
    assert [{"targets": [f"{LOOPBACK}:{port}"]} for port in ports] == job["static_configs"]


def check_picture(block: Block) -> None:
    """What the code draws."""
    drawn = pictures.all_pictures()
    assert block.text in drawn.values(), f"{block} is none of {sorted(drawn)}; python -m tests.pictures draws them"


def check_text(block: Block) -> None:
    """A picture, or the layout of a state folder."""
    if block.page == "docs/reference/formats.md":
        check_layout(block)
    else:
        check_picture(block)


def check_layout(block: Block) -> None:
    """Compared with a folder that is made; a line is a folder or a file, two more spaces are a level."""
    patterns: set[str] = set()
    above: list[str] = []
    for line in block.text.splitlines():
        name = line.strip().split("   ")[0]
        del above[(len(line) - len(line.lstrip())) // 4 :]
        above.append(name)
        if not name.endswith("/"):
            patterns.add(re.sub("<[^>]+>", "*", "".join(above)))
    with TemporaryDirectory() as folder:
        with Writer(Path(folder) / "state", 0, Path(folder) / "live") as shard:
            shard.commit(None, 1, range(2))
        files = [path.relative_to(folder) for path in (Path(folder) / "state").rglob("*") if path.is_file()]
        assert files
        found = {pattern for pattern in patterns for file in files if file.match(pattern)}
        assert all(any(file.match(pattern) for pattern in patterns) for file in files), f"{block}: {files}"
        assert found == patterns, f"{block}: nothing is there like {patterns - found}"


def check_python(block: Block) -> None:
    """``tests/spark/pages/test_documents.py`` knows every page that has such, and where it is run."""
    ast.parse(block.text, str(block))


def check_shell(block: Block) -> None:
    """Its lines are commands, which are looked at one by one."""
    assert any(c.page == block.page and c.line >= block.line for c in documents.commands(PROGRAMS)), str(block)


def check_printed(block: Block) -> None:
    """What the page's Python prints: tests/spark/pages/test_documents.py compares it."""
    assert block.page == "README.md", f"{block}: no test compares it with what is printed"


ACCOUNTED: dict[str, Callable[[Block], None]] = {
    "python": check_python,
    "yaml": check_yaml,
    "mermaid": check_picture,
    "text": check_printed,
    "": check_text,
    **dict.fromkeys(SHELLS, check_shell),
}


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("block", documents.blocks(), ids=str)
def test_every_block_is_accounted_for(block: Block) -> None:
    assert block.language in ACCOUNTED, f"{block}: no test runs blocks of this language"
    ACCOUNTED[block.language](block)


def test_every_picture_is_in_a_page() -> None:
    shown = {block.text for block in documents.blocks()}
    assert {name for name, text in pictures.all_pictures().items() if text not in shown} == set()


def test_blocks_are_found_and_fences_that_would_hide_one_are_refused() -> None:
    text = "a\n```python\nx = 1\n```\n`aion top`\n~~~sh\nls \\\n  -l # all\n~~~\n"
    found, prose = documents.parse("page", text)
    assert [(b.line, b.language, b.text) for b in found] == [(3, "python", "x = 1\n"), (7, "sh", "ls \\\n  -l # all\n")]
    assert "aion top" in prose and "x = 1" not in prose
    for wrong in ("```python\nx = 1\n", "    ```python\nx = 1\n    ```\n", "```python title=x\n```\n"):
        with pytest.raises(ValueError, match="page:"):
            documents.parse("page", wrong)


def test_the_page_on_the_store_runs_where_aion_cannot_be_imported(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['aion'] = None\n"
        "from pathlib import Path\n"
        "from tests.documents import run_python\n"
        "run_python('docs/inside/store.md', {}, Path(sys.argv[1]), {})\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    blocks = documents.read("docs/inside/store.md")[0]
    (shown,) = (line for block in blocks for line in block.text.splitlines() if line[:2] == "# ")
    assert done.stdout == f"{shown[2:]}\n"
    assert not (tmp_path / "store" / "live").exists()


# -- commands -----------------------------------------------------------------------------------------


class Refused(Exception):
    """A command that the command line does not take."""


def parse_aion(words: Sequence[str]) -> tuple[str, ...]:
    """Parses the command as the shell's ``aion`` would, without running it; the names of its commands."""
    command: Any = COMMAND
    context, names, rest = None, list[str](), list(words[1:])
    try:
        while True:
            context = command.make_context(names[-1] if names else "aion", rest, parent=context)
            if not hasattr(command, "resolve_command"):
                return tuple(names)
            name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
            names.append(str(name))
    except Exception as error:
        if not hasattr(error, "format_message"):  # an error of usage, whichever click typer brings
            raise
        raise Refused(f"{shlex.join(words)}: {error.format_message()}", names) from error


def named(command: Command) -> tuple[str, ...]:
    """Running text may name a command without what it needs; all else must be complete."""
    try:
        return parse_aion(command.words)
    except Refused as error:
        words, names = error.args
        if command.in_prose and "Missing argument" in words and command.words[1:] == tuple(names):
            return command.words[1:]
        raise


# Commands that are run, with options that make them quick, and what else may be run.
RUN: dict[tuple[str, ...], tuple[str, ...]] = {
    ("policy", "check"): (),
    ("policy", "explain"): (),
    ("policy", "show"): (),
    ("policy", "schema"): (),
    ("policy", "docs"): (),
    ("explain",): (),
    ("inspect",): (),
    ("top",): (),
    ("tune",): ("--evaluations", "5", "--machine", "machine.json"),
    ("experiment", "tune-check"): (
        "--scale",
        "0.01",
        "--batches",
        "5",
        "--past-windows",
        "2",
        "--pause",
        "0",
        "--repeats",
        "1",
    ),
}

ON_SPARK = {("demo",), ("diff",), ("fork",), ("migrate",), ("rescale",), ("rewind",)}
"""Commands that the tests of Spark run."""


def lay_out(folder: Path) -> None:
    """The paths that commands take for granted, where they need not hold anything."""
    (folder / "experiments").symlink_to(ROOT / "experiments")
    for result in ("A", "B", "out/stock", "out/other"):
        (folder / result).mkdir(parents=True)


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with what the documents' commands name: a policy, a state folder, a trace, a checkpoint."""
    lay_out(tmp_path)
    (tmp_path / "my.yaml").write_text("memory:\n  budget: 1GiB\n")
    for query in ("STATE_DIR", "DIR"):
        with Writer(tmp_path / query, 0, tmp_path / f"{query}-live") as shard:
            shard.commit(shard.commit(None, 1, range(2)), 2, range(2, 3))
    write(tmp_path / "STATE_DIR", tmp_path / "stateful-live", schema(user=StringType()), [(("ann",), 3)])
    first = tmp_path / "STATE_DIR" / "query" / "tolls"
    gone = Identity("query", "tolls", 0, 2, {}, checkpoint=f"file:{tmp_path}/gone")
    shutil.copytree(first / "shard-00000", first / "lineage-5f1d0b2c7a3e" / "shard-00000")
    (first / "lineage-5f1d0b2c7a3e" / "operator.json").write_bytes(dump_operator(gone))
    (tmp_path / "CHECKPOINT").mkdir()
    (tmp_path / "machine.json").write_text(json.dumps(asdict(Machine(50e6, 1e-4, 30e6, 2e-3, 400e6))))
    with aion.LocalOperator(
        windows=aion.Tumbling("1 minute"),
        time="ts",
        aggregates={"n": A.count()},
        policy={"trace": {"folder": tmp_path / "trace"}},
    ) as operator:
        for minute in range(5):
            operator.advance(minute * pictures.MINUTE)
            ts = [minute * pictures.MINUTE + second * 1_000_000 for second in range(-20, 60)]
            operator.process(pa.table({"ts": pa.array(ts, pa.timestamp("us", "UTC"))}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ours() -> list[Command]:
    return [command for command in documents.commands(PROGRAMS) if command.words[0] == "aion"]


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("command", ours(), ids=str)
def test_commands_of_ours_are_such(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are parsed where the paths are that they take for granted."""
    lay_out(tmp_path)
    monkeypatch.chdir(tmp_path)
    names = named(command)
    if names[0] == "experiment":
        assert names[1] in RUN_SMALL, f"{command}: say in RUN_SMALL what runs it"
    else:
        assert names in RUN or names in ON_SPARK, f"{command}: say in RUN how it is run"


def cheap() -> list[Command]:
    """Those in blocks that are run; what is said twice is run once."""
    first: dict[tuple[str, ...], Command] = {}
    for command in ours():
        if not command.in_prose:
            first.setdefault(command.words, command)
    return [command for command in first.values() if named(command) in RUN]


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("page", sorted({command.page for command in ours() if not command.in_prose}))
def test_commands_that_are_cheap_do_what_is_said(page: str, workplace: Path) -> None:
    """In their order: one may need what another wrote."""
    for command in cheap():
        if command.page == page:
            words = [re.sub(r"^/var/tmp/", f"{workplace}/", word) for word in command.words[1:]]
            done = CliRunner().invoke(app, [*words, *RUN[named(command)]], catch_exceptions=False)
            assert done.exit_code == 0, f"{command}\n{done.output}"
            assert done.output.strip(), str(command)


@pytest.mark.parametrize(
    "wrong",
    ["aion toop", "aion tune --stalenes 0.1", "aion tune --staleness much", "aion inspect", "aion top --every 0"],
)
def test_a_wrong_command_is_refused(wrong: str) -> None:
    with pytest.raises(Refused):
        parse_aion(wrong.split())


def test_experiments_are_run_small_by_the_tests_that_are_named() -> None:
    told = {name for command in ours() if (name := command.words[1:3])[0] == "experiment"}
    assert {name for _, name in told} <= RUN_SMALL.keys()
    assert COMMAND.commands["experiment"].commands.keys() == RUN_SMALL.keys()
    for name, test in RUN_SMALL.items():
        file, _, function = test.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (name, test)


def test_all_other_commands_are_known() -> None:
    """Targets of the Makefile; modules and files that are there; settings of a policy (Spark's own: with Spark)."""
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in documents.commands(PROGRAMS):
        program, *words = command.words
        match program:
            case "aion":
                pass
            case "make":
                assert words and set(words) <= targets, f"{command}: not in the Makefile"
            case "python" | ".venv/bin/python":
                check_python_command(command, words)
            case "pip":
                check_pip_command(command, words)
            case "docker" | "kubectl":
                check_files(command, words)
            case "spark-submit":
                resolve(keyword={}, spark_conf=documents.spark_settings(command))
            case _:
                raise AssertionError(f"{command}: nothing is known of {program}")


def check_python_command(command: Command, words: list[str]) -> None:
    assert words[0] == "-m", str(command)
    words = words[: words.index(">")] if ">" in words else words
    if words[1] == "aion.cli":
        parse_aion(["aion", *words[2:]])
        return
    assert find_spec(words[1]) is not None, f"{command}: there is no module {words[1]}"
    for path in words[2:]:
        assert path.startswith("-") or (ROOT / path.partition("::")[0]).exists(), f"{command}: there is no {path}"


def check_files(command: Command, words: list[str]) -> None:
    """There is no server of either program here."""
    if words[0] == "run":
        resolve(keyword={}, spark_conf=documents.spark_settings(command))
        return
    files = [word for option, word in pairwise(words) if option in ("--file", "--filename")]
    assert files and all((ROOT / file).is_file() for file in files), f"{command}: there is no such file"


def check_pip_command(command: Command, words: list[str]) -> None:
    """It installs this checkout, with extras that exist; or it writes the list of versions that it then keeps."""
    if words == ["freeze", ">", "platform.txt"]:
        return
    if words[1:2] == ["--constraint"]:
        assert words.pop(2) == "platform.txt" and words.pop(1)
    install, what = words
    wanted = re.fullmatch(r"\.(?:\[([\w,]+)\])?", what)
    assert install == "install" and wanted, str(command)
    assert set((wanted[1] or "cli").split(",")) <= aion.errors.EXTRAS.keys(), f"{command}: no such extra"


def test_a_page_names_every_experiment() -> None:
    there = [c for c in ours() if c.page == "docs/measured/experiments.md"]
    assert {c.words[2] for c in there if c.words[1] == "experiment"} == RUN_SMALL.keys()


def linked(page: str) -> set[str]:
    """The pages of ``docs`` that a page links."""
    links = re.findall(r"\]\(([^)\s#]+\.md)", documents.read(page)[1])
    return {os.path.normpath(Path(page).parent / link) for link in links} & set(documents.IN_DOCS)


def test_the_readme_leads_to_every_page_in_two_steps() -> None:
    """It links few pages, one of each kind among them that links all others of its kind."""
    first = linked("README.md")
    assert len(first) <= 8, "the README is for a newcomer: link the page where the page of its kind lists the others"
    for kind in documents.KINDS:
        pages = {page for page in documents.IN_DOCS if page.startswith(f"docs/{kind}/")}
        assert any(pages - {page} <= linked(page) for page in first & pages), f"no page lists all of docs/{kind}"
    assert {Path(page).parts[1] for page in documents.IN_DOCS} == set(documents.KINDS)
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")} == {*documents.IN_DOCS, INDEX}


# -- what is said elsewhere ---------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    """To files, and to headings of them. What one reads is words, not the name of a file."""
    assert re.findall(r"\[`?[\w/.-]+\.md`?\]\(", documents.read(page)[1]) == []
    for link in re.findall(r"\]\(([^)\s]+)\)", documents.read(page)[1]):
        if not re.match(r"https?://", link):
            file, _, anchor = link.partition("#")
            target = (ROOT / page).parent / file if file else ROOT / page
            assert target.exists(), f"{page}: {link}"
            if anchor:
                headings = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)
                assert anchor in {documents.anchor(heading) for heading in headings}, link


@pytest.mark.parametrize("page", PAGES)
def test_what_stands_between_backticks_and_looks_like_a_path_is_there(page: str) -> None:
    for path in re.findall(r"`((?:aion|state_backends|policies|experiments|tests|docs|dashboards|deploy)/[\w./-]*)`",
                           documents.read(page)[1]):  # fmt: skip
        assert (ROOT / path).exists(), f"{page}: there is no {path}"


def test_pages_that_code_and_settings_name_are_there() -> None:
    """In messages, docstrings and comments, with or without the heading that is meant."""
    folders = ("aion", "state_backends", "policies", "experiments", "examples", "deploy", "dashboards", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in NAMING]
    named = {
        (str(path.relative_to(ROOT)), *found)
        for path in [*files, ROOT / "pyproject.toml", ROOT / "CHANGELOG.md"]
        for found in re.findall(r"(?<![\w/.])(docs/[\w/-]+\.md)(?:#([\w-]+))?", path.read_text())
    }
    headings = {page: set(re.findall(r"^#+ (.*)", documents.read(page)[1], re.MULTILINE)) for page in documents.IN_DOCS}
    anchors = {page: {"", *map(documents.anchor, headings[page])} for page in headings}
    assert len({page for _, page, _ in named}) > 20
    wrong = [(file, page, heading) for file, page, heading in named if heading not in anchors.get(page, ())]
    assert [each for each in wrong if each[1] not in INVENTED] == []


@pytest.mark.parametrize("page", PAGES)
def test_keys_of_a_policy_that_are_named_exist(page: str) -> None:
    keys = {doc.key for doc in describe()}
    prose = documents.read(page)[1]
    for section, key in re.findall(rf"`(?:spark\.aion\.)?({'|'.join(SECTIONS)})\.(?!(?:py|json)`)([a-z_]+)[`:]", prose):
        assert f"{section}.{key}" in keys, f"{page}: there is no {section}.{key}"


@pytest.mark.parametrize("page", PAGES)
def test_errors_and_metrics_that_are_named_exist(page: str) -> None:
    prose = documents.read(page)[1]
    names = {series for metric in METRICS for series in metric.series} | {metric.name for metric in METRICS}
    assert set(re.findall(r"\baion_[a-z_]+[a-z]", prose)) <= {*names, MARKS, QUERY, BATCH}
    for error in re.findall(rf"`({ERRORS})[`:]", prose):
        assert issubclass(getattr(aion.errors, error), aion.errors.AionError), f"{page}: {error}"
