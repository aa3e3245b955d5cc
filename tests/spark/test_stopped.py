"""A query that was stopped leaves nothing in the state server of the driver's host, and can be started again."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import aion
from aion import aggregates as A
from aion import metrics
from state_backends.server_folder import occupant, runtime_dir
from tests.spark.conftest import EVENTS_DDL, FileStream, last_panes
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
    assert held(spark).m_bucket_bytes == 0
    assert psutil.Process(server.pid).num_fds() <= files - 2, "a descriptor of each shard, at least"

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
