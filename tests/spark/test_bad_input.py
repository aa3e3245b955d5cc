"""What a user can get wrong in a call: one clear error each, before any data flows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkConf
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import aion
from aion import aggregates as A
from aion import errors
from tests.spark.conftest import EVENTS_DDL, FileStream

LIMIT = "spark.executor.pyspark.memory"
GOOD: dict[str, Any] = {"key": "k", "time": "ts", "windows": aion.Tumbling("1 minute"), "aggregates": {"n": A.count()}}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key": "nokey"}, errors.SchemaError, "key: there is no column 'nokey'; the columns are k, ts, v"),
        ({"time": "when"}, errors.SchemaError, "time: there is no column 'when'"),
        ({"time": "v"}, errors.SchemaError, "time: column 'v' is of type double; a timestamp is needed"),
        ({"aggregates": {"s": A.sum("k")}}, errors.SchemaError, "needs numbers, not string"),
        ({"aggregates": {"s": A.sum("w")}}, errors.SchemaError, "names a column that does not exist"),
        ({"aggregates": {"s": "sum"}}, errors.ConfigError, "no aggregate"),
        ({"aggregates": {}}, errors.ConfigError, "aggregates: none given"),
        ({"aggregates": {"pane": A.count()}}, errors.SchemaError, "'pane' is a column that every result has"),
        ({"windows": []}, errors.WindowError, "none given"),
        ({"aggregates": None}, errors.ConfigError, "either aggregates"),
        ({"apply": len}, errors.ConfigError, "either aggregates"),
        ({"aggregates": None, "apply": len}, errors.ConfigError, "needs the schema"),
        ({"aggregates": None, "apply": len, "schema": "n integr"}, errors.SchemaError, "unknown type 'integr'"),
        ({"policy": {"memory": {"bugdet": "1GiB"}}}, errors.PolicyError, "budget"),
        ({"policy": "no such policy"}, errors.PolicyError, "no such policy"),
        ({"name": "a/b"}, errors.ConfigError, "becomes a folder"),
    ],
)
def test_wrong_arguments(stream: FileStream, change: dict[str, Any], error: type[Exception], message: str) -> None:
    events = stream.read(EVENTS_DDL).withWatermark("ts", "1 minute")
    with pytest.raises(error) as caught:
        aion.windowed(events, **{**GOOD, **change})
    assert message in str(caught.value)


def test_no_watermark(stream: FileStream) -> None:
    with pytest.raises(errors.WatermarkError, match="has no watermark"):
        aion.windowed(stream.read(EVENTS_DDL), **GOOD)


def test_no_stream(spark: SparkSession) -> None:
    with pytest.raises(errors.WatermarkError, match="not a stream"):
        aion.windowed(spark.range(1).withColumn("ts", F.current_timestamp()).withColumn("k", F.col("id")), **GOOD)


@pytest.mark.parametrize(
    ("size", "message"), [("0 seconds", "not positive"), ("-1 m", "not positive"), ("5", "no dur")]
)
def test_windows_that_cannot_be(size: str, message: str) -> None:
    with pytest.raises(errors.WindowError, match=message):
        aion.Tumbling(size)


def test_no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(errors.MissingJava, match=r"no java on the PATH\. Spark needs Java 17 or 21: install it"):
        aion.configure(SparkSession.Builder())


def test_an_old_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'openjdk version \"1.8.0_392\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(errors.MissingJava, match=r"is Java 8, which is too old"):
        aion.configure(SparkSession.Builder())


@pytest.mark.parametrize(
    ("given", "rows", "size"),
    [
        ({}, "4096", str(2**31 - 1)),
        ({"maxRecordsPerBatch": "10000"}, "10000", str(2**31 - 1)),
        ({"maxBytesPerBatch": "1048576"}, "4096", "1048576"),
        # Neither is what the user said to be, nor is there to be no limit at all.
        ({"maxRecordsPerBatch": "100000"}, "100000", None),
        ({"maxRecordsPerBatch": "0"}, "0", None),
        ({"maxRecordsPerBatch": "-1"}, "-1", None),
    ],
)
def test_batches_are_bounded_in_rows_or_in_bytes(given: dict[str, str], rows: str, size: str | None) -> None:
    builder = SparkSession.Builder()
    for name, value in given.items():
        builder = builder.config(f"spark.sql.execution.arrow.{name}", value)
    options = aion.configure(builder)._options
    assert options["spark.sql.execution.arrow.maxRecordsPerBatch"] == rows
    assert options.get("spark.sql.execution.arrow.maxBytesPerBatch") == size


def test_a_limit_that_the_state_server_would_inherit_is_told(
    spark: SparkSession, stream: FileStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = spark.sparkContext
    monkeypatch.setattr(context, "_conf", SparkConf().setAll([*context.getConf().getAll(), (LIMIT, "2g")]))
    with pytest.warns(UserWarning, match=f"{LIMIT} is set"):
        aion.explain(stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"), **GOOD)


def test_a_policy_for_a_session_that_runs_already_is_not_ignored(spark: SparkSession, stream: FileStream) -> None:
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    before = {key for key in spark.conf.getAll if key.startswith("spark.aion.")}
    try:
        again = aion.configure(SparkSession.builder, distribution={"merge_levels": 2, "fan_in": 3}).getOrCreate()
        assert again is spark
        assert "child -> level 1 -> level 2 -> root" in aion.explain(events, **GOOD)
    finally:
        for key in {key for key in spark.conf.getAll if key.startswith("spark.aion.")} - before:
            spark.conf.unset(key)
    assert "child -> root" in aion.explain(events, **GOOD)
