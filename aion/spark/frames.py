"""Converts result rows to pandas frames for pyspark without losing values."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc


def to_frame(batch: pa.RecordBatch) -> pd.DataFrame:
    """Converts a batch to pandas with Arrow's types, so that integers with nulls stay integers and times stay exact.

    pyspark wants nested values as Python objects, and pandas does not make the right ones. Beside a null, integers
    would become doubles. Times would lose their zone, and pyspark would take them for local times of the session. Maps
    would become lists of pairs. And pyspark would turn NaN into null. So nested values are converted here, except lists
    in which none of this can happen.
    """
    frame: pd.DataFrame = batch.to_pandas(types_mapper=_pandas_type)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_nested(column.type) and not _is_safe(column):
            values = [_object(value, column.type) for value in column.to_pylist()]
            frame[name] = pd.Series(values, index=frame.index, dtype=object)
    return frame


def _pandas_type(type_: pa.DataType) -> pd.ArrowDtype | None:
    return None if pa.types.is_nested(type_) else pd.ArrowDtype(type_)


def _is_safe(column: pa.Array) -> bool:
    """Returns whether pandas and pyspark keep these nested values. True for most lists of plain values."""
    if not pa.types.is_list(column.type):
        return False
    values = column.flatten()
    if pa.types.is_floating(values.type):
        return not pc.any(pc.is_nan(values)).as_py()
    if pa.types.is_integer(values.type):
        return not values.null_count
    return not (pa.types.is_nested(values.type) or pa.types.is_timestamp(values.type))


def _object(value: Any, type_: pa.DataType) -> Any:
    """Returns a value from Arrow's ``to_pylist`` as pyspark wants it. NaN becomes an Arrow scalar: a Python NaN means
    null.
    """
    if value is None:
        return None
    if pa.types.is_floating(type_):
        return pa.scalar(math.nan, type_) if math.isnan(value) else value
    if pa.types.is_map(type_):
        return {_object(key, type_.key_type): _object(item, type_.item_type) for key, item in value}
    if pa.types.is_struct(type_):
        return {field.name: _object(value[field.name], field.type) for field in type_}
    if pa.types.is_nested(type_):
        return [_object(item, type_.value_type) for item in value]
    return value
