"""What `aion.configure` changes in a session, and what a query of Aion has for itself only."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from pyspark.errors.exceptions.captured import StreamingQueryException
from pyspark.sql import GroupedData, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import DataStreamWriter

import aion
from aion import aggregates as A
from aion.spark.session.settings import REQUIRED, of_queries, rows_at_once
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink

PARTITIONS = "spark.sql.shuffle.partitions"
ROWS, BYTES = "spark.sql.execution.arrow.maxRecordsPerBatch", "spark.sql.execution.arrow.maxBytesPerBatch"
FILES = "spark.sql.streaming.checkpointFileManagerClass"
COUNT: dict[str, Any] = {"time": "ts", "windows": aion.Tumbling("10 seconds"), "aggregates": {"n": A.count()}}


@pytest.fixture
def session(spark: SparkSession) -> Iterator[SparkSession]:
    """A session of its own, with nothing of Aion in it."""
    policy = {key: value for key, value in spark.conf.getAll.items() if key.startswith("spark.aion.")}
    fresh = spark.newSession()
    for key in (*REQUIRED, *policy):
        fresh.conf.unset(key)
    yield fresh
    aion.unconfigure()
    aion.configure(SparkSession.builder).getOrCreate()
    for key, value in policy.items():
        spark.conf.set(key, value)


def configured(session: SparkSession, **overrides: Any) -> None:
    """Configures this session, as a builder does with the one that it finds."""
    kept = SparkSession._instantiatedSession, SparkSession._activeSession
    try:
        SparkSession._instantiatedSession = SparkSession._activeSession = session
        assert aion.configure(SparkSession.builder, **overrides).getOrCreate() is session
    finally:
        SparkSession._instantiatedSession, SparkSession._activeSession = kept


def test_only_what_is_needed_is_set(session: SparkSession, caplog: pytest.LogCaptureFixture) -> None:
    before, environment = dict(session.conf.getAll), dict(os.environ)
    with caplog.at_level(logging.INFO, "aion"):
        configured(session, memory_budget="1GiB")
    assert dict(session.conf.getAll) == before | REQUIRED | {"spark.aion.memory.budget": "1GiB"}
    assert dict(os.environ) == environment
    (said,) = (record.message for record in caplog.records if "no other setting of Spark changes" in record.message)
    assert "aion.unconfigure() undoes it" in said


def test_all_is_undone(session: SparkSession, stream: FileStream) -> None:
    provider = next(iter(REQUIRED))
    session.conf.set(provider, "org.example.Provider")
    before = dict(session.conf.getAll)
    aion.unconfigure()
    stock = [getattr(DataStreamWriter, name) for name in ("start", "toTable")]
    stock += [StreamingQueryException.__str__, GroupedData.transformWithState, GroupedData.transformWithStateInPandas]
    configured(session, stateful=True, memory_budget="1GiB")
    rows = session.readStream.schema(EVENTS_DDL).parquet(str(stream.folder)).withWatermark("ts", "1 second")
    aion.windowed(rows, key="k", **COUNT)
    session.conf.set("spark.sql.shuffle.partitions", "3")
    assert DataStreamWriter.start is not stock[0]
    aion.unconfigure()
    assert dict(session.conf.getAll) == before | {"spark.sql.shuffle.partitions": "3"}
    now = [getattr(DataStreamWriter, name) for name in ("start", "toTable")]
    now += [StreamingQueryException.__str__, GroupedData.transformWithState, GroupedData.transformWithStateInPandas]
    assert now == stock


@pytest.mark.parametrize(
    ("given", "rows", "size"),
    [
        ({}, "4096", str(2**31 - 1)),
        ({ROWS: "10000"}, None, str(2**31 - 1)),
        ({BYTES: "1048576"}, "4096", None),
        # Neither is what the user said to be, nor is there to be no limit at all.
        ({ROWS: "100000"}, None, None),
        ({ROWS: "0"}, None, None),
        ({ROWS: "-1"}, None, None),
        ({FILES: "mine"}, "4096", str(2**31 - 1)),
    ],
)
def test_what_a_query_gets_beside_what_the_user_has_set(
    session: SparkSession, given: dict[str, str], rows: str | None, size: str | None
) -> None:
    for name, value in given.items():
        session.conf.set(name, value)
    own = of_queries(session)
    assert [own.get(name) for name in (ROWS, BYTES)] == [rows, size]
    assert rows_at_once(session) == int(given.get(ROWS, rows or ""))
    assert (FILES in own) == (FILES not in given)


def test_another_writer_of_files_only_for_a_local_master(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark.sparkContext, "master", "yarn")
    assert FILES not in of_queries(spark)


@pytest.mark.parametrize(
    ("partitions", "shards", "words"),
    [
        (2, "auto", "2 shards, as spark.sql.shuffle.partitions says (if batches are small, 1 is quicker)"),
        (1, "auto", "1 shard"),
        (2, 3, "3 shards"),
    ],
)
def test_the_log_says_where_fewer_shards_would_be_quicker(
    spark: SparkSession, stream: FileStream, caplog: pytest.LogCaptureFixture, partitions: int, shards: Any, words: str
) -> None:
    before = spark.conf.get(PARTITIONS)
    spark.conf.set(PARTITIONS, partitions)
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    others = stream.read(EVENTS_DDL).selectExpr("k", "ts as other").withWatermark("other", "0 seconds")
    try:
        with caplog.at_level(logging.INFO, "aion"):
            aion.windowed(events, **COUNT, policy={"state": {"shards": shards}})
            aion.join(events, others, key="k", within=("0 seconds", "1 second"), policy={"state": {"shards": shards}})
    finally:
        spark.conf.set(PARTITIONS, before)
    said = [record.getMessage() for record in caplog.records if ": state in " in record.getMessage()]
    assert [f"{line.split(', ', 1)[1]}, ".startswith(words + ", ") for line in said] == [True, True], said


def test_a_query_has_them_and_the_session_has_not(spark: SparkSession, stream: FileStream, sink: Sink) -> None:
    stream.put([("a", 1, 1.0), ("a", 25, 1.0)])
    seen: list[dict[str, str]] = []
    keep = partial(_keep, seen)
    panes = aion.windowed(stream.read(EVENTS_DDL).withWatermark("ts", "1 second"), key="k", **COUNT)
    folder = str(stream.folder.parent / "of_settings")
    query = panes.writeStream.foreachBatch(keep).option("checkpointLocation", folder).trigger(availableNow=True).start()
    query.awaitTermination()
    own = of_queries(spark)
    assert own
    assert {key: seen[0].get(key) for key in own} == own
    assert not own.keys() & spark.conf.getAll.keys()


def _keep(seen: list[dict[str, str]], batch: Any, number: int) -> None:
    batch.collect()
    seen.append(dict(batch.sparkSession.conf.getAll))


def test_times_of_other_queries_stay(session: SparkSession) -> None:
    session.conf.set("spark.sql.session.timeZone", "Europe/Paris")
    text = F.to_timestamp(F.lit("2026-07-01 12:00:00")).cast("long").alias("t")
    before = session.range(1).select(text).collect()
    configured(session)
    assert session.range(1).select(text).collect() == before
