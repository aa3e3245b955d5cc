"""The columns of what is read of a state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from aion.core.join.plan import JoinPlan
from aion.core.query.plan import Plan

_OF_PANES = ("events", "late_events", "closes_at")


def of_windows(plan: Plan) -> pa.Schema:
    """Returns the columns for windows: key, window, results, and what is known of the window.

    A column of ours whose name a column of the user has begins with ``aion_``.
    """
    shown = [plan.result_schema.field(name) for name in shown_of(plan)]
    taken = {field.name for field in shown}
    own = (("bound", pa.duration("us")), ("status", pa.string()), ("bytes", pa.int64()), ("tier", pa.string()))
    return pa.schema([*shown, *(pa.field(f"aion_{name}" if name in taken else name, type_) for name, type_ in own)])


def shown_of(plan: Plan) -> list[str]:
    """Returns the columns of panes that are shown."""
    return [*plan.key, "window", "window_start", "window_end", *plan.outputs.names, *_OF_PANES]


def of_join(plan: JoinPlan) -> pa.Schema:
    """Returns the columns for the rows of a join: the side, the key, and the columns of both sides."""
    own = [
        pa.field("side", pa.string()),
        pa.field("event_time", plan.timestamp),
        pa.field("matched", pa.bool_()),
        pa.field("closes_at", plan.timestamp),
    ]
    fields = [plan.left.schema.field(name) for name in plan.key]
    fields += [f for side in plan.sides for f in side.schema if f.name not in plan.key]
    taken = {field.name for field in fields}
    return pa.schema([*fields, *(f.with_name(f"aion_{f.name}") if f.name in taken else f for f in own)])


def conformed(columns: Mapping[str, Any], rows: int, schema: pa.Schema) -> pa.RecordBatch:
    """Returns rows with the columns of a schema. One that is not given is null."""
    arrays = []
    for field in schema:
        value = columns.get(field.name)
        array = pa.nulls(rows, field.type) if value is None else value
        array = array if isinstance(array, pa.Array) else pa.array(array)
        arrays.append(array if array.type == field.type else array.cast(field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
