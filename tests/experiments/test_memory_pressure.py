"""The parts of `aion experiment memory-pressure` that need no Spark: settings, measures, verdicts, reports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aion.config.values import size_bytes
from aion.errors import ConfigError
from experiments.memory_pressure import compare, report
from experiments.memory_pressure.command import flink_left_out, progress_line
from experiments.memory_pressure.findings import Finding, findings, verdict
from experiments.memory_pressure.limits import enter, limited, make_group
from experiments.memory_pressure.measure import garbage, ingestion, measured, processing
from experiments.memory_pressure.run import Progress, ending
from experiments.memory_pressure.settings import (
    PARTS,
    SHARES,
    Cell,
    Settings,
    cell_spec,
    cells,
    estimate,
    load_settings,
    numbers,
)
from experiments.shared.tree import Tree, kind_of
from experiments.workloads.model import drawn_lateness

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
    settings = load_settings(EXPERIMENTS / "paper.yaml", {"scale": 0.2, "state": None, "past_windows": "1,4"})
    assert (settings.scale, settings.past_windows, settings.state) == (0.2, [1, 4], "8GiB")
    assert settings.is_scaled


def test_state_and_its_memory_shrink_by_the_square_of_the_scale() -> None:
    full, half = (Settings(scale=scale) for scale in (1.0, 0.5))
    assert full.state_bytes("average") == pytest.approx(4 * half.state_bytes("average"), rel=1e-6)
    events = [s.shape("average", 1).events_per_batch for s in (full, half)]
    assert events == [200_000, 50_000]


def test_the_most_state_is_ten_times_what_each_contender_gets_above_its_floor() -> None:
    settings = Settings(past_windows=[1, 32], backend=list(SHARES), scale=0.2, flink="x.whl")
    state_bytes = settings.state_bytes("average")
    assert settings.shape("average", 32).held_bytes == pytest.approx(10 * state_bytes, rel=1e-6)
    specs = [cell_spec(settings, cell, floor_bytes) for floor_bytes in (1 << 30, 2 << 30) for cell in cells(settings)]
    above = {spec["limit_bytes"] - spec["floor_bytes"] - spec["flight_bytes"] for spec in specs}
    assert above == {state_bytes}
    native = {spec["backend"]: spec["native_bytes"] for spec in specs if spec["native_bytes"]}
    assert set(native) == {"tiered", "memory", "rocksdb", "spark-state", "flink-rocksdb"}
    assert set(native.values()) == {round(state_bytes / 2)}
    budgets = {spec["policy"]["memory"]["budget"] for spec in specs if spec["policy"]}
    assert {size_bytes(budget) for budget in budgets} == {round(state_bytes / 2)}


def test_events_are_held_from_their_arrival_until_the_lateness_of_their_window_ends() -> None:
    shape = Settings(scale=0.01).shape("average", 3)
    held, bytes_each = [], shape.event_bytes
    for batch in range(12):
        held += [(batch - late, bytes_each) for late in drawn_lateness(np.random.default_rng(batch), 5_000, 3)]
    # After the last batch, windows that ended three windows ago or earlier are final.
    kept = sum(size for window, size in held if window > 11 - 4)
    assert shape.held_bytes == pytest.approx(kept * shape.events_per_batch / 5_000, rel=0.02)


def test_without_a_number_a_cell_warms_up_until_its_state_grows_no_longer() -> None:
    settings = Settings(warm_up=None, measured=5, past_windows=[1, 8])
    assert [settings.batches_of(cell) for cell in cells(settings)] == [7, 7, 14, 14]


def test_others_run_fewer_stores_and_past_windows() -> None:
    others = {"backend": ["tiered"], "past_windows": [8]}
    settings = load_settings(None, {"workload": "average,stock", "past_windows": "1,8", "others": others,
                                    "parts": {"none": {"prestage": {"mode": "none"}}}})  # fmt: skip
    names = [cell.name for cell in dict.fromkeys(cells(settings))]
    assert names == ["average-tiered-01", "average-spark-list-01", "average-tiered-08", "average-spark-list-08",
                     "stock-tiered-08", "average-tiered-none-08"]  # fmt: skip
    with pytest.raises(ConfigError, match="use tiered"):
        load_settings(None, {"others": {"backend": ["flnk"]}})


def test_flink_is_left_out_without_its_jars_and_where_it_has_no_program() -> None:
    settings = Settings(workload=["average", "stock"], past_windows=[1], backend=["tiered", "flink-heap"])
    assert [cell.name for cell in cells(settings)] == ["average-tiered-01", "stock-tiered-01"]
    assert "pip download --no-deps" in str(flink_left_out(settings))
    given = settings.model_copy(update={"flink": __file__})
    assert [cell.backend for cell in cells(given)] == ["tiered", "flink-heap", "tiered"]
    assert flink_left_out(given) == "Flink is left out of stock: it has a program only for average"
    with pytest.raises(ConfigError, match=r"there is no nowhere.whl. Flink is not measured"):
        flink_left_out(settings.model_copy(update={"flink": "nowhere.whl"}))


@pytest.mark.parametrize(("name", "minutes"), [("small", 5), ("middle", 45)])
def test_settings_say_how_many_cells_they_have_and_are_small_enough(name: str, minutes: int) -> None:
    path = EXPERIMENTS / f"{name}.yaml"
    settings = load_settings(path, {"flink": "x.whl"})
    words = re.search(r"(\d+) cells and (\d+) floors; at most about (\d+) minutes", estimate(settings))
    assert words and int(words[3]) <= minutes, estimate(settings)
    assert f"{words[1]} cells and {words[2]} floors" in path.read_text()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workload": "averge"}, "use average, bigrams"),
        ({"backend": "flink"}, "use tiered, memory"),
        ({"past_windows": "0"}, "past windows"),
        ({"past_windows": [1, 0]}, "past windows"),
        ({"past_windows": [-1]}, "write numbers"),
        ({"state": "lots"}, "not a size"),
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
    settings = Settings(state="1GiB")
    backends = ("tiered", "spark-state", "spark-list", "flink-heap")
    specs = {name: cell_spec(settings, Cell("average", name, 1)) for name in backends}
    heaps = {name: (spec["heap_bytes"] - spec["flight_bytes"] // 2) / 2**20 for name, spec in specs.items()}
    wanted = {"tiered": 512 + 256, "spark-state": 512 + 256, "spark-list": 512 + 870.4}
    assert {name: heaps[name] for name in wanted} == pytest.approx(wanted, abs=1)
    assert specs["flink-heap"]["heap_bytes"] == (192 + 1024) << 20


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
    assert found["pace"] == []
    del found["pace"]
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
    """A cell with as many of its series as are told; each of three equal values.

    ``memory``: above a floor of 1,000 MiB. Its state is 100 MiB for each past window, and there are 150 MiB for it.
    """
    memory, normal, windows, rate, late_rate, young, old, hits, share = (
        of.get(name, default)
        for name, default in (
            ("memory", 100.0), ("normal", 100.0), ("windows", 50.0), ("rate", 1e4), ("late_rate", 1e4),
            ("young", 0.02), ("old", 0.0), ("hits", 5), ("share", 0.5),
        )
    )  # fmt: skip
    pace = of.get("pace", "real")
    return {
        "workload": "average",
        "backend": backend,
        "past_windows": past,
        "part": part,
        "status": status,
        "agrees": of.get("agrees", True),
        "difference": "mean differs" if of.get("agrees") is False else None,
        "why": "the tree took 9 bytes" if status == "died" else None,
        "limit": "watched",
        "page_cache": {"times": 3, "files": 10, "cached": of.get("cached", 0)},
        "spec": {
            "policy": {"io": {"threads": 1}} if backend == "tiered" else None,
            "pace": pace,
            "floor_bytes": 1000 << 20,
            "held_bytes": (100 * past) << 20,
            "state_bytes": of.get("state_mib", 150) << 20,
            "limit_bytes": 1150 << 20,
        },
        "measured": {
            "batches": 3,
            "memory_mib": {kind: [1000.0 + memory] * 3 for kind in ("total", "jvm", "workers", "server", "driver")},
            "peak_mib": 1000.0 + memory,
            "ingestion": {"normal": [normal] * 3, "windows": [windows] * 3, "all": [normal * 1.5] * 3,
                          "pace": [share] * 3 if pace == "real" else []},
            "processing": {"normal": [rate] * 3, "all": [late_rate] * of.get("values", 3)},
            "panes": of.get("panes", {"on_time": 3, "final": 3}),
            "gc": {"young_share": young, "old_share": old},
            "dropped": 0,
            "state": {"staging": {"hits": hits, "misses": 0, "blocked_s": 0.0}} if backend == "tiered" else None,
        },
    }  # fmt: skip


def said(results: list[dict[str, Any]], figure: str, words: str, *, scaled: bool = True) -> str:
    found = [f.verdict for f in findings(results, scaled=scaled) if f.figure == figure and words in f.paper]
    assert len(found) == 1, found
    return found[0]


def test_verdicts() -> None:
    assert verdict(None, scaled=False) == "not judged"
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
        (OURS, "2", "the same for any number", True),
        ([result("tiered", 1), result("tiered", 8, memory=300.0)], "2", "the same for any number", False),
        ([result("tiered", 1), result("tiered", 8, status="died")], "2", "the same for any number", False),
        ([*OURS, result("spark-list", 8, memory=500.0)], "2", "less memory", True),
        # figures 3, 5, 7
        ([*OURS, result("memory", 1, normal=120.0)], "3", "18 %", True),
        ([*OURS, result("memory", 1, normal=130.0)], "3", "18 %", False),
        ([*OURS, result("memory", 1, windows=58.0)], "4", "16 %", True),
        ([*OURS, result("memory", 1, windows=62.0)], "4", "16 %", False),
        ([*OURS, result("memory", 8, rate=1.4e4)], "5", "31 %", True),
        ([*OURS, result("memory", 8, rate=1.5e4)], "5", "31 %", False),
        ([*OURS, result("memory", 8, late_rate=1.4e4)], "7", "31 %", True),
        ([*OURS, result("memory", 8, late_rate=1.5e4)], "7", "31 %", False),
        # figure 6
        ([result("flink-heap", 1), result("flink-heap", 8, old=0.1)], "6", "time on garbage collection", True),
        ([result("flink-heap", 1), result("flink-heap", 8)], "6", "time on garbage collection", False),
        # figure 8
        ([*OURS, result("tiered", 8, "no-prestaging", late_rate=50.0)], "8", "two orders", True),
        ([*OURS, result("tiered", 8, "no-prestaging", late_rate=5000.0)], "8", "two orders", False),
        ([*OURS, result("tiered", 8, "no-prestaging", normal=80.0)], "8", "about 20 %", True),
        ([*OURS, result("tiered", 8, "no-prestaging", normal=99.0)], "8", "about 20 %", False),
        ([*OURS, result("tiered", 8, "no-codec-threads", status="died")], "8", "one thread", True),
        ([*OURS, result("tiered", 8, "no-codec-threads")], "8", "one thread", False),
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


SLOW = result("tiered", 8, "no-prestaging", late_rate=50.0)
BIG = result("spark-list", 8, memory=500.0)
MANY = {"on_time": 3, "final": 3, "late": 30}


@pytest.mark.parametrize(
    ("results", "figure", "words", "why"),
    [
        # A contender that dies with any number of past windows shows no growth of its state.
        ([result("spark-list", 1, status="died")], "2", "crashes", "died with the fewest already"),
        ([result("spark-list", 1, agrees=False), result("spark-list", 8, status="died")], "2", "crashes", "fewest"),
        # One that lives was perhaps not asked for as much as the paper's.
        ([result("spark-list", 1), result("spark-list", 6)], "2", "crashes", "not run with 7"),
        ([result("spark-list", 8, status="failed")], "2", "crashes", "not run with 7"),
        ([result("spark-list", 8, state_mib=900)], "2", "crashes", "smaller than the memory for it"),
        # One number of past windows, or state that fits into memory, is flat whatever the store does.
        ([result("tiered", 1)], "2", "the same for any number", "fewer than two"),
        ([result("tiered", 1), result("tiered", 8, agrees=False)], "2", "the same for any number", "fewer than two"),
        ([result("tiered", 1), result("tiered", 2)], "2", "the same for any number", "less than the memory for it"),
        # The baseline's memory is only its floor.
        ([*OURS, result("spark-list", 8, memory=200.0)], "2", "less memory", "next to nothing"),
        # Rates of other work, of the source, or of a disturbed machine.
        ([*OURS, result("memory", 8, panes=MANY)], "3", "18 %", "did not run the same windows"),
        ([*OURS, result("memory", 8, panes={})], "7", "31 %", "did not run the same windows"),
        ([result("tiered", 8, share=1.0), result("memory", 8, share=1.0)], "3", "18 %", "kept up with the source"),
        # A mean over more windows.
        ([result("tiered", 1), result("tiered", 8, windows=20.0)], "4", "falls", "whatever the engine does"),
        # More windows make more garbage.
        ([result("spark-list", 1), result("spark-list", 8, old=0.1, panes=MANY)], "6", "time on", "ran more windows"),
        ([result("flink-heap", 1, young=1e-4), result("flink-heap", 8, young=1e-3)], "6", "time on", "next to no time"),
        # Prestaging without idle time, without use, and from the page cache.
        ([result("tiered", 8, pace="max"), SLOW], "8", "two orders", "no idle time"),
        ([result("tiered", 8, hits=0), SLOW], "8", "two orders", "prestaged nothing"),
        ([result("tiered", 8, cached=5), SLOW], "8", "two orders", "50% of the files stayed"),
        ([{**result("tiered", 8), "page_cache": None}, SLOW], "8", "two orders", "was in the page cache"),
        ([result("tiered", 8, panes=MANY), SLOW], "8", "two orders", "did not run the same windows"),
        # A part that dies where the full policy does, too.
        (
            [result("tiered", 8, status="died"), result("tiered", 8, "no-codec-threads", status="died")],
            "8", "one thread", "the full policy did not live",
        ),
        ([*OURS, result("tiered", 2, "no-codec-threads")], "8", "one thread", "not run with 8"),
        ([*OURS, result("tiered", 8, "no-codec-threads", status="failed")], "8", "one thread", "not run with 8"),
    ],
)  # fmt: skip
def test_no_claim_holds_by_accident(results: list[dict[str, Any]], figure: str, words: str, why: str) -> None:
    assert said(results, figure, words) == "not judged"
    (found,) = [f for f in findings(results, scaled=True) if f.figure == figure and words in f.paper]
    assert why in found.measured


def test_medians_of_few_values_and_cells_with_wrong_results_are_not_compared() -> None:
    few = [*OURS, result("memory", 8, late_rate=1e4, values=2)]
    assert [f for f in findings(few, scaled=True) if f.figure == "7"] == []
    wrong = [*OURS, result("memory", 8, agrees=False)]
    assert [f for f in findings(wrong, scaled=True) if f.figure in "3457" and "31 %" in f.paper] == []
    (found,) = [f for f in findings(wrong, scaled=True) if f.figure == "–"]
    assert (found.verdict, found.measured) == ("does not hold", "2 of 3 finished cells; memory full 8: mean differs")


def loaded(of: dict[str, Any], load: dict[str, Any]) -> dict[str, Any]:
    return {**of, **load, "spec": {**of["spec"], **load["spec"]}}


def test_rates_say_nothing_where_others_were_at_work_meanwhile() -> None:
    quiet, busy = (
        {"load_average": [[load] * 3, [load] * 3], "spec": {"cores": 2, "policy": None}} for load in (3.0, 30.0)
    )
    for loads, expected in (((quiet, quiet), True), ((busy, busy), True), ((quiet, busy), None)):
        ours, theirs = result("tiered", 1), result("memory", 1)
        both = [loaded(ours, loads[0]), loaded(theirs, loads[1])]
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
