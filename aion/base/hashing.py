"""Two 64-bit hashes of rows, computed over whole columns: Spark's for shards, and our own for all else. Pure.

:func:`hash_rows` splits keys and feeds sketches. It is not Spark's hash, and takes any type.

A row's shard follows from Spark's ``xxhash64`` of its key. If the child computes it, the shard need not be sent from
the JVM to Python with every event: that column alone costs as much as the partials do (``aion experiment ingest``).
Columns are combined as in Spark: the hash of one column is the seed for the next, and a null leaves the hash unchanged.

Source: ``org.apache.spark.sql.catalyst.expressions.XXH64`` (the public XXH64 algorithm; on 4 and 8 bytes for numbers).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NewType

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from state_backends.thresholds import threshold

_SEED = np.uint64(42)
_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)

_AT_ONCE_BYTES = threshold(8 << 20, 8)

Hashes = npt.NDArray[np.uint64]
Placements = NewType("Placements", npt.NDArray[np.int64])
"""Hashes that say where rows go. Different rows may share one (see :mod:`aion.base.identity`)."""


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
        or ((t.is_timestamp(type_) or t.is_duration(type_)) and type_.unit == "us")
        or type_ in (pa.float32(), pa.float64())
        or t.is_decimal128(type_)
        or _is_bytes(type_)
    )


def xxhash64(columns: Sequence[pa.Array]) -> Placements:
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
    return Placements(hashes.view(np.int64))


def _hash(column: pa.Array, seeds: Hashes) -> Hashes:
    t = pa.types
    if _is_bytes(column.type):
        return _hash_bytes(_Bytes.of(column), seeds)
    if t.is_decimal(column.type):
        number = _unscaled(column)
        return _hash_bytes(number, seeds) if isinstance(number, _Bytes) else _hash_longs(number, seeds)
    if t.is_floating(column.type):
        return _hash_longs(_double_bits(column), seeds)
    if column.type.bit_width == 64:
        return _hash_longs(_integers(column, pa.int64()), seeds)
    # Narrower integers, booleans and dates are hashed as 32-bit integers without their sign.
    values = _integers(column, pa.int32()).view(np.uint32).astype(np.uint64)
    mixed = seeds + _P5 + np.uint64(4)
    mixed ^= values * _P1
    return _finished(_rotated(mixed, 23) * _P2 + _P3)


def _hash_longs(values: npt.NDArray[np.int64], seeds: Hashes) -> Hashes:
    mixed = seeds + _P5 + np.uint64(8)
    mixed ^= _round(values.view(np.uint64))
    return _finished(_rotated(mixed, 27) * _P1 + _P4)


def _double_bits(column: pa.Array) -> npt.NDArray[np.int64]:
    """As Spark has it, 0.0 and -0.0 are one value, and all NaNs are one."""
    plain = column.cast(pa.float64())
    values = (plain.fill_null(0) if plain.null_count else plain).to_numpy(zero_copy_only=False) + 0.0
    values[np.isnan(values)] = np.nan
    bits: npt.NDArray[np.int64] = values.view(np.int64)
    return bits


def _unscaled(column: pa.Array) -> npt.NDArray[np.int64] | _Bytes:
    """The digits of decimals: as integers if the type has at most 18, else as Java's BigInteger writes them."""
    words = np.frombuffer(column.buffers()[1], np.int64).reshape(-1, 2)[column.offset : column.offset + len(column)]
    if column.type.precision <= 18:
        return np.ascontiguousarray(words[:, 0])
    big = np.ascontiguousarray(words).view(np.uint8).reshape(-1, 16)[:, ::-1]
    # A leading byte that only repeats the sign of the next one is left out.
    sign, below = big[:, :-1], big[:, 1:] >> 7
    idle = np.logical_and.accumulate((sign == 0) & (below == 0) | (sign == 255) & (below == 1), axis=1).sum(axis=1)
    return _Bytes(big.reshape(-1), np.arange(len(big)) * 16 + idle, 16 - idle)


def _is_bytes(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_binary(type_))


class _Bytes(NamedTuple):
    """Values of different lengths: where each begins in ``data``."""

    data: npt.NDArray[np.uint8]
    begins: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    @classmethod
    def of(cls, column: pa.Array) -> _Bytes:
        _, offsets, data = column.buffers()
        ends = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1].astype(np.int64)
        content = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
        return cls(content, ends[:-1], np.diff(ends))


def _hash_bytes(values: _Bytes, seeds: Hashes) -> Hashes:
    """Values of the same length go through the algorithm together."""
    hashes = np.empty(len(seeds), np.uint64)
    order = np.argsort(values.lengths, kind="stable")
    lengths, firsts = np.unique(values.lengths[order], return_index=True)
    for length, rows in zip(lengths.tolist(), np.split(order, firsts[1:]), strict=True):
        for at in range(0, len(rows), step := max(_AT_ONCE_BYTES // max(length, 1), 1)):
            some = rows[at : at + step]
            content = values.data[values.begins[some, None] + np.arange(length)]
            hashes[some] = _hash_equally_long(content, seeds[some])
    return hashes


def _hash_equally_long(content: npt.NDArray[np.uint8], seeds: Hashes) -> Hashes:
    length = content.shape[1]
    words = np.ascontiguousarray(content[:, : length // 8 * 8]).view(np.uint64)
    at = length // 32 * 4
    if at:
        lanes = [seeds + _P1 + _P2, seeds + _P2, seeds.copy(), seeds - _P1]
        for stripe in range(0, at, 4):
            lanes = [_rotated(lane + words[:, stripe + i] * _P2, 31) * _P1 for i, lane in enumerate(lanes)]
        hashes = np.zeros(len(seeds), np.uint64)
        for lane, bits in zip(lanes, (1, 7, 12, 18), strict=True):
            hashes = hashes + _rotated(lane, bits)
        for lane in lanes:
            hashes = (hashes ^ _round(lane)) * _P1 + _P4
    else:
        hashes = seeds + _P5
    hashes = hashes + np.uint64(length)
    for word in range(at, words.shape[1]):
        hashes = _rotated(hashes ^ _round(words[:, word]), 27) * _P1 + _P4
    rest = length // 8 * 8
    if length - rest >= 4:
        half = np.ascontiguousarray(content[:, rest : rest + 4]).view(np.uint32)[:, 0].astype(np.uint64)
        hashes = _rotated(hashes ^ half * _P1, 23) * _P2 + _P3
        rest += 4
    for byte in range(rest, length):
        hashes = _rotated(hashes ^ content[:, byte].astype(np.uint64) * _P5, 11) * _P1
    return _finished(hashes)


def _round(words: Hashes) -> Hashes:
    return _rotated(words * _P2, 31) * _P1


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
        if len(columns) == 1 and _is_bytes(columns[0].type):
            # Keys repeat, and to find that out is quicker than to hash each again.
            keys = columns[0].dictionary_encode(null_encoding="encode")
            shards: npt.NDArray[np.int32] = self._of([keys.dictionary])[keys.indices.to_numpy()]
            return shards
        return self._of(columns)

    def _of(self, columns: Sequence[pa.Array]) -> npt.NDArray[np.int32]:
        return self.of_hashes(xxhash64([column.cast(hashed_as(column.type)) for column in columns]))

    def of_hashes(self, hashes: Placements) -> npt.NDArray[np.int32]:
        """The same from the hashes of the keys."""
        return self._ids[hashes % len(self._ids)]

    @staticmethod
    def covers(types: Sequence[pa.DataType]) -> bool:
        """Whether the shard of keys of these types can be computed here. Otherwise Spark computes it."""
        return all(can_hash(type_) for type_ in types)


def hash_rows(columns: Sequence[pa.Array], seed: int) -> Hashes:
    """Returns a 64-bit hash of each row. Equal rows have equal hashes; hashes of different seeds are independent."""
    hashes = mixed(np.full(len(columns[0]), seed + 1, np.uint64))
    for column in columns:
        hashes = mixed(hashes ^ _digests(column))
    return hashes


def as_narrower(column: pa.Array, type_: pa.DataType) -> pa.Array:
    """Returns a column that is hashed as one of a narrower number type, for each value that this type can hold."""
    if column.type == type_:
        return column
    narrow = column.cast(type_, safe=False)
    fits = pc.fill_null(pc.equal(narrow.cast(column.type), column), True)
    both = [
        pa.array(_digests(c), pa.uint64(), mask=c.is_null().to_numpy(zero_copy_only=False)) for c in (narrow, column)
    ]
    return pc.if_else(fits, *both)


def _digests(column: pa.Array) -> Hashes:
    """64 bits for each value: the value itself where it has at most 64 bits."""
    type_ = column.type
    if pa.types.is_null(type_):
        return np.full(len(column), _NULL)
    if pa.types.is_boolean(type_):
        column = column.cast(pa.uint8())
    elif pa.types.is_nested(type_):
        return _digests_of_nested(column)
    elif not pa.types.is_primitive(type_) and not pa.types.is_decimal(type_):
        encoded = column.cast(pa.large_binary()).dictionary_encode()
        values = np.append(_digests_of_bytes(encoded.dictionary), _NULL)
        return np.asarray(values[encoded.indices.fill_null(len(values) - 1).to_numpy()])
    bits = column.type.bit_width
    words = np.frombuffer(column.buffers()[1], _UINTS[min(bits, 64)]).reshape(-1, max(bits // 64, 1))
    words = words[column.offset : column.offset + len(column)].astype(np.uint64)
    digests: Hashes = words[:, 0]
    for word in words.T[1:]:
        digests = mixed(digests) ^ word
    digests[column.is_null().to_numpy(zero_copy_only=False)] = _NULL  # the bits under a null are arbitrary
    return digests


def _digests_of_bytes(values: pa.LargeBinaryArray) -> Hashes:
    """Returns a hash of each value: the sum of a 64-bit hash of each byte together with its position."""
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    lengths = np.diff(ends)
    octets = np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]].astype(np.uint64)
    places = np.arange(ends[0], ends[-1]) - np.repeat(ends[:-1], lengths)
    sums = np.concatenate(([np.uint64(0)], np.cumsum(mixed((places.astype(np.uint64) << np.uint64(8)) | octets))))
    return mixed(sums[ends[1:] - ends[0]] - sums[ends[:-1] - ends[0]] + lengths.astype(np.uint64))


def _digests_of_nested(column: pa.Array) -> Hashes:
    """Structs are rows of their own. A list is the sum of the hashes of its elements together with their positions."""
    if pa.types.is_struct(column.type):
        fields = column.flatten()
        digests = hash_rows(fields, 0) if fields else np.zeros(len(column), np.uint64)
    else:
        if pa.types.is_map(column.type):
            pairs = pa.StructArray.from_arrays([column.keys, column.items], ["key", "value"])
            offsets = column.offsets
        else:
            plain = column.cast(pa.large_list(column.type.value_type))
            pairs, offsets = plain.values, plain.offsets
        ends = offsets.to_numpy().astype(np.int64)
        lengths = np.diff(ends)
        elements = _digests(pairs.slice(ends[0], ends[-1] - ends[0]))
        places = np.arange(ends[0], ends[-1]) - np.repeat(ends[:-1], lengths)
        words = mixed(elements ^ mixed(places.astype(np.uint64)))
        sums = np.concatenate(([np.uint64(0)], np.cumsum(words, dtype=np.uint64)))
        digests = mixed(sums[ends[1:] - ends[0]] - sums[ends[:-1] - ends[0]] + lengths.astype(np.uint64))
    digests[column.is_null().to_numpy(zero_copy_only=False)] = _NULL
    return digests


def mixed(words: Hashes) -> Hashes:
    """Scatters each word over 64 bits, one to one (the finaliser of splitmix64)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


# An arbitrary number that is unlikely to be a key.
_NULL = np.uint64(0xD1B54A32D192ED03)
_UINTS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
