"""Where a key's shard is: the same whether Spark or the child works it out."""

from __future__ import annotations

import datetime as dt

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from aion.hashing import ShardOfKeys, xxhash64
from aion.spark.shards import shard_column, shard_ids

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


def test_the_shards_are_sparks(spark: SparkSession) -> None:
    ids = shard_ids(7, 3)
    df = spark.range(1000).select(F.when(F.col("id") != 13, F.col("id")).alias("k"))
    expected = [row[0] for row in df.select(shard_column([F.col("k")], ids)).collect()]
    keys = pa.array([None if k == 13 else k for k in range(1000)], pa.int64())
    assert ShardOfKeys(ids)([keys], 1000).tolist() == expected
    assert set(expected) == set(ids)


def test_each_partition_gets_one_shard(spark: SparkSession) -> None:
    ids = shard_ids(4, 4)
    df = spark.createDataFrame([(i,) for i in ids], "shard int").repartition(4, "shard")
    where = df.select(F.spark_partition_id()).collect()
    assert sorted(row[0] for row in where) == [0, 1, 2, 3]


def test_without_a_key_there_is_one_shard() -> None:
    assert np.unique(ShardOfKeys([5, 6])([], 10)).tolist() == [5]
