"""The body of a block as text: one JSON object per line, the paper's baseline codec. Pure.

Each column becomes a list of plain values, and orjson writes a line for each row. That is as far as the format can be
vectorised. It is slower than Arrow by design. No value changes. Values are written like this:

    integers, booleans, null        as they are; all 64 bits, which not every other reader of JSON keeps
    floats                          shortest digits that read back; "Infinity", "-Infinity", "NaN", and
                                    "NaN:<hexadecimal bits>" for a NaN that is not the usual one
    decimals                        their digits, as a string
    dates, times, durations         the integer that Arrow stores, in the column's own unit
    strings                         as they are; {"base64": ...} if the bytes are not valid UTF-8
    binary                          base64
    structs                         an object; if several fields have the same name, the later ones get "#<position>"
    lists; maps                     an array; an array of [key, value]
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from decimal import Decimal
from itertools import islice
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from aion.errors import SchemaError
from state_backends.thresholds import threshold

_LINES_AT_ONCE = threshold(256, 2)
_FLOATS: dict[int, tuple[Any, Any, int]] = {
    # bits: the float, the unsigned integer of its bits, and the usual NaN as such an integer
    16: (np.float16, np.uint16, 0x7E00),
    32: (np.float32, np.uint32, 0x7FC00000),
    64: (np.float64, np.uint64, 0x7FF8000000000000),
}


def write(batch: pa.RecordBatch) -> bytes:
    """The rows, a line each. Raises SchemaError for a type that JSON cannot carry."""
    rows = _rows(list(batch.schema), batch.columns) if batch.columns else ({} for _ in range(batch.num_rows))
    lines = (orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE) for row in rows)
    # Join some lines at a time. orjson allocates a kilobyte for a line and then gives most of it back. If all lines
    # stayed alive, the holes between them would make this ten times slower.
    return b"".join(iter(lambda: b"".join(islice(lines, _LINES_AT_ONCE)), b""))


def read(body: bytes, schema: pa.Schema) -> pa.RecordBatch:
    """Reads what :func:`write` wrote. Raises ValueError for anything that is not JSON of this schema."""
    # A newline inside a value is always escaped, so the lines can be read as one array.
    rows = orjson.loads(b"[%b]" % body.removesuffix(b"\n").replace(b"\n", b","))
    if None in rows:
        raise ValueError("a row is null")
    try:
        columns = _columns(rows, list(schema))
        if not columns:
            return pa.RecordBatch.from_struct_array(pa.array(rows, pa.struct([])))
        return pa.RecordBatch.from_arrays(columns, schema=schema)
    except (TypeError, KeyError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _labels(fields: Sequence[pa.Field]) -> list[str]:
    """The fields' names. Arrow allows the same name twice; then the later field gets its position as a suffix."""
    labels: list[str] = []
    names = {f.name for f in fields}
    for position, field in enumerate(fields):
        label = field.name
        while label in labels or (label != field.name and label in names):
            label = f"{label}#{position}"
        labels.append(label)
    return labels


# -- Arrow to plain values --------------------------------------------------------------------------------


def _to_plain(array: pa.Array) -> list[Any]:
    """The array as a list of values that orjson can write. Raises SchemaError for a type that JSON cannot carry."""
    type_ = array.type
    if pa.types.is_struct(type_):
        return _struct_to_plain(array)
    if pa.types.is_map(type_):
        pairs = zip(_to_plain(_stretch(array, array.keys)), _to_plain(_stretch(array, array.items)), strict=True)
        return _split(array, pairs)
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return _split(array, iter(_to_plain(_stretch(array, array.values))))
    if pa.types.is_fixed_size_list(type_):
        items = iter(_to_plain(array.flatten()))  # flatten() leaves out the items of null lists
        return [list(islice(items, type_.list_size)) if there else None for there in _valid(array)]
    if pa.types.is_floating(type_):
        return _floats_to_plain(array)
    if pa.types.is_decimal(type_):
        return [None if value is None else str(value) for value in array.to_pylist()]
    if (
        pa.types.is_date(type_)
        or pa.types.is_time(type_)
        or pa.types.is_timestamp(type_)
        or pa.types.is_duration(type_)
    ):
        return _listed(array.view(_integer(type_)))
    if _is_string(type_):
        try:
            return _listed(array)
        except UnicodeDecodeError:
            return [_text(value) for value in array.cast(pa.large_binary()).to_pylist()]
    if _is_binary(type_):
        return [None if value is None else _base64(value) for value in array.to_pylist()]
    if pa.types.is_integer(type_) or pa.types.is_boolean(type_) or pa.types.is_null(type_):
        return _listed(array)
    raise SchemaError(f"codec json: a column of type {type_} cannot be written as JSON; use codec arrow, or cast it")


def _rows(fields: list[pa.Field], columns: list[pa.Array]) -> Iterator[dict[str, Any]]:
    """Yields one object for each row. Many at once would keep Python's garbage collector busy."""
    labels = _labels(fields)
    for row in zip(*map(_to_plain, columns), strict=True):
        yield dict(zip(labels, row, strict=True))


def _struct_to_plain(array: pa.Array) -> list[Any]:
    valid = _valid(array)
    rows = _rows(list(array.type), array.flatten()) if len(array.type) else ({} for _ in valid)
    return [row if there else None for row, there in zip(rows, valid, strict=True)]


def _stretch(array: pa.Array, values: pa.Array) -> pa.Array:
    """The list values that the array refers to. If it is a slice, these are not all of them."""
    if not len(array):
        return values.slice(0, 0)
    offsets = array.offsets
    first = offsets[0].as_py()
    return values.slice(first, offsets[-1].as_py() - first)


def _split(array: pa.Array, items: Iterator[Any]) -> list[Any]:
    """The items of each list, None for a null list. Items under a null list are left out."""
    if not len(array):
        return []
    lengths = np.diff(array.offsets.to_numpy()).tolist()
    lists = (list(islice(items, length)) for length in lengths)
    return [items if there else None for items, there in zip(lists, _valid(array), strict=True)]


def _floats_to_plain(array: pa.Array) -> list[Any]:
    values = _listed(array)
    odd = pc.invert(pc.is_finite(array)).fill_null(False)
    if pc.any(odd).as_py():
        float_, uint, usual = _FLOATS[array.type.bit_width]
        bits = np.frombuffer(array.buffers()[1], uint)[array.offset : array.offset + len(array)]
        numbers = bits.view(float_)
        for i in np.flatnonzero(odd.to_numpy(zero_copy_only=False)).tolist():
            if np.isnan(numbers[i]):
                values[i] = "NaN" if bits[i] == usual else f"NaN:{int(bits[i]):x}"
            else:
                values[i] = "Infinity" if numbers[i] > 0 else "-Infinity"
    return values


def _listed(array: pa.Array) -> list[Any]:
    values: list[Any] = array.to_pylist()
    return values


def _text(value: bytes | None) -> Any:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return {"base64": _base64(value)}


def _base64(value: bytes | None) -> str:
    return base64.b64encode(value or b"").decode()


def _valid(array: pa.Array) -> list[bool]:
    return _listed(array.is_valid())


# -- plain values to Arrow --------------------------------------------------------------------------------


def _to_arrow(values: list[Any], type_: pa.DataType) -> pa.Array:
    """An array of values that orjson read. Raises ValueError, TypeError or the like for values that do not fit."""
    if pa.types.is_struct(type_):
        return _struct_to_arrow(values, type_)
    if pa.types.is_map(type_):
        pairs = [pair for row in values if row is not None for pair in row]
        keys = _to_arrow([key for key, _ in pairs], type_.key_type)
        items = _to_arrow([item for _, item in pairs], type_.item_type)
        return pa.MapArray.from_arrays(_offsets(values, pa.int32()), keys, items, type=type_)
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        items = _to_arrow([item for row in values if row is not None for item in row], type_.value_type)
        if pa.types.is_list(type_):
            return pa.ListArray.from_arrays(_offsets(values, pa.int32()), items, type=type_)
        return pa.LargeListArray.from_arrays(_offsets(values, pa.int64()), items, type=type_)
    if pa.types.is_fixed_size_list(type_):
        return _fixed_size_list(values, type_)
    if pa.types.is_floating(type_):
        return _floats_to_arrow(values, type_)
    if pa.types.is_decimal(type_):
        return pa.array([None if value is None else Decimal(value) for value in values], type_)
    if (
        pa.types.is_date(type_)
        or pa.types.is_time(type_)
        or pa.types.is_timestamp(type_)
        or pa.types.is_duration(type_)
    ):
        return pa.array(values, _integer(type_)).view(type_)
    if _is_string(type_) and dict in set(map(type, values)):
        texts = [_from_base64(v["base64"]) if isinstance(v, dict) else v and v.encode() for v in values]
        return pa.array(texts, pa.large_binary()).cast(type_, safe=False)
    if _is_binary(type_):
        return pa.array([None if value is None else _from_base64(value) for value in values], type_)
    return pa.array(values, type_)


def _columns(rows: list[Any], fields: list[pa.Field]) -> list[pa.Array]:
    """The columns of a list of objects. An entry may also be null."""
    labels = _labels(fields)
    if {len(row) for row in rows if row is not None} - {len(labels)}:
        raise ValueError(f"an object does not have the {len(labels)} members of the schema")
    return [
        _to_arrow([None if row is None else row[label] for row in rows], field.type)
        for label, field in zip(labels, fields, strict=True)
    ]


def _struct_to_arrow(values: list[Any], type_: pa.StructType) -> pa.Array:
    columns = _columns(values, list(type_))
    if not columns:
        return pa.array(values, type_)
    return pa.StructArray.from_arrays(columns, fields=list(type_), mask=_nulls(values))


def _fixed_size_list(values: list[Any], type_: pa.FixedSizeListType) -> pa.Array:
    size = type_.list_size
    if {len(row) for row in values if row is not None} - {size}:
        raise ValueError(f"a list does not have the {size} items of {type_}")
    empty = [None] * size
    items = _to_arrow([item for row in values for item in (empty if row is None else row)], type_.value_type)
    if not size:
        return pa.array(values, type_)
    return pa.FixedSizeListArray.from_arrays(items, type=type_, mask=_nulls(values))


def _floats_to_arrow(values: list[Any], type_: pa.DataType) -> pa.Array:
    if str not in set(map(type, values)) and type_.bit_width > 16:
        return pa.array(values, type_)
    float_, uint, usual = _FLOATS[type_.bit_width]
    numbers = np.zeros(len(values), float_)
    bits = numbers.view(uint)
    for i, value in enumerate(values):
        if isinstance(value, str) and value.startswith("NaN"):
            bits[i] = int(value[4:], 16) if value[3:] else usual
        elif value is not None:
            numbers[i] = float(value)
    return pa.array(numbers, type_, mask=np.array([value is None for value in values], bool), from_pandas=False)


def _from_base64(value: str) -> bytes:
    return base64.b64decode(value, validate=True)


def _offsets(values: list[Any], type_: pa.DataType) -> pa.Array:
    """The offset where each list begins, null for a null list, and the offset where the last one ends."""
    lengths = [0 if value is None else len(value) for value in values]
    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return pa.array(ends, type_, mask=np.array([*(value is None for value in values), False], bool))


def _nulls(values: list[Any]) -> pa.Array:
    return pa.array([value is None for value in values], pa.bool_())


# -- types ------------------------------------------------------------------------------------------------


def _integer(type_: pa.DataType) -> pa.DataType:
    """The integer that Arrow stores a date, time or duration as."""
    return pa.int32() if type_.bit_width == 32 else pa.int64()


def _is_string(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_string_view(type_))


def _is_binary(type_: pa.DataType) -> bool:
    fixed = pa.types.is_fixed_size_binary(type_)
    return bool(pa.types.is_binary(type_) or pa.types.is_large_binary(type_) or pa.types.is_binary_view(type_) or fixed)
