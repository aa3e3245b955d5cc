"""Converts result rows to pandas frames for pyspark without losing values."""

from __future__ import annotations

import math

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc


def to_frame(batch: pa.RecordBatch) -> pd.DataFrame:
    """Converts a batch to pandas with Arrow's types, so that integers with nulls stay integers and times stay exact.

    pyspark wants nested values as Python objects. In arrays of numbers, pandas would turn integers into doubles if one
    is null, and pyspark would turn NaN into null. So such arrays are converted here.
    """
    frame: pd.DataFrame = batch.to_pandas(types_mapper=_pandas_type)
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_list(column.type) and _is_at_risk(column.flatten()):
            frame[name] = pd.Series(_lists(column), index=frame.index, dtype=object)
    return frame


def _pandas_type(type_: pa.DataType) -> pd.ArrowDtype | None:
    return None if pa.types.is_nested(type_) else pd.ArrowDtype(type_)


def _is_at_risk(values: pa.Array) -> bool:
    if pa.types.is_floating(values.type):
        return bool(pc.any(pc.is_nan(values)).as_py())
    return bool(pa.types.is_integer(values.type) and values.null_count)


def _lists(column: pa.ListArray) -> list[list[object] | None]:
    """The column as Python lists. NaN becomes an Arrow scalar: Arrow would take a Python NaN for a null."""
    lists: list[list[object] | None] = column.to_pylist()
    if not pa.types.is_floating(column.type.value_type):
        return lists
    nan = pa.scalar(math.nan, column.type.value_type)
    return [
        None if values is None else [nan if isinstance(v, float) and math.isnan(v) else v for v in values]
        for values in lists
    ]
