"""A query that was stopped leaves nothing in the state server of the driver's host, and can be started again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery, StreamingQueryListener
from pyspark.sql.streaming.listener import QueryProgressEvent

import aion
from aion import aggregates as A
from aion import metrics
from state_backends.server.server_folder import occupant, runtime_dir
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink, last_panes
from tests.spark.test_tiers import new_server

__all__ = ["new_server"]

PATIENCE = 60.0  # seconds
KEYS = [f"key {i}" for i in range(2000)]


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def held(spark: SparkSession) -> metrics.StateMetrics:
    found = metrics.state(spark)
    assert found is not None
    return found


@pytest.mark.proof
def test_what_a_query_held_is_let_go_of_when_it_is_stopped(
    spark: SparkSession, stream: FileStream, tmp_path: Path, new_server: None
) -> None:
    def started() -> StreamingQuery:
        panes: DataFrame = aion.windowed(
            stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"),
            key="k", time="ts", windows=aion.Tumbling("1 hour"), aggregates={"values": A.collect_list("v")},
        )  # fmt: skip
        writer = panes.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        return writer.start(str(tmp_path / "out"))

    stream.put([(key, 3600.0, 1.0) for key in KEYS])
    query = started()
    query.processAllAvailable()
    server = occupant(runtime_dir(spark.sparkContext.applicationId))
    assert server is not None
    before, files = held(spark), psutil.Process(server.pid).num_fds()
    assert before.shards == 2 and before.m_bucket_bytes > 10_000
    query.stop()
    until(lambda: held(spark).shards == 0, "the shards of a query that was stopped are there still")
    until(lambda: held(spark).m_bucket_bytes == 0, "their blocks are in memory still")
    until(lambda: psutil.Process(server.pid).num_fds() <= files - 2, "a descriptor of each shard, at least, is open")

    stream.put([*((key, 3601.0, 2.0) for key in KEYS), ("last", 7201.0, 0.0)])
    query = started()
    try:
        query.processAllAvailable()
        stream.put([("last", 7202.0, 0.0)])
        query.processAllAvailable()
        assert held(spark).shards == 2
    finally:
        query.stop()
    rows = [row.asDict(recursive=True) for row in spark.read.parquet(str(tmp_path / "out")).collect()]
    found = {pane["k"]: sorted(pane["values"]) for pane in last_panes(rows, "k").values()}
    assert found == {key: [1.0, 2.0] for key in KEYS}


class Counting(StreamingQueryListener):
    def __init__(self) -> None:
        self.progress, self.ended = 0, False

    def onQueryStarted(self, event: object) -> None:
        pass

    def onQueryProgress(self, event: object) -> None:
        self.progress += 1

    def onQueryIdle(self, event: object) -> None:
        pass

    def onQueryTerminated(self, event: object) -> None:
        self.ended = True


def test_the_progress_of_a_batch_is_not_fetched_from_the_jvm(
    spark: SparkSession, stream: FileStream, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field by field that takes tens of milliseconds, in each batch, for nobody."""
    fetched: list[object] = []
    whole = QueryProgressEvent.fromJObject
    monkeypatch.setattr(QueryProgressEvent, "fromJObject", lambda event: fetched.append(event) or whole(event))
    stream.put([("a", 3600.0, 1.0)])
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    panes = aion.windowed(events, key="k", time="ts", windows=aion.Tumbling("1 hour"), aggregates={"n": A.count()})
    listener = Counting()
    spark.streams.addListener(listener)
    try:
        sink.run(panes)
        until(lambda: listener.ended, "nobody hears that the query ended")  # behind all of its progress
    finally:
        spark.streams.removeListener(listener)
    assert 0 < listener.progress == len(fetched), "once, for the one who counts"
