"""``aion rescale``: a query goes on with other partitions, and its panes are those of one that was never touched."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import aion
from aion import aggregates as A
from aion.errors import ConfigError
from aion.spark.api.rescale import rescale
from tests.counters import Counter
from tests.spark.conftest import EVENTS, EVENTS_DDL, SECOND, FileStream, Sink, plain
from tests.spark.windows.test_windowed import naive

pytestmark = pytest.mark.skipif(
    not hasattr(SparkSession, "_streamingCheckpointManager"), reason="Spark moves the state of a query from 4.2 on"
)
DEFINITION: dict[str, Any] = {
    "key": "k",
    "time": "ts",
    "windows": {"minutes": aion.Tumbling("1 minute"), "visits": aion.Session("20 seconds"), "threes": aion.Count(3)},
    "aggregates": {"n": A.count(), "total": A.sum("v")},
    "bound": "1 hour",
    "trigger": "every_batch",
}


def batch(number: int) -> list[tuple[str, int, float]]:
    """Events of a minute, and late ones of each minute before."""
    on_time = [(f"key-{i % 11}", 60 * number + i, float(i)) for i in range(40)]
    return on_time + [(f"key-{i % 7}", 60 * at + 7 * i, 1.0) for at in range(number) for i in range(3)]


def panes(stream: FileStream, shards: int = 16) -> DataFrame:
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    policy = {"state": {"shards": shards}, "distribution": {"hand_over": "1KiB"}}
    return aion.windowed(events, policy=policy, **DEFINITION)


def settled(rows: list[dict[str, Any]]) -> list[str]:
    return plain([{k: v for k, v in row.items() if k not in ("reason", "event")} for row in rows])


@pytest.mark.slow
@pytest.mark.parametrize("most", [4, pytest.param(16, marks=pytest.mark.proof)])
def test_from_two_to_more_to_one(
    spark: SparkSession, stream: FileStream, sink: Sink, tmp_path: Path, most: int
) -> None:
    """Windows of time and of keys, with late events under way. The panes are those of one shard without Spark."""
    place = spark.conf.get("spark.aion.state.dir")
    expected: list[dict[str, Any]] = []
    watermark = None
    with aion.LocalOperator(**DEFINITION) as operator:
        for number, partitions in enumerate((None, most, 1)):
            if partitions is not None:
                done = rescale(spark, str(tmp_path / "checkpoint"), partitions, state_dir=place)
                assert (done.after, done.shards) == (partitions, {"windowed": most})
            for rows in (batch(number), [("key-0", 60 * number + 59, 0.5)]):
                expected += operator.process(stream.put(rows), watermark).to_pylist()
                watermark = max(watermark or 0, SECOND * max(at for _, at, _ in rows))
            got = sink.run(panes(stream, shards=most))
            expected += operator.advance(watermark).to_pylist()  # Spark's last batch, without data
    assert settled(got) == settled(naive(expected))
    last = max((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    assert json.loads(last.read_text().splitlines()[1])["conf"]["spark.sql.shuffle.partitions"] == "1"


@pytest.mark.proof
def test_a_processor_and_a_sink_go_on(spark: SparkSession, stream: FileStream, tmp_path: Path) -> None:
    """The sink of a database sees no gap between its batches."""
    place = spark.conf.get("spark.aion.state.dir")
    table = aion.sinks.upsert(f"sqlite:///{tmp_path}/panes.db", "panes")
    for number, partitions in enumerate((None, 8, 4, 1)):
        stream.put(batch(number))
        if partitions is not None:
            rescale(spark, str(tmp_path / "windows"), partitions, state_dir=place)
            rescale(spark, str(tmp_path / "counts"), partitions, state_dir=place)
        written = panes(stream).writeStream.foreachBatch(table).option("checkpointLocation", str(tmp_path / "windows"))
        written.trigger(availableNow=True).start().awaitTermination()
        grouped = aion.group_by(stream.read(EVENTS_DDL), "k", policy={"state": {"shards": 8}})
        counts = grouped.transformWithState(Counter(), "k string, n long", "Append", "none")
        rows = counts.writeStream.format("parquet").option("path", str(tmp_path / "out"))
        rows = rows.option("checkpointLocation", str(tmp_path / "counts")).trigger(availableNow=True)
        rows.start().awaitTermination()
    events = [key for number in range(4) for key, *_ in batch(number)]
    found = spark.read.parquet(str(tmp_path / "out")).groupBy("k").max("n").collect()
    assert dict(map(tuple, found)) == {key: events.count(key) for key in set(events)}
    with closing(sqlite3.connect(tmp_path / "panes.db")) as db:
        [[n]] = db.execute("SELECT sum(n) FROM panes WHERE window = 'minutes' AND window_start < '1970-01-01T00:03'")
    assert n == sum(at < 180 for number in range(4) for _, at, _ in batch(number))


def test_what_cannot_be_done_is_said(spark: SparkSession, stream: FileStream, sink: Sink, tmp_path: Path) -> None:
    place = spark.conf.get("spark.aion.state.dir")
    checkpoint = str(tmp_path / "checkpoint")
    with pytest.raises(ConfigError, match="not the checkpoint of a streaming query"):
        rescale(spark, checkpoint, 2, state_dir=place)
    stream.put(batch(0))
    sink.run(panes(stream, shards=4))
    for partitions, said in (
        (8, r"8 is more than the 4 shards.*state\.shards"),
        (0, "0 is not a number of partitions"),
    ):
        with pytest.raises(ConfigError, match=said):
            rescale(spark, checkpoint, partitions, state_dir=place)
    with pytest.raises(ConfigError, match=r"there is no state of the query .*; give the folder of its state.dir"):
        rescale(spark, checkpoint, 4, state_dir=str(tmp_path / "elsewhere"))
    assert rescale(spark, checkpoint, 2, state_dir=place)[:2] == (2, 2)
    newest = max((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    newest.rename(tmp_path / "commit")
    with pytest.raises(ConfigError, match=r"has begun and is not complete.*availableNow=True"):
        rescale(spark, checkpoint, 4, state_dir=place)
    (tmp_path / "commit").rename(newest)
    assert rescale(spark, checkpoint, 4, state_dir=place)[:2] == (2, 4)


@pytest.mark.slow
def test_what_spark_cannot_move_is_said_and_leaves_the_old_partitions(
    spark: SparkSession, stream: FileStream, tmp_path: Path
) -> None:
    """Spark's tool finds no batch in a checkpoint whose path has a space."""
    place, folder = spark.conf.get("spark.aion.state.dir"), tmp_path / "a b"
    stream.put(batch(0))
    rows = panes(stream).writeStream.format("noop").option("checkpointLocation", str(folder))
    rows.trigger(availableNow=True).start().awaitTermination()
    with pytest.raises(ConfigError, match=r"^.*Spark cannot move the state to other partitions: .*NO_COMMITTED_BATCH"):
        rescale(spark, str(folder), 4, state_dir=place)
    assert not (folder / "aion-rescaling.json").exists()


@pytest.mark.proof
def test_an_interrupted_one_leaves_the_old_partitions_or_the_new(
    spark: SparkSession, stream: FileStream, sink: Sink, tmp_path: Path
) -> None:
    """It is killed at several moments; then the query goes on, and all its panes are right."""
    place = spark.conf.get("spark.aion.state.dir")
    checkpoint = tmp_path / "checkpoint"
    stream.put(batch(0))
    sink.run(panes(stream))
    once = FileStream(spark, tmp_path / "again", EVENTS)
    once.put(batch(0))
    whole = Sink(tmp_path / "whole")
    killed = 0
    for number, wait_s in enumerate((0.0, 0.3, 0.6, 1.0, 60.0), start=1):
        command = [sys.executable, "-m", "aion", "rescale", str(checkpoint), str(2 + number), "--state", place]
        with subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None and not (checkpoint / "aion-rescaling.json").exists():
                time.sleep(0.01)
            with suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                killed += 1
        stream.put(batch(number))
        once.put(batch(number))
        rows = sink.run(panes(stream))
        assert not (checkpoint / "aion-rescaling.json").exists()
    assert killed
    assert process.returncode == 0, "the last one had the time to end"
    assert settled(rows) == settled(whole.run(panes(once)))
