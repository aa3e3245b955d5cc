"""The columns that a query names, and those of its result. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from aion.base.identity import can_identify
from aion.base.schema import instead_of_nested
from aion.core.windows import Calendar, Definition
from aion.errors import SchemaError

Column: TypeAlias = Any
"""A name, or a Column of Spark, which is not imported here."""
Columns: TypeAlias = Any
"""One of these, or several."""

# Columns that every result has besides the user's own.
WINDOW_COLUMNS = ("window", "window_start", "window_end")
PANE_SEQ = "pane_seq"
"""The column that orders panes: a later pane of a shard has a larger number. All rows of one pane share it."""
PANE_COLUMNS = ("pane", "kind", "events", "late_events", "closes_at", PANE_SEQ)
# Columns that results with completeness=True have, too.
COMPLETENESS_COLUMNS = ("completeness", "completeness_low")
OLD = "old_"
"""How the columns begin that results with emit="changes" have for each of the user's: the value before."""
NOT_OF_DROPPED = ("pane", "closes_at", PANE_SEQ, *COMPLETENESS_COLUMNS)
"""The columns that say nothing in a dropped row."""
DROPPED_COLUMNS = ("event_time", "lateness_us", "reason", "event")


def result_schema(
    key: Iterable[pa.Field],
    timestamp: pa.DataType,
    outputs: Iterable[pa.Field],
    *,
    completeness: bool = False,
    changes: bool = False,
) -> pa.Schema:
    """Returns the columns of a result: keys, window, the user's results, pane, and those for dropped rows."""
    return pa.schema(
        [
            *(pa.field(f.name, f.type) for f in key),
            pa.field("window", pa.string()),
            pa.field("window_start", timestamp),
            pa.field("window_end", timestamp),
            *(pa.field(f.name, f.type) for f in outputs),
            *(pa.field(OLD + f.name, f.type) for f in outputs if changes),
            pa.field("pane", pa.int32()),
            pa.field("kind", pa.string()),
            pa.field("events", pa.int64()),
            pa.field("late_events", pa.int64()),
            pa.field("closes_at", timestamp),
            pa.field(PANE_SEQ, pa.int64()),
            *((pa.field(name, pa.float64()) for name in COMPLETENESS_COLUMNS) if completeness else ()),
            pa.field("event_time", timestamp),
            pa.field("lateness_us", pa.int64()),
            pa.field("reason", pa.string()),
            pa.field("event", pa.string()),
        ]
    )


class ColumnName(str):
    """The text that Spark shows for a Column. It is the name of a plain column; only Spark knows that of an expression.

    ``column``: the Column itself.
    """

    __slots__ = ("column",)
    column: Any

    def __new__(cls, column: Any) -> ColumnName:
        shown = str(column).removeprefix("Column<'").removesuffix("'>")
        if re.fullmatch("`(?:[^`]|``)+`", shown):  # Spark Connect, or a name as in SQL
            shown = shown[1:-1].replace("``", "`")
        made = super().__new__(cls, shown)
        made.column = column
        return made


def column_name(given: Column, what: str, example: str) -> str:
    """Returns the name of a column that is given by its name or as a Column of Spark. ``what``: the argument.

    Raises SchemaError.
    """
    if isinstance(given, str):
        return given
    if type(given).__name__ == "Column" and type(given).__module__.startswith("pyspark.sql."):
        return ColumnName(given)
    raise SchemaError(f"{what}: {given!r} is neither the name of a column nor a Column; give e.g. {what}={example}")


def key_names(key: Columns | None) -> tuple[str, ...]:
    """Returns the names of the key columns. Raises SchemaError, as :func:`column_names`."""
    return () if key is None else column_names(key, "key", "'user'")


def column_names(given: Columns, what: str, example: str) -> tuple[str, ...]:
    """Returns different names, which may be given as Columns. ``what``: the argument. Raises SchemaError."""
    names = (given,) if isinstance(given, str) or type(given).__name__ == "Column" else given
    if isinstance(names, list | tuple):
        names = [column_name(each, what, example) if type(each).__name__ == "Column" else each for each in names]
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise SchemaError(
            f"{what}: {given!r} is neither the name of a column nor a list of names; give e.g. {what}={example} or "
            f"{what}=[{example}, 'page']"
        )
    if len(set(names)) != len(names):
        raise SchemaError(f"{what}: {list(names)} names a column twice")
    return tuple(names)


def unique_names(unique: Columns) -> tuple[str, ...]:
    """Returns the names of the columns of ``unique``. Raises SchemaError if it names none, or is not names."""
    names = tuple(map(str, column_names(unique, "unique", "'event_id'")))  # a Column cannot go to a task
    if not names:
        raise SchemaError("unique: no column is named; give e.g. unique='event_id', or leave it out")
    return names


def identity(unique: str | Sequence[str] | None, keys: Sequence[str], schema: pa.Schema) -> tuple[str, ...]:
    """Returns the columns by which an event is recognised. Raises SchemaError."""
    if unique is None:
        return ()
    names = unique_names(unique)
    for name in (*names, *keys):
        if name not in schema.names:
            raise SchemaError(f"unique: there is no column {name!r}; the columns are {', '.join(schema.names)}")
        if not can_identify(schema.field(name).type):
            raise SchemaError(
                f"unique: column {name!r} is of type {schema.field(name).type}; events are recognised by numbers, "
                "texts, bytes, dates and times; make a text of it"
            )
    return tuple(dict.fromkeys((*names, *keys)))


def asked_columns(asked: str | Sequence[str] | None, needed: Iterable[str], schema: pa.Schema) -> pa.Schema:
    """Returns the columns that are kept for ``apply``. ``asked``: by the user, or None for all. Raises SchemaError."""
    if asked is None:
        return schema
    names = column_names(asked, "columns", "'speed'")
    for name in names:
        if name not in schema.names:
            raise SchemaError(f"columns: there is no column {name!r}; the columns are {', '.join(schema.names)}")
    kept = {*names, *needed}
    return pa.schema([field for field in schema if field.name in kept])


def check_columns(schema: pa.Schema, keys: Sequence[str], time: str) -> None:
    for what, name in [("time", time), *(("key", k) for k in keys)]:
        if name not in schema.names:
            raise SchemaError(f"{what}: there is no column {name!r}; the columns are {', '.join(schema.names)}")
    if not pa.types.is_timestamp(schema.field(time).type):
        raise SchemaError(f"time: column {time!r} is of type {schema.field(time).type}; a timestamp is needed")
    for name in keys:
        type_ = schema.field(name).type
        if pa.types.is_nested(type_):
            raise SchemaError(f"key: column {name!r} is of type {type_}; {instead_of_nested(name, type_)}")


def check_names(keys: Sequence[str], outputs: Sequence[str], *, completeness: bool, changes: bool = False) -> None:
    taken = {*WINDOW_COLUMNS, *PANE_COLUMNS, *DROPPED_COLUMNS, *(COMPLETENESS_COLUMNS if completeness else ())}
    for what, names in (("key", keys), ("result column", outputs)):
        for name in names:
            if name in taken:
                raise SchemaError(f"{what}: {name!r} is a column that every result has; use another name")
    for name in outputs:
        if changes and OLD + name in (*keys, *outputs):
            raise SchemaError(
                f"result column: {OLD + name!r} is what {name!r} was, with emit='changes'; use another name"
            )
        if name in keys:
            raise SchemaError(f"result column: {name!r} is a key column already; use another name")


def check_zone(time: pa.Field, definitions: Mapping[str, Definition]) -> None:
    """A timestamp without zone may be what a clock showed somewhere, and a calendar needs instants."""
    for name, window in definitions.items():
        if isinstance(window, Calendar) and time.type.tz is None:
            raise SchemaError(
                f"windows: {name!r} needs instants, but the times in column {time.name!r} have no time zone; make it a "
                "timestamp with a zone: 'timestamp' instead of 'timestamp_ntz' in Spark, pa.timestamp('us', 'UTC') in "
                "Arrow"
            )
