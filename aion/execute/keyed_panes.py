"""From rows of blocks to the panes of keyed windows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from aion.aggregates.groups import Groups
from aion.aggregates.values import combined
from aion.core.operator.actions import Kind
from aion.core.operator.keyed.orders import ExecuteKeyed, Retract
from aion.core.operator.keyed.table import Ints, Places, Table, coded, ranges
from aion.core.plan import Plan
from aion.execute.rows import WindowColumns, pane_rows

SEQ, ROW = "\0seq", "\0row"
_ROWS_PER_BLOCK = 1 << 32


class Gathered(NamedTuple):
    """Windows of which all rows are at hand: those of window i are ``rows[offsets[i] : offsets[i + 1]]``."""

    windows: Table
    rows: Ints
    offsets: Ints


def placed(batch: pa.RecordBatch, seq: int) -> pa.RecordBatch:
    """Rows of a block, each with the block's seq and its own place in it."""
    n = batch.num_rows
    columns = [*batch.columns, pa.array(np.full(n, seq)), pa.array(np.arange(n))]
    return pa.RecordBatch.from_arrays(columns, [*batch.schema.names, SEQ, ROW])


def gather(plan: Plan, order: ExecuteKeyed, table: pa.Table, rows_at_once: int) -> Iterator[Gathered]:
    """Some of the windows at a time, with about so many rows or one window; only those of keys that the table has.

    ``table``: rows as :func:`placed` makes them, in the order of arrival, all those of a key or none.
    """
    columns = [combined(table.column(name)) for name in plan.block_keys]
    codes, window_codes = coded((columns, table.num_rows), (order.windows.keys, len(order.windows)))
    firsts = plan.instants(table)[0]
    if order.members is None:
        by_time, places = Places.ordering(codes, firsts, table.column(SEQ).to_numpy())
        begins = places.before(window_codes, order.windows["start"])
        lengths = places.after(window_codes, order.windows["last"]) - begins
        rows = by_time
    else:
        seqs, of = np.unique(table.column(SEQ).to_numpy(), return_inverse=True)
        found = of * _ROWS_PER_BLOCK + table.column(ROW).to_numpy()
        by_name = np.argsort(found)
        member_of = np.searchsorted(seqs, order.members.seqs)
        is_there = np.append(seqs, -1)[member_of] == order.members.seqs
        members = np.where(is_there, member_of * _ROWS_PER_BLOCK + order.members.rows, -1)
        at = np.minimum(np.searchsorted(found[by_name], members), len(found) - 1)
        rows, begins = by_name[at], order.members.begins
        here = found[rows] == members
        lengths = np.where(here[begins], order.members.lengths, 0)
    there = np.flatnonzero(lengths)
    upto = np.cumsum(lengths[there])
    start = 0
    while start < len(there):
        done = int(upto[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(upto, done + rows_at_once, side="right")))
        some = there[start:end]
        offsets = np.concatenate(([0], np.cumsum(lengths[some])))
        yield Gathered(order.windows.take(some), rows[ranges(begins[some], lengths[some])], offsets)
        start = end


def panes(plan: Plan, order: ExecuteKeyed, table: pa.Table, rows_at_once: int) -> Iterator[pa.RecordBatch]:
    """The panes of windows computed from partials."""
    layout = plan.layout
    assert layout is not None
    for windows, rows, offsets in gather(plan, order, table, rows_at_once):
        groups = Groups(np.repeat(np.arange(len(windows)), np.diff(offsets)), len(windows))
        take = pa.array(_in_order(plan, table, rows, groups))

        def column(name: str, take: pa.Array = take) -> pa.Array:
            return combined(table.column(name)).take(take)

        states = layout.merge(groups, column)
        yield _rows(plan, order.definition, order.kind, windows, list(layout.lower(states).values()))


def _in_order(plan: Plan, table: pa.Table, rows: Ints, groups: Groups) -> Ints:
    """The rows of each window slice by slice and cell by cell, and there as they came: which no folding changes."""
    assert plan.layout is not None
    if plan.layout.commutative or plan.cell_us is None:
        return rows
    firsts = plan.instants(table)[0][rows]
    seqs = table.column(SEQ).to_numpy()[rows]
    return rows[np.lexsort((rows, seqs, firsts // plan.cell_us, plan.grid.starts(firsts), groups.ids))]


def retractions(plan: Plan, order: Retract) -> pa.RecordBatch:
    """A row for each window that is no more, without values: a sink that replaces by key and window deletes it."""
    zeros = np.zeros(len(order.windows), np.int64)
    windows = order.windows.replaced(events=zeros, late_events=zeros)
    return _rows(plan, order.definition, Kind.RETRACTED, windows, None)


def _rows(plan: Plan, definition: int, kind: Kind, windows: Table, outputs: Sequence[Any] | None) -> pa.RecordBatch:
    return pane_rows(
        plan,
        keys=windows.keys,
        outputs=outputs,
        windows=WindowColumns(np.full(len(windows), definition), windows["start"], windows["end"]),
        which=np.arange(len(windows)),
        pane=windows["pane"].astype(np.int32),
        kind=pa.repeat(kind.value, len(windows)),
        events=windows["events"],
        late_events=windows["late_events"],
    )
