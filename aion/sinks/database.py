"""What a sink asks of a database, and what it does with every kind of database."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import pyarrow as pa

from aion.errors import ConfigError, SchemaError
from aion.sinks.addresses import Address
from aion.sinks.bad_values import Rule
from aion.sinks.marks import Content, History, Mark
from aion.sinks.names import check_names
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
        if not 1 <= len(parts) <= 2 or not all(parts) or "://" in text:
            raise ConfigError(
                f"table: {Address.of(text)!r} is not the name of a table; write 'table' or 'schema.table'"
            )
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

    nested: ClassVar[bool]
    """Whether a column can hold lists, maps and structs. If not, they are written as JSON."""
    case: ClassVar[bool]
    """Whether two names may differ only in case."""
    longest_name: ClassVar[int | None]
    """How many bytes a name has at most."""

    @classmethod
    def resolve(cls, address: Address) -> Address:
        """Returns an address that means the same in any current folder. Raises ConfigError if it is wrong."""

    @classmethod
    def open(cls, address: Address) -> AbstractContextManager[Database]:
        """A transaction, which is committed at the end. Nothing of it remains if an error is raised inside."""

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Runs a statement and returns its rows. ``?`` stands for a value."""

    def columns(self, table: TableName) -> dict[str, str]:
        """Returns the columns of a table with their types. They are empty if there is no such table."""

    def type_of(self, field: pa.Field) -> str:
        """Returns the type of a column for these values. Raises SchemaError if there is none."""

    def holds(self, declared: str, field: pa.Field) -> bool:
        """Returns whether a column of the ``declared`` type can hold these values."""

    def rules(self, table: TableName) -> Sequence[Rule]:
        """Returns which values a table cannot hold."""

    def index(self, table: TableName, columns: Sequence[str], *, unique: bool) -> None:
        """Makes the index by which rows of a new table are found. ``unique``: no two rows are equal in ``columns``."""

    def replace(self, table: TableName, change: Change) -> None:
        """Deletes the rows of a table that a batch replaces or retracts, and inserts the rows of the batch."""


class Columns(dict[str, str]):
    """The columns of a table in a database that does not tell names apart by case, with their types."""

    def __contains__(self, name: object) -> bool:
        return str(name).lower() in map(str.lower, self)

    def __missing__(self, name: str) -> str:
        for there, type_ in self.items():
            if there.lower() == name.lower():
                return type_
        raise KeyError(name)


def file_of(address: Address) -> Path:
    """Returns the path in a URI such as ``sqlite:///relative`` or ``sqlite:////absolute``. Raises ConfigError."""
    rest, scheme = address.secret.text.partition("://")[2], address.scheme
    if not rest.startswith("/") or rest == "/":
        raise ConfigError(
            f"uri: {address!r} names no file; write {scheme}:///PATH, with a fourth slash if it is absolute"
        )
    return Path(rest[1:])


def with_absolute_path(address: Address) -> Address:
    """Returns an address with the absolute path of its file. Raises ConfigError if it names none."""
    return Address.of(f"{address.scheme}:///{file_of(address).absolute()}")


def prepare(database: Database, table: TableName, change: Change, *, add: bool = False) -> Content:
    """Makes the table if it is missing, and with ``add``, its columns. Returns what was there.

    Raises SchemaError if there is one that cannot hold the rows.
    """
    there = database.columns(table)
    schema = change.rows.schema
    check_names(schema.names, case=database.case, longest=database.longest_name)
    if not there:
        columns = ", ".join(f"{identifier(field.name)} {database.type_of(field)}" for field in schema)
        database.query(f"CREATE TABLE {table} ({columns})")
        database.index(table, change.by_time, unique=change.single)
        return Content.MISSING
    for field in schema:
        if field.name not in there and add and field.name not in change.identity:
            add_column(database, table, field.name, database.type_of(field))
            continue
        if field.name not in there:
            raise SchemaError(
                f"table {table} has no column {field.name!r}; its columns are {', '.join(there)}. Add the column, or "
                "let the sink do it (add_columns=True), select fewer columns before the sink, or use another table"
            )
        if not database.holds(there[field.name], field):
            raise SchemaError(
                f"table {table}: column {field.name!r} is {there[field.name]}, which cannot hold {field.type}; make it "
                f"{database.type_of(field)}, cast the column before the sink, or use another table"
            )
    return content_of(database, table)


def add_column(database: Database, table: TableName, name: str, type_: str) -> None:
    """Adds a column, null in the rows that are there."""
    database.query(f"ALTER TABLE {table} ADD COLUMN {identifier(name)} {type_}")


def content_of(database: Database, table: TableName) -> Content:
    """Returns whether a table has rows."""
    return Content.ROWS if database.query(f"SELECT 1 FROM {table} LIMIT 1") else Content.EMPTY


_OLD_MARKS = "name text PRIMARY KEY, query text NOT NULL, checkpoint text NOT NULL, batch bigint NOT NULL"
_NEWER = {"run": "text", "digest": "text", "filled": "bigint"}
"""The columns that the table of marks did not always have."""


def locked_mark(database: Database, table: TableName) -> Mark | None:
    """Returns the mark of a table. Until the transaction ends, nobody else can change it."""
    marks = table.beside(MARKS)
    newer = [f"{name} {type_}" for name, type_ in _NEWER.items()]
    if there := database.columns(marks):
        for column in newer:
            if column.split()[0] not in there:
                database.query(f"ALTER TABLE {marks} ADD COLUMN {column}")
    else:
        database.query(f"CREATE TABLE IF NOT EXISTS {marks} ({', '.join([_OLD_MARKS, *newer])})")
    database.query(f"UPDATE {marks} SET batch = batch WHERE name = ?", table.table)
    columns = ", ".join(("query", "checkpoint", "batch", *_NEWER))
    for query, checkpoint, batch, run, digest, filled in database.query(
        f"SELECT {columns} FROM {marks} WHERE name = ?", table.table
    ):
        full = None if filled is None else bool(filled)
        return Mark(History(query, checkpoint), int(batch), run=run, digest=digest, filled=full)
    return None


def set_mark(database: Database, table: TableName, mark: Mark, before: Mark | None) -> None:
    """Replaces the mark of a table."""
    filled = None if mark.filled is None else int(mark.filled)
    columns = ("query", "checkpoint", "batch", *_NEWER)
    pairs = zip(columns, (*mark.history, mark.batch, mark.run, mark.digest, filled), strict=True)
    known = {column: value for column, value in pairs if value is not None}
    values, marks = (*known.values(), table.table), table.beside(MARKS)
    if before is None:
        places = ", ".join("?" * len(values))
        database.query(f"INSERT INTO {marks} ({', '.join([*known, 'name'])}) VALUES ({places})", *values)
    else:
        changed = ", ".join(f"{column} = {'?' if column in known else 'NULL'}" for column in columns)
        database.query(f"UPDATE {marks} SET {changed} WHERE name = ?", *values)


Types = Sequence[tuple[Callable[[pa.DataType], bool], str]]


def type_in(types: Types, field: pa.Field) -> str:
    """Returns the first type whose condition holds for a column. Raises SchemaError if there is none."""
    for fits, name in types:
        if fits(field.type):
            return name
    raise SchemaError(f"column {field.name!r} is of type {field.type}, which the database cannot hold; cast or drop it")
