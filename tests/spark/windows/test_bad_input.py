"""What a user can get wrong in a call: one clear error each, before any data flows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkConf
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.conf import RuntimeConfig
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import aion
from aion import aggregates as A
from aion import errors
from tests.spark.conftest import EVENTS_DDL, FileStream
from tests.spark.stateful.processors import CountInPandas

LIMIT = "spark.executor.pyspark.memory"
GOOD: dict[str, Any] = {"key": "k", "time": "ts", "windows": aion.Tumbling("1 minute"), "aggregates": {"n": A.count()}}


@pytest.fixture
def settings(spark: SparkSession) -> Iterator[RuntimeConfig]:
    """The session's, which are left as they were."""
    before = dict(spark.conf.getAll)
    yield spark.conf
    after = dict(spark.conf.getAll)
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            with suppress(Exception):  # what cannot be changed any more was not changed either
                spark.conf.set(name, before[name]) if name in before else spark.conf.unset(name)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"key": "nokey"}, errors.SchemaError, "key: there is no column 'nokey'; the columns are k, ts, v"),
        ({"time": "when"}, errors.SchemaError, "time: there is no column 'when'"),
        ({"time": "v"}, errors.SchemaError, "time: column 'v' is of type double; a timestamp is needed"),
        ({"aggregates": {"s": A.sum("k")}}, errors.SchemaError, "needs numbers, not string"),
        ({"aggregates": {"s": A.sum("w")}}, errors.SchemaError, "names a column that does not exist"),
        ({"aggregates": {"s": "sum"}}, errors.ConfigError, "not an aggregate"),
        ({"aggregates": {}}, errors.ConfigError, "aggregates: none given"),
        ({"aggregates": {"pane": A.count()}}, errors.SchemaError, "'pane' is a column that every result has"),
        ({"windows": []}, errors.WindowError, "none given"),
        ({"aggregates": None}, errors.ConfigError, "either aggregates"),
        ({"apply": aion.Apply(len, "n long")}, errors.ConfigError, "either aggregates"),
        ({"aggregates": None, "apply": len}, errors.ConfigError, "is no aion.Apply; write"),
        ({"aggregates": None, "apply": aion.Apply(len, "n integr")}, errors.SchemaError, "unknown type 'integr'"),
        ({"policy": {"memory": {"bugdet": "1GiB"}}}, errors.PolicyError, "budget"),
        ({"policy": "no such policy"}, errors.PolicyError, "no such policy"),
        ({"name": "a/b"}, errors.ConfigError, "becomes a folder"),
        ({"name": 1}, errors.ConfigError, "becomes a folder"),
        ({"time": F.lit}, errors.SchemaError, "neither the name of a column nor a Column; give e.g. time='ts'"),
        ({"aggregates": {"n": A.count(), "N": A.count()}}, errors.SchemaError, "'n' and 'N' differ only in case"),
        ({"aggregates": {"K": A.count()}}, errors.SchemaError, "'k' and 'K' differ only in case"),
        ({"aggregates": {"Pane": A.count()}}, errors.SchemaError, "'Pane' and 'pane' differ only in case"),
    ],
)
def test_wrong_arguments(stream: FileStream, change: dict[str, Any], error: type[Exception], message: str) -> None:
    events = stream.read(EVENTS_DDL).withWatermark("ts", "1 minute")
    with pytest.raises(error) as caught:
        aion.windowed(events, **{**GOOD, **change})
    assert message in str(caught.value)


def test_strings_of_which_different_ones_are_equal(stream: FileStream) -> None:
    events = stream.read(EVENTS_DDL).withWatermark("ts", "1 minute").withColumn("c", F.expr("collate(k, 'UTF8_LCASE')"))
    said = r"'c' is of type string collate UTF8_LCASE.*give e\.g\. collate\(lower\(c\), 'UTF8_BINARY'\)"
    for change in ({"key": "c"}, {"aggregates": {"n": A.count_distinct("c")}}):
        with pytest.raises(errors.SchemaError, match=said):
            aion.windowed(events, **{**GOOD, **change})
    aion.windowed(events, **GOOD)  # nothing compares it
    plain = events.withColumn("c", F.expr("collate(lower(c), 'UTF8_BINARY')"))
    aion.windowed(plain, **{**GOOD, "key": "c"})


def test_no_watermark(stream: FileStream) -> None:
    with pytest.raises(errors.WatermarkError, match="has no watermark"):
        aion.windowed(stream.read(EVENTS_DDL), **GOOD)


def test_windows_after_windows(stream: FileStream) -> None:
    first = aion.windowed(stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"), **GOOD)
    panes = aion.panes(first).select("k", "n", F.col("window_end").alias("ts")).withWatermark("ts", "0 seconds")
    with pytest.raises(errors.WatermarkError, match=r"results of another aion\.windowed"):
        aion.windowed(panes, **GOOD)


def test_no_stream(spark: SparkSession) -> None:
    with pytest.raises(errors.WatermarkError, match="not a stream"):
        aion.windowed(spark.range(1).withColumn("ts", F.current_timestamp()).withColumn("k", F.col("id")), **GOOD)


@pytest.mark.parametrize("wrong", [None, 5, {"ts": [1]}])
def test_no_dataframe(spark: SparkSession, wrong: Any) -> None:
    for call in (aion.windowed, aion.explain):
        with pytest.raises(errors.WatermarkError, match="a streaming DataFrame is needed"):
            call(wrong, **GOOD)
    for only in (aion.panes, aion.dropped):
        for other in (wrong, spark.range(1)):
            with pytest.raises(errors.SchemaError, match=r"a result of aion\.windowed is needed"):
                only(other)
    with pytest.raises(TypeError, match="is not a DataFrame"):
        aion.group_by(wrong, "k")
    with pytest.raises(TypeError, match=r"a SparkSession\.Builder is needed"):
        aion.configure(wrong)
    with pytest.raises(TypeError, match="a SparkSession is needed"):
        aion.read_files(wrong, "in/", schema=EVENTS_DDL, watermark=("ts", "1 s"))
    with pytest.raises(TypeError, match="a SparkSession is needed"):
        aion.read_state(wrong, "checkpoint")
    with pytest.raises(TypeError, match="a SparkSession is needed"):
        aion.metrics.state(wrong)


@pytest.mark.parametrize("wrong", [None, "", 0])
def test_no_checkpoint(spark: SparkSession, wrong: Any) -> None:
    with pytest.raises(errors.ConfigError, match="is not the location of a checkpoint"):
        aion.read_state(spark, wrong)
    with pytest.raises(errors.ConfigError, match="is not the location of a checkpoint"):
        aion.migrate(spark, wrong, "new")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"statefulProcessor": 5}, "5 is not a StatefulProcessor; give an object"),
        ({"statefulProcessor": StatefulProcessor}, "is not a StatefulProcessor; give an object, not its class"),
        ({"timeMode": None}, "timeMode: None is not a text"),
        ({"eventTimeColumnName": 5}, "eventTimeColumnName: 5 is not a text"),
        ({"initialState": 5}, "initialState: 5 is not grouped"),
    ],
)
def test_what_no_processor_can_have(spark: SparkSession, change: dict[str, Any], said: str) -> None:
    stream = spark.readStream.format("rate").load()
    good = {"outputStructType": "k bigint", "outputMode": "Update", "timeMode": "None"}
    given: dict[str, Any] = {"statefulProcessor": CountInPandas(), **good, **change}
    with pytest.raises(errors.ConfigError, match=said):
        aion.group_by(stream, "value").transformWithStateInPandas(**given)


@pytest.mark.parametrize(
    ("key", "instead"),
    [("map(value, 1)", "array_sort"), ("array(struct(map(value, 1)))", "array_sort"), ("parse_json('1')", "to_json")],
)
def test_what_cannot_be_a_key(spark: SparkSession, key: str, instead: str) -> None:
    stream = spark.readStream.format("rate").load().select(F.expr(key).alias("strange"))
    given = (CountInPandas(), "k bigint", "Update", "None")
    with pytest.raises(errors.ConfigError, match=rf"'strange' is of type .* cannot be a key; group by {instead}\("):
        aion.group_by(stream, "strange").transformWithStateInPandas(*given)


@pytest.mark.parametrize("key", ["collate('a', 'UTF8_LCASE')", "struct(value, collate('a', 'UTF8_LCASE') AS strange)"])
def test_a_key_of_strings_that_python_compares_otherwise(spark: SparkSession, key: str) -> None:
    stream = spark.readStream.format("rate").load().select(F.expr(key).alias("strange"))
    given = (CountInPandas(), "k bigint", "Update", "None")
    with pytest.raises(errors.SchemaError, match="'strange' is of type string collate UTF8_LCASE, and Aion compares"):
        aion.group_by(stream, "strange").transformWithStateInPandas(*given)


def test_an_alias_that_is_a_column_already(spark: SparkSession) -> None:
    stream = spark.readStream.format("rate").load()
    given = (CountInPandas(), "k bigint", "Update", "None")
    with pytest.raises(errors.ConfigError, match=r"'value' is a column of the DataFrame already, .* another alias"):
        aion.group_by(stream, F.abs("value").alias("value")).transformWithStateInPandas(*given)


def test_a_column_that_python_cannot_get(stream: FileStream) -> None:
    events = stream.read(EVENTS_DDL).withWatermark("ts", "1 minute").withColumn("z", F.expr("make_interval(0, 1)"))
    with pytest.raises(errors.SchemaError, match="column 'z' is of type interval, which Spark cannot send to Python"):
        aion.windowed(events, **{**GOOD, "key": "z"})


@pytest.mark.parametrize(
    ("size", "message"), [("0 seconds", "not positive"), ("-1 m", "not positive"), ("5", "not a duration")]
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


def test_a_limit_that_the_state_server_would_inherit_is_told(
    spark: SparkSession, stream: FileStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = spark.sparkContext
    monkeypatch.setattr(context, "_conf", SparkConf().setAll([*context.getConf().getAll(), (LIMIT, "2g")]))
    with pytest.warns(UserWarning, match=f"{LIMIT} is set"):
        aion.explain(stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"), **GOOD)


def test_a_policy_for_a_session_that_runs_already_is_not_ignored(
    spark: SparkSession, settings: RuntimeConfig, stream: FileStream
) -> None:
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    assert "child -> root" in aion.explain(events, **GOOD)
    again = aion.configure(SparkSession.builder, distribution={"merge_levels": 2, "fan_in": 3}).getOrCreate()
    assert again is spark
    assert "child -> level 1 -> level 2 -> root" in aion.explain(events, **GOOD)


def test_a_mapping_is_a_policy_that_settings_outrank_and_another_policy_replaces(
    settings: RuntimeConfig, stream: FileStream
) -> None:
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    policy = {"distribution": {"merge_levels": 2}, "trigger": {"bound": 0.2}}
    builder = SparkSession.builder.config("spark.aion.trigger.bound", "0.3")
    aion.configure(builder, policy=policy).getOrCreate()
    told = aion.explain(events, **GOOD)
    assert "child -> level 1 -> level 2 -> root" in told and "a staleness of 0.3" in told
    assert "child -> root" in aion.explain(events, policy="standard", **GOOD)
    settings.set("spark.aion.policy", "{not JSON")
    with pytest.raises(errors.PolicyError, match=r"spark\.aion\.policy: '\{not JSON' is not JSON"):
        aion.explain(events, **GOOD)


class Sealed:
    """What a builder says in public, and nothing else."""

    def __init__(self) -> None:
        self.told: dict[str, str] = {}

    def config(self, key: str, value: str) -> Sealed:
        self.told[key] = value
        return self

    def getOrCreate(self) -> SparkSession:
        builder = SparkSession.builder
        for key, value in self.told.items():
            builder = builder.config(key, value)
        return builder.getOrCreate()


def test_configure_uses_what_a_builder_says_in_public(spark: SparkSession, settings: RuntimeConfig) -> None:
    builder = Sealed()
    returned = aion.configure(builder, memory_budget="1GiB").config("spark.aion.memory.moderate", "0.5")  # type: ignore[arg-type]
    assert builder.told["spark.aion.memory.budget"] == "1GiB"
    assert builder.told["spark.aion.memory.moderate"] == "0.5"
    assert returned.appName("again").getOrCreate() is spark
    assert settings.get("spark.aion.memory.budget") == "1GiB"
    assert builder.told["spark.app.name"] == "again"
