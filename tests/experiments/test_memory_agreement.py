"""Results of `aion experiment memory-pressure` against a batch computation."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from experiments.memory_pressure.agreement import agreement
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
