"""Values that a store cannot hold: they are found before anything is written, and named. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from datetime import date, datetime
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aion.aggregates.values import combined
from aion.errors import ConfigError, SinkError
from aion.sinks.rows import Mask, TableChange

t = pa.types
ERROR, REPLACE, DROP = "error", "replace", "drop"
JSON = {b"aion": b"json"}
"""The metadata of a column that holds JSON."""
_INSTEAD = "\N{REPLACEMENT CHARACTER}"
_LONGEST = 60


class Rule(NamedTuple):
    """Values that a store cannot hold.

    ``why``: what is wrong with one, after "the value". ``applies``: whether a column may have such values. ``finds``:
    which values are such ones. ``instead``: the column with other values in their place; without it, such a row is left
    out if they are in its key or window.
    """

    why: str
    applies: Callable[[pa.Field], bool]
    finds: Callable[[pa.Array], pa.Array]
    instead: Callable[[pa.Array], pa.Array] | None


def _is_text(field: pa.Field) -> bool:
    return bool(t.is_string(field.type) or t.is_large_string(field.type))


def _is_not_utf8(column: pa.Array) -> pa.Array:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return pa.array([_decoded(value) is None for value in column.cast(_bytes_of(column)).to_pylist()])
    return pa.repeat(False, len(column))


def _decoded(value: bytes | None) -> str | None:
    try:
        return "" if value is None else value.decode()
    except UnicodeDecodeError:
        return None


def _as_utf8(column: pa.Array) -> pa.Array:
    values = column.cast(_bytes_of(column)).to_pylist()
    return pa.array([None if v is None else v.decode(errors="replace") for v in values], column.type)


def _bytes_of(column: pa.Array) -> pa.DataType:
    return pa.large_binary() if t.is_large_string(column.type) else pa.binary()


UTF8 = Rule("is not UTF-8", _is_text, _is_not_utf8, _as_utf8)
"""For every store. Spark takes any bytes as a text, with ``CAST(value AS string)`` for example."""
NUL = Rule(
    "has a NUL, which PostgreSQL cannot hold in text",
    lambda field: _is_text(field) and field.metadata != JSON,
    lambda column: pc.match_substring(column, "\0"),
    lambda column: pc.replace_substring(column, "\0", _INSTEAD),
)
_ESCAPED = r"((?:^|[^\\])(?:\\\\)*)(?:\\u0000)+"
NUL_IN_JSON = Rule(
    "has a NUL, which PostgreSQL cannot hold in JSON",
    lambda field: field.metadata == JSON,
    lambda column: pc.match_substring_regex(column, _ESCAPED),
    lambda column: pc.replace_substring_regex(column, _ESCAPED, rf"\1{_INSTEAD}"),
)


def times(first_us: int, last_us: int) -> Rule:
    """Returns the rule of a store that holds times and dates from one instant to another, in microseconds."""

    def finds(column: pa.Array) -> pa.Array:
        day = t.is_date(column.type)
        numbers = column.cast(pa.int32() if day else pa.int64())
        unit = _DAY_US if day else _UNITS_US[column.type.unit]
        first, last = (-(-first_us // unit), last_us // unit)
        return pc.or_(pc.less(numbers, first), pc.greater(numbers, last))

    def applies(field: pa.Field) -> bool:
        return bool(t.is_date32(field.type) or (t.is_timestamp(field.type) and field.type.unit in _UNITS_US))

    return Rule("is a time that the store cannot hold", applies, finds, None)


_DAY_US = 86_400_000_000
_UNITS_US = {"s": 1_000_000, "ms": 1_000, "us": 1}
_EPOCH = datetime(1970, 1, 1)
YEARS_1_TO_9999 = times((date.min - _EPOCH.date()).days * _DAY_US, ((date.max - _EPOCH.date()).days + 1) * _DAY_US - 1)


def longer_than(name: str, characters: int) -> Rule:
    """Returns the rule of a column whose texts have at most some characters."""
    return Rule(
        f"has more than {characters} characters, which the column of the table cannot hold",
        lambda field: field.name == name and _is_text(field),
        lambda column: pc.greater(pc.utf8_length(column), characters),
        lambda column: pc.utf8_slice_codeunits(column, 0, characters),
    )


def empty(names: Container[str]) -> Rule:
    """Returns the rule of columns by which a table of Delta Lake is partitioned."""
    return Rule(
        "is empty, which Delta Lake takes for null in a column that a table is partitioned by",
        lambda field: field.name in names and _is_text(field),
        lambda column: pc.equal(column, ""),
        lambda column: pa.nulls(len(column), column.type),
    )


def check_choice(on_bad_value: str) -> None:
    """Raises ConfigError for a word that ``on_bad_value=`` does not take."""
    if on_bad_value not in (ERROR, REPLACE, DROP):
        raise ConfigError(f"on_bad_value: {on_bad_value!r} is none of 'error', 'replace' and 'drop'")


def checked(change: TableChange, rules: Sequence[Rule], on_bad_value: str) -> tuple[TableChange, list[str]]:
    """Returns a change without the values that break a rule, and what was done, in words.

    Where a row is left out, the rows of its key and window in the table go. Raises SinkError with ``"error"``.
    """
    done = list[str]()

    def mended(table: pa.Table, identity: Sequence[str]) -> _Mended:
        return _mended(table, identity, rules, on_bad_value, done)

    rows, gone = mended(change.rows, change.identity), mended(change.removed, change.identity)
    dropped = None if change.dropped is None else mended(change.dropped, ())
    if not done:
        return change, done
    if dropped is not None:
        change = replace(change, dropped=dropped.table.filter(pa.array(dropped.kept)))
    change = replace(change, rows=rows.table, removed=gone.table.filter(pa.array(gone.kept)))
    return change.without(rows.kept, rows.found), done


class _Mended(NamedTuple):
    """A table with other values. ``kept``: the rows that can be written. ``found``: those with a key and window that
    the store can hold."""

    table: pa.Table
    kept: Mask
    found: Mask


def _mended(
    table: pa.Table, identity: Sequence[str], rules: Sequence[Rule], on_bad_value: str, done: list[str]
) -> _Mended:
    kept = found = np.ones(table.num_rows, bool)
    for number, field in enumerate(table.schema):
        for rule in (rule for rule in rules if rule.applies(field)):
            column = combined(table.column(number))
            bad = rule.finds(column).fill_null(False).to_numpy(zero_copy_only=False)
            if not bad.any():
                continue
            if on_bad_value == ERROR:
                raise SinkError(_refusal(table, identity, number, int(bad.argmax()), rule))
            of_key = field.name in identity
            if on_bad_value == REPLACE and (rule.instead is not None or not of_key):
                instead = pa.scalar(None, field.type) if rule.instead is None else rule.instead(column)
                table = table.set_column(number, field, pc.if_else(pa.array(bad), instead, column))
                what = "replaced"
            else:
                kept, found = kept & ~bad, found & ~bad if of_key else found
                what = "left out with its row"
            done.append(f"column {field.name!r} has {bad.sum()} values that were {what}: each {rule.why}")
    return _Mended(table, kept, found)


def _refusal(table: pa.Table, identity: Sequence[str], column: int, row: int, rule: Rule) -> str:
    names = table.column_names
    where = ", ".join(f"{name}={_shown(table[name], row)}" for name in identity)
    return (
        f"column {names[column]!r}{f' of {where}' if where else ' of a dropped row'}: the value "
        f"{_shown(table.column(column), row)} {rule.why}; pass on_bad_value='replace' or 'drop', or clean the column "
        "before the sink (docs/how-to/sinks.md#values-that-a-table-cannot-hold)"
    )


def _shown(column: pa.ChunkedArray, row: int) -> str:
    """A value as it is, whatever it is."""
    one = column.slice(row, 1)
    for type_ in (None, pa.binary(), pa.int64(), pa.int32()):
        try:
            (value,) = (one if type_ is None else one.cast(type_)).to_pylist()
        except (ValueError, OverflowError, pa.ArrowException):
            continue
        text = str(value) if isinstance(value, datetime | date) else repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return "?"
