"""What Aion is for, by its counters on Spark: windows leave memory, and are back before their late executions.

The stream is the workload ``average`` (paper, section 5.1): some events are several windows late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

import aion
from aion import metrics
from aion.metrics import StateMetrics
from aion.spark.tasks.running import next_start
from experiments.workloads import application, load, sources
from experiments.workloads.average import SCHEMA, mean
from experiments.workloads.model import Shape
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink, take_all
from tests.spark.state.test_tiers import new_server

__all__ = ["new_server"]

MIB = 1 << 20
PATIENCE = 60.0  # seconds
AVERAGE = load("average")
BATCHES = 14
PAST = 8  # windows
WARM = 4  # batches, after which the intervals and the disk are known


def state_of(spark: SparkSession) -> StateMetrics:
    found = metrics.state(spark)
    assert found is not None
    return found


def until(spark: SparkSession, what: Callable[[StateMetrics], bool]) -> StateMetrics:
    deadline = time.monotonic() + PATIENCE
    while not what(found := state_of(spark)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def averages(
    spark: SparkSession, folder: Path, policy: Mapping[str, Any], *, blocking: bool, batches: int = BATCHES
) -> list[StateMetrics]:
    """Runs the workload, as fast as Spark takes it, and returns the metrics after each batch but the last."""
    shape = Shape.of(AVERAGE.spec, past_windows=PAST, scale=0.05)
    sources.write_files(AVERAGE, shape, batches, folder / "data")
    events = sources.read(spark, AVERAGE, shape, batches=batches, folder=folder / "data", aion=True)["numbers"]
    panes = aion.windowed(
        events,
        time="ts",
        windows={"mean": aion.Tumbling(shape.window)},
        apply=aion.Apply(mean, SCHEMA, blocking=blocking),
        name="average",
        policy={"lateness": {"initial_bound": shape.bound, "coverage": None}, "state": {"shards": 1}, **policy},
    )
    found: list[StateMetrics] = []

    def seen(batch: int, rows: pa.Table) -> None:
        found.append(state_of(spark))

    rows: DataFrame = aion.panes(panes).withColumnRenamed("window", "stage")
    application.start(AVERAGE, "tiered", rows, shape, folder / "work", seen=seen).awaitTermination()
    return found[:batches]  # then comes a heartbeat that ends all windows at once, which nothing foretells


def between(before: StateMetrics, after: StateMetrics) -> dict[str, float]:
    return {name: after.staging[name] - before.staging[name] for name in after.staging}


@pytest.mark.slow
@pytest.mark.parametrize("blocking", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_late_executions_find_in_memory_what_was_planned_for_them(
    spark: SparkSession, tmp_path: Path, new_server: None, blocking: bool
) -> None:
    found = averages(spark, tmp_path, {}, blocking=blocking)
    counted = between(found[WARM], found[-1])
    reads = sum(counted[name] for name in ("hits", "ahead", "late", "misses"))
    assert reads >= 100
    served = counted["hits"] + (0 if blocking else counted["ahead"])
    assert served >= 0.9 * reads, counted
    assert counted["hits"] > 0
    assert counted["vain_bytes"] <= 0.05 * counted["staged_bytes"], counted
    assert found[-1].disk_only_bytes > 5 * MIB, "windows that have ended are on disk"


@pytest.mark.proof
def test_without_prestaging_executions_wait(spark: SparkSession, tmp_path: Path, new_server: None) -> None:
    found = averages(spark, tmp_path, {"prestage": {"mode": "none"}}, blocking=True)
    counted = between(found[WARM], found[-1])
    assert (counted["hits"], counted["ahead"], counted["staged_bytes"]) == (0, 0, 0)
    assert counted["misses"] >= 100
    assert counted["blocked_s"] > 0


@pytest.mark.proof
@pytest.mark.parametrize(("keep", "least", "most"), [(0.0, 0.0, 0.15), (0.5, 0.25, 0.6)])
def test_a_part_of_each_window_stays_if_it_shall(
    spark: SparkSession, tmp_path: Path, new_server: None, keep: float, least: float, most: float
) -> None:
    """The paper's rho_min: the part with which a late execution begins (section 3.2).

    It is a part of what a window has when it ends. Its late events, which are on disk, and the newest window also count
    here.
    """
    policy = {"prestage": {"mode": "none"}, "blocks": {"target": "64KiB"}, "destage": {"keep_fraction": keep}}
    found = averages(spark, tmp_path, policy, blocking=False)[-1]
    assert least <= found.m_bucket_bytes / (found.m_bucket_bytes + found.disk_only_bytes) <= most


def next_batch(key: Any, window: Any, events: Any) -> dict[str, float]:
    context = TaskContext.get()
    assert context is not None
    every_s, after_s = next_start(context) or (0.0, 0.0)
    return {"every_s": every_s, "after_s": after_s}


@pytest.mark.slow
@pytest.mark.parametrize(("interval", "every_s"), [("2 seconds", 2.0), ("0 seconds", 0.0)])
def test_tasks_know_when_the_trigger_starts_the_next_batch(
    spark: SparkSession, stream: FileStream, sink: Sink, interval: str, every_s: float
) -> None:
    """By that the state server stages for it, before it has seen how often batches come."""
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    windows = aion.windowed(
        events,
        time="ts",
        windows=aion.Tumbling("10 seconds"),
        apply=aion.Apply(next_batch, "every_s double, after_s double"),
    )
    stream.put([("a", 1, 1.0), ("a", 100, 1.0)])
    query = sink.start(windows, processingTime=interval)
    take_all(query)
    stream.put([("a", 200, 1.0)])
    take_all(query)
    query.stop()
    rows = [row for row in sink.rows() if row["kind"] == "on_time"]
    assert rows and {row["every_s"] for row in rows} == {every_s}
    assert all(0 <= row["after_s"] <= every_s for row in rows)


# -- windows that are open, and pressure ----------------------------------------------------------------------

ROW_BYTES = 2048


class Open:
    """A query with windows that do not end: their events fill memory."""

    def __init__(self, spark: SparkSession, folder: Path, policy: Mapping[str, Any]) -> None:
        schema = pa.schema([("ts", pa.timestamp("us", "UTC")), ("v", pa.float64()), ("pad", pa.string())])
        folder.mkdir()
        self.stream = FileStream(spark, folder / "input", schema)
        self.spark, self.windows = spark, 0
        events = self.stream.read("ts timestamp, v double, pad string").withWatermark("ts", "10 hours")
        panes = aion.windowed(
            events,
            time="ts",
            windows=aion.Tumbling("10 minutes"),
            apply=aion.Apply(total, "total double"),
            policy={
                "state": {"shards": 1},
                "blocks": {"target": "64KiB"},
                "distribution": {"hand_over": None},  # nothing goes to disk but by the policy
                **policy,
            },
        )
        writer = panes.writeStream.option("checkpointLocation", str(folder / "checkpoint"))
        self.query = writer.foreachBatch(lambda batch, number: batch.collect()).start()

    def put(self, windows: int, mib: float) -> None:
        """Events of new windows, so many MiB of each."""
        for _ in range(windows):
            self.windows += 1
            rows = int(mib * MIB / ROW_BYTES)
            self.stream.put([(600 * self.windows + i % 600, 1.0, "x" * ROW_BYTES) for i in range(rows)])
        take_all(self.query)


def total(key: Any, window: Any, events: Any) -> dict[str, float]:
    return {"total": float(sum(batch.num_rows for batch in events))}


BUDGET = {"memory": {"budget": 8 * MIB, "bucket_limit": 8 * MIB}}


@pytest.mark.proof
def test_moderate_pressure_moves_windows_until_there_is_room_and_no_further(
    spark: SparkSession, tmp_path: Path, new_server: None
) -> None:
    """From 75 % of the budget on until four fifths of that, 60 %; in between nothing moves (section 3.2)."""
    query = Open(spark, tmp_path / "q", BUDGET)
    query.put(5, 1.0)
    before = state_of(spark)
    assert before.destaged_under_pressure == 0
    assert 4.5 * MIB < before.m_bucket_bytes < 0.75 * 8 * MIB
    query.put(2, 0.7)
    after = until(spark, lambda now: now.m_bucket_bytes <= 0.6 * 8 * MIB)
    assert after.destaged_under_pressure >= 1
    assert after.m_bucket_bytes > 2 * MIB, "the largest windows went, and the others stayed"
    query.put(1, 0.5)
    time.sleep(1.0)  # four looks at the pressure
    again = state_of(spark)
    assert again.destaged_under_pressure == after.destaged_under_pressure, "below 75 %: nothing moves"
    query.query.stop()


@pytest.mark.proof
def test_when_memory_is_scarce_all_windows_move(spark: SparkSession, tmp_path: Path, new_server: None) -> None:
    policy = {"memory": {"budget": 8 * MIB, "bucket_limit": 8 * MIB, "moderate": 0.3, "scarce": 0.35}}
    query = Open(spark, tmp_path / "q", policy)
    query.put(3, 1.0)  # at moderate pressure, two of them would stay
    found = until(spark, lambda now: now.m_bucket_bytes < MIB // 4)
    assert found.disk_only_bytes > 2.5 * MIB
    query.query.stop()


@pytest.mark.proof
@pytest.mark.parametrize("idle_after", ["500 ms", "3x"])
def test_windows_that_get_no_events_leave_memory(
    spark: SparkSession, tmp_path: Path, new_server: None, idle_after: str
) -> None:
    """The paper's tau, as a time, and as a multiple of the time of an execution (section 3.2)."""
    policy = {"destage": {"idle_after": idle_after}}
    if idle_after == "3x":  # something must have been executed, under the same policy: it is that of the host
        averages(spark, tmp_path / "first", policy, blocking=True, batches=3)
    query = Open(spark, tmp_path / "q", policy)
    query.put(3, 1.0)
    found = until(spark, lambda now: now.m_bucket_bytes < MIB // 4)
    assert found.disk_only_bytes > 2.5 * MIB
    query.query.stop()


@pytest.mark.proof
def test_with_a_punctuated_watermark_the_first_late_event_announces_the_execution(
    spark: SparkSession, stream: FileStream, tmp_path: Path, new_server: None
) -> None:
    """Nothing foretells when such a watermark moves, so late events bring their windows back (section 3.2)."""
    rows = [("k", 1000 + second, float(second)) for second in range(100) for _ in range(20)]
    stream.put([*rows, ("clock", 1200, 0.0)])
    stream.put([("clock", 1200, 0.0)])  # the windows have ended, and leave memory
    for number, at in enumerate((1301, 1405, 1509), 1):
        stream.put([("k", 1000 + 10 * window, number * 1.0) for window in range(10)])
        stream.put([("clock", at, 0.0)])
        stream.put([("clock", at, 0.0)])
    found: list[StateMetrics] = []

    def take(batch: DataFrame, number: int) -> None:
        batch.collect()
        found.append(state_of(spark))

    panes = aion.windowed(
        stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"),
        key="k",
        time="ts",
        windows=aion.Tumbling("10 seconds"),
        apply=aion.Apply(ids, "n bigint"),
        policy={
            "state": {"shards": 1},
            "blocks": {"target": "512B"},
            "prestage": {"mode": "on_late_event"},
            "lateness": {"initial_bound": "1 hour", "coverage": None},
            "trigger": {"kind": "interval", "interval": "100 seconds"},
        },
    )
    writer = panes.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint")).foreachBatch(take)
    writer.trigger(availableNow=True).start().awaitTermination()
    counted = found[-1].staging
    assert counted["hits"] >= 0.9 * (counted["hits"] + counted["late"] + counted["misses"]) > 0, counted
    assert counted["vain_bytes"] <= 0.05 * counted["staged_bytes"], counted


def ids(key: Any, window: Any, events: Any) -> dict[str, int]:
    return {"n": sum(batch.num_rows for batch in events)}
