"""Converts Spark schemas to Arrow schemas with UTC timestamps, with all versions of pyspark that Aion supports; and
what Spark takes for equal: names of columns, and texts.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

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


def is_case_sensitive(spark: SparkSession) -> bool:
    return str(spark.conf.get("spark.sql.caseSensitive")).lower() == "true"


def meant(spark: SparkSession, columns: Sequence[str], name: str) -> str:
    """Returns the column that a name means for Spark: perhaps one in another case."""
    alike = [each for each in columns if each.lower() == name.lower()]
    is_other = name not in alike and len(alike) == 1 and not is_case_sensitive(spark)
    return alike[0] if is_other else name


def with_names(df: DataFrame, names: Iterable[str]) -> DataFrame:
    """Returns a DataFrame whose columns have the names that a user gives them, where Spark takes them for the same."""
    other = {name: name for name in names if type(name) is str and name not in df.columns}
    return df.withColumnsRenamed(other) if other else df


def check_case(spark: SparkSession, names: Iterable[str]) -> None:
    """Raises SchemaError if Spark cannot tell two columns of a result from each other."""
    if is_case_sensitive(spark):
        return
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(name.casefold(), name)
        if other != name:
            raise SchemaError(
                f"result columns: {other!r} and {name!r} differ only in case, which Spark ignores; rename one, or set "
                "spark.sql.caseSensitive"
            )


def check_text(field: StructField) -> None:
    """Raises SchemaError for a column of strings that Spark compares otherwise than by their bytes, as Python does.

    So values that Spark takes for equal would be two.
    """
    type_ = field.dataType
    for part in type_ if isinstance(type_, StructType) else ():
        check_text(part)
    if isinstance(type_, StringType) and not type_.isUTF8BinaryCollation():
        raise SchemaError(
            f"column {field.name!r} is of type {type_.simpleString()}, and Aion compares strings byte by byte; "
            f"give e.g. collate(lower({field.name}), 'UTF8_BINARY')"
        )
