"""What can be known when a query starts is said by ``start``, and the number of shards is that of the state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import aion
from aion import aggregates as A
from aion.errors import ConfigError, DiskError, ForeignState, StorageError
from tests.counters import Counter, FrameCounter
from tests.object_store import ObjectStore
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink, last_panes

DEFINITION: dict[str, Any] = {"key": "k", "time": "ts", "windows": aion.Tumbling("1 minute"), "bound": "1 hour"}


@pytest.fixture
def partitions(spark: SparkSession) -> Iterator[Callable[[int], None]]:
    before = spark.conf.get("spark.sql.shuffle.partitions")
    yield lambda n: spark.conf.set("spark.sql.shuffle.partitions", n)
    spark.conf.set("spark.sql.shuffle.partitions", before or "2")


def counts(stream: FileStream, **changes: Any) -> DataFrame:
    definition = DEFINITION | {"aggregates": {"n": A.count()}, "trigger": "every_batch"} | changes
    return aion.windowed(stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"), **definition)


def keys(n: int, at: int) -> list[tuple[str, int, float]]:
    return [(f"key-{i}", at, 1.0) for i in range(n)]


@pytest.mark.slow
def test_partitions_may_change_between_two_starts(
    stream: FileStream, sink: Sink, partitions: Callable[[int], None]
) -> None:
    """Spark goes on with those of the checkpoint, and the shards are those of the state, also with merging levels."""
    for number, (n, levels) in enumerate([(2, 0), (5, 0), (1, 1)]):
        partitions(n)
        stream.put(keys(20, 10) + keys(1, 100 + number))
        rows = sink.run(counts(stream, policy={"distribution": {"merge_levels": levels}}))
    assert {row["n"] for row in last_panes(rows, "k").values() if row["window_start"].timestamp() == 0} == {3}


@pytest.mark.proof
def test_also_of_a_stateful_processor(stream: FileStream, sink: Sink, partitions: Callable[[int], None]) -> None:
    for n in (2, 5, 1):
        partitions(n)
        stream.put(keys(20, 10))
        grouped = aion.group_by(stream.read(EVENTS_DDL), "k")
        rows = sink.run(grouped.transformWithState(Counter(), "k string, n long", "Append", "none"))
    assert sorted(row["n"] for row in rows) == sorted([1, 2, 3] * 20)


@pytest.mark.proof
def test_also_of_a_processor_of_frames(stream: FileStream, sink: Sink, partitions: Callable[[int], None]) -> None:
    for n in (2, 5, 1):
        partitions(n)
        stream.put(keys(20, 10))
        grouped = aion.group_by(stream.read(EVENTS_DDL), "k")
        rows = sink.run(grouped.transformWithStateInPandas(FrameCounter(), "k string, n long", "Append", "none"))
    assert sorted(row["n"] for row in rows) == sorted([1, 2, 3] * 20)
    with pytest.raises(ForeignState, match=r"belongs to shards 2, not 4; set state.shards to 2"):
        grouped = aion.group_by(stream.read(EVENTS_DDL), "k", policy={"state": {"shards": 4}})
        sink.run(grouped.transformWithStateInPandas(FrameCounter(), "k string, n long", "Append", "none"))


@pytest.mark.slow
def test_another_definition_is_refused_by_start(stream: FileStream, sink: Sink, spark: SparkSession) -> None:
    stream.put(keys(3, 10))
    sink.run(counts(stream))
    stream.put(keys(3, 20))
    with pytest.raises(ForeignState):
        sink.run(counts(stream, emit="final"))
    with pytest.raises(ForeignState, match=r"belongs to shards 2, not 3"):
        sink.run(counts(stream, policy={"state": {"shards": 3}}))
    assert not spark.streams.active
    stream.put(keys(1, 100))
    stream.put(keys(1, 101))
    rows = sink.run(counts(stream))  # nothing was lost
    assert [row["n"] for row in last_panes(rows, "k").values()] == [2, 2, 2]


def test_two_operators_of_one_name_are_refused_by_start(stream: FileStream, sink: Sink) -> None:
    stream.put(keys(3, 10))
    with pytest.raises(ConfigError, match="two operators of this query are both named 'windowed'"):
        sink.run(counts(stream).union(counts(stream)))
    once = counts(stream)
    with pytest.raises(ConfigError, match="the result of the operator 'windowed' is used twice in this query"):
        sink.run(once.where("n = 1").union(once.where("n > 1")))


def test_a_place_that_cannot_be_written_is_refused_by_start(
    stream: FileStream, sink: Sink, tmp_path: Path, place: Callable[[str], None]
) -> None:
    (tmp_path / "file").write_text("")
    place(str(tmp_path / "file" / "state"))
    stream.put(keys(3, 10))
    with pytest.raises(DiskError, match=r"writing state in .*file/state failed"):
        sink.run(counts(stream))


def test_a_bucket_that_does_not_exist_is_refused_by_start(
    stream: FileStream, sink: Sink, bucket: ObjectStore, place: Callable[[str], None]
) -> None:
    place(bucket.uri("state", bucket="no-such-bucket"))
    stream.put(keys(3, 10))
    with pytest.raises(StorageError, match="there is no bucket 'no-such-bucket'"):
        sink.run(counts(stream))
