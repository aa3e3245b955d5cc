"""Spark's own functions group events in the JVM, and what comes out is what the children in Python make of them."""

from __future__ import annotations

import io
import math
import random
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

import aion
from aion import aggregates as A
from aion.base.hashing import ShardOfKeys
from aion.core.ingest.builder import BlockBuilder, ShardBlock
from aion.core.ingest.encoding import decode
from aion.core.ingest.grouped import Grouped
from aion.core.ingest.packed import unpacked
from aion.core.query.plan import Plan, make_plan
from aion.errors import ConfigError
from aion.spark.api import sources
from aion.spark.api.rescale import rescale
from aion.spark.session import partials
from aion.spark.session.group_counter import GroupCounter
from aion.spark.session.query_settings import QUIET
from aion.spark.tasks.shards import shard_ids, shard_of_group
from tests.server.conftest import wait_until
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink, last_panes, plain

SETTING = "spark.aion.jvm_partials"
HOUR = 3600

EVENTS = pa.schema(
    [
        ("k", pa.string()),
        ("f", pa.float64()),
        ("ts", pa.timestamp("us", "UTC")),
        ("v", pa.float64()),
        ("n", pa.int64()),
        ("s", pa.int8()),
        ("d", pa.decimal128(12, 4)),
        ("day", pa.date32()),
    ]
)
DDL = "k string, f double, ts timestamp, v double, n bigint, s tinyint, d decimal(12, 4), day date"
AGGREGATES = {
    "all": A.count(),
    "values": A.count("v"),
    "sum_v": A.sum("v"),
    "mean_v": A.mean("v"),
    "min_v": A.min("v"),
    "max_v": A.max("v"),
    "sum_n": A.sum("n"),
    "mean_n": A.mean("n"),
    "sum_s": A.sum("s"),
    "mean_s": A.mean("s"),
    "min_s": A.min("s"),
    "sum_d": A.sum("d"),
    "mean_d": A.mean("d"),
    "max_d": A.max("d"),
    "day": A.max("day"),
    "first": A.min("ts"),
}


@pytest.fixture
def off(spark: SparkSession) -> Iterator[SparkSession]:
    adaptive = spark.conf.get("spark.sql.adaptive.enabled")
    yield spark
    spark.conf.unset(SETTING)
    spark.conf.set("spark.sql.adaptive.enabled", adaptive)


class Packing:
    """Rows of groups need no Python before the root in each batch of a query that allows it, from the first one on."""

    def __init__(self, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
        self._spark = spark
        monkeypatch.setattr(sources, "grouped", self._grouped)
        monkeypatch.setattr(GroupCounter, "decide", lambda _: None)

    def _grouped(self, *arguments: Any, **named: Any) -> tuple[DataFrame, GroupCounter]:
        rows, counter = partials.grouped(*arguments, **named)
        counter._strategy.setWay(counter._call, "packed")
        return rows, counter

    def in_batch(self) -> bool:
        """Whether the batch is such a one that a function for foreachBatch looks at."""
        (query,) = self._spark.streams.active
        plan = query._jsq.explainInternal(False)
        return "HashAggregate" in plan and "MapInArrow" not in plan


@pytest.fixture
def packing(off: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Packing:
    return Packing(off, monkeypatch)


class PlannedSink(Sink):
    def __init__(self, folder: Path, packing: Packing) -> None:
        super().__init__(folder)
        self._packing = packing
        self.packed: dict[int, bool] = {}

    def keep(self, batch: DataFrame, number: int) -> None:
        self.packed[number] = self._packing.in_batch()
        super().keep(batch, number)


def rows_of(seed: int, count: int = 60) -> list[tuple[Any, ...]]:
    """Events of any order, some of them late, without a time, or with odd values."""
    chosen = random.Random(seed)
    values = [None, 0.0, -0.0, 0.1, 1e-30, float("nan"), float("inf"), -float("inf"), 2.0**60, 1 / 3]
    return [
        (
            chosen.choice(["a", "b", None, "ä"]),
            chosen.choice([0.0, -0.0, 1.5, float("nan"), None]),
            None if chosen.random() < 0.05 else 100.0 * seed + chosen.random() * 90 - 50 * (chosen.random() < 0.3),
            chosen.choice([*values, chosen.random() * 100]),
            chosen.choice([None, 2**55, -(2**55), chosen.randrange(-(10**6), 10**6)]),
            chosen.choice([None, -128, 127, 5]),
            chosen.choice([None, Decimal(chosen.randrange(10**9)) / 10**4]),
            chosen.choice([None, datetime(2024, 1, 1 + chosen.randrange(28), tzinfo=UTC).date()]),
        )
        for _ in range(count)
    ]


def panes_of(stream: FileStream, sink: Sink, setting: str, **definition: Any) -> list[str]:
    stream._spark.conf.set(SETTING, setting)
    sink.folder.mkdir()
    events = aion.watermark(stream.read(DDL), "ts", "10 seconds", max_ahead="1 hour")
    panes = aion.windowed(events, key=["k", "f"], aggregates=AGGREGATES, **definition)
    return plain(sink.run(panes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "windows",
    [
        {
            "two": aion.Tumbling("7 seconds"),
            "hop": aion.Sliding("20 seconds", "10 seconds"),
            "grows": aion.Cumulative("10 seconds", "1 minute"),
            "quiet": aion.Session("3 s"),
        },
        pytest.param({"minute": aion.Tumbling("1 minute")}, marks=pytest.mark.proof),
    ],
)
def test_the_same_panes_come_out(
    spark: SparkSession, off: SparkSession, tmp_path: Path, windows: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = FileStream(spark, tmp_path / "input", EVENTS)
    for batch in range(3):
        stream.put(rows_of(batch))
    stream.put([("z", 0.0, 400.0 + second, 1.0, 1, 1, None, None) for second in (0, 50)])
    definition = {"windows": windows, "bound": "100 seconds", "trigger": "every_batch"}
    grouped = panes_of(stream, Sink(tmp_path / "auto"), "auto", **definition)
    assert grouped == panes_of(stream, Sink(tmp_path / "off"), "off", **definition)
    sink = PlannedSink(tmp_path / "packed", Packing(spark, monkeypatch))
    assert grouped == panes_of(stream, sink, "auto", **definition)
    # The last batch with events asks all shards, and so does the one after it.
    assert sink.packed == {0: True, 1: True, 2: True, 3: False, 4: False}
    kinds = {kind for row in grouped for kind in re.findall(r"\('kind', '(\w+)'\)", row)}
    assert {"on_time", "late", "dropped"} <= kinds


@pytest.mark.slow
def test_a_query_goes_on_with_each(off: SparkSession, stream: FileStream, tmp_path: Path, packing: Packing) -> None:
    """Packed, not grouped, grouped: from one checkpoint, with more and with fewer partitions, adaptive or not."""

    def query(name: str = "w") -> DataFrame:
        events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
        aggregates = {"n": A.count(), "v": A.sum("v")}
        return aion.windowed(
            events, key="k", windows=aion.Tumbling("1 minute"), aggregates=aggregates, bound="1 hour", name=name,
            policy={"state": {"shards": 4}},
        )  # fmt: skip

    sink = PlannedSink(tmp_path, packing)
    ways = ("auto", "true", None), ("off", "false", 4), ("auto", "false", 1)
    batches = 3
    for number, (setting, adaptive, partitions) in enumerate(ways):
        off.conf.set(SETTING, setting)
        off.conf.set("spark.sql.adaptive.enabled", adaptive)
        if partitions is not None and hasattr(SparkSession, "_streamingCheckpointManager"):  # from Spark 4.2 on
            rescale(off, str(tmp_path / "checkpoint"), partitions, state_dir=off.conf.get("spark.aion.state.dir"))
        for value in (0.1, None, 0.3)[:batches]:
            stream.put([("a", 10.0, value), ("b", 70.0 + 60 * number, value)])
        rows = sink.run(query())
    stream.put([("a", 30.0, 0.4), ("c", 4000.0, 1.0)])
    rows = sink.run(query())
    last = last_panes(rows, "k")
    found = {(key, int(start.timestamp())): (row["n"], row["v"]) for (key, _, start), row in last.items()}
    assert found["a", 0] == (10, math.fsum(3 * [0.1, 0.3]) + 0.4)
    assert found["b", 60] == (3, 0.1 + 0.3) and found["b", 180] == (3, 0.1 + 0.3)
    assert sum(sink.packed.values()) > 2


def plan_of(df: DataFrame) -> str:
    """The physical plan of the last batch of a query that reads what is there."""
    query = df.writeStream.format("noop").trigger(availableNow=True).start()
    query.awaitTermination()
    shown: str = query._jsq.explainInternal(False)
    return shown


@pytest.mark.slow
def test_what_groups_events_is_in_the_plan_and_explained(off: SparkSession, stream: FileStream) -> None:
    stream.put([("a", 10.0, 1.0)])
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    minutes: dict[str, Any] = {"key": "k", "windows": aion.Tumbling("1 minute"), "aggregates": {"v": A.sum("v")}}
    assert "HashAggregate(keys=[" in plan_of(aion.windowed(events, **minutes))
    in_python: dict[str, dict[str, Any]] = {
        "'v' = median(v) is none that": {"aggregates": {"n": A.count(), "v": A.median("v")}},
        "some of the windows begin or end with single events": {"windows": aion.Count(3)},
        "the events themselves are kept": {"unique": "v"},
    }
    said = {reason: re.sub(r"\s+", " ", aion.explain(events, **minutes | more)) for reason, more in in_python.items()}
    for reason, text in said.items():
        assert (f"Python groups the events, because {reason}" in text) == ("kept" not in reason)
        assert "Spark's own functions group" not in text
    assert "Spark's own functions group the events" in re.sub(r"\s+", " ", aion.explain(events, **minutes))
    off.conf.set(SETTING, "off")
    assert f"because {SETTING} is 'off'" in re.sub(r"\s+", " ", aion.explain(events, **minutes))
    assert "HashAggregate" not in plan_of(aion.windowed(events, **minutes, name="off"))
    off.conf.set(SETTING, "on")
    with pytest.raises(ConfigError, match=r"spark\.aion\.jvm_partials: 'on' is neither 'auto' nor 'off'"):
        aion.windowed(events, **minutes)


@pytest.mark.slow
def test_how_events_cross(off: SparkSession, stream: FileStream, sink: Sink) -> None:
    """What a batch had decides how the next one goes: grouped, without Python before the root, or as rows."""
    panes = aion.windowed(
        stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"), key="k", windows=aion.Tumbling("1 hour"),
        aggregates={"n": A.count()}, bound="1 hour",
    )  # fmt: skip
    query = sink.start(panes)

    files = 0

    def is_taken() -> bool:
        """Whether a batch has ended that read the newest file. Files are numbered from 0."""
        if (error := query.exception()) is not None:
            raise error
        ends = [str(report["sources"][0]["endOffset"]) for report in query.recentProgress]
        return any(str(files - 1) in re.findall(r"\d+", end) for end in ends)

    def way(keys: int) -> str:
        """How the events of a batch with this many keys cross, which has been decided after the one before."""
        nonlocal files
        stream.put([(str(n % keys), 10.0, 1.0) for n in range(5000)])
        files += 1
        wait_until(is_taken)
        off.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
        plan = query._jsq.explainInternal(False)
        if "MapInArrow" not in plan:
            return "packed"
        return "grouped" if "HashAggregate" in plan else "rows"

    try:
        assert (way(1), way(5000)) == ("grouped", "packed")
        assert (way(5000), way(1)) == ("rows", "rows")
        assert (way(1), way(1)) == ("packed", "packed")
    finally:
        query.stop()


@pytest.mark.slow
def test_a_definition_that_changes(off: SparkSession, stream: FileStream, sink: Sink) -> None:
    """Windows that finish have edges that only tasks know."""

    def query(seconds: int) -> DataFrame:
        return aion.windowed(
            stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"), key="k", name="w", bound="1 hour",
            windows={f"w{seconds}": aion.Tumbling(f"{seconds} seconds")}, aggregates={"n": A.count()},
        )  # fmt: skip

    stream.put([("a", 6.0, 1.0), ("a", 13.0, 1.0), ("a", 16.0, 1.0)])
    sink.run(query(7))
    stream.put([("a", 6.5, 1.0), ("a", 8.0, 1.0), ("a", 20.0, 1.0)])
    sink.run(query(11))
    stream.put([("a", 6.6, 1.0), ("a", 4000.0, 1.0)])
    last = last_panes(sink.run(query(11)), "k")
    found = {(name, int(start.timestamp())): row["n"] for (_, name, start), row in last.items()}
    assert {key: n for key, n in found.items() if key[0] == "w7"} == {("w7", 0): 3, ("w7", 7): 2, ("w7", 14): 2}


@pytest.mark.slow
def test_a_sum_that_does_not_fit(off: SparkSession, tmp_path: Path) -> None:
    stream = FileStream(
        off, tmp_path / "input", pa.schema([("k", pa.string()), ("ts", EVENTS.field("ts").type), ("n", pa.int64())])
    )
    stream.put([("a", 1.0, 2**63 - 1), ("a", 2.0, 1)])
    events = stream.read("k string, ts timestamp, n bigint").withWatermark("ts", "0 seconds")
    panes = aion.windowed(events, key="k", windows=aion.Tumbling("1 minute"), aggregates={"n": A.sum("n")})
    with pytest.raises(StreamingQueryException, match="9223372036854775808 does not fit into a bigint"):
        panes.writeStream.format("noop").trigger(availableNow=True).start().awaitTermination()


@pytest.mark.slow
def test_strategies_of_the_user_stay(off: SparkSession, stream: FileStream) -> None:
    methods = off._jsparkSession.experimental()
    before = methods.extraStrategies()
    partials._add(off)
    assert methods.extraStrategies().contains(partials._strategy(off))
    count = methods.extraStrategies().size()
    partials._add(off)
    assert methods.extraStrategies().size() == count
    other = off.newSession()
    assert other._jsparkSession.experimental().extraStrategies().size() == 0
    stream.put([("a", 10.0, 1.0)])
    # Whoever replaces the list loses only time: the observation is one, and rows cross as they are.
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    panes = aion.windowed(events, key="k", windows=aion.Tumbling("1 minute"), aggregates={"v": A.sum("v")}, name="lost")
    getattr(methods, "extraStrategies_$eq")(before.take(0))
    try:
        assert "HashAggregate" not in plan_of(panes)
    finally:
        getattr(methods, "extraStrategies_$eq")(before)


# -- the same states for any events -----------------------------------------------------------------------

WINDOWS: dict[str, Any] = {
    "one": aion.Tumbling("7 seconds"),
    "several": [aion.Tumbling("7 seconds"), aion.Sliding("20 seconds", "6 seconds")],
    "growing": [aion.Cumulative("6 seconds", "1 minute", offset="2 seconds"), aion.Tumbling("7 seconds")],
    "many": [
        aion.Tumbling(f"{n} seconds") for n in (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71)
    ],
    "days": [aion.Calendar("day", "America/St_Johns", start="00:20"), aion.Calendar("6 hours", "Africa/Monrovia")],
    "days and sessions": [aion.Calendar("week", "Pacific/Apia"), aion.Session("90 seconds")],
    "sessions": [aion.Session("2 seconds"), aion.Tumbling("1 minute")],
}
NUMBERS = st.one_of(
    st.none(), st.integers(-(2**40), 2**40).map(lambda n: n / 2**20), st.sampled_from([-0.0, 0.1, 1e9, 1e-9])
)
# The clocks of Monrovia change at odd seconds, those of St John's at 00:01; Apia leaves a day out; a day begins.
CHANGES = [63_593_070, 983_413_860, 1_325_239_200, 1_709_956_200]
NEAR = st.one_of(st.integers(-700, 700), st.integers(-100_000, 100_000))
INSTANTS = st.builds(lambda at, by: (at + by) * 10**6, st.sampled_from(CHANGES), NEAR)
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", None]),
        st.sampled_from([0.0, -0.0, float("nan"), None]),
        st.one_of(st.none(), st.integers(0, 200 * 10**6), st.sampled_from([2**62, -(2**62)]), INSTANTS),
        st.one_of(NUMBERS, st.sampled_from([float("nan"), float("inf"), -float("inf"), 2.0**49])),
        st.one_of(st.none(), st.integers(-(2**50), 2**50)),
        st.one_of(st.none(), st.integers(-128, 127)),
        st.one_of(st.none(), st.integers(-(10**11), 10**11).map(lambda n: Decimal(n) / 10**4)),
        st.none(),
    ),
    min_size=1,
    max_size=30,
)


def readable(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Times as numbers: Python has none that are out of range."""
    plain = [c.cast(pa.int64()) if pa.types.is_timestamp(c.type) else c for c in rows.columns]
    plain = [c.cast(pa.int32()) if pa.types.is_date(c.type) else c for c in plain]
    return pa.RecordBatch.from_arrays(plain, rows.schema.names)


def states_of(
    plan: Plan, batches: list[pa.RecordBatch], *, grouped: bool, ids: tuple[int, ...] = (0, 1, 2)
) -> list[str]:
    builder = BlockBuilder(plan, shard_of=ShardOfKeys(ids))
    blocks: list[ShardBlock] = []
    for batch in batches:
        blocks += Grouped(plan).blocks(batch, builder) if grouped else builder.add(batch)
    blocks += builder.finish()
    return sorted(
        repr((each.shard, each.block.header.slice_us, row))
        for each in blocks
        for row in readable(decode(each.block, plan.block_schema)).to_pylist()
    )


@given(windows=st.sampled_from(sorted(WINDOWS)), rows=ROWS)
@example(
    windows="many", rows=[("a", 0.0, 30 * 10**6, 0.1, 1, 1, None, None), ("a", 0.0, 31 * 10**6, 0.2, 2, 2, None, None)]
)
def test_the_same_states(spark: SparkSession, windows: str, rows: list[tuple[Any, ...]]) -> None:
    plan = make_plan(
        EVENTS, key=["k", "f"], time="ts", windows=WINDOWS[windows], aggregates=AGGREGATES, apply=None, outputs=None
    )
    columns = list(zip(*rows, strict=True))
    arrays = [
        pa.array(values, pa.int64()).cast(field.type) if field.name == "ts" else pa.array(values, field.type)
        for values, field in zip(columns, EVENTS, strict=True)
    ]
    events = pa.RecordBatch.from_arrays(arrays, schema=EVENTS).select(plan.schema.names)
    expected = states_of(plan, [events], grouped=False)
    df = spark.createDataFrame(pa.Table.from_batches([events]))
    df = df.select(*(F.col(name).alias(f"column{n}") for n, name in enumerate(plan.schema.names)))
    assert partials.why_in_python(spark, plan, drops_bad_texts=False) is None
    marked, _ = partials.grouped(df, plan, "w", shard=None, flags=None, flagged={})
    sent = [row.batch for row in marked.mapInArrow(as_bytes, "batch binary").collect()]
    batches = [batch for data in sent for batch in pa.ipc.open_stream(data)]
    assert batches[0].num_columns == len(Grouped(plan).groups) + len(Grouped(plan).aggregates)
    assert states_of(plan, batches, grouped=True) == expected


KEYS = pa.schema(
    [
        ("text", pa.string()),
        ("bytes", pa.binary()),
        ("flag", pa.bool_()),
        ("tiny", pa.int8()),
        ("large", pa.int64()),
        ("single", pa.float32()),
        ("double", pa.float64()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("digits", pa.decimal128(9, 2)),
        ("many_digits", pa.decimal128(30, 5)),
        ("ts", pa.timestamp("us", "UTC")),
    ]
)
ANY: dict[str, Any] = {
    "text": st.one_of(st.binary(max_size=6), st.text(max_size=40).map(str.encode)),
    "bytes": st.binary(max_size=5),
    "flag": st.booleans(),
    "tiny": st.integers(-128, 127),
    "large": st.integers(-(2**63), 2**63 - 1),
    "single": st.floats(width=32).map(lambda value: value + 0.0),
    "double": st.floats().map(lambda value: value + 0.0),
    "day": st.integers(-(2**31), 2**31 - 1),
    "at": st.integers(-(2**60), 2**60),
    "local": st.integers(-(2**60), 2**60),
    "digits": st.decimals(-9999999, 9999999, places=2),
    "many_digits": st.integers(-(10**30) + 1, 10**30 - 1).map(lambda n: Decimal(n).scaleb(-5, Context(prec=40))),
}
ODD = st.tuples(
    *(st.one_of(st.none(), values) for values in ANY.values()), st.integers(0, 200).map(lambda s: s * 10**6)
)


def column_of(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    if pa.types.is_string(type_):
        return pa.array(values, pa.binary()).view(pa.string())  # Spark takes bytes that are no UTF-8, too
    if pa.types.is_date(type_):
        return pa.array(values, pa.int32()).cast(type_)
    return pa.array(values, pa.int64()).cast(type_) if pa.types.is_timestamp(type_) else pa.array(values, type_)


def packed_rows(spark: SparkSession, marked: DataFrame, counter: GroupCounter) -> list[Any]:
    """The rows that reach the root, as in a batch that asks no shards."""
    counter._strategy.setWay(counter._call, "packed")
    spark.conf.set(QUIET, "0 9")
    spark.sparkContext.setLocalProperty("streaming.sql.batchId", "5")
    try:
        return list(marked.mapInArrow(as_bytes, "shard int, block binary").collect())
    finally:
        spark.conf.unset(QUIET)
        spark.sparkContext.setLocalProperty("streaming.sql.batchId", None)


@pytest.mark.parametrize("shards", [1, 3])
@settings(phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False)  # each try runs a job of Spark
@given(rows=st.lists(ODD, min_size=1, max_size=5))
def test_groups_of_any_type_reach_their_shards(spark: SparkSession, shards: int, rows: list[tuple[Any, ...]]) -> None:
    """Without a worker of Python, in the rows that it would have made, and with the same states."""
    key = KEYS.names[:-1]
    ordered = [name for name in key if name not in ("text", "bytes", "flag")]
    aggregates = {"n": A.count(), "first": A.min("ts")} | {f"least_{name}": A.min(name) for name in ordered}
    # With these, a row has more fields than one word has bits for nulls.
    aggregates |= {f"most_{name}": A.max(name) for name in ordered} | {f"n_{name}": A.count(name) for name in key}
    aggregates |= {f"sum_{name}": A.sum(name) for name in ("tiny", "single", "double", "digits")}
    aggregates |= {f"mean_{name}": A.mean(name) for name in ("tiny", "large")}
    plan = make_plan(
        KEYS, key=key, time="ts", windows=aion.Tumbling("7 seconds"), aggregates=aggregates, apply=None, outputs=None
    )
    columns = zip(zip(*rows, strict=True), KEYS, strict=True)
    events = pa.RecordBatch.from_arrays([column_of(values, f.type) for values, f in columns], schema=KEYS)
    events = events.select(plan.schema.names)
    ids = tuple(shard_ids(shards))
    as_sent = events.set_column(0, "text", events.column(0).view(pa.binary()))
    types = from_arrow_schema(as_sent.schema, prefer_timestamp_ntz=True)
    df = spark.createDataFrame(pa.Table.from_batches([as_sent]), types)
    df = df.select(*(F.col(name).alias(f"column{n}") for n, name in enumerate(plan.schema.names)))
    df = df.withColumn("column0", F.col("column0").cast("string"))
    keys = [(F.col(f"column{n}"), df.schema[n].dataType) for n in range(len(key))]
    assert partials.why_in_python(spark, plan, drops_bad_texts=False) is None
    marked, counter = partials.grouped(df, plan, "w", shard=shard_of_group(keys, ids), flags=None, flagged={})
    found = packed_rows(spark, marked, counter)
    how = Grouped(plan)
    assert len(how.groups) + len(how.aggregates) > 64
    batch = unpacked([row.block for row in found], [each.type for each in (*how.groups, *how.aggregates)])
    assert states_of(plan, [batch], grouped=True, ids=ids) == states_of(plan, [events], grouped=False, ids=ids)
    of_keys = [pa.RecordBatch.from_arrays(batch.columns[1 : 1 + len(key)], key)]
    settled = pa.RecordBatch.from_arrays([mended(c) for c in of_keys[0].columns], key)
    assert [row.shard for row in found] == ShardOfKeys(ids)(settled.columns, len(found)).tolist()


def test_rows_that_are_no_events_do_not_reach_the_root(spark: SparkSession) -> None:
    plan = make_plan(
        EVENTS, key="k", time="ts", windows=aion.Tumbling("7 seconds"), aggregates={"n": A.count()}, apply=None,
        outputs=None,
    )  # fmt: skip
    assert partials.why_in_python(spark, plan, drops_bad_texts=False) is None
    df = spark.sql("select 'a' column0, timestamp_seconds(id) column1, cast(id as tinyint) flag from range(4)")
    options: dict[str, Any] = {"flags": "flag", "flagged": {1: None, 3: None}}
    for condition, rows in (("true", 1), ("flag in (1, 3)", 0)):
        some = df.where(condition)
        marked, counter = partials.grouped(some, plan, "w", shard=shard_of_group([], (0,)), **options)
        assert len({row.block for row in packed_rows(spark, marked, counter)}) == rows


def mended(column: pa.Array) -> pa.Array:
    if not pa.types.is_string(column.type):
        return column
    texts = column.view(pa.binary()).to_pylist()
    return pa.array([None if text is None else text.decode("utf-8", "replace") for text in texts], pa.string())


def as_bytes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        data = io.BytesIO()
        with pa.ipc.new_stream(data, batch.schema) as writer:
            writer.write_batch(batch)
        yield pa.record_batch([pa.array([data.getvalue()], pa.binary())], ["batch"])
