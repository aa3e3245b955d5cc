"""Every aggregate beside the function of the same name in ``pyspark.sql.functions``, on the same events."""

from __future__ import annotations

import math
import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import aion
from aion import aggregates as A
from tests.spark.conftest import FileStream, Sink, last_panes

SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("ts", pa.timestamp("us", "UTC")),
        ("x", pa.float64()),
        ("i", pa.int32()),
        ("d", pa.decimal128(10, 2)),
        ("s", pa.string()),
    ]
)
DDL = "k string, ts timestamp, x double, i int, d decimal(10,2), s string"
SHARES = [0.0, 0.25, 0.9]

# By function, the columns that it is asked for; arguments beside the column are the same for both sides.
ASKED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "count": ("xs", ()),
    "sum": ("xid", ()),
    "mean": ("xid", ()),
    "avg": ("x", ()),
    "min": ("xids", ()),
    "max": ("xids", ()),
    "var_samp": ("xid", ()),
    "var_pop": ("xi", ()),
    "variance": ("x", ()),
    "stddev": ("x", ()),
    "std": ("x", ()),
    "stddev_samp": ("id", ()),
    "stddev_pop": ("xi", ()),
    "first": ("xs", (True,)),
    "last": ("xs", ()),
    "min_by": ("si", ("ts",)),
    "max_by": ("sx", ("ts",)),
    "count_distinct": ("xids", ()),
    "approx_count_distinct": ("xs", (0.02,)),
    "collect_list": ("xs", ()),
    "collect_set": ("xis", ()),
    "median": ("xid", ()),
    "percentile": ("xid", (SHARES,)),
    "approx_percentile": ("id", (SHARES,)),  # of x, which has NaN, Spark's own loses some when it merges
    "percentile_approx": ("i", (0.3, 1000)),
}
COMMUTE_ONLY = ("collect_list", "collect_set")


def spread() -> A.Aggregate:
    return A.aggregate(
        "i",
        lift=lambda i: [i, i],
        combine=lambda a, b: [pc.min_element_wise(a[0], b[0]), pc.max_element_wise(a[1], b[1])],
        lower=lambda low, high: pc.subtract(high.cast("int64"), low.cast("int64")),
        partial="low int, high int",
        result="bigint",
        name="spread",
    )


def events(seed: int, count: int) -> list[tuple[Any, ...]]:
    rng = random.Random(seed)
    numbers = [None, math.nan, 0.0, -0.0, 1.5, 1e9 + 0.1, -7.25]
    return [
        (
            rng.choice(["a", "b", None]),
            1000 + rng.randrange(40) + rng.random(),
            rng.choice(numbers) if rng.random() < 0.5 else rng.gauss(1e6, 1),
            rng.choice([None, 2**31 - 1, -5, rng.randrange(50)]),
            rng.choice([None, Decimal(rng.randrange(-(10**9), 10**9)).scaleb(-2)]),
            rng.choice([None, "", "x", "y", "ü"]),
        )
        for _ in range(count)
    ]


def sparks(name: str, column: str, arguments: tuple[Any, ...]) -> Column:
    if name in ("first", "last"):
        # Spark's own go by the order of rows, which is nobody's; ours go by time, which can be said in Spark as well.
        time = F.when(F.col(column).isNotNull(), F.col("ts")) if arguments else F.col("ts")
        return (F.min_by if name == "first" else F.max_by)(column, time)
    function: Column = getattr(F, name)(column, *arguments)
    return function


def by_spark(spark: SparkSession, folder: Path) -> DataFrame:
    rows = spark.read.schema(DDL).parquet(str(folder)).where("k is null or k <> 'clock'")
    columns = [
        sparks(name, column, arguments).alias(f"{name}_{column}")
        for name, (columns, arguments) in ASKED.items()
        for column in columns
    ]
    columns += [
        F.count(F.lit(1)).alias("n"),
        F.count_distinct("x", "s").alias("pairs"),
        F.slice(F.sort_array(F.collect_list("i"), asc=False), 1, 3).alias("top"),
        (F.max("i").cast("bigint") - F.min("i")).alias("spread"),
    ]
    return rows.groupBy("k", F.window("ts", "20 seconds").alias("w")).agg(*columns)


@pytest.mark.proof
def test_the_same_results_as_sparks_own_functions(spark: SparkSession, tmp_path: Path) -> None:
    stream, sink = FileStream(spark, tmp_path / "input", SCHEMA), Sink(tmp_path)
    rows = events(4, 240)
    stream.put(rows[0::2])
    stream.put([*rows[1::2], ("clock", 5000, 0.0, 0, None, "")])
    asked = {
        f"{name}_{column}": getattr(A, name)(column, *arguments)
        for name, (columns, arguments) in ASKED.items()
        for column in columns
    }
    asked |= {"n": A.count(), "pairs": A.count_distinct("x", "s"), "top": A.top_k("i", 3), "spread": spread()}
    panes = aion.windowed(
        stream.read(DDL).withWatermark("ts", "100 seconds"),
        key="k",
        time="ts",
        windows=aion.Tumbling("20 seconds"),
        aggregates=asked,
    )
    expected = by_spark(spark, tmp_path / "input")
    types = {f.name: f.dataType.simpleString() for f in expected.schema}
    assert {f.name: f.dataType.simpleString() for f in panes.schema if f.name in asked} == {n: types[n] for n in asked}
    found = last_panes(sink.run(panes), "k")
    wanted = {(row["k"], row["w"]["start"]): row for row in expected.collect()}
    assert len(wanted) == 6
    for (k, start), row in wanted.items():
        mine = found[k, str(aion.Tumbling("20 seconds")), start]
        for name in asked:
            assert alike(name, mine[name], row[name]), f"{name} of {k}: {mine[name]!r}, not {row[name]!r}"


def alike(name: str, found: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        if name.startswith(COMMUTE_ONLY):
            found, wanted = sorted(found, key=repr), sorted(wanted, key=repr)
        return len(found) == len(wanted) and all(alike(name, f, w) for f, w in zip(found, wanted, strict=True))
    if name.startswith("approx_count"):
        return abs(found - wanted) <= 0.1 * wanted
    if isinstance(wanted, float) and math.isnan(wanted):
        return math.isnan(found)
    if isinstance(wanted, float):
        # Spark adds one by one and so is itself off by some of the last digits.
        return math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-9)
    return bool(found == wanted and type(found) is type(wanted))


NESTED = pa.schema(
    [
        ("k", pa.string()),
        ("ts", pa.timestamp("us", "UTC")),
        ("s", pa.struct([("i", pa.int64()), ("x", pa.float64())])),
        ("m", pa.map_(pa.string(), pa.int64())),
    ]
)
NESTED_DDL = "k string, ts timestamp, s struct<i: bigint, x: double>, m map<string, bigint>"


@pytest.mark.proof
def test_nested_values_in_a_session_of_another_zone(spark: SparkSession, tmp_path: Path) -> None:
    stream, sink = FileStream(spark, tmp_path / "input", NESTED), Sink(tmp_path)
    large = 2**62 + 1
    stream.put([("a", 1000, {"i": large, "x": math.nan}, [("b", large)]), ("z", 1000, {"i": None, "x": None}, None)])
    stream.put([("clock", 5000, None, None)])
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")
    try:
        panes = aion.windowed(
            stream.read(NESTED_DDL).withWatermark("ts", "100 seconds"),
            key="k",
            time="ts",
            windows=aion.Tumbling("20 seconds"),
            aggregates={"s": A.last("s"), "m": A.first("m"), "at": A.collect_list("ts")},
        )
        shown = panes.withColumn("at", F.expr("transform(at, t -> unix_seconds(t))"))
        found = last_panes(sink.run(shown), "k")
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(zone))
    rows = {key[0]: row for key, row in found.items()}
    assert (rows["a"]["s"]["i"], rows["a"]["m"], rows["a"]["at"]) == (large, {"b": large}, [1000])
    assert math.isnan(rows["a"]["s"]["x"])
    assert (rows["z"]["s"]["i"], rows["z"]["s"]["x"], rows["z"]["m"]) == (None, None, None)
