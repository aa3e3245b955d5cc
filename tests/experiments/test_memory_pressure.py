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
from experiments.memory_pressure.cell import java_options
from experiments.memory_pressure.command import flink_left_out, progress_line
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
    shape_of,
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


def test_a_floor_has_the_panes_of_the_longest_cell_and_next_to_no_state() -> None:
    settings = Settings(warm_up=None, measured=5, past_windows=[1, 8], scale=0.1)
    cell = list(cells(settings))[-1]
    spec, floor = (cell_spec(settings, of) for of in (cell, cell.its_floor))
    assert [floor[name] for name in ("warm_up", "measured")] == [spec[name] for name in ("warm_up", "measured")]
    shape, of_floor = shape_of(spec), shape_of(floor)
    assert of_floor.events_per_batch == shape.events_per_batch
    assert of_floor.held_bytes < shape.held_bytes / 100


def test_a_heap_has_a_fixed_size_unless_it_holds_the_state() -> None:
    settings = Settings(state="1GiB", flink="x.whl")
    for cell in (Cell("average", backend, 1) for backend in SHARES):
        options = java_options(cell_spec(settings, cell))
        holds = cell.backend in ("spark-list", "spark-window", "flink-heap")
        assert ("-Xms" in options and "+AlwaysPreTouch" in options) == (not holds), cell
        assert "-Xms" in java_options(cell_spec(settings, cell.its_floor))
        assert "-XX:MaxMetaspaceSize" in options


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
        ({"state": "lots"}, "write a size above 0"),
        ({"scale": 2.0}, "scale"),
        ({"source": "kafka"}, "localhost:9092"),
        ({"policy": "nonesuch"}, "nonesuch"),
        ({"parts": {"odd": {"prestaging": {"mode": "none"}}}}, "not a section"),
        ({"parts": {"odd": {"prestage": {"mode": "never"}}}}, "mode"),
        ({"parts": {"odd": {"server": "fast"}}}, "parts: server: 'fast' is not one of commits, nothing, 4-io-threads"),
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
    backends = ("tiered", "spark-state", "spark-list", "flink-heap", "flink-rocksdb")
    specs = {name: cell_spec(settings, Cell("average", name, 1)) for name in backends}
    heaps = {name: (spec["heap_bytes"] - spec["flight_bytes"] // 2) / 2**20 for name, spec in specs.items()}
    wanted = {"tiered": 512 + 256, "spark-state": 512 + 256, "spark-list": 512 + 870.4, "flink-rocksdb": 192 + 256}
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
        ("python3", ["python3", "-m", "experiments.shared.state_server"], "server"),
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
