"""Texts that are not UTF-8. Spark lets them through (a cast of bytes), and nothing that reads texts can. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def settled(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, npt.NDArray[np.bool_] | None]:
    """Returns a batch in which each byte that is no UTF-8 is U+FFFD, and a mask of the rows that had one.

    None: no row had one. It looks at texts anywhere in a column.
    """
    bad: npt.NDArray[np.bool_] | None = None
    for number, column in enumerate(batch.columns):
        if not _has_text(column.type) or _is_utf8(column):
            continue
        rows = list(_bad_rows(column, 0))
        if bad is None:
            bad = np.zeros(batch.num_rows, np.bool_)
        bad[rows] = True
        batch = batch.set_column(number, batch.schema.field(number), _mended(column, rows))
    return batch, bad


def _has_text(type_: pa.DataType) -> bool:
    return bool(_bytes_of(type_) != type_)


def _bytes_of(type_: pa.DataType) -> pa.DataType:
    """Returns a type with bytes in the place of texts."""
    if pa.types.is_string(type_):
        return pa.binary()
    if pa.types.is_large_string(type_):
        return pa.large_binary()
    if pa.types.is_struct(type_):
        return pa.struct([field.with_type(_bytes_of(field.type)) for field in type_])
    if pa.types.is_map(type_):
        return pa.map_(_bytes_of(type_.key_type), type_.item_field.with_type(_bytes_of(type_.item_type)))
    if pa.types.is_list(type_):
        return pa.list_(type_.value_field.with_type(_bytes_of(type_.value_type)))
    return type_


def _is_utf8(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _bad_rows(column: pa.Array, first: int) -> Iterator[int]:
    """Yields the numbers of the rows with such a text: those of halves that have one."""
    if _is_utf8(column.take(pa.array(range(len(column)))) if pa.types.is_nested(column.type) else column):
        return  # a part of a column of lists would be checked with all texts of the column
    if len(column) == 1:
        yield first
        return
    half = len(column) // 2
    yield from _bad_rows(column[:half], first)
    yield from _bad_rows(column[half:], first + half)


def _mended(column: pa.Array, rows: list[int]) -> pa.Array:
    """Returns a column with other values in some rows."""
    parts, begin = [], 0
    for row in rows:
        (value,) = column[row : row + 1].view(_bytes_of(column.type)).to_pylist()
        parts += [column[begin:row], pa.array([_replaced(value, column.type)], column.type)]
        begin = row + 1
    return pa.concat_arrays([*parts, column[begin:]])


def _replaced(value: Any, type_: pa.DataType) -> Any:
    """Returns a value of a type whose texts are bytes, with texts."""
    if value is None:
        return None
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        return value.decode("utf-8", "replace")
    if pa.types.is_struct(type_):
        return {field.name: _replaced(value[field.name], field.type) for field in type_}
    if pa.types.is_map(type_):
        return [(_replaced(key, type_.key_type), _replaced(item, type_.item_type)) for key, item in value]
    if pa.types.is_list(type_):
        return [_replaced(each, type_.value_type) for each in value]
    return value
