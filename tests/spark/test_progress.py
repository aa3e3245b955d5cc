"""What Spark's progress and the log say of windows."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from pyspark.sql import SparkSession

import aion
from aion import aggregates as A
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink

POLICY = {"lateness": {"initial_bound": "1 minute", "coverage": None}, "trigger": {"kind": "every_batch"}}


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
    assert [line.partition("-")[0] + line[line.index(":") :] for line in said if "dropped" in line] == [
        "counts: batch 3 dropped 2 events; see aion.dropped"
    ]


def test_the_numbers_are_in_the_progress(stream: FileStream, sink: Sink, spark: SparkSession) -> None:
    stream.put([("a", 10, 1.0), ("b", 10, 1.0)])
    stream.put([("a", 100, 1.0)])
    stream.put([("a", 20, 1.0), ("a", 400, 1.0)])
    panes = aion.windowed(
        stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"),
        key="k", time="ts", windows=aion.Tumbling("1 minute"), aggregates={"n": A.count()}, policy=POLICY,
    )  # fmt: skip
    query = (
        panes.writeStream.format("noop")
        .option("checkpointLocation", str(sink.folder / "noop"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    total: dict[str, Any] = {}
    for report in query.recentProgress:
        for name, row in json.loads(report.json)["observedMetrics"].items():
            assert name.startswith("windowed-")
            for field, value in row.items():
                total[field] = total.get(field, 0) + value
    assert total == {"panes": 4, "late_panes": 1, "retracted": 0, "dropped_events": 0}
