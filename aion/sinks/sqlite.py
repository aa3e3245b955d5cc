"""SQLite, through Python's own module. Rows are made of whole columns."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t

from aion.sinks.addresses import Address
from aion.sinks.bad_values import UTF8, YEARS_1_TO_9999
from aion.sinks.database import WAIT_S, Database, TableName, file_of, identifier, identifiers
from aion.sinks.rows import TableChange


class Sqlite(Database):
    """A transaction on a SQLite database. The statements take values as columns of Python objects.

    Times are texts in UTC, with six digits for the fraction; decimals are texts; durations are microseconds. SQLite has
    no NaN, so that is the text 'NaN'.
    """

    types = (
        (lambda type_: t.is_boolean(type_) or t.is_integer(type_) or t.is_duration(type_), "INTEGER"),
        (t.is_floating, "REAL"),
        (lambda type_: t.is_string(type_) or t.is_large_string(type_) or t.is_decimal(type_), "TEXT"),
        (lambda type_: t.is_timestamp(type_) or t.is_date(type_), "TEXT"),
        (lambda type_: t.is_binary(type_) or t.is_large_binary(type_), "BLOB"),
    )
    unfit = (UTF8, YEARS_1_TO_9999)
    equal = "IS"

    @classmethod
    @contextmanager
    def open(cls, address: Address) -> Iterator[Sqlite]:
        with closing(sqlite3.connect(file_of(address), timeout=WAIT_S, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield cls(connection)
            connection.execute("COMMIT")

    def _columns(self, table: TableName) -> list[tuple[str, str]]:
        return self.query("SELECT name, type FROM pragma_table_info(?, ?)", table.table, table.schema)

    def holds(self, declared: str, field: pa.Field) -> bool:
        """Compares affinities, because that is all that SQLite takes from a type. Bytes fit everywhere."""
        wanted, affinity = self.type_of(field), _affinity(declared)
        if affinity in ("BLOB", wanted) or wanted == "BLOB":
            return True
        # A number becomes an equal number. A text that looks like a number becomes one, but no time looks so.
        numeric = wanted != "TEXT" or t.is_timestamp(field.type) or t.is_date(field.type)
        return affinity == "NUMERIC" and numeric

    def index(self, table: TableName, columns: Sequence[str], *, unique: bool) -> None:
        name, kind = table.beside(f"{table.table}_window"), "UNIQUE INDEX" if unique else "INDEX"
        self.query(f"CREATE {kind} {name} ON {identifier(table.table)} ({identifiers(columns)})")

    def replace(self, table: TableName, change: TableChange) -> None:
        found = " AND ".join(f"{identifier(name)} IS ?" for name in change.identity)
        self.driver.executemany(f"DELETE FROM {table} WHERE {found}", python_rows(change.places))
        names, rows = identifiers(change.rows.column_names), python_rows(change.rows)
        places = ", ".join("?" * change.rows.num_columns)
        self.driver.executemany(f"INSERT INTO {table} ({names}) VALUES ({places})", rows)

    def delete(self, table: TableName, places: str, patterns: pa.Table) -> None:
        names = patterns.column_names
        found = " AND ".join(f"{identifier(name)} IS ?" for name in names)
        rows = self.driver.execute(f"SELECT {identifiers(names)} FROM {places}")
        self.driver.executemany(f"DELETE FROM {table} WHERE {found}", rows)


def _affinity(declared: str) -> str:
    """The rules of https://www.sqlite.org/datatype3.html, section 3.1."""
    upper = declared.upper()
    for parts, affinity in (
        (("INT",), "INTEGER"),
        (("CHAR", "CLOB", "TEXT"), "TEXT"),
        (("BLOB",), "BLOB"),
        (("REAL", "FLOA", "DOUB"), "REAL"),
    ):
        if any(part in upper for part in parts):
            return affinity
    return "NUMERIC" if upper else "BLOB"


def python_rows(table: pa.Table) -> Iterator[tuple[Any, ...]]:
    """The rows of a table with the values that SQLite holds."""
    for batch in table.to_batches(max_chunksize=65_536):
        yield from zip(*map(_values, batch.columns), strict=True)


def _values(column: pa.Array) -> list[Any]:
    type_ = column.type
    if t.is_timestamp(type_):
        # Without a zone, because pyarrow would write "Z" at the end, which not all functions of SQLite read.
        column = column.cast(pa.timestamp("us", type_.tz)).cast(pa.timestamp("us")).cast(pa.string())
    elif t.is_date(type_) or t.is_decimal(type_):
        column = column.cast(pa.string())
    elif t.is_duration(type_):
        column = column.cast(pa.duration("us")).cast(pa.int64())
    elif t.is_floating(type_) and pc.any(pc.is_nan(column)).as_py():
        return ["NaN" if value != value else value for value in column.to_pylist()]
    if not column.null_count and (t.is_integer(column.type) or t.is_floating(column.type)):
        values: list[Any] = column.to_numpy().tolist()
        return values
    return list(column.to_pylist())
