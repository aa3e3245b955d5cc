"""Each workload's last results, after late panes went through all its stages, against a batch computation."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from experiments.workloads import application, load, sources
from experiments.workloads.chaining import Results
from experiments.workloads.model import Probe, Shape, Spec

pytestmark = pytest.mark.timeout(1200)  # a loaded machine takes its time: stock has three operators

PAST = 2
BATCHES = {"average": 3, "bigrams": 3, "stock": 3, "linear-road": 4}  # cars stand still from the second window on
SPECS = {
    "average": Spec(300, 2, 60),
    "bigrams": Spec(60, 2, 60),
    "stock": Spec(300, 1.2, 60, parts=6),
    "linear-road": Spec(1_200, 2, 60),
}
POLICY = {
    # So little that most of it goes over the disk.
    "memory": {"budget": "256KiB", "bucket_limit": "64KiB"},
    "trigger": {"kind": "staleness", "executions": 1},
}


def policy(shape: Shape, backend: str) -> dict[str, dict[str, object]]:
    lateness = {"initial_bound": shape.bound, "coverage": None}
    return {**POLICY, "lateness": lateness, "state": {"backend": backend}}


def assert_equal(found: Mapping[str, pd.DataFrame], truth: Mapping[str, pd.DataFrame]) -> None:
    assert set(found) == set(truth)
    for name, wanted in truth.items():
        columns = sorted(wanted.columns)
        numbers = [c for c in columns if wanted[c].dtype.kind == "f"]
        by = [c for c in columns if c not in numbers]
        frames = [f[columns].sort_values(by, ignore_index=True) for f in (wanted, found[name])]
        assert len(frames[0]) == len(frames[1]), name
        for column in columns:
            one, other = (frame[column].to_numpy() for frame in frames)
            same = np.isclose(one, other, rtol=1e-9, atol=1e-9) if column in numbers else one == other
            assert same.all(), f"{name}.{column}"


def same_executions(rows: pa.Table, shape: Shape, batches: int) -> None:
    """Each window ran once at its end, and once at the end of its lateness if it had changed since."""
    panes = sorted((row["window_start"], row["kind"], row["events"]) for row in rows.to_pylist())
    on_time = {start: events for start, kind, events in panes if kind == "on_time"}
    final = {start: events for start, kind, events in panes if kind == "final"}
    assert len(panes) == len(on_time) + len(final), "none ran twice"
    assert len(on_time) == batches + shape.past_windows
    last = on_time | final
    assert sum(last.values()) == batches * shape.events_per_batch, "all events are in the last panes"


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("average", "tiered"),
        pytest.param("bigrams", "tiered", marks=pytest.mark.proof),
        pytest.param("stock", "tiered", marks=pytest.mark.proof),
        pytest.param("linear-road", "tiered", marks=pytest.mark.proof),
        # The baselines compute the same.
        ("average", "spark-state"),
        ("stock", "spark-state"),
        ("linear-road", "spark-state"),
        pytest.param("linear-road", "spark-list", marks=pytest.mark.proof),
        pytest.param("stock", "spark-window", marks=pytest.mark.proof),
    ],
)
def test_last_results_are_those_of_a_batch_computation(
    spark: SparkSession, tmp_path: Path, name: str, backend: str
) -> None:
    workload, shape, batches = load(name), Shape.of(SPECS[name], past_windows=PAST), BATCHES[name]
    data = tmp_path / "data"
    counts = sources.write_files(workload, shape, batches, data)
    assert sum(sum(of[1:]) for of in counts) > 0, "some events are late"
    aion = application.is_aion(backend)
    twice = application.runs_twice(backend)
    for setting, value in application.settings_of(backend).items():
        spark.conf.set(setting, value)
    streams = sources.read(spark, workload, shape, batches=batches, folder=data, aion=twice)
    panes = application.panes_of(workload, backend, streams, shape, Probe(), policy(shape, backend) if aion else None)
    seen: list[pa.Table] = []
    out = tmp_path / "out"
    query = application.start(workload, backend, panes, shape, out, seen=lambda _, rows: seen.append(rows))
    for setting in application.settings_of(backend):
        spark.conf.unset(setting)
    query.awaitTermination()
    if name == "average" and twice:
        same_executions(pa.concat_tables(seen, promote_options="permissive"), shape, batches)
    truth = workload.truth(sources.events_of(data, workload, batches), shape)
    assert all(len(rows) for rows in truth.values())
    if name == "linear-road":
        assert (truth["tolls"]["toll"] > 0).any()
    assert_equal(Results(tmp_path / "out" / "results").read(), truth)


@pytest.mark.proof
def test_the_rate_source_makes_the_same_events(spark: SparkSession, tmp_path: Path) -> None:
    workload, shape = load("average"), Shape.of(SPECS["average"], past_windows=1)
    batches, enough = 2, threading.Event()

    def seen(batch: int, rows: pa.Table) -> None:
        if batch > shape.heartbeats(batches)[-1]:  # they have moved the watermark, and the batch after them has seen it
            enough.set()

    streams = sources.read(spark, workload, shape, batches=batches, aion=True)
    panes = application.panes_of(workload, "tiered", streams, shape, Probe(), policy(shape, "tiered"))
    query = application.start(workload, "tiered", panes, shape, tmp_path, every="0 seconds", seen=seen)
    try:
        assert enough.wait(200), query.exception()
    finally:
        query.stop()
    events = pa.concat_tables(sources.table_of(workload, "numbers", shape, batch)[0] for batch in range(batches))
    assert_equal(Results(tmp_path / "results").read(), workload.truth({"numbers": events}, shape))
