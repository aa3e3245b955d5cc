"""Arrow columns as numpy arrays and back. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from aion.errors import IntegerOverflow

Ints: TypeAlias = npt.NDArray[np.int64]
Doubles: TypeAlias = npt.NDArray[np.float64]
Mask: TypeAlias = npt.NDArray[np.bool_]


def combined(column: Any) -> pa.Array:
    """Returns a column as one array, without chunks."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)  # combine_chunks() copies it
    column = column.combine_chunks()
    return pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column


def as_batch(table: pa.Table) -> pa.RecordBatch:
    """Returns all rows of a table in one batch, also if there are none."""
    return pa.RecordBatch.from_arrays([combined(column) for column in table.columns], schema=table.schema)


def to_doubles(values: pa.Array) -> Doubles:
    """Returns numbers without nulls as doubles, rounded if necessary."""
    if not pa.types.is_float64(values.type):
        values = values.cast(pa.float64(), safe=False)
    found: Doubles = values.to_numpy(zero_copy_only=False)
    return found


def to_int64(values: pa.Array) -> Ints:
    """Integers without nulls as int64. Raises IntegerOverflow for an unsigned integer of more than 63 bits."""
    try:
        found: Ints = values.cast(pa.int64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as error:
        raise IntegerOverflow(f"{error}; cast the column to double") from None
    return found


def as_integers(values: pa.Array) -> Ints | None:
    """Returns values without nulls as integers with the same order; None if the type is not stored as an integer."""
    t, type_ = pa.types, values.type
    if t.is_boolean(type_):
        values = values.cast(pa.int8())
    elif t.is_temporal(type_) and not t.is_interval(type_):
        values = values.view(pa.int32() if type_.bit_width == 32 else pa.int64())
    elif not t.is_integer(type_) or t.is_uint64(type_):
        return None
    found: Ints = values.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    return found


def from_integers(values: pa.Array, type_: pa.DataType) -> pa.Array:
    """Returns the inverse of :func:`as_integers`; ``values`` may have nulls."""
    if pa.types.is_temporal(type_):
        return (values.cast(pa.int32()) if type_.bit_width == 32 else values).view(type_)
    return values.cast(type_)


def orderable(values: pa.Array) -> Ints:
    """Returns values without nulls as integers with the same order. Integers are equal exactly if the values are."""
    if pa.types.is_floating(values.type):
        return ordered_doubles(to_doubles(values))
    integers = as_integers(values)
    if integers is not None:
        return integers
    if pa.types.is_struct(values.type):
        return _ordered_structs(values)
    ranks: Ints = pc.rank(values, tiebreaker="dense").to_numpy(zero_copy_only=False).astype(np.int64)
    return ranks


def _ordered_structs(values: pa.Array) -> Ints:
    """Structs as Spark orders them: by their first field, then by the next. A field that is null comes first."""
    columns = []
    for field in values.flatten():
        valid = field.is_valid().to_numpy(zero_copy_only=False)
        codes = np.zeros(len(field), np.int64)
        codes[valid] = orderable(field.drop_null())
        columns += [valid.astype(np.int64), codes]
    return np.unique(np.column_stack(columns), axis=0, return_inverse=True)[1].reshape(-1)


def ordered_doubles(values: Doubles) -> Ints:
    """Doubles as integers with the same order. NaN is last, and -0.0 equals 0.0."""
    bits = canonical(values).view(np.int64)
    return bits ^ ((bits >> 63) & np.int64(2**63 - 1))


def canonical(values: Doubles) -> Doubles:
    """Doubles as Spark compares them: -0.0 becomes 0.0, and all NaNs become the same."""
    values = values + 0.0
    nan = np.isnan(values)
    return np.where(nan, np.nan, values) if nan.any() else values


def one_zero(column: pa.Array) -> pa.Array:
    """Returns a column in which equal floats have equal bits: see :func:`canonical`. Other types are unchanged."""
    if not pa.types.is_floating(column.type):
        return column
    is_null = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    found = canonical(to_doubles(column if is_null is None else column.fill_null(0)))
    return pa.array(found, mask=is_null, from_pandas=False).cast(column.type)


def with_one_zero(batch: pa.RecordBatch, names: Iterable[str]) -> pa.RecordBatch:
    """Returns a batch in which these columns are as :func:`one_zero` makes them, because Spark groups by them."""
    for name in names:
        if pa.types.is_floating(batch.schema.field(name).type):
            batch = batch.set_column(batch.schema.get_field_index(name), name, one_zero(batch.column(name)))
    return batch


def spread(values: npt.NDArray[Any], valid: Mask | None) -> pa.Array:
    """Returns an Arrow array that is null where ``valid`` is False. NaN stays NaN."""
    if valid is None:
        return pa.array(values, from_pandas=False)
    return pa.array(values, mask=~valid, from_pandas=False)
