"""Spark's own functions group events in the JVM, and what comes out is what the children in Python make of them."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import aion
from aion import aggregates as A
from aion.base.hashing import ShardOfKeys
from aion.core.ingest.builder import BlockBuilder, ShardBlock
from aion.core.ingest.encoding import decode
from aion.core.ingest.grouped import Grouped
from aion.core.query.plan import Plan, make_plan
from aion.errors import ConfigError
from aion.spark.api.rescale import rescale
from aion.spark.session import partials
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


def panes_of(stream: FileStream, folder: Path, setting: str, **definition: Any) -> list[str]:
    stream._spark.conf.set(SETTING, setting)
    sink = Sink(folder / setting)
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
    spark: SparkSession, off: SparkSession, tmp_path: Path, windows: dict[str, Any]
) -> None:
    stream = FileStream(spark, tmp_path / "input", EVENTS)
    for batch in range(3):
        stream.put(rows_of(batch))
    stream.put([("z", 0.0, 400.0 + second, 1.0, 1, 1, None, None) for second in (0, 50)])
    definition = {"windows": windows, "bound": "100 seconds", "trigger": "every_batch"}
    grouped = panes_of(stream, tmp_path, "auto", **definition)
    assert grouped == panes_of(stream, tmp_path, "off", **definition)
    kinds = {kind for row in grouped for kind in re.findall(r"\('kind', '(\w+)'\)", row)}
    assert {"on_time", "late", "dropped"} <= kinds


@pytest.mark.slow
def test_a_query_goes_on_with_either(off: SparkSession, stream: FileStream, sink: Sink, tmp_path: Path) -> None:
    """Grouped, not grouped, grouped: from one checkpoint, with more and with fewer partitions, adaptive or not."""

    def query() -> DataFrame:
        events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
        aggregates = {"n": A.count(), "v": A.sum("v")}
        return aion.windowed(
            events, key="k", windows=aion.Tumbling("1 minute"), aggregates=aggregates, bound="1 hour", name="w",
            policy={"state": {"shards": 4}},
        )  # fmt: skip

    ways = ("auto", "true", None), ("off", "false", 4), ("auto", "false", 1)
    for number, (setting, adaptive, partitions) in enumerate(ways):
        off.conf.set(SETTING, setting)
        off.conf.set("spark.sql.adaptive.enabled", adaptive)
        if partitions is not None and hasattr(SparkSession, "_streamingCheckpointManager"):  # from Spark 4.2 on
            rescale(off, str(tmp_path / "checkpoint"), partitions, state_dir=off.conf.get("spark.aion.state.dir"))
        stream.put([("a", 10.0, 0.1), ("b", 70.0 + 60 * number, 0.2), ("a", 20.0, None)])
        rows = sink.run(query())
    stream.put([("a", 30.0, 0.4), ("c", 4000.0, 1.0)])
    rows = sink.run(query())
    last = last_panes(rows, "k")
    found = {(key, int(start.timestamp())): (row["n"], row["v"]) for (key, _, start), row in last.items()}
    assert found["a", 0] == (7, 0.1 + 0.1 + 0.1 + 0.4)
    assert found["b", 60] == (1, 0.2) and found["b", 180] == (1, 0.2)


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
def test_events_of_many_groups_are_not_grouped(off: SparkSession, stream: FileStream, sink: Sink) -> None:
    """What a batch had decides how the next one goes, and the events of few groups are grouped again."""
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

    def is_grouped(keys: int) -> bool:
        """Whether Spark groups the events of a batch with this many keys, which has been decided after."""
        nonlocal files
        stream.put([(str(n % keys), 10.0, 1.0) for n in range(5000)])
        files += 1
        wait_until(is_taken)
        off.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
        return "HashAggregate" in query._jsq.explainInternal(False)

    try:
        assert is_grouped(1) and is_grouped(5000)
        assert not is_grouped(5000)
        assert not is_grouped(1)
        assert is_grouped(1)
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
    return pa.RecordBatch.from_arrays(plain, rows.schema.names)


def states_of(plan: Plan, batches: list[pa.RecordBatch], *, grouped: bool) -> list[str]:
    builder = BlockBuilder(plan, shard_of=ShardOfKeys((0, 1, 2)))
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
    marked, _ = partials.grouped(df, plan, "w", flags=None, flagged={})
    sent = [row.batch for row in marked.mapInArrow(as_bytes, "batch binary").collect()]
    batches = [batch for data in sent for batch in pa.ipc.open_stream(data)]
    assert batches[0].num_columns == len(Grouped(plan).groups) + len(Grouped(plan).aggregates)
    assert states_of(plan, batches, grouped=True) == expected


def as_bytes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        data = io.BytesIO()
        with pa.ipc.new_stream(data, batch.schema) as writer:
            writer.write_batch(batch)
        yield pa.record_batch([pa.array([data.getvalue()], pa.binary())], ["batch"])
