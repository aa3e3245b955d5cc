"""``windowed`` in a session in which Spark's own stateful processors run on Aion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import aion
from aion import aggregates as A
from aion.errors import AionError
from aion.spark.api import patch
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink, last_panes

PLAIN, HOOKED = "plain", "hooked"


@pytest.fixture
def session(spark: SparkSession) -> Iterator[Callable[[str], None]]:
    """Makes the session a plain one, or one in which the processors of Spark run on Aion."""

    def become(kind: str) -> None:
        if kind == PLAIN:
            aion.unconfigure()
            spark.conf.unset(patch.ENABLED)
        else:
            aion.configure(SparkSession.builder, stateful=True).getOrCreate()

    yield become
    become(PLAIN)


def windows(stream: FileStream) -> Any:
    return aion.windowed(
        stream.read(EVENTS_DDL).withWatermark("ts", "1 second"),
        key="k", time="ts", windows=aion.Tumbling("10 seconds"), aggregates={"n": A.count()}, bound="1 hour",
        policy={"trigger": {"kind": "every_batch"}},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [(PLAIN, HOOKED), (HOOKED, PLAIN)])
def test_windows_go_on_whatever_the_session_does_with_processors(
    stream: FileStream, sink: Sink, session: Callable[[str], None], first: str, second: str
) -> None:
    session(first)
    stream.put([("a", second_of, 1.0) for second_of in (1, 2, 3)])
    stream.put([("a", 25, 1.0)])
    sink.run(windows(stream))
    session(second)
    stream.put([("a", 4, 1.0)])
    stream.put([("a", 60, 1.0)])
    stream.put([("a", 90, 1.0)])
    rows = sink.run(windows(stream))
    found = {row["window_start"].timestamp(): row["n"] for row in last_panes(rows, "k").values()}
    assert found[0] == 4


class Count(StatefulProcessor):
    """Counts the rows of a key."""

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("state", "token string, timer_ms bigint")

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Any], timers: Any) -> Iterator[pd.DataFrame]:
        n = ((self._count.get() or (None, 0))[1] or 0) + sum(map(len, rows))
        self._count.update((None, n))
        yield pd.DataFrame({"n": [n]})


@pytest.mark.slow
def test_windows_that_ran_as_a_processor_of_the_hook_are_refused(
    stream: FileStream, sink: Sink, session: Callable[[str], None]
) -> None:
    """Earlier, the hook took the operator of ``windowed`` for a processor of the user, with shards as keys."""
    session(HOOKED)
    stream.put([("a", 1, 1.0)])
    shards = stream.read(EVENTS_DDL).withWatermark("ts", "1 second").withColumn("shard", F.lit(0))
    sink.run(shards.groupBy("shard").transformWithStateInPandas(Count(), "n bigint", "Append", "EventTime"))
    session(PLAIN)
    stream.put([("a", 2, 1.0)])
    with pytest.raises(AionError, match=r"stateful.enabled.*state is inside that of 'stateful'.*new checkpoint"):
        sink.run(windows(stream))
