"""Results against a batch computation, files out of the page cache, and the events of Flink's program. No Spark."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from experiments.memory_pressure import flink_cell
from experiments.memory_pressure.agreement import agreement
from experiments.memory_pressure.page_cache import Evictor, evict, is_cached
from experiments.memory_pressure.run import sweep
from experiments.memory_pressure.settings import Cell, Settings, cell_spec, shape_of
from experiments.workloads import NAMES, load, sources
from experiments.workloads.chaining import Results

SETTINGS = Settings(scale=0.002, warm_up=1, measured=3, pace="max", past_windows=[2])


def computed(tmp_path: Path, name: str, spec: dict[str, Any]) -> Results:
    """The results of a batch computation, as a query would have written them."""
    workload, shape = load(name), shape_of(spec)
    sources.write_files(workload, shape, 4, tmp_path / "data")
    results = Results(tmp_path / "results")
    for stage, rows in workload.truth(sources.events_of(tmp_path / "data", workload, 4), shape).items():
        for start, of in rows.groupby("window_start"):
            results.put({(stage, int(start)): of.drop(columns="window_start")})
    return results


@pytest.mark.parametrize("name", NAMES)
def test_results_of_a_batch_computation_agree_with_it(tmp_path: Path, name: str) -> None:
    settings = SETTINGS.model_copy(update={"workload": [name], "scale": 0.05 if name == "stock" else 0.01})
    spec = cell_spec(settings, Cell(name, "tiered", 2))
    computed(tmp_path, name, spec)
    found = agreement(tmp_path / "results", tmp_path / "data", spec)
    assert found in ({"agrees": True, "difference": None}, {"agrees": False, "difference": "no results of accidents"})
    assert found["agrees"] or name == "linear-road"


def test_a_wrong_value_and_a_missing_window_are_found(tmp_path: Path) -> None:
    spec = cell_spec(SETTINGS, Cell("average", "tiered", 2))
    results = computed(tmp_path, "average", spec)
    first, second, *_ = sorted((tmp_path / "results" / "mean").iterdir())
    value = pq.read_table(first).to_pandas()
    results.put({("mean", int(first.stem)): value[["mean"]] + 1e-3})
    found = agreement(tmp_path / "results", tmp_path / "data", spec)
    assert (found["agrees"], found["difference"]) == (False, "mean: mean differs in 1 of 4 rows")
    second.unlink()
    found = agreement(tmp_path / "results", tmp_path / "data", spec)
    assert (found["agrees"], found["difference"]) == (False, "mean: 3 rows instead of 4")


def test_in_real_time_only_windows_are_compared_whose_lateness_ended(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"past_windows": [1], "pace": "real"})
    spec = cell_spec(settings, Cell("average", "tiered", 1))
    computed(tmp_path, "average", spec)
    *_, last = sorted((tmp_path / "results" / "mean").iterdir())
    last.unlink()
    assert agreement(tmp_path / "results", tmp_path / "data", spec)["agrees"]
    assert not agreement(tmp_path / "results", tmp_path / "data", {**spec, "pace": "max"})["agrees"]


def test_results_that_dropped_events_on_purpose_are_not_judged(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"parts": {"learnt": {"lateness": {"coverage": 0.9}}}})
    spec = cell_spec(settings, Cell("average", "tiered", 2, "learnt"))
    computed(tmp_path, "average", spec)
    assert agreement(tmp_path / "results", tmp_path / "data", spec)["agrees"] is None


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A folder on a file system with a page cache; /tmp may be in memory."""
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        yield Path(folder)


def cached(path: Path) -> bool:
    file = os.open(path, os.O_RDONLY)
    try:
        return is_cached(file)
    finally:
        os.close(file)


def test_files_just_written_leave_the_page_cache(on_disk: Path) -> None:
    (on_disk / "deep").mkdir()
    for name in ("a", "deep/b"):
        (on_disk / name).write_bytes(os.urandom(1 << 20))
    (on_disk / "empty").touch()
    assert cached(on_disk / "a")
    found = evict(on_disk)
    if found["cached"]:
        pytest.skip("this file system keeps its pages")
    assert found == {"files": 2, "cached": 0}
    assert not cached(on_disk / "a") and not cached(on_disk / "deep" / "b")


def test_an_evictor_evicts_when_it_is_woken_and_ends(on_disk: Path) -> None:
    (on_disk / "a").write_bytes(os.urandom(1 << 20))
    with Evictor(on_disk) as evictor:
        evictor.wake()
        while not evictor.found["files"]:
            os.sched_yield()
    assert (evictor.found["times"], evictor.found["files"]) == (1, 1)


def test_flink_reads_the_same_events(tmp_path: Path) -> None:
    shape = replace(SETTINGS.shape("average", 2), payload_bytes=20)
    sources.write_files(load("average"), shape, 2, tmp_path)
    flink_cell.write_events(tmp_path, 2)
    wanted = pq.read_table(tmp_path / "numbers" / "batch-00001.parquet")
    data = (tmp_path / "flink" / "batch-00001.bin").read_bytes()
    assert int.from_bytes(data[:4], "big") == wanted.num_rows
    fields = [("ts", ">i8"), ("counter", ">i8"), ("value", ">i8"), ("pad", "V20")]
    rows = np.frombuffer(data[4:], np.dtype(fields))
    assert rows["value"].tolist() == wanted["value"].to_pylist()
    assert rows["ts"].tolist() == wanted["ts"].cast("int64").to_pylist()
    assert [pad.tobytes().decode() for pad in rows["pad"]] == wanted["pad"].to_pylist()


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.skipif("AION_FLINK" not in os.environ, reason="AION_FLINK=WHEEL names Flink's jars")
def test_flink_runs_each_window_twice_and_its_results_are_right(tmp_path: Path) -> None:
    settings = Settings(
        workload=["average"], backend=["flink-heap", "flink-rocksdb"], past_windows=[2], scale=0.02, state="64MiB",
        warm_up=3, measured=3, pace="max", limit="watched", flink=os.environ["AION_FLINK"],
    )  # fmt: skip
    results = sweep(settings, tmp_path, lambda text, progress: None)
    assert [(r["backend"], r["status"], r.get("agrees")) for r in results] == [
        ("flink-heap", "done", True),
        ("flink-rocksdb", "done", True),
    ]
    assert {tuple(sorted(r["measured"]["panes"].items())) for r in results} == {(("final", 3), ("on_time", 3))}
    assert all(len(r["measured"]["ingestion"]["normal"]) == 3 for r in results)
