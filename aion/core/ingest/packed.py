"""How a group of events is one binary value, which Spark's own functions write and the root reads. Pure.

So groups reach the root without a worker of Python before it, in the column that otherwise holds blocks. Numbers are
big endian, because Spark's functions write them so:

    magic "AIOG" | words of nulls u64 ... | fields i64 ... | bytes ...

Bit i of word w says that field ``64 * w + i`` is null. A number is in its field: a double by its bits, a time in
microseconds, a date in days, a decimal of up to 18 digits without its point. The field of a text or of binary is its
number of bytes, which follow after the last field in the same order. Decimals with more digits are texts.
``aion/spark/session/PartialAggregates.java`` writes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aion.base.numbers import Ints

MAGIC = b"AIOG"
_FIELD = 8
_DIGITS = 18
"""A decimal of this many digits fits into a field."""


def can_be_packed(type_: pa.DataType) -> bool:
    """Returns whether a value of this type can be in a row."""
    return not pa.types.is_duration(type_) and not pa.types.is_nested(type_)


def is_packed(row: bytes) -> bool:
    """Returns whether a value that has reached the root is such a row, and not a block or a fragment of one."""
    return row[: len(MAGIC)] == MAGIC


def unpacked(rows: Sequence[bytes], types: Sequence[pa.DataType]) -> pa.RecordBatch:
    """Returns rows as columns of these types. The names of the columns are their numbers."""
    data = np.frombuffer(b"".join(rows), np.uint8)
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    begins = np.cumsum(lengths) - lengths + len(MAGIC)
    words = -(-len(types) // 64)
    fields = data[begins[:, None] + np.arange(_FIELD * (words + len(types)))].view(">i8").astype(np.int64)
    at = begins + fields.shape[1] * _FIELD
    columns = []
    for number, type_ in enumerate(types):
        field = fields[:, words + number]
        nulls = (fields[:, number // 64] >> (number % 64)) & 1 != 0
        if _is_bytes(type_):
            columns.append(_of_bytes(data, at, field, nulls, type_))
            at = at + field
        else:
            columns.append(_of_numbers(field, nulls, type_))
    return pa.RecordBatch.from_arrays(columns, [str(number) for number in range(len(types))])


def _is_bytes(type_: pa.DataType) -> bool:
    t = pa.types
    return bool(t.is_string(type_) or t.is_binary(type_) or (t.is_decimal(type_) and type_.precision > _DIGITS))


def _of_bytes(
    data: npt.NDArray[np.uint8], at: Ints, lengths: Ints, nulls: npt.NDArray[np.bool_], type_: pa.DataType
) -> pa.Array:
    ends = np.cumsum(lengths)
    content = data[np.repeat(at - (ends - lengths), lengths) + np.arange(lengths.sum())]
    offsets = np.concatenate(([0], ends)).astype(np.int32)
    stored = pa.string() if pa.types.is_decimal(type_) else type_
    valid = pa.array(~nulls).buffers()[1] if nulls.any() else None
    found = pa.Array.from_buffers(stored, len(at), [valid, pa.py_buffer(offsets), pa.py_buffer(content)])
    return found if stored == type_ else found.cast(type_)


def _of_numbers(field: Ints, nulls: npt.NDArray[np.bool_], type_: pa.DataType) -> pa.Array:
    t = pa.types
    if t.is_floating(type_):
        return pa.array(np.ascontiguousarray(field).view(np.float64), mask=nulls).cast(type_)
    if t.is_decimal(type_):
        valid = pa.array(~nulls).buffers()[1]
        return pa.Array.from_buffers(type_, len(field), [valid, pa.py_buffer(np.stack([field, field >> 63], axis=1))])
    if t.is_boolean(type_):
        return pa.array(field != 0, mask=nulls)
    numbers = pa.array(field, mask=nulls)
    return (numbers.cast(pa.int32()) if t.is_date(type_) else numbers).cast(type_)
