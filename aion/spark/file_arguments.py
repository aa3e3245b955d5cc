"""Checks the arguments of ``read_files`` on the driver, before any data flows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from aion.core.time import duration_us
from aion.errors import ConfigError, SchemaError
from aion.spark.file_child import Transform, transformed
from aion.spark.types import arrow_schema


def declared_columns(schema: str | StructType | pa.Schema) -> pa.Schema:
    if isinstance(schema, str):
        try:
            schema = StructType.fromDDL(schema)
        except Exception as error:
            first, *_ = str(error).splitlines() or [""]
            raise SchemaError(f"schema: {schema!r} is not a schema of Spark: {first}") from error
    if isinstance(schema, pa.Schema):
        schema = from_arrow_schema(schema, prefer_timestamp_ntz=True)
    if not isinstance(schema, StructType) or not schema.fields:
        raise SchemaError(f"schema: {schema!r} is not a schema; write e.g. schema='ts timestamp, speed double'")
    names = schema.fieldNames()
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SchemaError(f"schema: it names the column {twice[0]!r} twice")
    return arrow_schema(schema)


def watermark_of(watermark: tuple[str, str]) -> tuple[str, int]:
    if not isinstance(watermark, tuple | list) or len(watermark) != 2:
        raise ConfigError(f"watermark: {watermark!r} is not a column and a delay; e.g. ('ts', '20 seconds')")
    column, delay = watermark
    delay_us = duration_us(delay, what="watermark")
    if delay_us < 0 or delay_us % 1000:
        raise ConfigError(f"watermark: {delay!r} is not a whole number of milliseconds from 0 on")
    return column, delay_us


def columns_after(transform: Transform, declared: pa.Schema) -> pa.Schema:
    """The columns that ``transform`` returns, with the types that Spark has for them."""
    empty = pa.RecordBatch.from_pylist([], schema=declared)
    return declared_columns(transformed(transform, empty, None).schema)


def columns_used(where: Any, schema: pa.Schema) -> tuple[str, ...]:
    """The columns that an expression uses: those without which it cannot be computed. Raises ConfigError."""
    if where is None:
        return ()
    if not isinstance(where, pc.Expression):
        raise ConfigError(f"where: {where!r} is not an expression of pyarrow; write e.g. pc.field('speed') > 0")
    empty = schema.empty_table()
    try:
        empty.filter(where)
    except Exception as error:
        first, *_ = str(error).splitlines() or [""]
        raise SchemaError(f"where: {where} cannot be computed from {', '.join(schema.names)}: {first}") from error
    return tuple(name for name in schema.names if not _computes(where, empty.drop_columns([name])))


def _computes(where: Any, table: pa.Table) -> bool:
    try:
        table.filter(where)
    except Exception:
        return False
    return True


def base_of(spark: SparkSession, path: str) -> str:
    """The folder of ``path`` as Spark writes it in the paths of files. Of a glob, what comes before its first star."""
    jvm: Any = spark.sparkContext._jvm
    hadoop: Any = spark.sparkContext._jsc.hadoopConfiguration()
    plain = path
    for wild in "*?[{":
        plain = plain.partition(wild)[0]
    if plain != path:
        plain = plain.rpartition("/")[0] or plain
    place = jvm.org.apache.hadoop.fs.Path(plain or ".")
    return f"{place.getFileSystem(hadoop).makeQualified(place).toString().rstrip('/')}/"
