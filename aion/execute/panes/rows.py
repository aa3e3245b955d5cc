"""Makes result rows: keys, window, the user's columns, pane, and the columns that only dropped rows have. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aion.base.numbers import NEVER
from aion.core.life.actions import Execute, PaneKind, WindowRef
from aion.core.query.plan import Plan

TOO_LATE = "later than the window's bound"
"""The reason in dropped rows of events that came too late for their window."""
LEFT_OUT = "older than the definitions of the windows"
"""The reason in those of events whose windows went when the query was started with other definitions."""

ENTERED = "\0entered "
"""How the columns begin that say how many events a result is made from."""


class WindowColumns(NamedTuple):
    """Windows as columns. The definition -1 stands for no window.

    ``closes_us``: the watermark from which on a window cannot change. It is NEVER if that is not known, and None
    without a window.
    """

    definition: Any
    start_us: Any
    end_us: Any
    closes_us: Any = None

    @classmethod
    def of(cls, windows: Iterable[WindowRef | None]) -> WindowColumns:
        none = WindowRef(-1, 0, 0)
        return cls(*np.array([none if w is None else w for w in windows], np.int64).reshape(-1, 3).T)

    @classmethod
    def of_execution(cls, execute: Execute) -> WindowColumns:
        return cls(execute.definition, execute.start_us, execute.end_us, execute.closes_us)

    def take(self, which: Any) -> WindowColumns:
        """Returns the windows with these numbers. A window may come several times."""
        return WindowColumns(*(None if column is None else column[which] for column in self))


class RowFacts(NamedTuple):
    """What result rows are besides their values. Each array has one value for each row. ``pane``: None shows null."""

    kind: PaneKind
    events: Any
    late_events: Any
    pane: Any = None


class Dropped(NamedTuple):
    """What only dropped rows have. What is None is null."""

    reason: str
    lateness_us: Any = None
    event_time: Any = None
    event: Any = None


def pane_rows(
    plan: Plan,
    keys: Sequence[Any],
    windows: WindowColumns,
    counted: RowFacts,
    outputs: Sequence[Any] | None = None,
    dropped: Dropped | None = None,
) -> pa.RecordBatch:
    """A batch of ``plan.result_schema``. Row i is about window i. Columns that are not given are null."""
    n = len(windows.definition)
    none = windows.definition < 0 if (windows.definition < 0).any() else None
    reason, lateness_us, event_time, event = dropped or (None, None, None, None)
    columns = {
        **dict(zip(plan.key, keys, strict=True)),
        "window": pa.array(plan.names, pa.string()).take(pa.array(windows.definition, mask=none)),
        "window_start": pa.array(windows.start_us, mask=none).cast(plan.timestamp),
        "window_end": pa.array(windows.end_us, mask=none).cast(plan.timestamp),
        **(_outputs(plan, outputs, windows.start_us) if outputs is not None else {}),
        "pane": None if counted.pane is None else counted.pane.astype(np.int32),
        "kind": pa.repeat(counted.kind.value, n),
        "events": counted.events,
        "late_events": counted.late_events,
        "closes_at": _closes_at(plan, windows.closes_us),
        "event_time": event_time,
        "lateness_us": None if lateness_us is None else np.full(n, lateness_us),
        "reason": None if reason is None else pa.repeat(reason, n),
        "event": event,
    }
    return pa.RecordBatch.from_arrays(
        [_array(columns.get(field.name), field.type, n) for field in plan.result_schema],
        schema=plan.result_schema,
    )


def with_entered(rows: pa.RecordBatch, entered: Mapping[str, Any]) -> pa.RecordBatch:
    """Adds columns that :mod:`aion.execute.panes.changing` reads and takes away.

    They say how many events a result is made from whose last digit says nothing.
    """
    for name, counts in entered.items():
        rows = rows.append_column(ENTERED + name, counts)
    return rows


def _outputs(plan: Plan, outputs: Sequence[Any], starts_us: Any) -> dict[str, Any]:
    """Returns the user's columns. They are null in windows that began before they did."""
    found = dict(zip(plan.outputs.names, outputs, strict=True))
    if plan.history is not None:
        for name, since_us in plan.history.columns.items():
            found[name] = pc.if_else(pa.array(starts_us >= since_us), found[name], pa.scalar(None, found[name].type))
    return found


def _closes_at(plan: Plan, closes_us: Any) -> pa.Array | None:
    return None if closes_us is None else pa.array(closes_us, mask=closes_us == NEVER).cast(plan.timestamp)


def _array(value: Any, type_: pa.DataType, n: int) -> pa.Array:
    if value is None:
        return pa.nulls(n, type_)
    if isinstance(value, pa.ChunkedArray):
        value = value.combine_chunks()
    if not isinstance(value, pa.Array):
        value = pa.array(value)
    return value if value.type == type_ else value.cast(type_)
