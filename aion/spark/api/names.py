"""The columns of a DataFrame, by the names that a specification has for them.

A name means what it means for Spark: perhaps in another case, or a field of a column. Only what is used matters:
another column may be of any type, and two others may have the same name.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StructField, StructType

from aion.core.query.columns import ColumnName, key_names
from aion.errors import SchemaError
from aion.spark.session.types import arrow_schema, quoted
from aion.spec import Spec


class Names:
    """``hidden``: columns that are none of the user's."""

    def __init__(self, df: DataFrame, hidden: Collection[str]) -> None:
        self._df = df
        self._fields = [field for field in df.schema if field.name not in hidden]
        self._refused: dict[str, SchemaError] = {}
        self._meant: dict[str, tuple[Column, StructField]] = {}
        self.schema = pa.schema([field for each in self._fields if (field := self._arrow(each)) is not None])

    def field(self, name: str) -> StructField:
        """Returns the column of this name. Raises KeyError if there is none."""
        return self._find(name)[1]

    def column(self, name: str) -> Column:
        """Returns the same for an expression. Raises KeyError."""
        return self._find(name)[0]

    def resolved(self, spec: Spec) -> tuple[Spec, pa.Schema]:
        """Returns a specification, and the columns with the names that it uses. Raises SchemaError.

        A key that is a field of a column gets the name that Spark gives to it, which is that of the field.
        """
        key = tuple(self._key(name, spec) for name in key_names(spec.key))
        spec = replace(spec, key=key) if spec.key is not None and key != key_names(spec.key) else spec
        if isinstance(spec.time, ColumnName):
            spec = replace(spec, time=self._time(spec.time))
        names = [name for name in spec.used_columns if name != "*"]
        every = spec.apply is not None and spec.apply.columns is None
        for name in (*names, *(self._refused if every else ())):
            if name in self._refused:
                raise self._refused[name]
        own = {field.name for field in self._fields} - self._meant.keys()
        more = [found for name in dict.fromkeys(names) if name not in own and (found := self._field_of(name))]
        renamed = {field.name.lower() for field in more} | {*self._meant}
        kept = [field for field in self.schema if field.name in {*names} & own or field.name.lower() not in renamed]
        return spec, pa.schema([*kept, *more])

    def _arrow(self, field: StructField) -> pa.Field | None:
        name = field.name
        if sum(each.name == name for each in self._fields) > 1:
            self._refused[name] = SchemaError(f"windowed: the DataFrame has two columns named {name!r}; rename one")
            return None
        try:
            return arrow_schema(StructType([field])).field(0)
        except SchemaError as error:
            self._refused[name] = error
            return None

    def _field_of(self, name: str) -> pa.Field | None:
        try:
            _, found = self._find(name)
        except KeyError:
            return None
        return pa.field(name, arrow_schema(StructType([found])).field(0).type)

    def _key(self, name: str, spec: Spec) -> str:
        if any(field.name == name for field in self._fields):
            return name
        try:
            column, found = self._find(name)
        except KeyError:
            return name
        if found.name != name:
            if found.name in {*spec.used_columns} - {name}:
                raise SchemaError(
                    f"key: {name!r} is called {found.name!r} in the result, as another column that is used here; "
                    "give it a column of its own with withColumn"
                )
            self._meant[found.name] = column, found
        return str(found.name)

    def _time(self, name: ColumnName) -> str:
        """Returns the name of the time. A field of a column has the one that it has as a text, too."""
        column, found = self._find(name)
        if str(name) == found.name or ("." in name and self._df.select(column).columns == [name.split(".")[-1]]):
            return str(name)
        self._meant[found.name] = column, found
        return str(found.name)

    def _find(self, name: str) -> tuple[Column, StructField]:
        """Raises KeyError if there is no such column, and SchemaError if there are several."""
        if name not in self._meant:
            for field in self._fields:
                if field.name == name:
                    return self._df[quoted(name)], field
            column = name.column if isinstance(name, ColumnName) else F.col(name)
            try:
                self._meant[str(name)] = column, self._df.select(column).schema[0]
            except PySparkException as error:
                if error.getCondition() == "AMBIGUOUS_REFERENCE":
                    raise SchemaError(f"{name!r} may be several columns: {error.getMessage()}") from error
                raise KeyError(name) from error
        return self._meant[name]
