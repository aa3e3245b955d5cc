"""How complete rows are, on Spark: the same as without it, and a restart forgets nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

import aion
from aion import aggregates as A
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink

COLUMNS = ("k", "window_end", "pane", "kind", "events", "completeness", "completeness_low")


def told(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    picked = [tuple(row[name] for name in COLUMNS) for row in rows]
    return sorted((str(k), end.replace(tzinfo=None), pane, *rest) for k, end, pane, *rest in picked)


@pytest.mark.proof
def test_a_restart_forgets_nothing(spark: SparkSession, stream: FileStream, sink: Sink) -> None:
    rng = np.random.default_rng(3)
    definition: dict[str, Any] = {
        "key": "k",
        "windows": aion.Tumbling("1 second"),
        "aggregates": {"n": A.count()},
        "policy": {
            "lateness": {"initial_bound": "8 seconds"}, "trigger": {"kind": "every_batch"}, "state": {"shards": 1},
        },
        "completeness": True,
    }  # fmt: skip
    got: list[dict[str, Any]] = []
    local: list[dict[str, Any]] = []
    operator = aion.LocalOperator(time="ts", **definition)
    watermark = 0
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    for batch in range(8):
        latest = 1000.0 + 8 * (batch + 1)
        seconds = latest - np.append(rng.exponential(3.0, 400), np.linspace(0, 8, 40))
        rows = [("abcd"[i % 4], float(max(second, 1000.0)), 1.0) for i, second in enumerate(seconds)]
        local += operator.process(stream.put(rows), watermark or None).to_pylist()
        watermark = max(watermark, int(max(second for _, second, _ in rows) * 1000) * 1000)
        if batch in (4, 7):  # the last micro-batch of a start has no data
            local += operator.advance(watermark).to_pylist()
            got = sink.run(aion.windowed(events, time="ts", name="complete", **definition))
    got = [row for row in got if row["kind"] != "dropped"]
    assert told(got) == told([row for row in local if row["kind"] != "dropped"])
    operator.close()
    known = [row for row in got if row["completeness"] is not None and row["kind"] != "final"]
    assert any(0 < row["completeness_low"] < row["completeness"] < 1 for row in known)
