"""Spark schemas as Arrow schemas with UTC timestamps, over the versions of pyspark that Aion supports."""

from __future__ import annotations

import inspect

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

# pyspark 4.3 asks for the zone that timestamps get; before, UTC was what it gave.
_ZONE = {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}


def arrow_schema(schema: StructType) -> pa.Schema:
    """Names and types only: neither nullability nor metadata (watermarks are metadata) belong to a plan."""
    converted = to_arrow_schema(schema, **_ZONE)
    return pa.schema([pa.field(field.name, field.type) for field in converted])
