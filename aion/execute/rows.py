"""Rows of the result: keys, window, the user's columns, pane, and what only dropped rows have. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from aion.core.operator.actions import WindowRef
from aion.core.plan import Plan


def pane_rows(
    plan: Plan,
    *,
    keys: Sequence[Any],
    outputs: Sequence[Any] | None,
    windows: Sequence[WindowRef | None],
    which: Any,
    kind: Any,
    events: Any,
    late_events: Any,
    pane: Any = None,
    event_time: Any = None,
    lateness_us: Any = None,
    reason: str | None = None,
    event: Any = None,
) -> pa.RecordBatch:
    """A batch of ``plan.result_schema``; ``which[i]`` is the number in ``windows`` of row i's window.

    Columns that are not given are null. Arrays all have one row each for every result row.
    """
    n = len(which)
    where = pa.array(which)
    names = pa.array([None if w is None else plan.names[w.definition] for w in windows], pa.string())
    columns = {
        **dict(zip(plan.key, keys, strict=True)),
        "window": names.take(where),
        "window_start": _times(plan, [None if w is None else w.start_us for w in windows]).take(where),
        "window_end": _times(plan, [None if w is None else w.end_us for w in windows]).take(where),
        **(dict(zip(plan.outputs.names, outputs, strict=True)) if outputs is not None else {}),
        "pane": pane,
        "kind": kind,
        "events": events,
        "late_events": late_events,
        "event_time": event_time,
        "lateness_us": None if lateness_us is None else np.full(n, lateness_us),
        "reason": None if reason is None else pa.repeat(reason, n),
        "event": event,
    }
    return pa.RecordBatch.from_arrays(
        [_array(columns.get(field.name), field.type, n) for field in plan.result_schema],
        schema=plan.result_schema,
    )


def _array(value: Any, type_: pa.DataType, n: int) -> pa.Array:
    if value is None:
        return pa.nulls(n, type_)
    if isinstance(value, pa.ChunkedArray):
        value = value.combine_chunks()
    if not isinstance(value, pa.Array):
        value = pa.array(value)
    return value if value.type == type_ else value.cast(type_)


def _times(plan: Plan, micros: list[int | None]) -> pa.Array:
    return pa.array(micros, pa.int64()).cast(plan.timestamp)
