"""What a sink does with a database. A subclass of :class:`Database` is a dialect: what differs in one kind of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pyarrow as pa

from aion.errors import ConfigError, SchemaError
from aion.sinks.addresses import Address
from aion.sinks.bad_values import JSON, Rule
from aion.sinks.marks import Content, History, Mark
from aion.sinks.names import check_names
from aion.sinks.rows import TableChange, null_patterns

WAIT_S = 60.0
"""How long a batch waits for others who use the database."""
STAGED = "aion_staged"
"""The name under which a batch is in a database while it is written."""
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


Types = Sequence[tuple[Callable[[pa.DataType], bool], str]]


class Database(ABC):
    """A transaction on a database."""

    nested: ClassVar[bool] = False
    """Whether a column can hold lists, maps and structs. If not, they are written as JSON."""
    case: ClassVar[bool] = False
    """Whether two names may differ only in case."""
    longest_name: ClassVar[int | None] = None
    """How many bytes a name has at most."""
    types: ClassVar[Types] = ()
    """The types of columns. The first whose condition holds for an Arrow type is that of its values."""
    widths: ClassVar[Sequence[Sequence[str]]] = ()
    """Types from narrow to wide: a column of one also holds the values of those before it."""
    unfit: ClassVar[Sequence[Rule]]
    """Which values no table can hold."""
    equal: ClassVar[str | None] = None
    """This operator takes nulls for equal, and the database still finds rows by an index. None if it has none."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        """The connection or the cursor that runs statements."""

    @classmethod
    def resolve(cls, address: Address) -> Address:
        """Returns an address that means the same in any current folder. Raises ConfigError if it is wrong."""
        return Address.of(f"{address.scheme}:///{file_of(address).absolute()}")

    @classmethod
    @abstractmethod
    def open(cls, address: Address) -> AbstractContextManager[Database]:
        """A transaction, which is committed at the end. Nothing of it remains if an error is raised inside."""

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """Runs a statement and returns its rows. ``?`` stands for a value."""
        return list(self.driver.execute(sql, values).fetchall())

    def columns(self, table: TableName) -> dict[str, str]:
        """Returns the columns of a table with their types. They are empty if there is no such table."""
        rows = self._columns(table)
        return dict(rows) if self.case else Columns(rows)

    @abstractmethod
    def _columns(self, table: TableName) -> list[tuple[str, str]]: ...

    def insertable(self, table: TableName) -> Sequence[str]:
        """Returns the columns to which values can be written: those that the database does not compute."""
        return list(self.columns(table))

    def type_of(self, field: pa.Field) -> str:
        """Returns the type of a column for these values. Raises SchemaError if there is none."""
        for fits, name in self.types:
            if fits(field.type):
                return name
        what = f"column {field.name!r} is of type {field.type}"
        raise SchemaError(f"{what}, which the database cannot hold; cast or drop it")

    def holds(self, declared: str, field: pa.Field) -> bool:
        """Returns whether a column of the ``declared`` type can hold these values."""
        wanted = self.type_of(field)
        wider = (types[types.index(wanted) :] for types in self.widths if wanted in types)
        return declared == wanted or any(declared in types for types in wider)

    def rules(self, table: TableName) -> Sequence[Rule]:
        """Returns which values a table cannot hold."""
        return self.unfit

    @abstractmethod
    def index(self, table: TableName, columns: Sequence[str], *, unique: bool) -> None:
        """Makes the index by which rows of a new table are found. ``unique``: no two rows are equal in ``columns``."""

    def same(self, places: pa.Table, one: str, other: str) -> list[str]:
        """Returns conditions under which rows of two tables are equal in the columns of ``places``. One of them is met.

        ``places``: the rows of one of the tables. Equality alone finds rows by an index or a hash table; nulls have
        conditions of their own if the database has no operator for both.
        """
        patterns = null_patterns(places) if self.equal is None else [()]
        pairs = [(name, f"{one}.{identifier(name)}", f"{other}.{identifier(name)}") for name in places.column_names]
        return [
            " AND ".join(
                f"{a} IS NULL AND {b} IS NULL" if name in nulls else f"{a} {self.equal or '='} {b}"
                for name, a, b in pairs
            )
            for nulls in patterns
        ]

    @abstractmethod
    def replace(self, table: TableName, change: TableChange) -> None:
        """Deletes the rows of a table that a batch replaces or retracts, and inserts the rows of the batch."""

    @abstractmethod
    def delete(self, table: TableName, places: str, patterns: pa.Table) -> None:
        """Deletes the rows of a table that are equal to one of another, in the columns of ``patterns``.

        ``places``: the name of the other table in SQL. ``patterns``: rows with nulls where rows of it have nulls.
        """


class Staging(Database):
    """A transaction on a database that takes all rows of a batch at once, as a table."""

    @abstractmethod
    def staged(self, rows: pa.Table) -> AbstractContextManager[None]:
        """Makes a table of rows, named ``STAGED``, as long as the context is open."""

    def replace(self, table: TableName, change: TableChange) -> None:
        for rows in (change.rows, change.removed):
            if rows.num_rows:
                with self.staged(rows):
                    for same in self.same(rows.select(list(change.identity)), "old", "new"):
                        self.query(f"DELETE FROM {table} AS old USING {STAGED} AS new WHERE {same}")
                    if rows is change.rows:
                        self._insert(table, rows.schema)

    def delete(self, table: TableName, places: str, patterns: pa.Table) -> None:
        for same in self.same(patterns, "old", "new"):
            self.query(f"DELETE FROM {table} AS old USING {places} AS new WHERE {same}")

    def _insert(self, table: TableName, schema: pa.Schema) -> None:
        declared = self.columns(table)
        values = [
            f"CAST({name} AS {declared[field.name]})" if field.metadata == JSON else name
            for field in schema
            for name in (identifier(field.name),)
        ]
        self.query(f"INSERT INTO {table} ({identifiers(schema.names)}) SELECT {', '.join(values)} FROM {STAGED}")


def prepare(database: Database, table: TableName, change: TableChange, *, add: bool = False) -> Content:
    """Makes the table if it is missing, and with ``add``, its columns. Returns what was there.

    Raises SchemaError if there is one that cannot hold the rows.
    """
    there = database.columns(table)
    schema = change.rows.schema
    check_names(schema.names, case=database.case, longest=database.longest_name)
    if not there:
        create(
            database, table, {field.name: database.type_of(field) for field in schema}, change.by_time, change.single
        )
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


def create(database: Database, table: TableName, columns: Mapping[str, str], by: Sequence[str], unique: bool) -> None:
    """Makes a table with an index. ``columns``: their types. ``by``, ``unique``: see :meth:`Database.index`."""
    declared = ", ".join(f"{identifier(name)} {type_}" for name, type_ in columns.items())
    database.query(f"CREATE TABLE {table} ({declared})")
    database.index(table, by, unique=unique)


def add_column(database: Database, table: TableName, name: str, type_: str) -> None:
    """Adds a column, null in the rows that are there."""
    database.query(f"ALTER TABLE {table} ADD COLUMN {identifier(name)} {type_}")


def content_of(database: Database, table: TableName) -> Content:
    """Returns whether a table has rows."""
    return Content.ROWS if database.query(f"SELECT 1 FROM {table} LIMIT 1") else Content.EMPTY


_OLD_MARKS = "name text PRIMARY KEY, query text NOT NULL, checkpoint text NOT NULL, batch bigint NOT NULL"
_NEWER = {"run": "text", "digest": "text", "filled": "bigint", "rewound": "text"}
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
    return found_mark(database, table)


def found_mark(database: Database, table: TableName) -> Mark | None:
    """Returns the mark of a table, and changes nothing."""
    marks = table.beside(MARKS)
    there = database.columns(marks)
    columns = ", ".join(
        ("query", "checkpoint", "batch", *(name if name in there else f"NULL AS {name}" for name in _NEWER))
    )
    rows = database.query(f"SELECT {columns} FROM {marks} WHERE name = ?", table.table) if there else []
    for query, checkpoint, batch, run, digest, filled, rewound in rows:
        full = None if filled is None else bool(filled)
        return Mark(History(query, checkpoint), int(batch), run=run, digest=digest, filled=full, rewound=rewound)
    return None


def set_mark(database: Database, table: TableName, mark: Mark | None) -> None:
    """Replaces the mark of a table, or removes it."""
    marks = table.beside(MARKS)
    if mark is None:
        database.query(f"DELETE FROM {marks} WHERE name = ?", table.table)
        return
    filled = None if mark.filled is None else int(mark.filled)
    columns = ("query", "checkpoint", "batch", *_NEWER)
    pairs = zip(columns, (*mark.history, mark.batch, mark.run, mark.digest, filled, mark.rewound), strict=True)
    known = {column: value for column, value in pairs if value is not None}
    values = (*known.values(), table.table)
    if database.query(f"SELECT 1 FROM {marks} WHERE name = ?", table.table):
        changed = ", ".join(f"{column} = {'?' if column in known else 'NULL'}" for column in columns)
        database.query(f"UPDATE {marks} SET {changed} WHERE name = ?", *values)
    else:
        places = ", ".join("?" * len(values))
        database.query(f"INSERT INTO {marks} ({', '.join([*known, 'name'])}) VALUES ({places})", *values)
