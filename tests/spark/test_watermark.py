"""``aion.watermark``: devices whose clocks run ahead spoil nobody's windows but their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import aion
from aion import aggregates as A
from aion.errors import ConfigError, SchemaError, WatermarkError
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink

HOUR = 3600
POLICY = {"lateness": {"initial_bound": "10 minutes", "coverage": None}, "trigger": {"kind": "every_batch"}}


def rows_of(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    table = pa.Table.from_batches(list(events))
    assert table.schema.names == ["k", "ts", "v"]  # nothing of ours is among them
    return {"n": table.num_rows}


CONTENTS: dict[str, dict[str, Any]] = {
    "aggregates": {"aggregates": {"n": A.count()}},
    "apply": {"apply": rows_of, "schema": "n long"},
    "unique": {"aggregates": {"n": A.count()}, "unique": "v"},
}
WINDOWS = {"tumbling": aion.Tumbling("1 minute"), "mixed": [aion.Tumbling("1 minute"), aion.PerRecord("30 seconds")]}


@pytest.mark.parametrize(
    ("content", "windows"),
    [
        ("apply", "tumbling"),
        ("aggregates", "mixed"),
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


def names_of(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    return {"names": ",".join(next(events).schema.names)}


def test_a_column_that_only_has_the_watermark_is_not_among_the_events(
    spark: SparkSession, stream: FileStream, tmp_path: Path
) -> None:
    stream.put([("a", 10, 1.0)])
    stream.put([("a", 500, 1.0)])
    df = stream.read(EVENTS_DDL).withColumn("at", F.timestamp_seconds(F.unix_seconds("ts") + 1))
    definition: dict[str, Any] = {"key": "k", "time": "at", "windows": aion.Tumbling("1 minute"), "policy": POLICY}
    seen = []
    for name, asked in {"usual": {}, "asked": {"columns": ["v", "ts"]}}.items():
        applied = {**definition, **asked, "apply": names_of, "schema": "names string", "name": name}
        (tmp_path / name).mkdir()
        rows = Sink(spark, tmp_path / name).run(aion.windowed(df.withWatermark("ts", "0 seconds"), **applied))
        seen += [row["names"] for row in rows if row["kind"] == "on_time"]
    assert seen == ["k,v,at", "k,ts,v,at"]


def test_without_a_limit_it_is_sparks_own(stream: FileStream) -> None:
    df = aion.watermark(stream.read(EVENTS_DDL), "ts", "10 seconds")
    assert df.columns == ["k", "ts", "v"]
    assert df.schema["ts"].metadata == stream.read(EVENTS_DDL).withWatermark("ts", "10 seconds").schema["ts"].metadata


def test_wrong_arguments(stream: FileStream) -> None:
    df = stream.read(EVENTS_DDL)
    for error, message, call in (
        (SchemaError, "there is no column 'when'", lambda: aion.watermark(df, "when", "1 second")),
        (SchemaError, "column 'k' is of type string", lambda: aion.watermark(df, "k", "1 second")),
        (ConfigError, "max_ahead: '-1 hour' is negative", lambda: aion.watermark(df, "ts", "1 s", max_ahead="-1 hour")),
        (
            ConfigError,
            "max_ahead of 'soon' is not a duration",
            lambda: aion.watermark(df, "ts", "1 s", max_ahead="soon"),
        ),
        (WatermarkError, "a streaming DataFrame is needed", lambda: aion.watermark(None, "ts", "1 s")),  # type: ignore[arg-type]
    ):
        with pytest.raises(error, match=message):
            call()


def test_names_with_dots(stream: FileStream) -> None:
    df = stream.read(EVENTS_DDL).select(F.col("ts").alias("a.b"), "k")
    marked = aion.watermark(df, "a.b", "1 second", max_ahead="1 hour")
    aion.windowed(marked, time="a.b", windows=aion.Tumbling("1 minute"), aggregates={"n": A.count()})
