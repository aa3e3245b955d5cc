"""Which rows are the same: 128 bits for the values of some columns, computed over whole columns. Pure.

The type, the null flag and the value of each column decide, so (5, null) and (null, 5) are different rows. Equality is
Spark's: 0.0 and -0.0 are equal, all NaNs are equal, a null equals a null, integers of all widths are numbers, and so
are decimals of all scales. A hash that places rows (:mod:`aion.base.hashing`) ignores nulls and has no key, so it never
says which rows are the same; its type differs, too.

The values are hashed with SipHash with 128 bits (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012, and
its reference implementation), with a secret key. So a sender who chooses values cannot make two of them collide. It has
one round for a word and three at the end, as the hashes of Python's and Rust's own tables have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from state_backends.thresholds import threshold

Identities = NewType("Identities", npt.NDArray[np.int64])
"""A row of two numbers for each row of the columns. Equal rows have equal numbers, and only these have."""
SECRET_BYTES = 16
_ROUNDS, _LAST_ROUNDS = 1, 3
_ROWS_AT_ONCE = threshold(8192, 2)  # the numbers of so many rows stay in a processor's cache
_BYTES_AT_ONCE = threshold(128 << 10, 8)
_CANONICAL_DECIMAL = pa.decimal256(76, 38)  # holds each decimal of 128 bits, whatever its scale

Words = npt.NDArray[np.uint64]


def can_identify(type_: pa.DataType) -> bool:
    """Returns whether values of this type can say which rows are the same."""
    return family(type_) is not None


def identify(columns: Sequence[pa.Array], secret: bytes) -> Identities:
    """Returns the identity of each row over all columns.

    ``secret``: the key of the hash, of ``SECRET_BYTES`` bytes. There must be at least one column, and
    :func:`can_identify` must accept the type of each.
    """
    rows = len(columns[0])
    if not rows:
        return Identities(np.empty((0, 2), np.int64))
    families = [family(column.type) for column in columns]
    # The types are the same for all rows, so they are hashed once, into the key.
    of_types = _siphash(_words_of("\n".join(map(str, families)).encode()), secret)
    flags = np.zeros((-(-len(columns) // 64), rows), np.uint64)
    words: list[Words] = [*flags]
    for number, column in enumerate(columns):
        if column.null_count:
            nulls = column.is_null().to_numpy(zero_copy_only=False).astype(np.uint64)
            words[number // 64] = words[number // 64] | (nulls << np.uint64(number % 64))
        words += _values(column, secret)
    return Identities(_siphash(words, of_types.tobytes()))


def family(type_: pa.DataType) -> str | None:
    """Returns the name that types share whose values can be equal, or None if it is not known."""
    t = pa.types
    if t.is_signed_integer(type_):
        return "integer"
    if t.is_floating(type_):
        return "float"
    if t.is_decimal128(type_):
        return "decimal"
    if t.is_string(type_) or t.is_large_string(type_):
        return "text"
    if t.is_binary(type_) or t.is_large_binary(type_) or t.is_fixed_size_binary(type_):
        return "bytes"
    if t.is_null(type_) or t.is_boolean(type_) or t.is_unsigned_integer(type_):
        return str(type_)
    return str(type_) if t.is_temporal(type_) and type_.bit_width in (32, 64) else None


def _values(column: pa.Array, secret: bytes) -> list[Words]:
    """Returns words that two values share only if they are equal. They are 0 for a null."""
    t, type_ = pa.types, column.type
    rows = len(column)
    if t.is_null(type_):
        return []
    if family(type_) in ("text", "bytes"):
        return _digests(column.cast(pa.large_binary()), secret)
    if t.is_decimal(type_):
        wide = column.cast(_CANONICAL_DECIMAL)
        found = np.frombuffer(wide.buffers()[1], np.uint64).reshape(-1, 4)[wide.offset : wide.offset + rows].copy()
        if column.null_count:
            found[column.is_null().to_numpy(zero_copy_only=False)] = 0
        return list(np.ascontiguousarray(found.T))
    if t.is_floating(type_):
        # The sum makes 0.0 of -0.0.
        numbers = column.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False) + 0.0
        numbers[np.isnan(numbers)] = np.nan
        return [numbers.view(np.uint64)]
    if t.is_temporal(type_):
        column = column.view(pa.int32() if type_.bit_width == 32 else pa.int64())
    if t.is_unsigned_integer(column.type):
        return [column.cast(pa.uint64()).fill_null(0).to_numpy(zero_copy_only=False)]
    integers = column.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    return [integers.view(np.uint64)]


def _digests(column: pa.LargeBinaryArray, secret: bytes) -> list[Words]:
    """Returns the two words of a hash of each value. Values of the same length are hashed together."""
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
    content = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    lengths = np.diff(ends)
    found = np.empty((len(column), 2), np.int64)
    order = np.argsort(lengths, kind="stable")
    distinct, firsts = np.unique(lengths[order], return_index=True)
    for length, of_length in zip(distinct.tolist(), np.split(order, firsts[1:]), strict=True):
        for at in range(0, len(of_length), step := max(_BYTES_AT_ONCE // max(length, 1), 1)):
            some = of_length[at : at + step]
            padded = np.zeros((len(some), length // 8 * 8 + 8), np.uint8)
            padded[:, :length] = content[ends[some, None] + np.arange(length)]
            padded[:, -1] = length % 256
            found[some] = _hashed(np.ascontiguousarray(padded.view(np.uint64).T), secret)
    if column.null_count:
        found[column.is_null().to_numpy(zero_copy_only=False)] = 0
    return list(np.ascontiguousarray(found.view(np.uint64).T))


def _words_of(content: bytes) -> list[Words]:
    padded = content + b"\0" * (-len(content) % 8)
    return list(np.frombuffer(padded, np.uint64).reshape(-1, 1))


def _siphash(words: Sequence[Words], secret: bytes) -> npt.NDArray[np.int64]:
    """Returns the hash of rows of words: an array with two numbers for each row."""
    last = np.full(len(words[0]), (len(words) * 8 % 256) << 56, np.uint64)
    return _hashed([*words, last], secret)


def _hashed(words: Sequence[Words] | Words, secret: bytes) -> npt.NDArray[np.int64]:
    """The same for words that end with the length, as the algorithm pads them."""
    key = np.frombuffer(secret, np.uint64)
    rows = len(words[0])
    found = np.empty((rows, 2), np.uint64)
    for at in range(0, rows, _ROWS_AT_ONCE):
        some = slice(at, at + _ROWS_AT_ONCE)
        found[some] = _sip_rows([word[some] for word in words], key)
    return found.view(np.int64)


def _sip_rows(words: Sequence[Words], key: Words) -> Words:
    rows = len(words[0])
    begin = (0x736F6D6570736575, 0x646F72616E646F6D ^ 0xEE, 0x6C7967656E657261, 0x7465646279746573)
    v = np.empty((4, rows), np.uint64)
    for i, constant in enumerate(begin):
        v[i] = key[i % 2] ^ np.uint64(constant)
    free = np.empty(rows, np.uint64)
    for word in words:
        v[3] ^= word
        _rounds(v, _ROUNDS, free)
        v[0] ^= word
    found = np.empty((rows, 2), np.uint64)
    for half, (at, mark) in enumerate(((2, 0xEE), (1, 0xDD))):
        v[at] ^= np.uint64(mark)
        _rounds(v, _LAST_ROUNDS, free)
        found[:, half] = v[0] ^ v[1] ^ v[2] ^ v[3]
    return found


def _rounds(v: Words, count: int, free: Words) -> None:
    """The rounds of the algorithm, in place. ``free``: an array to work in."""
    a, b, c, d = v
    for _ in range(count):
        _mix(a, b, 13, free)
        _rotate(a, 32, free)
        _mix(c, d, 16, free)
        _mix(a, d, 21, free)
        _mix(c, b, 17, free)
        _rotate(c, 32, free)


def _mix(to: Words, by: Words, bits: int, free: Words) -> None:
    np.add(to, by, out=to)
    _rotate(by, bits, free)
    np.bitwise_xor(by, to, out=by)


def _rotate(words: Words, bits: int, free: Words) -> None:
    np.right_shift(words, np.uint64(64 - bits), out=free)
    np.left_shift(words, np.uint64(bits), out=words)
    np.bitwise_or(words, free, out=words)
