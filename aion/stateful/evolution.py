"""Values that were stored by another schema of the same variable.

If Spark's state store has the Avro encoding (``spark.sql.streaming.stateStore.encodingFormat``), fields may be added,
removed, moved, and get another type, as Avro's rules for reading allow. Spark refuses every other change when the query
starts. A value becomes what Spark's Avro reader makes of it. For Avro, dates are ints, timestamps and intervals are
longs, and texts are bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    YearMonthIntervalType,
)

Convert = Callable[[Any], Any]
_INTS = ByteType | ShortType | IntegerType | DateType | YearMonthIntervalType
_LONGS = LongType | TimestampType | TimestampNTZType | DayTimeIntervalType


def converter(old: DataType, new: DataType) -> Convert:
    """Makes a plain value of the type ``new`` from one of the type ``old``. What cannot be converted becomes null."""
    if isinstance(old, StructType) and isinstance(new, StructType):
        at = {name: i for i, name in enumerate(old.names)}
        fields = [
            (at[field.name], converter(old[field.name].dataType, field.dataType)) if field.name in at else None
            for field in new
        ]
        return _of_present(lambda v: [None if found is None else found[1](v[found[0]]) for found in fields])
    if isinstance(old, ArrayType) and isinstance(new, ArrayType):
        element = converter(old.elementType, new.elementType)
        return _of_present(lambda v: [element(e) for e in v])
    if isinstance(old, MapType) and isinstance(new, MapType):
        key, value = converter(old.keyType, new.keyType), converter(old.valueType, new.valueType)
        return _of_present(lambda v: [[key(k), value(e)] for k, e in v])
    if type(old) is type(new) or (isinstance(old, _INTS | _LONGS) and isinstance(new, _INTS | _LONGS)):
        return lambda v: v
    if isinstance(old, _INTS | _LONGS) and isinstance(new, FloatType):
        return _of_present(lambda v: float(np.int64(v).astype(np.float32)))  # not by way of a double, which rounds too
    if isinstance(old, _INTS | _LONGS | FloatType) and isinstance(new, DoubleType):
        return _of_present(float)
    if isinstance(old, StringType) and isinstance(new, BinaryType):
        return _of_present(str.encode)
    if isinstance(old, BinaryType) and isinstance(new, StringType):
        return _of_present(lambda v: v.decode(errors="replace"))
    return lambda v: None


def _of_present(convert: Convert) -> Convert:
    return lambda v: None if v is None else convert(v)
