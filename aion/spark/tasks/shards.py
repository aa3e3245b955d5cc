"""The shard of a row, computed by Spark itself before the child."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, DecimalType, FractionalType, IntegralType, StringType

from aion.spark.session.query_settings import PAST, STORED

_MASK = 0xFFFFFFFF


def shard_ids(shards: int) -> list[int]:
    """Returns the ids of this number of shards. They work with any number of partitions.

    Small integers hash unevenly: of the ids 0 to 3, one went to the first of two partitions and three to the second. So
    suitable ids are searched for: the i-th id is the smallest integer that Spark's hash partitioner sends to partition
    i of ``shards``. A hash that is i modulo ``shards`` is also i modulo each divisor of ``shards``. So the ids spread
    evenly over any number of partitions that divides ``shards``.
    """
    found: dict[int, int] = {}
    for candidate in itertools.count():
        found.setdefault(partition_of(candidate, shards), candidate)
        if len(found) == shards:
            return [found[i] for i in range(shards)]
    raise AssertionError("Murmur3 reaches every partition")


def ids_here(operator: str, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the ids of an operator's shards in a task of the query. ``ids``: as they were when it was planned."""
    context = TaskContext.get()
    stored = None if context is None else context.getLocalProperty(STORED + operator)
    return ids if stored is None else _ids(int(stored))


def past_here(operator: str) -> str | None:
    """Returns what the definition of an operator has been before, as JSON, in a task of the query. It returns None if
    the definition has never been another one.
    """
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(PAST + operator)


@lru_cache(maxsize=16)
def _ids(shards: int) -> tuple[int, ...]:
    return tuple(shard_ids(shards))


def hash_column(keys: Sequence[tuple[Column, DataType]]) -> Column:
    """Returns the hash of a row's key, bigint. Modulo the number of shards, it is an index into their ids."""
    return F.xxhash64(*map(_hashable, keys)) if keys else F.lit(0).cast("bigint")


def shard_column(keys: Sequence[tuple[Column, DataType]], operator: str, ids: tuple[int, ...]) -> Column:
    """Returns the shard id of a row, from the hash of its key. Gives the same ids as aion.base.hashing.

    ``operator``, ``ids``: as for :func:`ids_here`. Only a task knows how many shards the state has, so the hashes go
    through a worker of Python.
    """

    def shard_of(hashes: pa.Array) -> pa.Array:
        here = np.array(ids_here(operator, ids), np.int32)
        return pa.array(here[hashes.to_numpy() % len(here)])

    return F.arrow_udf(shard_of, "int")(hash_column(keys))


def shard_of_group(keys: Sequence[tuple[Column, DataType]], ids: tuple[int, ...]) -> Column:
    """Returns the shard id of a row from its key, where the shards of the state are those of the session.

    Bytes of texts that are no UTF-8 count as U+FFFD, as in the child.
    """
    if len(ids) == 1 or not keys:
        return F.lit(ids[0])
    valid = [(F.make_valid_utf8(key) if isinstance(type_, StringType) else key, type_) for key, type_ in keys]
    return F.array(*map(F.lit, ids))[F.pmod(hash_column(valid), F.lit(len(ids))).cast("int")]


def _hashable(key: tuple[Column, DataType]) -> Column:
    column, type_ = key
    if isinstance(type_, IntegralType):
        return column.cast("bigint")
    # For doubles, Spark hashes 0.0 and -0.0 alike, and all NaNs alike.
    return column.cast("double") if isinstance(type_, FractionalType) and not isinstance(type_, DecimalType) else column


def partition_of(value: int, partitions: int) -> int:
    """Returns the partition to which Spark's hash partitioning sends an int key: Murmur3 with seed 42, modulo
    partitions.
    """
    h = _murmur3_int(value, 42)
    signed = h - (1 << 32) if h & 0x80000000 else h
    return signed % partitions


def _murmur3_int(value: int, seed: int) -> int:
    """Murmur3 x86 32 of a 4-byte integer, like ``org.apache.spark.unsafe.hash.Murmur3_x86_32.hashInt``."""
    k = (value * 0xCC9E2D51) & _MASK
    k = ((k << 15) | (k >> 17)) & _MASK
    k = (k * 0x1B873593) & _MASK
    h = seed ^ k
    h = ((h << 13) | (h >> 19)) & _MASK
    h = (h * 5 + 0xE6546B64) & _MASK
    h ^= 4
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & _MASK
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)
