"""Settings of a session that belong to others change nothing for Aion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import DoubleType, StringType, StructField, StructType, TimestampType

import aion
from aion import aggregates as A
from aion.errors import SchemaError, WatermarkError
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink

TYPES = StructType([StructField("k", StringType()), StructField("ts", TimestampType()), StructField("v", DoubleType())])
COUNT: dict[str, Any] = {"time": "ts", "windows": aion.Tumbling("10 seconds"), "aggregates": {"n": A.count()}}


@pytest.fixture
def setting(spark: SparkSession) -> Iterator[Callable[[str, str], None]]:
    before: dict[str, str | None] = {}

    def change(name: str, value: str) -> None:
        before.setdefault(name, spark.conf.get(name, None))
        spark.conf.set(name, value)

    yield change
    for name, value in before.items():
        if value is None:
            spark.conf.unset(name)
        else:
            spark.conf.set(name, value)


class Count(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self._n = handle.getValueState("n", "n bigint")

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Any], timers: Any) -> Iterator[Row]:
        n = (self._n.get() or (0,))[0] + sum(1 for _ in rows)
        self._n.update((n,))
        yield Row(n=n)


@pytest.mark.proof
def test_times_without_a_zone_as_the_default(
    spark: SparkSession, stream: FileStream, sink: Sink, tmp_path: Path, setting: Callable[[str, str], None]
) -> None:
    stream.put([("a", 1, 1.0), ("a", 2, 1.0), ("a", 25, 1.0)])
    setting("spark.sql.timestampType", "TIMESTAMP_NTZ")
    files = aion.read_files(spark, str(stream.folder), schema=TYPES, watermark=("ts", "1 second"))
    assert [row["n"] for row in sink.run(aion.windowed(files, **COUNT))] == [2]
    rows = spark.readStream.schema(TYPES).parquet(str(stream.folder))
    counted = aion.group_by(rows.withWatermark("ts", "1 second"), "k").transformWithState(
        Count(), "n bigint", "Update", "EventTime"
    )
    assert [row["n"] for row in Sink(tmp_path / "counted").run(counted)] == [3]
    until = aion.watermark(rows, "ts", "1 second", complete_until="1970-01-01T00:00:40")
    assert sorted(row["n"] for row in Sink(tmp_path / "until").run(aion.windowed(until, **COUNT))) == [1, 2]


@pytest.mark.parametrize("length", [pytest.param("40", marks=pytest.mark.proof), "0"])
def test_the_length_of_plans_as_text(
    stream: FileStream, sink: Sink, setting: Callable[[str, str], None], length: str
) -> None:
    stream.put([("a", 1, 1.0), ("a", 2, 1.0), ("a", 25, 1.0)])
    setting("spark.sql.maxPlanStringLength", length)
    rows = stream.read(EVENTS_DDL).withWatermark("ts", "1 second")
    with pytest.raises(WatermarkError, match="dropDuplicates comes first"):
        aion.windowed(rows.dropDuplicates(["k", "ts"]), **COUNT)
    twice = aion.windowed(rows, key="k", **COUNT).withWatermark("window_end", "1 second")
    with pytest.raises(WatermarkError, match="second withWatermark"):
        twice.groupBy(F.window("window_end", "1 minute")).count().writeStream.format("noop").start()
    assert [row["n"] for row in sink.run(aion.windowed(rows, key="k", **COUNT))] == [2]


def test_a_column_that_is_not_used_may_have_any_type(spark: SparkSession, stream: FileStream, sink: Sink) -> None:
    stream.put([("a", 1, 1.0), ("a", 25, 1.0)])
    rows = stream.read(EVENTS_DDL).withWatermark("ts", "1 second")
    rows = rows.withColumn("other", F.parse_json(F.lit("1"))).withColumn("months", F.expr("make_interval(0, 1)"))
    rows = rows.select("*", F.lit(1).alias("twice"), F.lit(2).alias("twice"))
    assert [row["n"] for row in sink.run(aion.windowed(rows, key="k", **COUNT))] == [1]
    for key, said in [("months", "Spark cannot send to Python"), ("twice", "two columns named 'twice'")]:
        with pytest.raises(SchemaError, match=said):
            aion.windowed(rows, key=key, **COUNT)


@pytest.mark.slow
def test_names_mean_what_they_mean_for_spark(stream: FileStream, sink: Sink) -> None:
    """In another case, as a field of a column, and both."""
    stream.put([("a", 1, 1.0), ("b", 2, 1.0), ("a", 25, 1.0)])
    rows: DataFrame = stream.read(EVENTS_DDL).withColumn("s", F.struct(F.col("k").alias("x")))
    marked, found = rows.withWatermark("ts", "1 second"), []
    for key, name in (("K", "K"), ("s.x", "x"), ("S.X", "X")):
        panes = aion.windowed(marked, key=key, name=f"of-{key}", **{**COUNT, "time": "TS"})
        found.append(panes.select(F.lit(name).alias("name"), panes[name].alias("k"), "n"))
    got = sorted((row["name"], row["k"], row["n"]) for row in sink.run(reduce(DataFrame.union, found)))
    assert got == sorted((name, k, 1) for name in ("K", "x", "X") for k in "ab")


COLUMNS: dict[str, Callable[[DataFrame], Any]] = {
    "a column": lambda df: df.k,
    "by its name": lambda df: F.col("k"),
    "a field": lambda df: F.col("s.x"),
    "of the frame": lambda df: df.s.x,
    "an alias": lambda df: df["k"].alias("who"),
    "an expression": lambda df: F.lower(F.upper("k")),
    "several": lambda df: [df.k, F.length("k").alias("long")],
    "an alias of another column": lambda df: F.col("k").alias("v"),
}


@pytest.mark.slow
def test_a_key_may_be_a_column(stream: FileStream, sink: Sink) -> None:
    stream.put([("a", 1, 1.0), ("b", 2, 1.0), ("a", 25, 1.0)])
    rows: DataFrame = stream.read(EVENTS_DDL).withColumn("s", F.struct(F.col("k").alias("x")))
    marked = rows.withWatermark("ts", "1 second")
    found = []
    for number, (which, column) in enumerate(COLUMNS.items()):
        key = column(rows)
        panes = aion.windowed(marked, key=key, name=f"of-{number}", **COUNT)
        names = rows.select(key).columns
        assert panes.columns[: len(names)] == names
        first = panes[f"`{names[0]}`"]
        found.append(panes.select(F.lit(which).alias("which"), first.alias("k"), "n"))
    got = sorted((row["which"], row["k"], row["n"]) for row in sink.run(reduce(DataFrame.union, found)))
    assert got == sorted((which, k, 1) for which in COLUMNS for k in "ab")


@pytest.mark.slow
def test_the_time_is_the_column_with_the_watermark_or_any_other(stream: FileStream, sink: Sink) -> None:
    stream.put([("a", 1, 1.0), ("b", 2, 1.0), ("a", 25, 1.0)])
    rows = stream.read(EVENTS_DDL).withColumn("s", F.struct(F.col("ts").alias("at")))
    marked = rows.withWatermark("ts", "1 second")
    usual = {name: value for name, value in COUNT.items() if name != "time"}
    at = F.timestamp_seconds(F.unix_seconds("ts"))
    said = {
        "usual": {},
        "column": {"time": rows.ts},
        "text": {"time": "s.at"},
        "field": {"time": F.col("s.at")},
        "alias": {"time": at.alias("at")},
        "expression": {"time": at},
    }
    panes = [aion.windowed(marked, key="k", name=name, **usual, **time) for name, time in said.items()]
    ahead = aion.watermark(rows, "ts", "1 second", max_ahead="1000 days")
    panes.append(aion.windowed(ahead, key="k", name="ahead", **usual))
    got = sink.run(reduce(DataFrame.union, panes))
    assert Counter((row["k"], row["n"]) for row in got) == {("a", 1): len(panes), ("b", 1): len(panes)}


def test_a_time_that_is_not_clear(spark: SparkSession, stream: FileStream) -> None:
    usual = {name: value for name, value in COUNT.items() if name != "time"}
    rows = stream.read(EVENTS_DDL).withColumn("at", F.col("ts"))
    both = rows.withWatermark("ts", "1 second").withColumn("again", F.col("ts"))
    with pytest.raises(SchemaError, match="several columns have a watermark: again, ts; name the one"):
        aion.windowed(both, key="k", **usual)
    files = aion.read_files(spark, str(stream.folder), schema=EVENTS_DDL, watermark=("ts", "1 second"))
    assert aion.windowed(files, key="k", **usual).columns[0] == "k"
    panes = aion.panes(aion.windowed(files, key="k", **usual))
    with pytest.raises(SchemaError, match="give the window_start or window_end of the windows before"):
        aion.windowed(panes, windows=aion.Tumbling("1 minute"), aggregates={"n": A.count()}, name="outer")


@pytest.mark.slow
def test_names_mean_the_same_for_files(spark: SparkSession, stream: FileStream, sink: Sink) -> None:
    stream.put([("a", 1, 1.0), ("b", 2, 2.0), ("a", 25, 1.0)])
    files = aion.read_files(spark, str(stream.folder), schema=TYPES, watermark=("ts", "1 second"))
    aggregates = {"n": A.count(), "high": A.max("V"), "low": A.min("v")}
    panes = aion.windowed(files, key="K", **{**COUNT, "time": "TS", "aggregates": aggregates})
    rows = [(row["K"], row["n"], row["high"], row["low"]) for row in sink.run(panes)]
    assert sorted(rows) == [("a", 1, 1.0, 1.0), ("b", 1, 2.0, 2.0)]
