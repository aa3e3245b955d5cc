"""From the blocks of an arrival to the rows of what was dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from aion.core.ingest.block import Block, decode
from aion.core.operator.actions import EmitDropped, EmitUntimed, PaneKind
from aion.core.plan import Plan
from aion.core.slicing.tree import ranges
from aion.execute.applying import dropped_events
from aion.execute.rows import TOO_LATE, WindowColumns, pane_rows

_ROWS_AT_ONCE = 1 << 20
_WINDOW = "\0window"
NO_WINDOW = WindowColumns(*(np.array([number]) for number in (-1, 0, 0)))


def dropped(plan: Plan, order: EmitDropped, blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
    """Rows of what came too late for each of the order's windows.

    Kept events one by one. Of partials a row for each key and window: which events share a block follows from how Spark
    made tasks of them, and must not show in what comes out.
    """
    found = [decode(blocks[index], plan.block_schema) for index in order.blocks]
    windows = WindowColumns(order.definition, order.start_us, order.end_us)
    if plan.layout is None:
        for index, batch in zip(order.blocks, found, strict=True):
            slice_us = blocks[index].header.slice_us  # kept events have no segments: a block is of one slice
            own = np.flatnonzero((order.start_us <= slice_us) & (slice_us < order.end_us))
            which = np.repeat(own, batch.num_rows)
            rows = np.tile(np.arange(batch.num_rows), len(own))
            yield dropped_events(plan, batch, rows, windows, which, order.lateness_us[which], TOO_LATE)
        return
    table = pa.Table.from_batches(found)
    slices = plan.slices_of(table)
    if slices is None:
        counts = [batch.num_rows for batch in found]
        slices = np.repeat([blocks[index].header.slice_us for index in order.blocks], counts)
    by_slice = np.argsort(slices, kind="stable")
    begins, ends = (np.searchsorted(slices[by_slice], us) for us in (order.start_us, order.end_us))
    upto, start = np.cumsum(ends - begins), 0
    while start < len(upto):
        done = int(upto[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(upto, done + _ROWS_AT_ONCE, side="right")))
        some = slice(start, stop)
        lengths = (ends - begins)[some]
        rows = by_slice[ranges(begins[some], lengths)]
        which = np.repeat(np.arange(start, stop), lengths)
        yield _partials(plan, table.take(pa.array(rows)), windows, which, order)
        start = stop


def untimed(plan: Plan, orders: Sequence[EmitUntimed], blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
    """Rows of events without a time that windows are made for: kept events one by one, partials by key and reason."""
    for reason in sorted({order.reason for order in orders}):
        found = [decode(blocks[order.index], plan.block_schema) for order in orders if order.reason == reason]
        if plan.layout is None:
            for batch in found:
                rows, none = np.arange(batch.num_rows), np.zeros(batch.num_rows, np.int64)
                yield dropped_events(plan, batch, rows, NO_WINDOW, none, None, reason)
        else:
            table = pa.Table.from_batches(found)
            yield _partials(plan, table, NO_WINDOW, np.zeros(table.num_rows, np.int64), None, reason)


def _partials(
    plan: Plan,
    rows: pa.Table,
    windows: WindowColumns,
    which: np.ndarray,
    order: EmitDropped | None,
    reason: str = TOO_LATE,
) -> pa.RecordBatch:
    """A row for each key and window of these partials; row i is of window ``which[i]``."""
    assert plan.layout is not None
    keys = [field.name for field in plan.key_fields]
    states = plan.layout.combine([_WINDOW, *keys], rows.append_column(_WINDOW, pa.array(which)))
    which, events = states.column(_WINDOW).to_numpy(), states.column("p0")
    return pane_rows(
        plan,
        keys=[states.column(name) for name in keys],
        outputs=list(plan.layout.lower(plan.layout.states(states)).values()),
        windows=windows,
        which=which,
        kind=pa.repeat(PaneKind.DROPPED.value, len(which)),
        events=events,
        late_events=events if order is not None else pa.array(np.zeros(len(which), np.int64)),
        lateness_us=None if order is None else order.lateness_us[which],
        reason=reason,
    )
