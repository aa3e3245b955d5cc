"""A run that ends has shown what it has read."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import aion
from aion import aggregates as A
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink, take_all


def windows(stream: FileStream, **definition: Any) -> Any:
    return aion.windowed(
        stream.read(EVENTS_DDL).withWatermark("ts", "1 second"),
        key="k", time="ts", windows=aion.Tumbling("10 seconds"), aggregates={"n": A.count()}, bound="1 hour",
        **definition,
    )  # fmt: skip


def first(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """The panes of the first window."""
    panes = [row for row in rows if row["kind"] != "dropped" and row["window_start"].timestamp() == 0]
    return [(row["kind"], row["n"]) for row in sorted(panes, key=lambda row: row["pane"])]


def put(stream: FileStream) -> None:
    stream.put([("a", second, 1.0) for second in (1, 2, 3)])
    stream.put([("a", 25, 1.0)])
    stream.put([("a", 4, 1.0)] * 10)


@pytest.mark.slow
def test_late_events_of_the_last_batch_are_in_the_table(spark: SparkSession, stream: FileStream, sink: Sink) -> None:
    put(stream)
    assert first(sink.run(windows(stream))) == [("on_time", 3), ("late", 13)]


@pytest.mark.proof
def test_a_window_that_is_shown_once_is_not_shown_earlier(spark: SparkSession, stream: FileStream, sink: Sink) -> None:
    put(stream)
    assert first(sink.run(windows(stream, emit="final"))) == []
    stream.put([("a", 8000, 1.0)])
    assert first(sink.run(windows(stream, emit="final"))) == [("final", 13)]


@pytest.mark.slow
@pytest.mark.parametrize("levels", [0, pytest.param(1, marks=pytest.mark.proof)])
def test_late_events_of_shards_that_have_no_events_at_last(
    spark: SparkSession, stream: FileStream, sink: Sink, levels: int
) -> None:
    """The last file has events of one key, and so of one shard. The late events of the others came before."""
    keys = [f"key-{number}" for number in range(8)]
    stream.put([(key, 1, 1.0) for key in keys])
    stream.put([(key, 25, 1.0) for key in keys])
    stream.put([(key, 4, 1.0) for key in keys])
    stream.put([(keys[0], 26, 1.0)])
    rows = sink.run(windows(stream, policy={"distribution": {"merge_levels": levels}}))
    assert [first([row for row in rows if row["k"] == key]) for key in keys] == [[("on_time", 1), ("late", 2)]] * 8


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, pytest.param(False, marks=pytest.mark.proof)])
def test_a_batch_that_runs_again_decides_the_same(
    spark: SparkSession, stream: FileStream, sink: Sink, ends: bool
) -> None:
    """The sink fails when it has the rows. In the run that repeats the batch, it is the last one, or is not."""
    taken: list[dict[str, Any]] = []

    def fails(batch: DataFrame, number: int) -> None:
        rows = [row.asDict(recursive=True) for row in batch.collect()]
        if number == 2:
            taken.extend(rows)
            raise ValueError("no answer")
        sink.keep(batch, number)

    put(stream)
    writer = windows(stream).writeStream.foreachBatch(fails)
    writer = writer.option("checkpointLocation", str(sink.folder / "checkpoint"))
    query = (writer.trigger(availableNow=True) if ends else writer).start()
    with pytest.raises(StreamingQueryException, match="no answer"):
        query.awaitTermination()
    assert first(taken) == [("on_time", 3), *([("late", 13)] if ends else [])]
    if ends:
        stream.put([("a", 5, 1.0)] * 10)
    rows = sink.run(windows(stream))
    assert first(rows) == [("on_time", 3), *([("late", 13), ("late", 23)] if ends else [])]
    assert sink.of_batch(2) == taken
    stream.put([("a", 26, 1.0)])
    assert first(sink.run(windows(stream)))[-1] == ("late", 23 if ends else 13), "no later than in the next run"


@pytest.mark.proof
def test_a_query_without_an_end_waits_for_its_trigger(spark: SparkSession, stream: FileStream, sink: Sink) -> None:
    put(stream)
    query = sink.start(windows(stream), processingTime="0 seconds")
    take_all(query)
    query.stop()
    assert first(sink.rows()) == [("on_time", 3)]


@pytest.mark.slow
def test_a_trigger_waits_until_the_last_batch(spark: SparkSession, stream: FileStream, sink: Sink) -> None:
    """Also in the next run, which has read some of the files already."""
    put(stream)
    stream.put([("a", 5, 1.0)] * 10)
    assert first(sink.run(windows(stream))) == [("on_time", 3), ("late", 23)]
    for second in (6, 7):
        stream.put([("a", second, 1.0)] * 10)
    assert first(sink.run(windows(stream))) == [("on_time", 3), ("late", 23), ("late", 43)]
