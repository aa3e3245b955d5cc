"""SQLite, through Python's own module. Rows are made of whole columns."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t

from aion.sinks.addresses import Address
from aion.sinks.bad_values import UTF8, YEARS_1_TO_9999, Rule
from aion.sinks.database import Columns, TableName, Types, file_of, identifier, identifiers, type_in, with_absolute_path
from aion.sinks.rows import Change

_WAIT_S = 60.0
_TYPES: Types = (
    (lambda type_: t.is_boolean(type_) or t.is_integer(type_) or t.is_duration(type_), "INTEGER"),
    (t.is_floating, "REAL"),
    (lambda type_: t.is_string(type_) or t.is_large_string(type_) or t.is_decimal(type_), "TEXT"),
    (lambda type_: t.is_timestamp(type_) or t.is_date(type_), "TEXT"),
    (lambda type_: t.is_binary(type_) or t.is_large_binary(type_), "BLOB"),
)


class Sqlite:
    """A transaction on a SQLite database. The statements take values as columns of Python objects.

    Times are texts in UTC, with six digits for the fraction; decimals are texts; durations are microseconds. SQLite has
    no NaN, so that is the text 'NaN'.
    """

    nested: ClassVar[bool] = False
    case: ClassVar[bool] = False
    longest_name: ClassVar[int | None] = None

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def resolve(cls, address: Address) -> Address:
        return with_absolute_path(address)

    @classmethod
    @contextmanager
    def open(cls, address: Address) -> Iterator[Sqlite]:
        with closing(sqlite3.connect(file_of(address), timeout=_WAIT_S, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield cls(connection)
            connection.execute("COMMIT")

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql, values).fetchall()

    def columns(self, table: TableName) -> dict[str, str]:
        schema = "" if table.schema is None else f"{identifier(table.schema)}."
        rows = self.query(f"PRAGMA {schema}table_info({identifier(table.table)})")
        return Columns((row[1], row[2]) for row in rows)

    def type_of(self, field: pa.Field) -> str:
        return type_in(_TYPES, field)

    def holds(self, declared: str, field: pa.Field) -> bool:
        """Compares affinities, because that is all that SQLite takes from a type. Bytes fit everywhere."""
        wanted, affinity = self.type_of(field), _affinity(declared)
        if affinity in ("BLOB", wanted) or wanted == "BLOB":
            return True
        # A number becomes an equal number. A text that looks like a number becomes one, but no time looks so.
        numeric = wanted != "TEXT" or t.is_timestamp(field.type) or t.is_date(field.type)
        return affinity == "NUMERIC" and numeric

    def rules(self, table: TableName) -> Sequence[Rule]:
        return (UTF8, YEARS_1_TO_9999)

    def index(self, table: TableName, columns: Sequence[str], *, unique: bool) -> None:
        schema = "" if table.schema is None else f"{identifier(table.schema)}."
        name = f"{schema}{identifier(f'{table.table}_window')}"
        kind = "UNIQUE INDEX" if unique else "INDEX"
        self.query(f"CREATE {kind} {name} ON {identifier(table.table)} ({identifiers(columns)})")

    def replace(self, table: TableName, change: Change) -> None:
        found = " AND ".join(f"{identifier(name)} IS ?" for name in change.identity)
        self._connection.executemany(f"DELETE FROM {table} WHERE {found}", python_rows(change.places))
        names = change.rows.column_names
        places = ", ".join("?" * len(names))
        self._connection.executemany(
            f"INSERT INTO {table} ({identifiers(names)}) VALUES ({places})", python_rows(change.rows)
        )


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
