"""What a sink asks of a database, and what it does with every kind of database."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from aion.errors import ConfigError, SchemaError
from aion.sinks.marks import History, Mark
from aion.sinks.rows import Change

MARKS = "aion_batches"
"""The table with a row for each table that is written to. It is in the same schema of the database."""


class TableName(NamedTuple):
    """The name of a table, and its schema in the database if one was given."""

    schema: str | None
    table: str

    @classmethod
    def of(cls, text: str) -> TableName:
        """Raises ConfigError if it is not ``table`` or ``schema.table``."""
        parts = text.split(".")
        if not 1 <= len(parts) <= 2 or not all(parts):
            raise ConfigError(f"table: {text!r} is not the name of a table; write 'table' or 'schema.table'")
        return cls(parts[0] if len(parts) == 2 else None, parts[-1])

    def beside(self, table: str) -> TableName:
        """Returns the name of another table in the same schema."""
        return self._replace(table=table)

    def __str__(self) -> str:
        """The name in SQL."""
        return ".".join(identifier(part) for part in self if part is not None)


def identifier(name: str) -> str:
    """Returns a name in SQL."""
    return '"' + name.replace('"', '""') + '"'


def identifiers(names: Iterable[str], prefix: str = "") -> str:
    """Returns a list of names in SQL."""
    return ", ".join(prefix + identifier(name) for name in names)


class Database(Protocol):
    """A transaction on a database."""

    nested: bool
    """Whether a column can hold lists, maps and structs. If not, they are written as JSON."""

    @classmethod
    def resolve(cls, uri: str) -> str:
        """Returns a URI that means the same when the current folder is another. Raises ConfigError if it is wrong."""

    @classmethod
    def open(cls, uri: str) -> AbstractContextManager[Database]:
        """A transaction, which is committed at the end. Nothing of it remains if an error is raised inside."""

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Runs a statement and returns its rows. ``?`` stands for a value."""

    def columns(self, table: TableName) -> dict[str, str]:
        """Returns the columns of a table with their types. They are empty if there is no such table."""

    def type_of(self, field: pa.Field) -> str:
        """Returns the type of a column for these values. Raises SchemaError if there is none."""

    def holds(self, declared: str, field: pa.Field) -> bool:
        """Returns whether a column of the ``declared`` type can hold these values."""

    def index(self, table: TableName, columns: Sequence[str], *, unique: bool) -> None:
        """Makes the index by which rows of a new table are found. ``unique``: no two rows are equal in ``columns``."""

    def replace(self, table: TableName, change: Change) -> None:
        """Deletes the rows of a table that a batch replaces or retracts, and inserts the rows of the batch."""


def file_of(uri: str) -> Path:
    """Returns the path in a URI such as ``sqlite:///relative`` or ``sqlite:////absolute``. Raises ConfigError."""
    scheme, _, rest = uri.partition("://")
    if not rest.startswith("/") or rest == "/":
        raise ConfigError(f"uri: {uri!r} names no file; write {scheme}:///PATH, with a fourth slash if it is absolute")
    return Path(rest[1:])


def with_absolute_path(uri: str) -> str:
    """Returns a URI with the absolute path of its file. Raises ConfigError if it names none."""
    return f"{uri.partition('://')[0]}:///{file_of(uri).absolute()}"


def prepare(database: Database, table: TableName, change: Change) -> None:
    """Makes the table if it is missing. Raises SchemaError if there is one that cannot hold the rows."""
    there = database.columns(table)
    schema = change.rows.schema
    if not there:
        columns = ", ".join(f"{identifier(field.name)} {database.type_of(field)}" for field in schema)
        database.query(f"CREATE TABLE {table} ({columns})")
        database.index(table, change.by_time, unique=change.single)
        return
    for field in schema:
        if field.name not in there:
            raise SchemaError(
                f"table {table} has no column {field.name!r}; its columns are {', '.join(there)}. Add the column, "
                "select fewer columns before the sink, or use another table"
            )
        if not database.holds(there[field.name], field):
            raise SchemaError(
                f"table {table}: column {field.name!r} is {there[field.name]}, which cannot hold {field.type}; make it "
                f"{database.type_of(field)}, cast the column before the sink, or use another table"
            )


def is_empty(database: Database, table: TableName) -> bool:
    """Returns whether a table has no rows."""
    return not database.query(f"SELECT 1 FROM {table} LIMIT 1")


def locked_mark(database: Database, table: TableName) -> Mark | None:
    """Returns the mark of a table. Until the transaction ends, nobody else can change it."""
    marks = table.beside(MARKS)
    columns = "name text PRIMARY KEY, query text NOT NULL, checkpoint text NOT NULL, batch bigint NOT NULL"
    if not database.columns(marks):
        database.query(f"CREATE TABLE IF NOT EXISTS {marks} ({columns})")
    database.query(f"UPDATE {marks} SET batch = batch WHERE name = ?", table.table)
    found = database.query(f"SELECT query, checkpoint, batch FROM {marks} WHERE name = ?", table.table)
    return Mark(History(found[0][0], found[0][1]), int(found[0][2])) if found else None


def set_mark(database: Database, table: TableName, mark: Mark, before: Mark | None) -> None:
    """Replaces the mark of a table."""
    marks, values = table.beside(MARKS), (*mark.history, mark.batch, table.table)
    if before is None:
        database.query(f"INSERT INTO {marks} (query, checkpoint, batch, name) VALUES (?, ?, ?, ?)", *values)
    else:
        database.query(f"UPDATE {marks} SET query = ?, checkpoint = ?, batch = ? WHERE name = ?", *values)


JSON = {b"aion": b"json"}
"""The metadata of a column that holds JSON."""

Types = Sequence[tuple[Callable[[pa.DataType], bool], str]]


def type_in(types: Types, field: pa.Field) -> str:
    """Returns the first type whose condition holds for a column. Raises SchemaError if there is none."""
    for fits, name in types:
        if fits(field.type):
            return name
    raise SchemaError(f"column {field.name!r} is of type {field.type}, which the database cannot hold; cast or drop it")
