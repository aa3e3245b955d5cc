"""A 64-bit hash of values or rows, computed over whole columns. Pure.

It splits keys and feeds sketches. It is not Spark's hash (that is :mod:`aion.base.hashing`), and takes any type.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Hashes = npt.NDArray[np.uint64]


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
