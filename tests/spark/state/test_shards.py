"""Where a key's shard is: the same whether Spark or the child works it out."""

from __future__ import annotations

import datetime as dt
import struct
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DoubleType, LongType

from aion.base.hashing import ShardOfKeys, xxhash64
from aion.spark.tasks.shards import partition_of, shard_column, shard_ids

ROWS = [
    (0, 0, 0, True, dt.date(1970, 1, 1), dt.datetime(1970, 1, 1), 1),
    (-1, -1, -1, False, dt.date(1969, 12, 31), dt.datetime(1960, 5, 5, 1, 2, 3, 4), 2),
    (2**63 - 1, 2**31 - 1, 127, None, dt.date(9999, 12, 31), None, 3),
    (-(2**63), -(2**31), -128, True, None, dt.datetime(2024, 2, 29, 23, 59, 59, 999999), 4),
    (None, None, None, None, None, None, 5),
]
DDL = "l bigint, i int, b tinyint, o boolean, d date, t timestamp, n smallint"
TYPES = [pa.int64(), pa.int32(), pa.int8(), pa.bool_(), pa.date32(), pa.timestamp("us", "UTC"), pa.int16()]


def place(keys: Sequence[tuple[Column, DataType]], ids: Sequence[int]) -> Column:
    return shard_column(keys, "operator", tuple(ids))


def test_the_hash_is_sparks(spark: SparkSession) -> None:
    df = spark.createDataFrame(ROWS, DDL)
    names = [part.split()[0] for part in DDL.split(", ")]
    several = [[name] for name in names] + [["l", "i"], ["d", "t", "o"], ["n", "b", "l"]]
    expected = df.select(*[F.xxhash64(*keys) for keys in several]).collect()
    columns = {n: pa.array(values, t) for n, values, t in zip(names, zip(*ROWS, strict=True), TYPES, strict=True)}
    for at, keys in enumerate(several):
        assert xxhash64([columns[key] for key in keys]).tolist() == [row[at] for row in expected], keys


TEXTS = [None, "", "a", "abcd", "Straße", "12345678", "x" * 31, "y" * 32, "z" * 33, "w" * 63 + "é", "v" * 200]
BIG = [None, 0, 1, -1, 127, 128, -128, -129, 10**20, -(10**20), 10**37]
OTHERS = {
    "s": (pa.array(TEXTS, pa.string()), "string"),
    "y": (pa.array(TEXTS, pa.string()).cast(pa.binary()), "binary"),
    "m": (pa.array([None if n is None else Decimal(n) for n in BIG], pa.decimal128(38)), "decimal(38,0)"),
    "p": (pa.array(map(Decimal, range(-5, 6)), pa.decimal128(18)), "decimal(18,0)"),
    "g": (pa.array([None, 0.0, -0.0, 1.5, -2.25, float("nan"), 1e300, 3.0, 4.0, 5.0, 6.0]), "double"),
}


def test_the_hash_of_texts_decimals_and_doubles_is_sparks(spark: SparkSession) -> None:
    # In a slice the first value is not where the column's memory begins.
    columns = {key: pa.concat_arrays([values.slice(3, 2), values]).slice(2) for key, (values, _) in OTHERS.items()}
    df = spark.createDataFrame(pa.table(columns)).coalesce(1)
    assert [kind for _, kind in df.dtypes] == [kind for _, kind in OTHERS.values()]
    ids = shard_ids(5)
    several = [*"symgp", "sgm", "gs", "ps"]
    pairs = [[(F.col(key), df.schema[key].dataType) for key in keys] for keys in several]
    rows = df.select(*[F.xxhash64(*keys) for keys in several], *[place(of, ids) for of in pairs]).collect()
    for at, keys in enumerate(several):
        of_keys = [columns[key] for key in keys]
        assert xxhash64(of_keys).tolist() == [row[at] for row in rows], keys
        assert ShardOfKeys(ids)(of_keys, len(rows)).tolist() == [row[len(several) + at] for row in rows], keys


def test_the_shards_are_sparks(spark: SparkSession) -> None:
    ids = shard_ids(7)
    df = spark.range(1000).select(F.when(F.col("id") != 13, F.col("id")).alias("k"))
    expected = [row[0] for row in df.select(place([(F.col("k"), LongType())], ids)).collect()]
    keys = pa.array([None if k == 13 else k for k in range(1000)], pa.int64())
    assert ShardOfKeys(ids)([keys], 1000).tolist() == expected
    assert set(expected) == set(ids)


def test_a_key_stays_where_it_is_when_its_type_becomes_wider(spark: SparkSession) -> None:
    """Whether Spark works it out or the child."""
    types = {"tinyint": pa.int8(), "smallint": pa.int16(), "int": pa.int32(), "bigint": pa.int64()}
    ids = shard_ids(16)
    df = spark.range(-50, 50).select(*[F.col("id").cast(kind).alias(kind) for kind in (*types, "float", "double")])
    rows = df.select(*[place([(F.col(f.name), f.dataType)], ids).alias(f.name) for f in df.schema]).collect()
    of = {kind: [row[kind] for row in rows] for kind in df.columns}
    assert of["float"] == of["double"] and len(set(of["float"])) > 8 and len(set(of["bigint"])) > 8
    for kind, type_ in types.items():
        assert ShardOfKeys(ids)([pa.array(range(-50, 50), type_)], 100).tolist() == of[kind] == of["bigint"]


def test_both_zeros_are_one_key_and_all_that_is_no_number_is_one(spark: SparkSession) -> None:
    odd_nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]
    df = spark.createDataFrame([(0.0,), (-0.0,), (float("nan"),), (odd_nan,)], "k double")
    shard = place([(F.col("k"), DoubleType())], shard_ids(64))
    zero, minus, nan, odd = (row[0] for row in df.select(shard).collect())
    assert zero == minus and nan == odd


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8, 12, 16, 200])
def test_ids_spread_evenly_over_each_number_of_partitions_that_divides_theirs(shards: int) -> None:
    ids = shard_ids(shards)
    assert len(set(ids)) == shards
    for partitions in (n for n in range(1, shards + 1) if shards % n == 0):
        spread = Counter(partition_of(i, partitions) for i in ids)
        assert set(spread.values()) == {shards // partitions} and len(spread) == partitions


def test_partitions_are_those_of_sparks_own_hash(spark: SparkSession) -> None:
    ids = shard_ids(16)
    df = spark.createDataFrame([(i,) for i in ids], "shard int").repartition(16, "shard")
    assert {row[0]: row[1] for row in df.select("shard", F.spark_partition_id()).collect()} == {
        i: partition_of(i, 16) for i in ids
    }


def test_without_a_key_there_is_one_shard() -> None:
    assert np.unique(ShardOfKeys([5, 6])([], 10)).tolist() == [5]
