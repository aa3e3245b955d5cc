"""The columns and predicates that decide where windows of keys begin and end. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from aion.aggregates.values import combined
from aion.core.gaps import is_gap
from aion.core.windows import Definition, Punctuated, Session
from aion.errors import ApplyError, SchemaError, WindowError

_MARKS = 64
"""Only the first 64 definitions may be Punctuated: each row has 64 bits, one for each, set if it is a punctuation."""


def deciding(definitions: Mapping[str, Definition], schema: pa.Schema) -> list[str]:
    """Returns the columns that decide where windows begin and end: those of predicates, and of gaps.

    A predicate that is a function may need all columns. Raises SchemaError or WindowError.
    """
    columns: list[str] = []
    for number, (name, window) in enumerate(definitions.items()):
        if isinstance(window, Punctuated) and number >= _MARKS:
            raise WindowError(
                f"windows: {name!r} is definition {number + 1}, and a Punctuated must be among the first {_MARKS}, "
                "because each needs a bit; put it before others"
            )
        if isinstance(window, Session) and window.gap_column is not None:
            if window.gap_column not in schema.names:
                raise SchemaError(
                    f"windows: {name!r}: there is no column {window.gap_column!r} for the gap; "
                    f"the columns are {', '.join(schema.names)}"
                )
            if not is_gap(type_ := schema.field(window.gap_column).type):
                raise SchemaError(
                    f"windows: {name!r}: the gap column {window.gap_column!r} is of type {type_}; give an interval "
                    "(Spark: INTERVAL DAY TO SECOND; pyarrow: duration) or a string like '30 minutes'"
                )
            columns.append(window.gap_column)
        if isinstance(window, Punctuated):
            predicate = window.predicate
            if not isinstance(predicate, str):
                columns += schema.names
                continue
            if predicate not in schema.names or not pa.types.is_boolean(schema.field(predicate).type):
                raise SchemaError(f"windows: {name!r}: there is no boolean column {predicate!r}")
            columns.append(predicate)
    return columns


def columns_of(definitions: Iterable[Definition]) -> list[str]:
    """Returns the columns that definitions name."""
    found = [window.gap_column for window in definitions if isinstance(window, Session)]
    found += [w.predicate for w in definitions if isinstance(w, Punctuated) and isinstance(w.predicate, str)]
    return [name for name in found if name is not None]


def says(window: Punctuated, events: pa.RecordBatch) -> Any:
    """Returns a mask of the events that the window's predicate calls punctuations. Raises ApplyError."""
    if isinstance(window.predicate, str):
        answer = events.column(window.predicate)
    else:
        try:
            answer = pa.array(window.predicate(events), pa.bool_())
        except Exception as error:
            raise ApplyError(f"windows: {window}: {type(error).__name__}: {error}") from error
        if len(answer) != events.num_rows:
            raise ApplyError(f"windows: {window}: {len(answer)} answers for {events.num_rows} events")
    return combined(answer).fill_null(False).to_numpy(zero_copy_only=False)
