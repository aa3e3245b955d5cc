"""Triggers on Spark: an event-time timer makes a late window run though nothing comes for it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

import aion
from aion import aggregates as A
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink, plain
from tests.spark.windows.test_windowed import batches, naive


def locally(tables: list[pa.Table], definition: dict[str, Any]) -> list[dict[str, Any]]:
    """What LocalOperator yields for the micro-batches that Spark makes of these files, the last one without data."""
    rows: list[dict[str, Any]] = []
    watermark = 0
    with aion.LocalOperator(time="ts", **definition) as operator:
        for table in tables:
            rows += operator.process(table, watermark or None).to_pylist()
            latest = max((t for t in table.column("ts").cast(pa.int64()).to_pylist() if t is not None), default=0)
            watermark = max(watermark, latest // 1000 * 1000)
        rows += operator.advance(watermark).to_pylist()
    return rows


def test_late_windows_run_when_the_trigger_says(spark: SparkSession, stream: FileStream, sink: Sink) -> None:
    definition = {
        "key": "k",
        "windows": aion.Tumbling("10 seconds"),
        "aggregates": {"n": A.count(), "total": A.sum("v")},
        "policy": {"lateness": {"initial_bound": "90 seconds"}, "trigger": {"bound": 0.2}, "state": {"shards": 1}},
    }
    tables = [stream.put(rows) for rows in batches(5, count=3, size=15)]
    # Time goes on, with nothing for the windows that wait.
    tables += [stream.put([("clock", 1060.0 + 25 * i, 0.0)]) for i in range(1, 4)]
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    got = sink.run(aion.windowed(events, time="ts", name="fresh", **definition))
    expected = naive(locally(tables, definition))
    assert plain(got) == plain(expected)
    late = [row for row in got if row["kind"] == "late"]
    assert late
    assert len(late) < sum(row["late_events"] for row in late), "some waited for others"
    metrics = aion.metrics.state(spark)
    assert metrics is not None
    stale = metrics.operators["fresh"]["staleness"]
    assert 0 < stale["windows"] == stale["kept"] + stale["missed_between_looks"] + stale["missed_otherwise"]
    assert 0 < stale["largest"] <= stale["total"]
