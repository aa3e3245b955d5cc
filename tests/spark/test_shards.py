"""Where a key's shard is: the same whether Spark or the child works it out."""

from __future__ import annotations

import datetime as dt
import struct
from collections import Counter
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DoubleType, LongType

from aion.core.ingest.hashing import ShardOfKeys, xxhash64
from aion.spark.shards import partition_of, shard_column, shard_ids

ROWS = [
    (0, 0, 0, True, dt.date(1970, 1, 1), dt.datetime(1970, 1, 1), 1),
    (-1, -1, -1, False, dt.date(1969, 12, 31), dt.datetime(1960, 5, 5, 1, 2, 3, 4), 2),
    (2**63 - 1, 2**31 - 1, 127, None, dt.date(9999, 12, 31), None, 3),
    (-(2**63), -(2**31), -128, True, None, dt.datetime(2024, 2, 29, 23, 59, 59, 999999), 4),
    (None, None, None, None, None, None, 5),
]
DDL = "l bigint, i int, b tinyint, o boolean, d date, t timestamp, n smallint"
TYPES = [pa.int64(), pa.int32(), pa.int8(), pa.bool_(), pa.date32(), pa.timestamp("us", "UTC"), pa.int16()]


@pytest.mark.parametrize("keys", [[k] for k in "libodtn"] + [["l", "i"], ["d", "t", "o"], ["n", "b", "l"]])
def test_the_hash_is_sparks(spark: SparkSession, keys: list[str]) -> None:
    df = spark.createDataFrame(ROWS, DDL)
    expected = [row[0] for row in df.select(F.xxhash64(*keys)).collect()]
    names = [part.split()[0] for part in DDL.split(", ")]
    columns = []
    for key in keys:
        at = names.index(key)
        columns.append(pa.array([row[at] for row in ROWS], TYPES[at]))
    assert xxhash64(columns).tolist() == expected


TEXTS = [None, "", "a", "abcd", "Straße", "12345678", "x" * 31, "y" * 32, "z" * 33, "w" * 63 + "é", "v" * 200]
BIG = [None, 0, 1, -1, 127, 128, -128, -129, 10**20, -(10**20), 10**37]
OTHERS = {
    "s": (pa.array(TEXTS, pa.string()), "string"),
    "y": (pa.array(TEXTS, pa.string()).cast(pa.binary()), "binary"),
    "m": (pa.array([None if n is None else Decimal(n) for n in BIG], pa.decimal128(38)), "decimal(38,0)"),
    "p": (pa.array(map(Decimal, range(-5, 6)), pa.decimal128(18)), "decimal(18,0)"),
    "g": (pa.array([None, 0.0, -0.0, 1.5, -2.25, float("nan"), 1e300, 3.0, 4.0, 5.0, 6.0]), "double"),
}


@pytest.mark.parametrize("keys", [*"symgp", "sgm", "gs", "ps"])
def test_the_hash_of_texts_decimals_and_doubles_is_sparks(spark: SparkSession, keys: str) -> None:
    # In a slice the first value is not where the column's memory begins.
    columns = {key: pa.concat_arrays([OTHERS[key][0].slice(3, 2), OTHERS[key][0]]).slice(2) for key in keys}
    df = spark.createDataFrame(pa.table(columns)).coalesce(1)
    assert [kind for _, kind in df.dtypes] == [OTHERS[key][1] for key in keys]
    expected = [row[0] for row in df.select(F.xxhash64(*keys)).collect()]
    assert xxhash64(list(columns.values())).tolist() == expected
    ids = shard_ids(5)
    pairs = [(F.col(key), df.schema[key].dataType) for key in keys]
    shards = [row[0] for row in df.select(shard_column(pairs, ids)).collect()]
    assert ShardOfKeys(ids)(list(columns.values()), len(expected)).tolist() == shards


def test_the_shards_are_sparks(spark: SparkSession) -> None:
    ids = shard_ids(7)
    df = spark.range(1000).select(F.when(F.col("id") != 13, F.col("id")).alias("k"))
    expected = [row[0] for row in df.select(shard_column([(F.col("k"), LongType())], ids)).collect()]
    keys = pa.array([None if k == 13 else k for k in range(1000)], pa.int64())
    assert ShardOfKeys(ids)([keys], 1000).tolist() == expected
    assert set(expected) == set(ids)


@pytest.mark.parametrize("narrow", ["tinyint", "smallint", "int", "float"])
def test_a_key_stays_where_it_is_when_its_type_becomes_wider(spark: SparkSession, narrow: str) -> None:
    """Whether Spark works it out or the child."""
    wide = "double" if narrow == "float" else "bigint"
    ids = shard_ids(16)
    df = spark.range(-50, 50).select(F.col("id").cast(narrow).alias("n"), F.col("id").cast(wide).alias("w"))
    of = [shard_column([(F.col(name), df.schema[name].dataType)], ids).alias(name) for name in "nw"]
    rows = df.select(*of).collect()
    assert [row.n for row in rows] == [row.w for row in rows]
    assert len({row.n for row in rows}) > 8
    if narrow != "float":
        keys = pa.array(range(-50, 50), {"tinyint": pa.int8(), "smallint": pa.int16(), "int": pa.int32()}[narrow])
        assert ShardOfKeys(ids)([keys], 100).tolist() == [row.w for row in rows]


def test_both_zeros_are_one_key_and_all_that_is_no_number_is_one(spark: SparkSession) -> None:
    odd_nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]
    df = spark.createDataFrame([(0.0,), (-0.0,), (float("nan"),), (odd_nan,)], "k double")
    shard = shard_column([(F.col("k"), DoubleType())], shard_ids(64))
    zero, minus, nan, odd = (row[0] for row in df.select(shard).collect())
    assert zero == minus and nan == odd


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8, 12, 16, 200])
def test_ids_spread_evenly_over_each_number_of_partitions_that_divides_theirs(spark: SparkSession, shards: int) -> None:
    ids = shard_ids(shards)
    assert len(set(ids)) == shards
    for partitions in (n for n in range(1, shards + 1) if shards % n == 0):
        spread = Counter(partition_of(i, partitions) for i in ids)
        assert set(spread.values()) == {shards // partitions} and len(spread) == partitions
    if shards <= 16:
        df = spark.createDataFrame([(i,) for i in ids], "shard int").repartition(shards, "shard")
        where = df.select(F.spark_partition_id()).collect()
        assert sorted(row[0] for row in where) == [*range(shards)], "as Spark's own hash has it"


def test_without_a_key_there_is_one_shard() -> None:
    assert np.unique(ShardOfKeys([5, 6])([], 10)).tolist() == [5]
