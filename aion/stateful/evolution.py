"""Values that were stored by another schema of the same variable.

If Spark's state store has the Avro encoding (``spark.sql.streaming.stateStore.encodingFormat``), fields may be added,
removed, moved, and get a wider type. Spark refuses every other change when the query starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspark.sql.types import (
    ArrayType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    MapType,
    StringType,
    StructType,
)

Convert = Callable[[Any], Any]


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
    if type(old) is type(new) or (isinstance(old, IntegralType) and isinstance(new, IntegralType)):
        return lambda v: v
    if isinstance(new, FloatType | DoubleType) and isinstance(old, IntegralType | FloatType):
        return _of_present(float)
    if isinstance(new, DecimalType | StringType) and isinstance(old, IntegralType | DecimalType):
        return _of_present(str)
    return lambda v: None


def _of_present(convert: Convert) -> Convert:
    return lambda v: None if v is None else convert(v)
