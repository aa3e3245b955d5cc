"""Spark's ``xxhash64`` for keys of fixed width, computed over whole columns. Pure.

A row's shard follows from this hash. If the child computes it, the shard need not be sent from the JVM to Python with
every event: that column alone costs as much as the partials do (``aion experiment ingest``). Columns are combined as in
Spark: the hash of one column is the seed for the next, and a null leaves the hash unchanged.

Source: ``org.apache.spark.sql.catalyst.expressions.XXH64`` (the public XXH64 algorithm on 4 and 8 bytes).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_SEED = np.uint64(42)
_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)

Hashes = npt.NDArray[np.uint64]


def hashed_as(type_: pa.DataType) -> pa.DataType:
    """The type that keys are cast to before they are hashed. So a key column may get a wider type later."""
    t = pa.types
    if t.is_integer(type_):
        return pa.int64()
    return pa.float64() if t.is_floating(type_) else type_


def can_hash(type_: pa.DataType) -> bool:
    """Whether keys of this type are hashed here. Spark hashes the others."""
    t = pa.types
    return bool(
        t.is_signed_integer(type_)
        or t.is_boolean(type_)
        or t.is_date32(type_)
        or (t.is_timestamp(type_) and type_.unit == "us")
    )


def xxhash64(columns: Sequence[pa.Array]) -> npt.NDArray[np.int64]:
    """The hash of each row over all columns.

    There must be at least one column and one row, and :func:`can_hash` must accept the type of each column.
    """
    hashes: Hashes = np.full(len(columns[0]), _SEED)
    with np.errstate(over="ignore"):
        for column in columns:
            hashed = _hash(column, hashes)
            if column.null_count:
                valid = column.is_valid().to_numpy(zero_copy_only=False)
                hashed = np.where(valid, hashed, hashes)
            hashes = hashed
    return hashes.view(np.int64)


def _hash(column: pa.Array, seeds: Hashes) -> Hashes:
    if column.type.bit_width == 64:
        values = _integers(column, pa.int64()).view(np.uint64)
        mixed = seeds + _P5 + np.uint64(8)
        mixed ^= _rotated(values * _P2, 31) * _P1
        return _finished(_rotated(mixed, 27) * _P1 + _P4)
    # Narrower integers, booleans and dates are hashed as 32-bit integers without their sign.
    values = _integers(column, pa.int32()).view(np.uint32).astype(np.uint64)
    mixed = seeds + _P5 + np.uint64(4)
    mixed ^= values * _P1
    return _finished(_rotated(mixed, 23) * _P2 + _P3)


def _integers(column: pa.Array, type_: pa.DataType) -> npt.NDArray[np.int64]:
    plain = column.cast(type_)
    values: npt.NDArray[np.int64] = (plain.fill_null(0) if plain.null_count else plain).to_numpy(zero_copy_only=False)
    return values


def _rotated(values: Hashes, bits: int) -> Hashes:
    return (values << np.uint64(bits)) | (values >> np.uint64(64 - bits))


def _finished(values: Hashes) -> Hashes:
    values ^= values >> np.uint64(33)
    values *= _P2
    values ^= values >> np.uint64(29)
    values *= _P3
    values ^= values >> np.uint64(32)
    return values


class ShardOfKeys:
    """The shard id of each row, from its key columns: ``ids[pmod(xxhash64(keys), len(ids))]``.

    Keys are cast as :func:`hashed_as` says. Without a key, or with one shard, every row gets the first id.
    """

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = np.array(ids, np.int32)

    def __call__(self, columns: Sequence[pa.Array], rows: int) -> npt.NDArray[np.int32]:
        if not columns or len(self._ids) == 1:
            return np.full(rows, self._ids[0])
        return self._ids[xxhash64([column.cast(hashed_as(column.type)) for column in columns]) % len(self._ids)]

    @staticmethod
    def covers(types: Sequence[pa.DataType]) -> bool:
        """Whether the shard of keys of these types can be computed here. Otherwise Spark computes it."""
        return all(can_hash(type_) for type_ in types)
