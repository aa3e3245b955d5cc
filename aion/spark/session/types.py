"""Converts Spark schemas to Arrow schemas with UTC timestamps, with all versions of pyspark that Aion supports."""

from __future__ import annotations

import inspect

import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructField, StructType

from aion.errors import SchemaError

# pyspark 4.3 has a parameter for the time zone of timestamps; earlier versions always use UTC.
_ZONE = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}


def arrow_schema(schema: StructType) -> pa.Schema:
    """Returns the Arrow schema, with names and types only. A plan needs neither nullability nor metadata (as of
    watermarks).

    Raises SchemaError if Spark cannot send a column to Python.
    """
    return pa.schema([_arrow_field(field) for field in schema])


def _arrow_field(field: StructField) -> pa.Field:
    try:
        (converted,) = to_arrow_schema(StructType([field]), **_ZONE)
    except PySparkTypeError as error:
        what = f"column {field.name!r} is of type {field.dataType.simpleString()}"
        raise SchemaError(f"{what}, which Spark cannot send to Python; cast or drop it") from error
    return pa.field(converted.name, converted.type)


def quoted(name: str) -> str:
    """Returns the name of a column in an expression of Spark."""
    return "`" + name.replace("`", "``") + "`"
