"""The parts of `aion experiment memory-pressure` that need no Spark: settings, measures, verdicts, reports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aion.errors import ConfigError
from experiments.memory_pressure import compare, report
from experiments.memory_pressure.command import progress_line
from experiments.memory_pressure.findings import Finding, findings, verdict
from experiments.memory_pressure.limits import enter, limited, make_group
from experiments.memory_pressure.measure import garbage, ingestion, measured, processing
from experiments.memory_pressure.run import Progress, ending
from experiments.memory_pressure.settings import PARTS, Cell, Settings, cell_spec, cells, load_settings, numbers
from experiments.shared.tree import Tree, kind_of

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"

# --- settings ---------------------------------------------------------------------------------------------


def test_ranges_of_numbers() -> None:
    assert numbers("1..4") == [1, 2, 3, 4]
    assert numbers("8, 1,4..5") == [1, 4, 5, 8]
    for wrong in ("", "0..2", "a", "1...2", "-1"):
        with pytest.raises(ValueError, match=r"past window|numbers"):
            numbers(wrong)


def test_the_papers_settings_are_the_papers() -> None:
    settings = load_settings(EXPERIMENTS / "paper.yaml", {})
    assert not settings.is_scaled
    assert settings.past_windows == list(range(1, 11))
    assert (settings.warm_up, settings.measured, settings.pace, settings.executions) == (10, 30, "real", "twice")
    assert settings.parts == PARTS
    assert len(set(cells(settings))) == 4 * 10 * 3 + 10 * len(PARTS)
    policy = cell_spec(settings, Cell("average", "tiered", 5))["policy"]
    assert (policy["lateness"]["initial_bound"], policy["lateness"]["coverage"]) == ("100 seconds", None)
    assert policy["trigger"]["executions"] == 1


def test_every_settings_file_is_valid_and_what_is_given_outranks_it() -> None:
    for path in EXPERIMENTS.glob("*.yaml"):
        assert load_settings(path, {}).workload
    settings = load_settings(EXPERIMENTS / "paper.yaml", {"scale": 0.2, "memory": None, "past_windows": "1,4"})
    assert (settings.scale, settings.past_windows, settings.memory) == (0.2, [1, 4], "8GiB")
    assert settings.is_scaled


def test_state_and_memory_shrink_by_the_square_of_the_scale() -> None:
    full, half = (Settings(scale=scale, policy={"memory": {"budget": "2GiB"}}) for scale in (1.0, 0.5))
    base = 1792 << 20
    assert full.memory_bytes - base == 8 << 30
    assert half.memory_bytes - base == 2 << 30
    budgets = [cell_spec(s, Cell("average", "tiered", 1))["policy"]["memory"]["budget"] for s in (full, half)]
    assert budgets == ["2GiB", "512MiB"]
    events = [s.shape("average", 1).events_per_batch for s in (full, half)]
    assert events == [200_000, 50_000]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workload": "averge"}, "use average, bigrams"),
        ({"backend": "flink"}, "use tiered, memory"),
        ({"past_windows": "0"}, "past windows"),
        ({"past_windows": [1, 0]}, "past windows"),
        ({"past_windows": [-1]}, "write numbers"),
        ({"memory": "lots"}, "not a size"),
        ({"scale": 2.0}, "scale"),
        ({"source": "kafka"}, "localhost:9092"),
        ({"policy": "nonesuch"}, "nonesuch"),
        ({"parts": {"odd": {"prestaging": {"mode": "none"}}}}, "not a section"),
        ({"parts": {"odd": {"prestage": {"mode": "never"}}}}, "mode"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_wrong_settings_are_told_before_anything_runs(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_settings(None, given)


def test_settings_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_bytes(b"workload: [\xff]")
    with pytest.raises(ConfigError, match=r"settings\.yaml"):
        load_settings(file, {})


def test_the_jvm_has_nearly_all_memory_where_it_keeps_the_state() -> None:
    settings = Settings(memory="3GiB")
    specs = {name: cell_spec(settings, Cell("average", name, 1)) for name in ("tiered", "spark-list")}
    heaps = {name: spec["heap_bytes"] >> 20 for name, spec in specs.items()}
    assert heaps == {"tiered": 512 + 320, "spark-list": 512 + 1088}


# --- limits and trees ----------------------------------------------------------------------------------------


def test_a_control_group_gets_the_limit_and_the_tree_enters_it(tmp_path: Path) -> None:
    make_group(tmp_path / "cell", 1 << 30)
    assert (tmp_path / "cell" / "memory.max").read_text() == str(1 << 30)
    done = subprocess.run(
        [*enter(tmp_path / "cell"), "sh", "-c", "echo $$"], capture_output=True, text=True, check=True
    )
    assert (tmp_path / "cell" / "cgroup.procs").read_text() == done.stdout, "the command is who entered"
    with pytest.raises(ConfigError, match="control group"), limited(f"cgroup:{tmp_path}/none", 1, "x"):
        pass
    with pytest.raises(ConfigError, match="write auto"), limited("rlimit", 1, "x"):
        pass


HOG = "import subprocess, sys; held = b'x' * (60 << 20); {then}"
CHILD = "subprocess.run([sys.executable, '-c', \"held = b'x' * (60 << 20); print('up', flush=True); input()\"])"


def test_a_tree_is_seen_and_ended_with_its_children() -> None:
    program = HOG.format(then=CHILD)
    root = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert root.stdout is not None and root.stdout.readline() == b"up\n"
    tree = Tree(root.pid)
    used = tree.look()
    assert used["driver"] > 60 << 20 and used["workers"] > 60 << 20
    tree.end()
    assert sum(tree.look().values()) == 0
    assert root.poll() is not None
    for pipe in (root.stdin, root.stdout):
        assert pipe is not None
        pipe.close()


@pytest.mark.parametrize(
    ("name", "command", "kind"),
    [
        ("java", ["/usr/bin/java", "-cp"], "jvm"),
        ("python3", ["python3", "-m", "pyspark.daemon"], "workers"),
        ("python3", ["python3", "-m", "aion.spark.daemon"], "workers"),
        ("python3", ["python3", "-m", "state_backends.server.main"], "server"),
        ("python3", ["python3", "-m", "experiments.memory_pressure.cell", "x"], "driver"),
    ],
)
def test_processes_are_told_apart(name: str, command: list[str], kind: str) -> None:
    assert kind_of(name, command, is_root=False) == kind


# --- what is measured ------------------------------------------------------------------------------------------


def report_of(batch: int, t: float, ms: int) -> dict[str, Any]:
    return {"batch": batch, "t": t, "rows": 10, "ms": {"triggerExecution": ms}, "dropped": 0, "state_rows": 1}


def test_a_batch_takes_until_the_next_one_begins() -> None:
    progress = {batch: report_of(batch, t, 500) for batch, t in ((0, 0.0), (1, 2.0), (2, 4.0))}
    found = ingestion(progress, [0, 1, 2], [[80, 20]] * 3)
    assert found == {"normal": [40.0, 40.0, 160.0], "windows": [25.0, 25.0, 100.0], "all": [50.0, 50.0, 200.0]}


def test_a_batch_that_takes_longer_than_its_window_lowers_the_rate() -> None:
    progress = {0: report_of(0, 0.0, 4_000), 1: report_of(1, 4.0, 500)}
    assert ingestion(progress, [0], [[100]], 2.0)["normal"] == [25.0]


def test_a_batch_that_begins_early_after_a_long_one_brings_no_more_than_its_source() -> None:
    progress = {0: report_of(0, 0.0, 500), 1: report_of(1, 1.0, 500)}
    assert ingestion(progress, [0], [[100]], 2.0)["normal"] == [50.0]


def test_processing_rates_are_those_of_executions() -> None:
    late = {"stage": "mean", "kind": "final", "events": 50, "seconds": 0.5}
    on_time = {"stage": "mean", "kind": "on_time", "events": 100, "seconds": 0.1}
    assert processing([{"executions": [on_time, late]}]) == {"normal": [1000.0], "all": [1000.0, 100.0]}


def test_garbage_is_counted_by_generation_from_the_first_sample_on() -> None:
    first = {"t": 0.0, "gc": {"PS Scavenge": [5, 100], "PS MarkSweep": [1, 50]}}
    last = {"t": 10.0, "gc": {"PS Scavenge": [15, 600], "PS MarkSweep": [2, 1_050]}}
    found = garbage([first, last])
    assert found is not None
    assert (found["young_share"], found["old_share"]) == (pytest.approx(0.05), pytest.approx(0.1))
    assert (found["young_collections"], found["old_collections"]) == (10, 1)
    assert garbage([first]) is None


def test_only_what_comes_after_the_warm_up_counts(tmp_path: Path) -> None:
    def lines(name: str, rows: list[dict[str, Any]]) -> None:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    nothing = {"workers": 0, "server": 0, "driver": 0}
    lines("batches.jsonl", [{"batch": b, "t": 10.0 + b, "executions": []} for b in range(4)])
    lines("progress.jsonl", [report_of(b, 9.0 + b, 900) for b in range(4)])
    lines("memory.jsonl", [{"t": 10.5 + i, "jvm": (i + 1) << 20, "peak": (9 - i) << 20, **nothing} for i in range(5)])
    lines("samples.jsonl", [{"t": 10.5 + i, "heap": 1 << 20, "gc": {}} for i in range(5)])
    with (tmp_path / "memory.jsonl").open("a") as cut_off:
        cut_off.write('{"t": 99')
    found = measured(tmp_path, {"warm_up": 2, "measured": 2, "pace": "real"}, [[1]] * 4)
    assert (found["batches"], found["all_batches"]) == (2, 4)
    assert found["memory_mib"]["total"] == [2.0, 3.0]
    assert found["peak_mib"] == 9.0


@pytest.mark.parametrize(
    ("log", "killed", "kills", "status"),
    [
        ("java.lang.OutOfMemoryError: Java heap space", None, 0, "died"),
        ("MemoryError", None, 0, "died"),
        ("", "the tree took 5 bytes, above the limit", 0, "died"),
        ("", None, 1, "died"),
        ("", "stalled: no batch ended for 5 s", 0, "failed"),
        ("ValueError: no", None, 0, "failed"),
    ],
)
def test_deaths_of_memory_are_told_from_failures(
    tmp_path: Path, log: str, killed: str | None, kills: int, status: str
) -> None:
    (tmp_path / "log").write_text(f"something\n{log}\n")
    (tmp_path / "cell.json").write_text(json.dumps({"heap_bytes": 100}))
    assert ending(tmp_path, killed, 1, kills)["status"] == status


def test_a_cell_that_thrashes_until_it_stalls_died_of_memory(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("")
    (tmp_path / "cell.json").write_text(json.dumps({"heap_bytes": 100}))
    (tmp_path / "samples.jsonl").write_text(json.dumps({"t": 0, "heap": 97, "gc": {}}) + "\n")
    found = ending(tmp_path, "stalled: no batch ended for 5 s", None, 0)
    assert found["status"] == "died" and "97%" in found["why"]


def test_progress_tells_the_time_that_is_left() -> None:
    progress = Progress(4, batches_of_cell=10)
    progress.cell_begun = time.monotonic()
    assert progress_line("x", progress) == "cell 1 of 4, x"
    progress.done, progress.cell_seconds, progress.batches = 1, [600.0], 5
    assert progress_line("x", progress) == "cell 2 of 4, x: batch 5 of 10; about 30 min left"


# --- verdicts ----------------------------------------------------------------------------------------------------


def result(backend: str, past: int, part: str = "full", status: str = "done", **of: Any) -> dict[str, Any]:
    """A cell with as many of its series as are told; each of one value."""
    memory, normal, windows, rate, late_rate, young, old = (
        of.get(name, default)
        for name, default in (
            ("memory", 1000.0), ("normal", 100.0), ("windows", 50.0), ("rate", 1e4), ("late_rate", 1e4),
            ("young", 0.02), ("old", 0.0),
        )
    )  # fmt: skip
    return {
        "workload": "average",
        "backend": backend,
        "past_windows": past,
        "part": part,
        "status": status,
        "why": "the tree took 9 bytes" if status == "died" else None,
        "limit": "watched",
        "spec": {"policy": {"io": {"threads": 1}} if backend == "tiered" else None},
        "measured": {
            "memory_mib": {kind: [memory] for kind in ("total", "jvm", "workers", "server", "driver")},
            "peak_mib": memory,
            "ingestion": {"normal": [normal], "windows": [windows], "all": [normal * 1.5]},
            "processing": {"normal": [rate], "all": [late_rate]},
            "gc": {"young_share": young, "old_share": old},
            "dropped": 0,
            "state": None,
        },
    }


def said(results: list[dict[str, Any]], figure: str, words: str, *, scaled: bool = True) -> str:
    found = [f.verdict for f in findings(results, scaled=scaled) if f.figure == figure and words in f.paper]
    assert len(found) == 1, found
    return found[0]


def test_verdicts() -> None:
    assert verdict(None, scaled=False) == "not measured"
    assert verdict(False, scaled=True) == "does not hold"
    assert verdict(True, scaled=True) == "holds at this scale"
    assert verdict(True, scaled=False) == "holds"


OURS = [result("tiered", 1), result("tiered", 8)]


@pytest.mark.parametrize(
    ("results", "figure", "words", "expected"),
    [
        # figure 2
        ([*OURS, result("spark-list", 1), result("spark-list", 8, status="died")], "2", "crashes", True),
        ([*OURS, result("spark-list", 1), result("spark-list", 8)], "2", "crashes", False),
        ([*OURS, result("spark-list", 1), result("spark-list", 6)], "2", "crashes", None),
        ([*OURS, result("spark-list", 8, status="failed")], "2", "crashes", None),
        (OURS, "2", "the same for any number", True),
        ([result("tiered", 1), result("tiered", 8, memory=1200.0)], "2", "the same for any number", False),
        ([result("tiered", 1), result("tiered", 8, status="died")], "2", "the same for any number", False),
        ([result("tiered", 1)], "2", "the same for any number", None),
        ([*OURS, result("spark-list", 8, memory=1500.0)], "2", "less memory", True),
        ([*OURS, result("spark-list", 8, memory=1200.0)], "2", "less memory", False),
        # figures 3, 4, 5, 7
        ([*OURS, result("memory", 1, normal=120.0)], "3", "18 %", True),
        ([*OURS, result("memory", 1, normal=130.0)], "3", "18 %", False),
        ([*OURS, result("memory", 1, windows=58.0)], "4", "16 %", True),
        ([*OURS, result("memory", 1, windows=62.0)], "4", "16 %", False),
        ([result("tiered", 1), result("tiered", 8, windows=20.0)], "4", "falls", True),
        (OURS, "4", "falls", False),
        ([*OURS, result("memory", 8, rate=1.4e4)], "5", "31 %", True),
        ([*OURS, result("memory", 8, rate=1.5e4)], "5", "31 %", False),
        ([*OURS, result("memory", 8, late_rate=1.4e4)], "7", "31 %", True),
        ([*OURS, result("memory", 8, late_rate=1.5e4)], "7", "31 %", False),
        # figure 6
        ([*OURS, result("spark-list", 1), result("spark-list", 8, old=0.1)], "6", "time on garbage collection", True),
        ([*OURS, result("spark-list", 1), result("spark-list", 8)], "6", "time on garbage collection", False),
        ([*OURS, result("spark-list", 1), result("spark-list", 8, young=0.01)], "6", "young generation more", True),
        ([*OURS, result("spark-list", 1), result("spark-list", 8, young=0.05)], "6", "young generation more", False),
        # figure 8
        ([*OURS, result("tiered", 8, "no-prestaging", late_rate=50.0)], "8", "two orders", True),
        ([*OURS, result("tiered", 8, "no-prestaging", late_rate=5000.0)], "8", "two orders", False),
        ([*OURS, result("tiered", 8, "no-prestaging", normal=80.0)], "8", "about 20 %", True),
        ([*OURS, result("tiered", 8, "no-prestaging", normal=99.0)], "8", "about 20 %", False),
        ([*OURS, result("tiered", 8, "no-codec-threads", status="died")], "8", "one thread", True),
        ([*OURS, result("tiered", 8, "no-codec-threads")], "8", "one thread", False),
        ([*OURS, result("tiered", 2, "no-codec-threads")], "8", "one thread", None),
        ([*OURS, result("tiered", 8, "no-codec-threads", status="failed")], "8", "one thread", None),
        (
            [*OURS, result("tiered", 1, "4-io-threads"), result("tiered", 8, "4-io-threads", late_rate=5e3)],
            "8", "several I/O threads", True,
        ),
        ([*OURS, result("tiered", 1, "4-io-threads"), result("tiered", 8, "4-io-threads")], "8", "several I/O", False),
    ],
)  # fmt: skip
def test_every_claim_can_hold_and_fail(
    results: list[dict[str, Any]], figure: str, words: str, expected: bool | None
) -> None:
    assert said(results, figure, words) == verdict(expected, scaled=True)
    assert said(results, figure, words, scaled=False) == verdict(expected, scaled=False)


def test_rates_say_nothing_where_others_were_at_work_meanwhile() -> None:
    quiet, busy = (
        {"load_average": [[load] * 3, [load] * 3], "spec": {"cores": 2, "policy": None}} for load in (3.0, 30.0)
    )
    for loads, expected in (((quiet, quiet), True), ((busy, busy), True), ((quiet, busy), None)):
        ours, theirs = result("tiered", 1), result("memory", 1)
        both = [{**ours, **loads[0]}, {**theirs, **loads[1]}]
        assert said(both, "3", "18 %") == verdict(expected, scaled=True)
    words = [finding.measured for finding in findings(both, scaled=True) if finding.figure == "3"]
    assert "load averages 3 to 30 on 2 cores" in words[0]


def test_what_did_not_run_says_nothing() -> None:
    assert findings([], scaled=True) == []


# --- reports -----------------------------------------------------------------------------------------------------

SWEEP = [
    *OURS,
    result("spark-list", 1, memory=1400.0),
    result("spark-list", 8, status="died"),
    {"workload": "average", "backend": "memory", "past_windows": 8, "part": "full", "status": "not run", "why": "<&>"},
    result("tiered", 1, "no-prestaging"),
]


def write_report(out: Path, **changed: Any) -> dict[str, Any]:
    settings = load_settings(
        None, {"scale": 0.1, "backend": "tiered,memory,spark-list", "past_windows": "1,8", **changed}
    )
    record = report.record_of(settings, SWEEP, {"claims": [{"paper": "p", "found": "f", "holds": True}]})
    report.write(out, settings, record)
    return record


def test_the_report_is_one_file_that_needs_no_other(tmp_path: Path) -> None:
    record = write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert re.findall(r"(?:src|href)\s*=\s*\"(?!data:image/png;base64,)", page) == []
    assert "http://" not in page and "https://" not in page and "@import" not in page
    for number in "2345678":
        assert f"Figure {number}:" in page
        png = (tmp_path / f"figure-{number}.png").read_bytes()
        assert png.startswith(b"\x89PNG")
    assert "Scaled: smaller" in page and "holds at this scale" in page
    assert "&lt;&amp;&gt;" in page and "<&>" not in page
    assert json.loads((tmp_path / "memory-pressure.json").read_text())["findings"] == record["findings"]
    assert Finding(**record["findings"][-1]) == Finding("9", "p", "f", "holds")


def test_a_comparison_names_what_was_set_differently_and_nothing_else(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        write_report(tmp_path / name, seed=seed)
    place = tmp_path / "b" / "memory-pressure.json"
    other = json.loads(place.read_text())
    for each in other["results"]:
        if each.get("spec", {}).get("policy"):
            each["spec"]["policy"]["io"]["threads"] = 4
            each["measured"]["ingestion"]["normal"] = [50.0]
    place.write_text(json.dumps(other))
    changed, cells_of, paths = compare.write(tmp_path / "both", (tmp_path / "a", tmp_path / "b"))
    assert changed == [("seed", "1", "2"), ("policy.io.threads", "1", "4")]
    rows = {row[0]: dict(zip(cells_of.headings, row, strict=True)) for row in cells_of.rows}
    assert rows["average tiered N=8"]["normal events/s: B / A"] == "0.50"
    assert rows["average tiered N=8"]["memory, MiB: B / A"] == "1.00"
    assert rows["average spark-list N=8"]["A"] == "died"
    assert all(path.exists() for path in paths)
    assert "policy.io.threads" in paths[0].read_text()


@pytest.mark.parametrize("found", [b'{"experiment": "ingest"}', b"[1]", b"\xff"])
def test_only_results_can_be_compared(tmp_path: Path, found: bytes) -> None:
    (tmp_path / "memory-pressure.json").write_bytes(found)
    with pytest.raises(ConfigError, match="no result of"):
        compare.load_record(tmp_path)
