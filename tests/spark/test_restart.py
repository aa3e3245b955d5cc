"""What a query finds when it is restarted: other settings, other places; and what it must not find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession

import aion
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink, last_panes
from tests.spark.test_windowed import ALL, BOUND


@pytest.fixture
def conf(spark: SparkSession) -> Iterator[Callable[[str, str], None]]:
    """Sets what is set back afterwards."""
    before: dict[str, str] = {}

    def set_(key: str, value: str) -> None:
        before.setdefault(key, spark.conf.get(key) or "")
        spark.conf.set(key, value)

    yield set_
    for key, value in before.items():
        spark.conf.set(key, value)


def counted(stream: FileStream, **policy: Any) -> Any:
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    return aion.windowed(
        events, key="k", time="ts", windows=aion.Tumbling("10 seconds"), aggregates=ALL, policy={**BOUND, **policy}
    )


def test_other_shuffle_partitions_are_refused_by_name(
    stream: FileStream, sink: Sink, conf: Callable[[str, str], None]
) -> None:
    """Where there are as many shards as partitions, other partitions would be other shards."""
    stream.put([("a", 1001, 1.0)])
    sink.run(counted(stream))
    conf("spark.sql.shuffle.partitions", "3")
    stream.put([("a", 1002, 1.0)])
    with pytest.raises(Exception, match=r"ForeignState.*belongs to shards 2, not 3; set state\.shards to 2"):
        sink.run(counted(stream))


def test_partitions_may_change_where_the_shards_stay(
    stream: FileStream, sink: Sink, conf: Callable[[str, str], None]
) -> None:
    """Spark takes those of the checkpoint, whatever the session says."""
    stream.put([(key, 1001, 1.0) for key in "abcdefgh"])
    sink.run(counted(stream, state={"shards": 4}))
    conf("spark.sql.shuffle.partitions", "3")
    stream.put([(key, 1002, 1.0) for key in "abcdefgh"] + [("end", 1500, 1.0)])
    stream.put([("end", 1501, 1.0)])
    rows = last_panes(sink.run(counted(stream, state={"shards": 4})), "k")
    assert {row["n"] for (key, *_), row in rows.items() if key != "end"} == {2}


def test_another_number_of_shards_is_refused_by_name(stream: FileStream, sink: Sink) -> None:
    """Also by shards that are new, and have no state that could tell."""
    stream.put([("a", 1001, 1.0)])
    sink.run(counted(stream, state={"shards": 1}))
    stream.put([(key, 1002, 1.0) for key in "abcdefgh"])
    with pytest.raises(Exception, match=r"ForeignState.*belongs to shards 1, not 64"):
        sink.run(counted(stream, state={"shards": 64}))
