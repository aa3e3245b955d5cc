"""What a sink asks of a table of Delta Lake or Iceberg: a snapshot of it, and one commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as t

from aion.errors import SchemaError, SinkError
from aion.sinks.bad_values import Rule
from aion.sinks.marks import History, Mark
from aion.sinks.names import check_names
from aion.sinks.rows import TableChange
from aion.sinks.versions import Base, Commit
from state_backends.thresholds import threshold

MOST_PLACES = threshold(1_000)
"""A filter lists at most this many values. If there are more, it takes all between the first and the last."""


class Places(NamedTuple):
    """Rows, by their values in a column; ``between``: those with a value between two, or equal to one."""

    column: str
    values: list[Any]
    between: bool

    @classmethod
    def of(cls, change: TableChange) -> Places:
        """Returns where a change changes rows, or little more: mostly a few windows."""
        values = pc.unique(change.places[change.start]).sort()
        if len(values) <= MOST_PLACES:
            return cls(change.start, values.to_pylist(), False)
        return cls(change.start, [values[0].as_py(), values[-1].as_py()], True)


class Conflict(SinkError):
    """Somebody else has changed the table since it was opened. It can be opened and read again."""


class Lake(Protocol):
    """A table as it was when it was opened. A commit fails if somebody else has changed these rows since.

    It is read by the engine that writes it.
    """

    case: ClassVar[bool]
    """Whether two columns may differ only in case."""

    def __init__(self, table: str, options: Mapping[str, str]) -> None: ...

    def columns(self) -> pa.Schema | None:
        """Returns the columns, or None if there is no such table."""

    @property
    def computed(self) -> set[str]:
        """The columns that the engine computes from others, unless rows have them."""

    def create(self, schema: pa.Schema) -> None:
        """Makes an empty table."""

    def rules(self) -> Sequence[Rule]:
        """Returns which values the table cannot hold."""

    def count(self) -> int:
        """Returns how many rows the table has."""

    def mark(self, now: Mark) -> Mark | None:
        """Returns the mark of the table. ``now``: the mark of the batch."""

    def read(self, places: Places) -> pa.Table:
        """Returns all rows of some places."""

    def overwrite(self, places: Places, rows: pa.Table, mark: Mark, last: str | None = None) -> None:
        """Puts rows in the place of all that :meth:`read` returns, and replaces the mark, in one commit.

        ``last``: what the commit says of the batch before (:func:`aion.sinks.versions.last_of`). Raises Conflict.
        """

    def commits(self, history: History, batches: int) -> Iterable[Commit]:
        """Yields commits as a query sees them, the newest first. ``batches``: how many of its batches are enough."""

    def missing(self, version: int) -> str | None:
        """Returns why an earlier version cannot be restored, as words after ``because``, or None if it can."""

    def count_at(self, version: int) -> int:
        """Returns how many rows an earlier version has."""

    def restore(self, base: Base, mark: Mark, last: str) -> None:
        """Gives the table the rows of an earlier version, or none, and replaces the mark, in one commit.

        Raises Conflict.
        """

    def close(self) -> None:
        """Ends all connections."""


def columns_for(table: str, lake: Lake, schema: pa.Schema) -> pa.Schema:
    """Returns the columns of a table, which is made if it is missing. Raises SchemaError if they do not fit."""
    check_names(schema.names, case=lake.case)
    if lake.columns() is None:
        lake.create(pa.schema([pa.field(field.name, field.type) for field in schema]))
    there = lake.columns()
    assert there is not None
    for field in schema:
        if field.name not in there.names:
            raise SchemaError(
                f"table {table!r} has no column {field.name!r}; its columns are {', '.join(there.names)}. Add the "
                "column, select fewer columns before the sink, or use another table"
            )
        declared = there.field(field.name).type
        if not _holds(declared, field.type):
            raise SchemaError(
                f"table {table!r}: column {field.name!r} is {declared}, which cannot hold {field.type}; cast the "
                "column before the sink, or use another table"
            )
    return there


def _holds(declared: pa.DataType, type_: pa.DataType) -> bool:
    if t.is_integer(declared) and t.is_integer(type_):
        return bool(declared.bit_width >= type_.bit_width)
    if t.is_decimal(declared) and t.is_decimal(type_):
        more = declared.precision - declared.scale >= type_.precision - type_.scale
        return bool(more and declared.scale >= type_.scale)
    # What is nested has other names and sizes of the same parts. If it does not fit, the cast says so.
    return bool(declared == type_ or (t.is_nested(type_) and declared.id == type_.id))


def as_columns(rows: pa.Table, columns: pa.Schema) -> pa.Table:
    """Returns rows with the types that a table has for their columns."""
    return rows.cast(pa.schema([columns.field(name) for name in rows.column_names]))


def plain(schema: pa.Schema) -> pa.Schema:
    """Returns the same columns without metadata, and with strings and bytes as Spark sends them."""
    return pa.schema([pa.field(field.name, _plain(field.type), nullable=field.nullable) for field in schema])


def _plain(type_: pa.DataType) -> pa.DataType:
    if t.is_large_string(type_) or t.is_string_view(type_):
        return pa.string()
    if t.is_large_binary(type_) or t.is_binary_view(type_):
        return pa.binary()
    return pa.list_(type_.value_type) if t.is_large_list(type_) else type_
