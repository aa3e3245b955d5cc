"""``aion.read_state``: live windows and open rows of joins as a DataFrame, while the query runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import aion
from aion import aggregates as A
from aion.errors import ConfigError
from tests.spark.conftest import EVENTS_DDL, FileStream, take_all
from tests.spark.joins.test_join import Two, two  # noqa: F401 (a fixture)

MINUTES = {"minutes": aion.Tumbling("1 minute"), "visits": aion.Session("20 seconds")}


def batch(number: int) -> list[tuple[str, int, float]]:
    """Events of a minute. Those of the minutes before stay live, because the bound is an hour."""
    return [(f"key-{i % 5}", 60 * number + 2 * i, float(i)) for i in range(20)]


def counts(*numbers: int) -> Counter[tuple[str, int]]:
    return Counter((key, at // 60) for number in numbers for key, at, _ in batch(number))


def read(spark: SparkSession, checkpoint: Path, **asked: Any) -> dict[tuple[str, int], int]:
    rows = aion.read_state(spark, str(checkpoint), **asked).where("window = 'minutes'")
    found = rows.selectExpr("k", "unix_micros(window_start) div 60000000 minute", "n").collect()
    assert len({(k, minute) for k, minute, _ in found}) == len(found)
    return {(k, minute): n for k, minute, n in found}


@pytest.mark.slow
def test_windows_of_a_query_that_runs(spark: SparkSession, stream: FileStream, tmp_path: Path) -> None:
    """As of the last batch and of an earlier one, all of them and those of a key or a stretch of time."""
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    panes = aion.windowed(
        events, key="k", time="ts", windows=MINUTES, bound="1 hour", aggregates={"n": A.count(), "mean": A.mean("v")}
    )
    checkpoint = tmp_path / "checkpoint"
    query = panes.writeStream.format("noop").option("checkpointLocation", str(checkpoint)).start()
    try:
        stream.put(batch(0))
        take_all(query)
        assert read(spark, checkpoint) == counts(0)
        first = max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))
        for number in (1, 2):
            stream.put(batch(number))
        take_all(query)
        assert read(spark, checkpoint) == counts(0, 1, 2)
        assert read(spark, checkpoint, batch=first) == counts(0)
        of_key = {place: n for place, n in counts(0, 1, 2).items() if place[0] == "key-3"}
        assert read(spark, checkpoint, key={"k": "key-3"}) == of_key
        stretch = (60_000_000, 120_000_000)
        assert read(spark, checkpoint, window=stretch) == counts(1)
        row = aion.read_state(spark, str(checkpoint), key={"k": "key-1"}, window=stretch).first()
        assert row is not None and row["closes_at"].timestamp() == 3600 + 120 and row["status"] == "late"
        found = aion.read_state(spark, str(checkpoint)).select("window", "status", "tier").distinct().collect()
        tiers = {"active": "memory", "late": "disk"}  # what is over has left memory
        assert set(found) == {(window, *pair) for window in MINUTES for pair in tiers.items()}
        for asked, said in (
            ({"batch": 99}, "batch: 99 is not one of the complete batches that are kept"),
            ({"name": "other"}, "there is no state of the operator 'other'.*; there is that of 'windowed'"),
            ({"key": {"x": 1}}, "is not a key of this operator"),
        ):
            with pytest.raises(ConfigError, match=said):
                aion.read_state(spark, str(checkpoint), **asked)
    finally:
        query.stop()


def test_open_rows_of_a_join(spark: SparkSession, two: Two, tmp_path: Path) -> None:  # noqa: F811
    checkpoint = tmp_path / "checkpoint"
    two.orders.put([("a", 0, 10.0), ("b", 1, 20.0)])
    two.payments.put([("a", 5, 10.0), ("x", 5, 1.0)])
    writer = two.joined().writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()
    rows = aion.read_state(spark, str(checkpoint)).select("side", "id", "price", "amount", "matched").collect()
    assert sorted(map(tuple, rows)) == [
        ("left", "a", 10.0, None, True),
        ("left", "b", 20.0, None, False),
        ("right", "a", None, 10.0, None),
        ("right", "x", None, 1.0, None),
    ]
