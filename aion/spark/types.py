"""Converts Spark schemas to Arrow schemas with UTC timestamps, with all versions of pyspark that Aion supports."""

from __future__ import annotations

import inspect

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

# pyspark 4.3 has a parameter for the time zone of timestamps; earlier versions always use UTC.
_ZONE = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}


def arrow_schema(schema: StructType) -> pa.Schema:
    """The Arrow schema, with names and types only. A plan needs neither nullability nor metadata (as of watermarks)."""
    converted = to_arrow_schema(schema, **_ZONE)
    return pa.schema([pa.field(field.name, field.type) for field in converted])
