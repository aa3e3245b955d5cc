"""An operator's definition in its user's words, for the message about another definition. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from aion.aggregates import Aggregate
from aion.aggregates.binding import BoundAggregate
from aion.core.windows import Definition

Words = dict[str, list[tuple[str, str]]]


def words(
    schema: pa.Schema,
    *,
    key: Sequence[str],
    time: str,
    windows: Mapping[str, Definition],
    bound: Iterable[BoundAggregate],
    columns: Iterable[str],
    emit: str,
    unique: Iterable[str],
    updates: Iterable[str],
) -> Words:
    """Returns for each argument the names in it, each with what it stands for."""
    types = {field.name: str(field.type) for field in schema}
    return {
        "operator": [("windows", "")],
        "key": [(name, types[name]) for name in key],
        "time": [(time, types[time])],
        "windows": [(name, str(window)) for name, window in windows.items()],
        "aggregates": [(b.name, _told(b.aggregate, types)) for b in bound],
        "columns": [(name, types[name]) for name in columns if name not in (*key, time)],
        "emit": [(emit, "")],
        "unique": [(name, "") for name in unique],
        "updates": [(name, "") for name in updates],
    }


def computed(bound: Iterable[BoundAggregate], schema: pa.Schema) -> dict[str, Any]:
    """Returns the aggregates as JSON values: name, function, columns and options of each, and the columns' types.

    The options of an aggregate that has functions are null, because functions are not stored.
    """
    aggregates = []
    for b in bound:
        has_functions = any(callable(value) for _, value in b.aggregate.options)
        options = None if has_functions else [list(option) for option in b.aggregate.options]
        aggregates.append([b.name, b.aggregate.function, list(b.aggregate.columns), options])
    return {"aggregates": aggregates, "columns": [[field.name, str(field.type)] for field in schema]}


def _told(aggregate: Aggregate, types: Mapping[str, str]) -> str:
    read = ", ".join(types[name] for name in aggregate.columns if name in types)
    return f"{aggregate} of {read}" if read else str(aggregate)
