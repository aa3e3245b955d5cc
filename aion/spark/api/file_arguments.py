"""Checks the arguments of ``read_files`` on the driver, before any data flows."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from inspect import signature
from numbers import Integral
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrameReader, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructField, StructType, VariantType

from aion.base.time import duration_us
from aion.core.ingest.conforming import nullable
from aion.errors import ConfigError, SchemaError
from aion.execute.files.formats import Format
from aion.execute.files.lakes import opened
from aion.spark import SOURCES_FROM, numbers
from aion.spark.session.sessions import is_remote, qualified
from aion.spark.session.types import arrow_schema
from aion.spark.tasks.file_child import Transform, transformed

_SOURCE_OPTIONS = (
    "pathGlobFilter", "recursiveFileLookup", "maxBytesPerTrigger", "fileNameOnly", "cleanSource", "sourceArchiveDir",
    "maxCachedFiles", "discardCachedInputRatio",
)  # fmt: skip

_TEXT_SOURCE_OPTIONS = ("ignoreCorruptFiles", "ignoreMissingFiles")
"""What Spark's readers do with files, besides lines."""

"""The first version of Spark that asks a source in Python for the files of a batch, and says how many it wants."""

_ARGUMENTS = {
    "maxfilespertrigger": "max_files_per_trigger",
    "latestfirst": "latest_first",
    "maxfileage": "max_file_age",
}


def declared_columns(schema: str | StructType | pa.Schema, case_sensitive: bool, what: str = "schema") -> pa.Schema:
    """Returns the columns of a schema, with Spark's types. As with Spark's readers, any part of any column may be null.

    Raises SchemaError, which names ``what``.
    """
    if isinstance(schema, str):
        try:
            schema = StructType.fromDDL(schema)
        except Exception as error:
            first, *_ = str(error).splitlines() or [""]
            raise SchemaError(f"{what}: {schema!r} is not a schema of Spark: {first}") from error
    if isinstance(schema, pa.Schema):
        schema = StructType([_of_arrow(field, what) for field in schema])
    if not isinstance(schema, StructType) or not schema.fields:
        raise SchemaError(f"{what}: {schema!r} is not a schema; write e.g. schema='ts timestamp, speed double'")
    names = schema.fieldNames()
    known: dict[str, str] = {}
    for name in names:
        plain = name if case_sensitive else name.lower()
        if plain in known:
            first = known[plain]
            alike = "" if first == name else f", also as {name!r}: spark.sql.caseSensitive is false"
            raise SchemaError(f"{what}: it names the column {first!r} twice{alike}")
        known[plain] = name
    return pa.schema([pa.field(field.name, nullable(_in_arrow(field, what))) for field in schema.fields])


def _of_arrow(field: pa.Field, what: str) -> StructField:
    try:
        return from_arrow_schema(pa.schema([field]), prefer_timestamp_ntz=True).fields[0]
    except Exception as error:
        raise SchemaError(
            f"{what}: column {field.name!r} is of type {field.type}, which Spark does not have"
        ) from error


def _in_arrow(field: StructField, what: str) -> pa.DataType:
    message = f"{what}: columns of type {field.dataType.simpleString()} cannot be read from files: {field.name!r}"
    if isinstance(field.dataType, VariantType):
        raise SchemaError(message)
    try:
        return arrow_schema(StructType([field])).field(0).type
    except Exception as error:
        raise SchemaError(message) from error


def watermark_of(watermark: tuple[str, str]) -> tuple[str, int]:
    if not isinstance(watermark, tuple | list) or len(watermark) != 2 or not isinstance(watermark[0], str):
        raise ConfigError(f"watermark: {watermark!r} is not a column and a delay; e.g. ('ts', '20 seconds')")
    column, delay = watermark
    delay_us = duration_us(delay, what="watermark")
    if delay_us < 0 or delay_us % 1000:
        raise ConfigError(f"watermark: {delay!r} is not a whole number of milliseconds from 0 on")
    return column, delay_us


def path_of(path: str | Path) -> str:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(
            f"path: {path!r} is not a path; write e.g. 'positions/' or 's3a://bucket/positions/*.parquet'"
        )
    return text


def source_options(max_files: int | None, latest_first: bool, max_age: str | None) -> dict[str, str]:
    """Spark's options of these arguments."""
    check_count("max_files_per_trigger", max_files)
    if not isinstance(latest_first, bool):
        raise ConfigError(f"latest_first: {latest_first!r} is neither True nor False")
    options: dict[str, str] = {}
    if max_files is not None:
        options["maxFilesPerTrigger"] = str(max_files)
    if latest_first:
        options["latestFirst"] = "true"
    if max_age is not None:
        age_us = duration_us(max_age, what="max_file_age")
        if age_us < 0 or age_us % 1000:
            raise ConfigError(f"max_file_age: {max_age!r} is not a whole number of milliseconds from 0 on")
        options["maxFileAge"] = f"{age_us // 1000}ms"
    return options


def other_options(spark: SparkSession, options: Mapping[str, object] | None, format_: Format) -> dict[str, str]:
    """Returns the options of the file source, and of Spark's reader of text, by Spark's names."""
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(f"options: {options!r} is not a mapping; write e.g. options={{'header': True}}")
    known = [*_SOURCE_OPTIONS, *(_text_options(spark, format_.name) if format_.is_text else ())]
    spelled = {name.lower(): name for name in known}  # Spark does not regard case
    result: dict[str, str] = {}
    for given, value in (options or {}).items():
        name = spelled.get(str(given).lower())
        if name is None:
            argument = _ARGUMENTS.get(str(given).lower())
            use = f"; use the argument {argument}=" if argument else ""
            raise ConfigError(f"options: {given!r} is not one of {', '.join(known)}{use}")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if name == "recursiveFileLookup" and text.lower() not in ("true", "false"):
            raise ConfigError(f"options: {name} is {value!r}, and neither true nor false")
        result[name] = text
    if format_.is_text:
        _check_values(spark, format_.name, result)
    return result


@dataclass(frozen=True)
class LakeTable:
    """A table of a lake. ``name``: for Delta Lake its folder, as Spark writes it. ``limit``: files of a batch at most.

    ``options``: those that say what is read, and those of its storage or catalog.
    """

    format: str
    name: str
    limit: int | None
    options: Mapping[str, str] = field(repr=False)  # credentials may be among them

    @classmethod
    def of(
        cls,
        spark: SparkSession,
        path: str,
        format_: str,
        max_files: int | None,
        refused: Mapping[str, object],
        options: Mapping[str, object] | None,
    ) -> LakeTable:
        """Checks the arguments. Those that are ``refused`` make no sense for a table. Raises ConfigError."""
        if numbers(spark.version) < SOURCES_FROM:
            raise ConfigError(f"format: tables of {format_} need Spark 4.2, and this is Spark {spark.version}")
        for argument, value in refused.items():
            if value:
                raise ConfigError(f"{argument}: the versions of a table are read in their order; leave it out")
        check_count("max_files_per_trigger", max_files)
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(f"options: {options!r} is not a mapping; write e.g. options={{'startingVersion': 5}}")
        texts = {str(k): str(v).lower() if isinstance(v, bool) else str(v) for k, v in (options or {}).items()}
        for name in texts:
            if (argument := _ARGUMENTS.get(name.lower(), "")) != "":
                raise ConfigError(f"options: {name!r} is an argument; use {argument}=")
        if format_ == "iceberg" and "." not in path:
            raise ConfigError(f"path: {path!r} is no table of a catalog; write 'namespace.table'")
        if format_ == "delta":
            # Only deltalake reads a folder with a scheme of its own, and Spark may not have access to it.
            path = path.rstrip("/") if "://" in path else qualified(spark, path)
        return cls(format_, path, None if max_files is None else int(max_files), texts)

    def columns(self) -> pa.Schema:
        """Returns the columns that the table has now. Raises ConfigError, MissingExtra, StorageError."""
        with closing(opened(self.format, self.name, self.options)) as lake:
            return lake.columns()

    def to_json(self) -> str:
        """Returns the arguments of the source of its files."""
        return json.dumps(
            {"format": self.format, "table": self.name, "limit": self.limit, "options": dict(self.options)}
        )


def _check_values(spark: SparkSession, format_: str, options: Mapping[str, str]) -> None:
    """Spark would look at their values only when the first batch runs. That of a server does. Raises ConfigError."""
    if is_remote(spark):
        return
    jvm: Any = spark.sparkContext._jvm
    formats = jvm.org.apache.spark.sql.execution.datasources
    reader = formats.csv.CSVFileFormat() if format_ == "csv" else formats.json.JsonFileFormat()
    try:
        # What it answers does not matter: it parses all options first.
        reader.isSplitable(
            spark._jsparkSession, jvm.PythonUtils.toScalaMap(options), jvm.org.apache.hadoop.fs.Path("x")
        )
    except Exception as error:
        first, *_ = str(getattr(error, "java_exception", error)).splitlines() or [""]
        raise ConfigError(f"options: Spark does not take {dict(options)} for {format_}: {first}") from error


def _text_options(spark: SparkSession, format_: str) -> list[str]:
    """Returns the names of the options that Spark's reader has. One changes the schema, which is given here.

    With Spark Connect, these are the ones that pyspark knows.
    """
    if is_remote(spark):
        known = signature(DataFrameReader.csv if format_ == "csv" else DataFrameReader.json).parameters
        return sorted({*known, *_TEXT_SOURCE_OPTIONS} - {"self", "path", "schema"})
    jvm: Any = spark.sparkContext._jvm
    catalyst = jvm.org.apache.spark.sql.catalyst
    options = catalyst.csv.CSVOptions if format_ == "csv" else catalyst.json.JSONOptions
    names = str(options.getAllOptions().mkString(",")).split(",")
    return sorted({*names, *_TEXT_SOURCE_OPTIONS} - {"singleVariantColumn"})


def check_count(name: str, value: int | None) -> None:
    if value is not None and (not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 1):
        raise ConfigError(f"{name}: {value!r} is not a whole number from 1 on")


def columns_after(transform: Transform, declared: pa.Schema, case_sensitive: bool) -> pa.Schema:
    """Returns the columns that ``transform`` returns, with the types that Spark has for them."""
    if not callable(transform):
        raise ConfigError(f"transform: {transform!r} is not a function of a pyarrow.RecordBatch")
    empty = pa.RecordBatch.from_pylist([], schema=declared)
    result = transformed(transform, empty, None).schema
    for column in result:
        if pa.types.is_null(column.type):
            raise SchemaError(
                f"transform: column {column.name!r} has no type in an empty batch; name it, e.g. "
                "pa.array(values, pa.int64())"
            )
    return declared_columns(result, case_sensitive, "transform")


def columns_used(where: Any, schema: pa.Schema) -> tuple[str, ...]:
    """Returns the columns that an expression uses: those without which it cannot be computed. Raises ConfigError."""
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
    """Returns the folder of ``path``. Of a glob, what comes before its first star."""
    plain = path
    for wild in "*?[{":
        plain = plain.partition(wild)[0]
    if plain != path:
        plain = plain.rpartition("/")[0] or plain
    return f"{qualified(spark, plain or '.').rstrip('/')}/"


def zone_of(spark: SparkSession) -> str:
    """Returns the session's time zone by a name that Arrow knows, too. Java also has names such as ``GMT+2`` and
    ``PST``, which only a JVM can translate. Raises ConfigError.
    """
    name = spark.conf.get("spark.sql.session.timeZone")
    if is_remote(spark):
        return _known_zone(str(name))
    jvm: Any = spark.sparkContext._jvm
    zone: Any = jvm.org.apache.spark.sql.catalyst.util.DateTimeUtils.getZoneId(name)
    plain = str(zone.normalized().getId())
    return "UTC" if plain == "Z" else plain


def _known_zone(name: str) -> str:
    if re.fullmatch(r"[+-]\d\d:\d\d", name):
        return name
    try:
        return ZoneInfo(name).key
    except (ZoneInfoNotFoundError, ValueError):
        raise ConfigError(
            f"spark.sql.session.timeZone is {name!r}; with Spark Connect, read_files needs a region or an offset; "
            "set e.g. 'Europe/Berlin', 'UTC' or '+02:00'"
        ) from None
