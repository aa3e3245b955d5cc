"""The way back: a stock query that takes the state of a processor on Aion goes on as Aion would."""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import aion
from aion.errors import ConfigError
from tests.spark.conftest import FileStream
from tests.spark.stateful import processors as p
from tests.spark.stateful.conftest import ENCODING
from tests.spark.stateful.rig import Case, Output, grouped_by_aion, query_of, to_the_end

COLUMNS = [("k", pa.string()), ("v", pa.int64())]
FAR_MS = 4_000_000_000_000


class Everything(StatefulProcessor):
    """A value, a list and a map of a key, and its timers, all of which it gives out."""

    def __init__(self, ttl_ms: int | None = None) -> None:
        self._ttl_ms = ttl_ms

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._last = handle.getValueState("last", "v bigint, at timestamp, odd boolean", self._ttl_ms)
        self._all = handle.getListState("all", "v bigint, note string")
        self._times = handle.getMapState("times", "v bigint, odd boolean", "n int")
        self._seen = handle.getValueState("last-seen", "large array<bigint>, x array<double>, at array<timestamp>")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        before, seen = self._last.get(), self._seen.get()
        for v in sorted(row.v for row in rows):
            at = (v, v % 2 == 1)
            self._last.update((v, pd.Timestamp(v, unit="h", tz="UTC").to_pydatetime(), v % 2 == 1))
            self._all.appendValue((v, None if v % 3 else f"note {v}"))
            self._seen.update(([2**62 + v, None], [math.nan, None], [datetime.fromtimestamp(3600 * v, UTC), None]))
            self._times.updateValue(at, ((self._times.getValue(at) or (0,))[0] + 1,))
            self._handle.registerTimer(FAR_MS + v)
        held = (
            before and tuple(before),
            seen and tuple(seen),
            [tuple(v) for v in self._all.get()],
            sorted(map(repr, self._times.iterator())),
        )
        yield Row(k=key[0], what=f"{held} {sorted(self._handle.listTimers())}")

    def close(self) -> None:
        pass


class EverythingInPandas(Everything):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        found = super().handleInputRows(key, (row for frame in rows for row in frame.itertuples()), timerValues)
        yield pd.DataFrame([row.asDict() for row in found])


def case(processor: Any, pandas: bool, batches: list[Any]) -> Case:
    return Case(processor, COLUMNS, "k string, what string", batches, pandas=pandas, time_mode="processingTime")


@pytest.fixture
def far_zone(spark: SparkSession) -> Iterator[None]:
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    yield
    spark.conf.set("spark.sql.session.timeZone", str(zone))


@pytest.mark.proof
@pytest.mark.parametrize("pandas", [False, True])
def test_stock_spark_goes_on_with_the_state_of_aion(
    spark: SparkSession, tmp_path: Path, pandas: bool, far_zone: None
) -> None:
    processor = EverythingInPandas if pandas else Everything
    batches = [[("a", 1), ("a", 2), (None, 3), ("b", 9)], [("a", 3), ("c", 1)], [("a", 1), (None, 4), ("d", 5)]]
    shape = case(processor, pandas, batches)
    stream, later = (FileStream(spark, tmp_path / name, pa.schema(COLUMNS)) for name in ("input", "later"))
    aions: Output = {}
    for rows in batches[:2]:
        stream.put(rows)
        to_the_end(query_of(spark, shape, grouped_by_aion, stream), tmp_path / "aion", shape, aions)
    state = aion.read_state(spark, str(tmp_path / "aion"))
    assert state.columns == ["k", "timers", "all", "last", "last-seen", "times", "packed"]
    assert sorted(map(repr, (row["k"] for row in state.collect()))) == ["'a'", "'b'", "'c'", "None"]

    stream.put(batches[2])
    to_the_end(query_of(spark, shape, grouped_by_aion, stream), tmp_path / "aion", shape, aions)

    later.put(batches[2])
    grouped = later.read("k string, v bigint").groupBy("k")
    method = grouped.transformWithStateInPandas if pandas else grouped.transformWithState
    sparks: Output = {}
    taking = aion.restoring(processor())
    df = method(taking, shape.output, "update", "processingTime", initialState=state.groupBy("k"))
    to_the_end(df, tmp_path / "stock", shape, sparks)
    assert sparks[0] == aions[2]
    assert sum(sparks[0].values()) == 3


@pytest.mark.proof
def test_what_cannot_go_back_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the checkpoint of a streaming query with a complete batch"):
        aion.read_state(spark, str(tmp_path / "nothing"))
    shape = case(lambda: Everything(1_000_000), False, [])
    stream = FileStream(spark, tmp_path / "input", pa.schema(COLUMNS))
    stream.put([("a", 1)])
    given: Output = {}
    to_the_end(query_of(spark, shape, grouped_by_aion, stream), tmp_path / "aion", shape, given)
    what = "(None, None, [(1, None)], ['((1, True), (1,))']) [4000000000001]"
    assert given[0] == Counter([("a", what)])
    with pytest.raises(ConfigError, match="the values of last expire, and Spark cannot be told when"):
        aion.read_state(spark, str(tmp_path / "aion"))
    with pytest.raises(ConfigError, match="there is no state of the operator 'other' of query"):
        aion.read_state(spark, str(tmp_path / "aion"), name="other")


@pytest.mark.proof
def test_a_query_that_is_running_is_left_alone(spark: SparkSession, tmp_path: Path) -> None:
    shape = case(Everything, False, [])
    stream = FileStream(spark, tmp_path / "input", pa.schema(COLUMNS))
    stream.put([("a", 1)])
    df = query_of(spark, shape, grouped_by_aion, stream)
    running = df.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "aion")).outputMode("update")
    query = running.start()
    try:
        # Timers of processing time make one batch after another: nothing else ever says that the file was taken.
        while not any(progress["numInputRows"] for progress in query.recentProgress):
            time.sleep(0.1)
        with pytest.raises(ConfigError, match="its query is running"):
            aion.read_state(spark, str(tmp_path / "aion"))
    finally:
        query.stop()
    assert aion.read_state(spark, str(tmp_path / "aion")).count() == 1


@pytest.mark.proof
def test_state_that_is_not_all_there_is_refused(
    spark: SparkSession, tmp_path: Path, place: Callable[[str], None]
) -> None:
    place(str(tmp_path / "state"))
    shape = case(Everything, False, [])
    stream = FileStream(spark, tmp_path / "input", pa.schema(COLUMNS))
    stream.put([(letter, 1) for letter in "abcdefgh"])
    to_the_end(query_of(spark, shape, grouped_by_aion, stream), tmp_path / "aion", shape, {})
    assert aion.read_state(spark, str(tmp_path / "aion")).count() == 8
    shards = sorted((path for path in (tmp_path / "state").glob("*/*/shard-*")), key=lambda path: path.name)
    assert len(shards) > 1
    shutil.rmtree(shards[-1])
    with pytest.raises(ConfigError, match=r"versions that the checkpoint names are missing, of the shards \[\d+\]"):
        aion.read_state(spark, str(tmp_path / "aion"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "new", "added", "old"),
    [
        ("avro", "more string, n bigint", ("x", 2**40), {"more": None, "n": 1}),
        ("unsaferow", "m int", (2,), {"m": 1}),
    ],
)
def test_a_shard_without_rows_since_a_schema_changed_has_the_new_schema(
    spark: SparkSession,
    tmp_path: Path,
    avro: None,
    encoding: str,
    new: str,
    added: tuple[Any, ...],
    old: dict[str, Any],
) -> None:
    spark.conf.set(ENCODING, encoding)
    stream = FileStream(spark, tmp_path / "input", pa.schema(COLUMNS[:1]))
    for keys, schema, value in (("abcdefgh", "n int", (1,)), ("a", new, added)):
        shape = Case(lambda s=schema, v=value: p.Evolving(s, v), COLUMNS[:1], "k string, what string", [], pandas=False)
        stream.put([(key,) for key in keys])
        to_the_end(query_of(spark, shape, grouped_by_aion, stream), tmp_path / "aion", shape, {})
    state = {row.k: row.asDict(recursive=True) for row in aion.read_state(spark, str(tmp_path / "aion")).collect()}
    assert state.keys() == set("abcdefgh")
    latest = dict(zip(old, added, strict=True))
    for key, row in state.items():
        newest = latest if key == "a" else old
        assert (row["single"], row["list"][-1], row["map"][-1]["value"]) == (newest,) * 3
        assert (row["list"][0], row["map"][0]["key"]) == (old, {"at": 1})
