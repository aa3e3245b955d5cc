"""What Spark's progress and the log say of windows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import aion
from aion import aggregates as A
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink

POLICY = {"lateness": {"initial_bound": "1 minute", "coverage": None}, "trigger": {"kind": "every_batch"}}


@pytest.mark.slow
def test_panes_and_drops_are_counted(
    spark: SparkSession, stream: FileStream, sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    stream.put([("a", 10, 1.0), ("b", 10, 1.0)])
    stream.put([("a", 100, 1.0)])
    stream.put([("a", 20, 1.0), ("a", 400, 1.0)])
    stream.put([("a", 30, 1.0), ("b", 30, 1.0)])
    with caplog.at_level(logging.INFO, "aion"):
        panes = aion.windowed(
            stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"),
            key="k", time="ts", windows=aion.Tumbling("1 minute"), aggregates={"n": A.count()}, policy=POLICY,
            name="counts",
        )  # fmt: skip
        sink.run(panes)
        spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()  # type: ignore[union-attr]
    said = [record.getMessage() for record in caplog.records if record.name.startswith("aion.spark")]
    assert any("windowed 'counts': state in " in line and "kept for 1 minute after" in line for line in said)
    assert [line for line in said if "dropped" in line] == ["counts: batch 3 dropped 2 events (see aion.dropped)"]


def counts_of(query: StreamingQuery) -> dict[str, Any]:
    """What Spark's progress has of the only operator, added up over the batches."""
    total: dict[str, Any] = {}
    for report in query.recentProgress:
        for name, row in json.loads(report.json)["observedMetrics"].items():
            assert name.startswith("windowed-")
            for field, value in row.items():
                total[field] = total.get(field, 0) + value
    return total


def run(panes: DataFrame, folder: Path) -> StreamingQuery:
    query = (
        panes.writeStream.format("noop")
        .option("checkpointLocation", str(folder / "noop"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return query


@pytest.mark.slow
def test_the_numbers_are_in_the_progress(stream: FileStream, spark: SparkSession, tmp_path: Path) -> None:
    stream.put([("a", 10, 1.0), ("a", 12, 1.0)])
    stream.put([("a", 100, 1.0)])
    stream.put([("a", 20, 1.0), ("a", 400, 1.0)])
    panes = aion.windowed(
        stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"),
        key="k", time="ts", windows=aion.Tumbling("1 minute"), aggregates={"n": A.count()}, policy=POLICY,
    )  # fmt: skip
    query = run(panes, tmp_path)
    assert counts_of(query) == {
        "panes": 3, "late_panes": 1, "retracted": 0, "dropped_events": 0,
        "early_executions": 0, "on_time_executions": 2, "late_executions": 1, "final_executions": 0,
        "stale_windows": 0, "judged_events": 0, "missed_events": 0,
    }  # fmt: skip
    state = aion.progress(query)["windowed"]
    assert state["batch"] == 3 and state["on_time_executions"] == 1
    # The third window is still open. Its shard is the only one that has state.
    assert (state["windows"], state["shards"]) == (1, 1)
    assert state["memory_bytes"] > 0 and state["disk_bytes"] >= 0
    assert state["bounds_us"] == {"shortest": 60_000_000, "longest": 60_000_000}


@pytest.mark.slow
def test_windows_that_were_too_stale_are_counted_and_logged(
    spark: SparkSession, stream: FileStream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream.put([("a", 10, 1.0)])
    stream.put([("a", 100, 1.0)])
    stream.put([("a", 20, 1.0), ("a", 110, 1.0)])
    stream.put([("a", 30, 1.0), ("a", 400, 1.0)])
    staleness = {**POLICY, "trigger": {"kind": "staleness", "bound": 0.01}}
    with caplog.at_level(logging.INFO, "aion"):
        panes = aion.windowed(
            stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"),
            key="k", time="ts", windows=aion.Tumbling("1 minute"), aggregates={"n": A.count()}, policy=staleness,
        )  # fmt: skip
        query = run(panes, tmp_path)
        spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()  # type: ignore[union-attr]
    assert counts_of(query)["stale_windows"] == 1
    assert [r.getMessage() for r in caplog.records if ": batch " in r.getMessage()] == [
        "windowed: batch 4 ended 1 window that had been staler than trigger.bound"
    ]
