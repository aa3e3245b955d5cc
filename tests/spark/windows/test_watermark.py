"""``aion.watermark``: devices whose clocks run ahead spoil nobody's windows but their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

import aion
from aion import aggregates as A
from aion.core.heartbeat import Position
from aion.errors import ConfigError, SchemaError, WatermarkError
from aion.spark.api import heartbeat
from tests.server.conftest import wait_until
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink, take_all

HOUR = 3600
POLICY = {"lateness": {"initial_bound": "10 minutes", "coverage": None}, "trigger": {"kind": "every_batch"}}

MINUTE = {"key": "k", "time": "ts", "windows": aion.Tumbling("1 minute"), "aggregates": {"n": A.count()}}
SECONDS: dict[str, Any] = {**MINUTE, "windows": aion.Tumbling("1 second")}


def rows_of(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    table = pa.Table.from_batches(list(events))
    assert table.schema.names == ["k", "ts", "v"]  # nothing of ours is among them
    return {"n": table.num_rows}


CONTENTS: dict[str, dict[str, Any]] = {
    "aggregates": {"aggregates": {"n": A.count()}},
    "apply": {"apply": aion.Apply(rows_of, "n long")},
    "unique": {"aggregates": {"n": A.count()}, "unique": "v"},
}
WINDOWS = {"tumbling": aion.Tumbling("1 minute"), "mixed": [aion.Tumbling("1 minute"), aion.PerRecord("30 seconds")]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "windows"),
    [
        ("apply", "tumbling"),
        pytest.param("aggregates", "mixed", marks=pytest.mark.proof),
        *(pytest.param(content, "tumbling", marks=pytest.mark.proof) for content in ("aggregates", "unique")),
    ],
)
def test_fast_clocks(stream: FileStream, sink: Sink, content: str, windows: str) -> None:
    now = int(time.time()) // 60 * 60 - 20 * 60
    for minute in range(4):
        at = now + 60 * minute
        stream.put([("slow", at + 1, 1.0), ("slow", at + 2, 2.0), ("fast", at + HOUR * 5, 3.0), ("null", None, 4.0)])
    df = aion.watermark(stream.read(EVENTS_DDL), "ts", "10 seconds", max_ahead="1 hour")
    definition: dict[str, Any] = {"key": "k", "time": "ts", "windows": WINDOWS[windows], "policy": POLICY}
    rows = sink.run(aion.windowed(df, **definition, **CONTENTS[content]))
    shown = [row for row in rows if row["kind"] != "dropped" and row["window"].startswith("tumbling")]
    assert sorted((row["k"], row["window_start"].timestamp() - now, row["n"], row["kind"]) for row in shown) == [
        ("slow", 60 * minute, 2, "on_time") for minute in range(2)
    ]
    gone: dict[tuple[str, str], int] = {}
    for row in rows:
        if row["kind"] == "dropped":
            gone[row["k"], row["reason"]] = gone.get((row["k"], row["reason"]), 0) + row["events"]
    assert gone == {
        ("fast", "the event time is ahead of the clock"): 4,
        ("null", "the event time is null"): 4,
    }
    assert "more than 1 hour after the start of their batch" in " ".join(
        aion.explain(df, **definition, **CONTENTS[content]).split()
    )


@pytest.mark.parametrize("sensitive", [True, False])
def test_names_by_case(spark: SparkSession, stream: FileStream, sensitive: bool) -> None:
    df = stream.read("k string, ts timestamp, Until timestamp")
    spark.conf.set("spark.sql.caseSensitive", sensitive)
    try:
        with pytest.raises(SchemaError, match="no column 'TS'") if sensitive else nullcontext():
            marked = aion.watermark(df, F.col("TS"), "10 seconds", max_ahead="1 hour", complete_until="until")
            assert marked.columns[:3] == ["k", "ts", "Until"]
            panes = aion.windowed(
                marked,
                key=F.col("k"),
                time="ts",
                unique=F.col("k"),
                windows=aion.Tumbling("1 minute"),
                apply=aion.Apply(rows_of, "n long", columns=[F.col("k")]),
            )
            assert panes.columns[:1] == ["k"]
    finally:
        spark.conf.set("spark.sql.caseSensitive", False)


def names_of(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    return {"names": ",".join(next(events).schema.names)}


@pytest.mark.slow
def test_a_column_that_only_has_the_watermark_is_not_among_the_events(stream: FileStream, sink: Sink) -> None:
    stream.put([("a", 10, 1.0)])
    stream.put([("a", 500, 1.0)])
    df = stream.read(EVENTS_DDL).withColumn("at", F.timestamp_seconds(F.unix_seconds("ts") + 1))
    definition: dict[str, Any] = {"key": "k", "time": "at", "windows": aion.Tumbling("1 minute"), "policy": POLICY}
    usual, asked = (
        aion.windowed(
            df.withWatermark("ts", "0 seconds"),
            **definition,
            apply=aion.Apply(names_of, "names string", columns=columns),
            name=name,
        )
        for name, columns in {"usual": None, "asked": ["v", "ts"]}.items()
    )
    rows = sink.run(usual.union(asked))
    assert sorted(row["names"] for row in rows if row["kind"] == "on_time") == ["k,ts,v,at", "k,v,at"]


def test_without_a_limit_it_is_sparks_own(stream: FileStream) -> None:
    df = aion.watermark(stream.read(EVENTS_DDL), "ts", "10 seconds")
    assert df.columns == ["k", "ts", "v"]
    assert df.schema["ts"].metadata == stream.read(EVENTS_DDL).withWatermark("ts", "10 seconds").schema["ts"].metadata


def test_wrong_arguments(stream: FileStream, spark: SparkSession) -> None:
    df = stream.read(EVENTS_DDL)
    local = df.withColumn("ts", F.col("ts").cast("timestamp_ntz"))
    files = aion.read_files(spark, str(stream.folder), schema=EVENTS_DDL, watermark=("ts", "1 second"))
    for error, message, given, arguments in (
        (SchemaError, "there is no column 'when'", df, {"time": "when"}),
        (SchemaError, "column 'k' is of type string", df, {"time": "k"}),
        (ConfigError, "max_ahead: '-1 hour' is negative", df, {"max_ahead": "-1 hour"}),
        (ConfigError, "max_ahead of 'soon' is not a duration", df, {"max_ahead": "soon"}),
        (ConfigError, "idle_after: '0 s' is not positive", df, {"idle_after": "0 s"}),
        (SchemaError, "watermark: column 'ts' is of type timestamp_ntz; Spark needs a timestamp", local, {}),
        (ConfigError, "complete_until: 'soon' is neither a time nor a column", df, {"complete_until": "soon"}),
        (ConfigError, "complete_until: 5 is neither a time nor a column", df, {"complete_until": 5}),
        (SchemaError, "complete_until: column 'k' is of type string", df, {"complete_until": "k"}),
        (WatermarkError, "a streaming DataFrame is needed", None, {}),
        (WatermarkError, "read_files returns has a watermark of its own", files, {"max_ahead": "1 s"}),
        (WatermarkError, "has a watermark already", files.to_df(), {"max_ahead": "1 s"}),
    ):
        with pytest.raises(error, match=message):
            aion.watermark(given, **{"time": "ts", "delay": "1 s", **arguments})  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_time_without_a_zone_is_of_the_sessions_zone(spark: SparkSession, stream: FileStream) -> None:
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        df = stream.read(EVENTS_DDL)
        for until in ("1969-12-31 19:01", datetime(1969, 12, 31, 19, 1), "1970-01-01T01:01+01:00"):
            marked = aion.watermark(df, "ts", "1 second", complete_until=until)
            assert "end at 1970-01-01T00:01:00Z or before" in " ".join(aion.explain(marked, **MINUTE).split())
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)


@pytest.mark.slow
def test_what_may_come_behind(stream: FileStream, spark: SparkSession) -> None:
    df = aion.watermark(stream.read(EVENTS_DDL), "ts", "1 second", idle_after="1 minute")
    df.withColumn("v", F.col("v") + 1).createOrReplaceTempView("silent")
    aion.windowed(spark.table("silent"), **MINUTE)
    spark.catalog.dropTempView("silent")
    for behind in (df.where("v > 0"), df.dropna(), df.union(df), df.join(spark.range(1), F.lit(True))):
        with pytest.raises(WatermarkError, match=r"comes behind aion.watermark.*do it before"):
            aion.windowed(behind, **MINUTE)
    with pytest.raises(WatermarkError, match=r"idle_after and complete_until of aion\.watermark are for"):
        aion.group_by(df, "k").transformWithStateInPandas(Counting(), "k string", "Append", "None")


class Counting(StatefulProcessor):
    def init(self, handle: Any) -> None: ...

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any: ...

    def close(self) -> None: ...


def test_names_with_dots(stream: FileStream) -> None:
    df = stream.read(EVENTS_DDL).select(F.col("ts").alias("a.b"), "k")
    marked = aion.watermark(df, "a.b", "1 second", max_ahead="1 hour")
    aion.windowed(marked, time="a.b", windows=aion.Tumbling("1 minute"), aggregates={"n": A.count()})


# -- silent sources -------------------------------------------------------------------------------------------


def shown(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted((row["k"], row["window_start"].timestamp(), row["n"], row["kind"]) for row in rows)


@pytest.fixture
def started(sink: Sink) -> Iterator[Callable[[DataFrame], StreamingQuery]]:
    """Starts a query that goes on until the test ends."""
    queries: list[StreamingQuery] = []

    def start(df: DataFrame) -> StreamingQuery:
        queries.append(sink.start(df))
        return queries[-1]

    yield start
    for query in queries:
        query.stop()


@pytest.mark.slow
def test_windows_of_a_silent_source_close(
    stream: FileStream, sink: Sink, started: Callable[[DataFrame], StreamingQuery]
) -> None:
    """Even after a backfill, which is not made late, though it takes several batches."""
    old = int(time.time()) - HOUR
    for second in range(3):
        stream.put([("a", old + second, 1.0)])
    df = aion.watermark(stream.read(EVENTS_DDL), "ts", "0 seconds", idle_after="1 second", max_ahead="2 minutes")
    query = started(aion.windowed(df, **SECONDS, policy=POLICY))
    take_all(query)
    now = int(time.time())
    stream.put([("a", now, 1.0)])
    truth = [("a", at, 1, "on_time") for at in (old, old + 1, old + 2, now)]
    wait_until(lambda: shown(sink.rows()) == truth)
    assert query.isActive


@pytest.mark.proof
def test_a_silent_source_in_runs_that_end(stream: FileStream, sink: Sink) -> None:
    """Each ends. In the first, no event is close to the clock."""
    at = int(time.time()) - 600
    stream.put([("a", at, 1.0), ("a", at + 2, 1.0)])
    for close, windows in (("1 minute", 1), ("1 hour", 2)):
        df = aion.watermark(stream.read(EVENTS_DDL), "ts", "0 seconds", idle_after="2 seconds", max_ahead=close)
        rows = sink.run(aion.windowed(df, **SECONDS, policy=POLICY))
        assert shown(rows) == [("a", at, 1, "on_time"), ("a", at + 2, 1, "on_time")][:windows]
    said = " ".join(aion.explain(df, **SECONDS).split())
    assert "follows the clock, 2 seconds and its delay behind it, once an event was within 1 hour" in said


# -- events that are complete ---------------------------------------------------------------------------------


def complete(stream: FileStream, until: Any) -> DataFrame:
    return aion.watermark(stream.read(EVENTS_DDL), "ts", "1 hour", complete_until=until)


@pytest.mark.slow
def test_windows_close_in_the_run_that_has_all_their_events(stream: FileStream, sink: Sink) -> None:
    """No event of a later batch of the run is late. Another run has a later time."""

    def run(until: Any) -> list[dict[str, Any]]:
        return sink.run(aion.windowed(complete(stream, until), **MINUTE, policy=POLICY))

    for seconds in ((190, 70), (10, 130), (20, 185)):
        stream.put([("a", second, 1.0) for second in seconds])
    rows = run("1970-01-01T00:03:00Z")
    assert shown(rows) == [("a", 0, 2, "on_time"), ("a", 60, 1, "on_time"), ("a", 120, 1, "on_time")]
    assert [row["late_events"] for row in rows] == [0, 0, 0]
    assert len(run("1970-01-01 00:03:59.999Z")) == 3, "one millisecond of the window is missing"
    assert shown(run(datetime(1970, 1, 1, 0, 4, tzinfo=UTC)))[3:] == [("a", 180, 2, "on_time")]
    said = " ".join(aion.explain(complete(stream, "1970-01-01T00Z"), **MINUTE).split())
    assert "windows that end at 1970-01-01T00:00:00Z or before close at the end of an availableNow run" in said


@pytest.mark.proof
def test_windows_close_in_the_run_though_spark_runs_no_batch_without_data(
    spark: SparkSession, stream: FileStream, sink: Sink
) -> None:
    stream.put([("a", 10, 1.0)])
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    try:
        rows = sink.run(
            aion.windowed(complete(stream, datetime(1970, 1, 1, 0, 1, tzinfo=UTC)), **MINUTE, policy=POLICY)
        )
    finally:
        spark.conf.unset("spark.sql.streaming.noDataMicroBatches.enabled")
    assert shown(rows) == [("a", 0, 1, "on_time")]


def test_a_run_without_an_end_is_never_complete(
    stream: FileStream, started: Callable[[DataFrame], StreamingQuery]
) -> None:
    stream.put([("a", 10, 1.0)])
    query = started(aion.windowed(complete(stream, "1970-01-01T00Z"), **MINUTE, policy=POLICY))
    with pytest.raises(StreamingQueryException, match=r"complete_until: this run has no end.*availableNow=True"):
        query.awaitTermination()


@pytest.mark.slow
def test_promises_in_the_data(stream: FileStream, sink: Sink) -> None:
    """A row that is only a promise is no event; one with an event counts as well."""
    promise = F.when(F.col("v") > 0, F.timestamp_micros((F.col("v") * 1_000_000).cast("long")))
    df = aion.watermark(
        stream.read(EVENTS_DDL).withColumn("until", promise), "ts", "1 hour", complete_until="until", max_ahead="1 day"
    )
    stream.put([("a", 10, 0.0), ("a", 70, 0.0), ("a", time.time() + 100 * HOUR, 0.0)])
    stream.put([("a", 61, 60.0), (None, None, 0.0)])
    stream.put([("a", 62, 0.0), ("x", None, 120.0)])
    stream.put([("a", 20, 0.0)])
    rows = sink.run(aion.windowed(df, **MINUTE, policy=POLICY))
    assert shown([row for row in rows if row["kind"] != "dropped"]) == [
        ("a", 0, 1, "on_time"), ("a", 0, 2, "late"), ("a", 60, 3, "on_time"),
    ]  # fmt: skip
    assert sorted((row["k"] or "", row["reason"]) for row in rows if row["kind"] == "dropped") == [
        ("", "the event time is null"), ("a", "the event time is ahead of the clock"),
    ]  # fmt: skip
    assert "when until says that events are complete" in " ".join(aion.explain(df, **MINUTE).split())


def test_a_batch_that_runs_again_makes_the_same_promise_with_another_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat._Reader, "_position", lambda self: Position(None, ()))
    options = {"socket": "", "until_us": "5000010", "delay_us": "10"}
    reader = heartbeat.HeartbeatSource(options).streamReader(StructType())
    reader.prepareForTriggerAvailableNow()
    offsets = [reader.initialOffset()]
    while not (rows := reader.partitions(offsets[-1], offsets[-1])):
        offsets.append(reader.latestOffset(offsets[-1], ReadAllAvailable()))
    assert [row.value for row in rows] == [5_000_010]
    after = heartbeat.HeartbeatSource(options | {"delay_us": "3"}).streamReader(StructType())
    after.prepareForTriggerAvailableNow()
    assert [row.value for row in after.partitions(offsets[-2], offsets[-1])] == [5_000_003]
    assert not after.partitions(offsets[-1], after.latestOffset(offsets[-1], ReadAllAvailable()))


@pytest.mark.proof
def test_a_batch_that_runs_again_makes_the_same_promise(stream: FileStream, tmp_path: Path) -> None:
    """Although its run makes another one, and more has come since."""
    shown_by: dict[int, list[tuple[Any, ...]]] = {}
    broken = {2}

    def write(panes: DataFrame, batch: int) -> None:
        rows = [row.asDict() for row in panes.collect()]
        if batch in broken:
            raise RuntimeError("the sink is broken")
        shown_by[batch] = shown(rows)

    def run(until: str) -> None:
        panes = aion.windowed(complete(stream, until), **MINUTE, policy=POLICY)
        writer = panes.writeStream.foreachBatch(write).option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    stream.put([("a", 10, 1.0), ("a", 130, 1.0)])
    with pytest.raises(StreamingQueryException, match="the sink is broken"):
        run("1970-01-01T00:02:00Z")
    assert shown_by == {0: [], 1: []}
    promised = (tmp_path / "checkpoint" / "offsets" / "2").read_text()
    broken.clear()
    stream.put([("b", 20, 1.0)])
    run("1970-01-01T00:00:30Z")
    assert (tmp_path / "checkpoint" / "offsets" / "2").read_text() == promised
    assert shown_by[2] == [] and ("a", 0, 1, "on_time") in shown_by[3]
    assert [row for rows in shown_by.values() for row in rows if row[0] == "b"] == [("b", 0, 1, "late")]
