"""Makes the dropped rows for events in the blocks of an arrival."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from aion.core.ingest.encoding import decode
from aion.core.life.actions import EmitDropped, EmitUntimed, PaneKind
from aion.core.query.plan import Plan
from aion.core.slicing.tree import ranges
from aion.execute.applying import dropped_events
from aion.execute.rows import TOO_LATE, WindowColumns, pane_rows
from state_backends.format.block import Block
from state_backends.thresholds import threshold

_BYTES_AT_ONCE = threshold(64 << 20, 256)
_ROWS_AT_ONCE = threshold(1 << 20)
_WINDOW = "\0window"
NO_WINDOW = WindowColumns(*(np.array([number]) for number in (-1, 0, 0)))


def dropped(plan: Plan, order: EmitDropped, blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
    """The rows for events that came too late for the windows of the order.

    For kept events, there is a row for each event and window. For partials, there is a row for each key and window,
    over all blocks: Spark's tasks decide which events share a block, and that must not show in the output.
    """
    batches = [decode(blocks[index], plan.block_schema) for index in order.blocks]
    windows = WindowColumns(order.definition, order.start_us, order.end_us)
    if plan.layout is None:
        for index, batch in zip(order.blocks, batches, strict=True):
            slice_us = blocks[index].header.slice_us  # a block of kept events holds a single slice
            own = np.flatnonzero((order.start_us <= slice_us) & (slice_us < order.end_us))
            # Each window repeats the text of the events.
            step = max(_BYTES_AT_ONCE // max(batch.nbytes, 1), 1)
            for begin in range(0, len(own), step):
                shown = own[begin : begin + step]
                which, rows = np.repeat(shown, batch.num_rows), np.tile(np.arange(batch.num_rows), len(shown))
                yield dropped_events(plan, batch, rows, windows, which, order.lateness_us[which], TOO_LATE)
        return
    table = pa.Table.from_batches(batches)
    slices = plan.slices_of(table)
    if slices is None:
        counts = [batch.num_rows for batch in batches]
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
    """The rows for events without a time in range: one for each kept event, or one for each key and reason."""
    for reason in sorted({order.reason for order in orders}):
        batches = [decode(blocks[order.index], plan.block_schema) for order in orders if order.reason == reason]
        if plan.layout is None:
            for batch in batches:
                rows, none = np.arange(batch.num_rows), np.zeros(batch.num_rows, np.int64)
                yield dropped_events(plan, batch, rows, NO_WINDOW, none, None, reason)
        else:
            table = pa.Table.from_batches(batches)
            yield _partials(plan, table, NO_WINDOW, np.zeros(table.num_rows, np.int64), None, reason)


def _partials(
    plan: Plan,
    rows: pa.Table,
    windows: WindowColumns,
    which: np.ndarray,
    order: EmitDropped | None,
    reason: str = TOO_LATE,
) -> pa.RecordBatch:
    """A result row for each key and window of these partials. Row i of ``rows`` belongs to window ``which[i]``."""
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
