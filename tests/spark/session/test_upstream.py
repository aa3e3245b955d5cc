"""Operators of Spark before Aion: those that drop late rows are refused, and the others let all events through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

import aion
from aion import aggregates as A
from aion.errors import WatermarkError
from tests.spark.conftest import FileStream, Sink

DDL = "k string, ts timestamp, v double"
WINDOWS: dict[str, Any] = {"time": "ts", "windows": aion.Tumbling("1 minute"), "aggregates": {"n": A.count()}}


KEEPS = {"lateness": {"initial_bound": "1 hour", "coverage": None}, "trigger": {"kind": "every_batch"}}


class Through(StatefulProcessor):
    """Passes all rows on."""

    def init(self, handle: StatefulProcessorHandle) -> None: ...

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        yield from rows

    def close(self) -> None: ...


def through(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    yield from frames


def timed(df: DataFrame) -> DataFrame:
    return df.withWatermark("ts", "0 seconds")


def with_state(df: DataFrame) -> DataFrame:
    return df.groupBy("k").transformWithStateInPandas(Through(), DDL, "Append", "EventTime", eventTimeColumnName="ts")


def with_timeout(timeout: str) -> Callable[[DataFrame], DataFrame]:
    return lambda df: timed(df.groupBy("k").applyInPandasWithState(through, DDL, "n int", "append", timeout))


def joined(df: DataFrame) -> DataFrame:
    other = df.select(F.col("k").alias("k2"), F.col("ts").alias("ts2"))
    return df.join(other, F.expr("k = k2 and ts2 between ts and ts + interval 1 minute")).drop("k2", "ts2")


def counted(df: DataFrame) -> DataFrame:
    return df.groupBy(F.window("ts", "10 seconds"), "k").count().withColumn("ts", F.col("window.end"))


def distinct(df: DataFrame) -> DataFrame:
    df.createOrReplaceTempView("upstream_distinct")
    return df.sparkSession.sql("SELECT DISTINCT * FROM upstream_distinct")


def shared(df: DataFrame) -> DataFrame:
    """The watermark is in a common table expression, and what drops late rows behind it."""
    df.createOrReplaceTempView("upstream_shared")
    return df.sparkSession.sql(
        "WITH timed AS (SELECT * FROM upstream_shared) SELECT k, ts, max(v) AS v FROM timed GROUP BY k, ts"
    )


LOSSY = {
    "distinct": distinct,
    "an aggregation, in a common table expression": shared,
    "dropDuplicates": lambda df: df.dropDuplicates(["k", "ts"]),
    "dropDuplicatesWithinWatermark": lambda df: df.dropDuplicatesWithinWatermark(["k", "ts"]),
    "a join of two streams": joined,
    "an aggregation": counted,
    "transformWithState": with_state,
    "applyInPandasWithState": with_timeout("EventTimeTimeout"),
}
HARMLESS = {
    "no state": lambda df: df.where("v is not null").withColumn("w", F.col("v") * 2),
    "a static side": lambda df: df.join(df.sparkSession.range(1), F.lit(True), "left"),
    "a static aggregation": lambda df: df.crossJoin(df.sparkSession.range(3).groupBy().count()),
    "a union": lambda df: df.union(df.where("false")),
    "applyInPandasWithState": with_timeout("NoTimeout"),
}


def events(stream: FileStream) -> DataFrame:
    return timed(stream.read(DDL))


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("name", LOSSY)
def test_what_drops_late_rows_is_refused(stream: FileStream, name: str) -> None:
    what, _, _ = name.partition(", ")
    said = rf"windowed: {what} comes first .* give on_lossy_upstream='accept'"
    for between in (lambda df: df, lambda df: df.where("k <> 'x'").withColumn("w", F.lit(1))):
        df = between(LOSSY[name](events(stream)))
        with pytest.raises(WatermarkError, match=said):
            aion.windowed(df, **WINDOWS)
        with pytest.raises(WatermarkError, match=said.replace("windowed", "explain")):
            aion.explain(df, **WINDOWS)
    aion.windowed(LOSSY[name](events(stream)), **WINDOWS, on_lossy_upstream="accept")
    text = " ".join(aion.explain(LOSSY[name](events(stream)), **WINDOWS, on_lossy_upstream="accept").split())
    assert f"{what} drops rows that are later than the watermark, before they get here" in text


def test_a_watermark_behind_it_loses_nothing(stream: FileStream) -> None:
    aion.windowed(timed(stream.read(DDL).dropDuplicates(["k", "ts"])), **WINDOWS)


@pytest.mark.parametrize(
    "name", [name if name == "a static side" else pytest.param(name, marks=pytest.mark.proof) for name in HARMLESS]
)
def test_what_keeps_late_rows_goes(stream: FileStream, sink: Sink, name: str) -> None:
    """All of them arrive, the late ones, too."""
    times = [10, 70, 300, 20, 80, 310]
    panes = aion.windowed(HARMLESS[name](events(stream)), **WINDOWS, policy=KEEPS)
    for at in range(0, len(times), 2):
        stream.put([("a", times[at], 1.0), ("b", times[at + 1], 2.0)])
    rows = sink.run(panes)
    assert sum(row["events"] for row in rows if row["kind"] == "dropped") == 0
    last = {row["window_start"]: row["n"] for row in rows}
    assert sorted(last.values()) == [2, 2]


def test_stateful_processors_refuse_it_too(stream: FileStream) -> None:
    df = events(stream).dropDuplicates(["k", "ts"])
    grouped = aion.group_by(df, "k")
    with pytest.raises(WatermarkError, match=r"group_by: dropDuplicates comes first"):
        grouped.transformWithStateInPandas(Through(), DDL, "Append", "None")
    # With event time, the processor drops late rows itself, as on stock Spark.
    grouped.transformWithStateInPandas(Through(), DDL, "Append", "EventTime")
    aion.group_by(df, "k", on_lossy_upstream="accept").transformWithStateInPandas(Through(), DDL, "Append", "None")


def test_a_second_watermark_behind_windows_is_an_error(stream: FileStream, sink: Sink) -> None:
    """Each would wait for the other, and nothing would come out, without a word."""
    stream.put([("a", 10, 1.0)])
    stream.put([("a", 1000, 1.0)])
    panes = aion.panes(aion.windowed(events(stream), **WINDOWS))
    hours = timed(panes.withColumn("ts", F.col("window_end"))).groupBy(F.window("ts", "1 hour")).agg(F.sum("n"))
    with pytest.raises(WatermarkError, match=r"a second withWatermark behind aion\.windowed"):
        sink.run(hours)


@pytest.mark.slow
def test_an_aggregation_of_final_panes_works(stream: FileStream, tmp_path: Path) -> None:
    """Without a watermark of its own, and in update mode: each pane is final, so sums never take anything back."""
    for batch in ((10, 20, 130), (30,), (4000,), (9000,)):
        stream.put([("a", at, 1.0) for at in batch])
    final = aion.panes(aion.windowed(events(stream), **WINDOWS, emit="final", policy=KEEPS))
    hours = final.groupBy(F.floor(F.unix_timestamp("window_start") / 3600).alias("hour")).agg(F.sum("n").alias("n"))
    found: dict[int, int] = {}

    def keep(batch: DataFrame, number: int) -> None:
        found.update({row["hour"] * 3600: row["n"] for row in batch.collect()})

    query = (
        hours.writeStream.outputMode("update").foreachBatch(keep)
        .option("checkpointLocation", str(tmp_path / "hours")).trigger(availableNow=True).start()
    )  # fmt: skip
    query.awaitTermination()
    assert found == {0: 4, 3600: 1}
