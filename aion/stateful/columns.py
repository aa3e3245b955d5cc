"""Plain values (:mod:`aion.stateful.encoding`) from columns of Arrow. Pure."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pyarrow as pa

_INTEGERS = {"timestamp": pa.int64(), "duration": pa.int64(), "time64": pa.int64(), "date32": pa.int32()}


def plain_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Returns the plain form of each value. Times keep the unit of the column, which is Spark's own."""
    if isinstance(column, pa.ChunkedArray):
        return [value for chunk in column.chunks for value in plain_values(chunk)]
    values = _values(column)
    if column.null_count and pa.types.is_nested(column.type):
        return [v if valid else None for v, valid in zip(values, column.is_valid().to_pylist(), strict=True)]
    return values


def _values(array: pa.Array) -> list[Any]:
    kind = array.type
    if pa.types.is_struct(kind):
        fields = [plain_values(field) for field in array.flatten()]
        return [list(row) for row in zip(*fields, strict=True)] if fields else [[] for _ in range(len(array))]
    if pa.types.is_map(kind):
        keys, items = plain_values(array.keys), plain_values(array.items)
        pairs = [list(pair) for pair in zip(keys, items, strict=True)]
        return [pairs[begin:end] for begin, end in pairwise(array.offsets.to_pylist())]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        elements = plain_values(array.values)
        return [elements[begin:end] for begin, end in pairwise(array.offsets.to_pylist())]
    if pa.types.is_decimal(kind):
        return [None if value is None else str(value) for value in array.to_pylist()]
    integer = _INTEGERS.get(str(kind).split("[")[0])
    plain: list[Any] = (array if integer is None else array.cast(integer)).to_pylist()
    return plain
