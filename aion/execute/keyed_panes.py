"""Turns rows of blocks into the panes of windows of single keys. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from aion.aggregates.groups import Groups
from aion.aggregates.partial import Partial, States
from aion.aggregates.values import combined
from aion.core.operator.actions import PaneKind
from aion.core.operator.keyed.orders import ExecuteKeyed, Retract
from aion.core.operator.keyed.table import Ints, Places, Table, coded
from aion.core.plan import Plan
from aion.core.slicing.tree import SliceTree, ranges, spans, trees_for
from aion.execute.rows import WindowColumns, pane_rows

SEQ, ROW = "\0seq", "\0row"
_ROWS_PER_BLOCK = 1 << 32


class Gathered(NamedTuple):
    """Windows and all their rows. The rows of window i are ``rows[offsets[i] : offsets[i + 1]]``."""

    windows: Table
    rows: Ints
    offsets: Ints


def placed(batch: pa.RecordBatch, seq: int) -> pa.RecordBatch:
    """The rows of a block. Each gets two more columns: the block's seq, and its own position in the block."""
    n = batch.num_rows
    columns = [*batch.columns, pa.array(np.full(n, seq)), pa.array(np.arange(n))]
    return pa.RecordBatch.from_arrays(columns, [*batch.schema.names, SEQ, ROW])


class Located(NamedTuple):
    """Where the rows of windows are. The rows of window i are ``rows[begins[i] : begins[i] + lengths[i]]``.

    All lengths are above 0. Windows that overlap share rows.
    """

    windows: Table
    rows: Ints
    begins: Ints
    lengths: Ints


def locate(plan: Plan, order: ExecuteKeyed, table: pa.Table) -> Located:
    """Finds the rows of the windows whose keys are in the table.

    ``table``: rows from :func:`placed`, in the order of arrival. It has all rows of a key or none.
    """
    columns = [combined(table.column(name)) for name in plan.block_keys]
    codes, window_codes = coded((columns, table.num_rows), (order.windows.keys, len(order.windows)))
    firsts = plan.instants(table)[0]
    if order.members is None:
        rows, places = Places.ordering(codes, firsts, table.column(SEQ).to_numpy())
        begins = places.before(window_codes, order.windows["start"])
        lengths = places.after(window_codes, order.windows["last"]) - begins
    else:
        seqs, block_of = np.unique(table.column(SEQ).to_numpy(), return_inverse=True)
        # A block and a position in it, as one integer, identify a row.
        names = block_of * _ROWS_PER_BLOCK + table.column(ROW).to_numpy()
        by_name = np.argsort(names)
        member_of = np.searchsorted(seqs, order.members.seqs)
        is_there = np.append(seqs, -1)[member_of] == order.members.seqs
        members = np.where(is_there, member_of * _ROWS_PER_BLOCK + order.members.rows, -1)
        at = np.minimum(np.searchsorted(names[by_name], members), len(names) - 1)
        rows, begins = by_name[at], order.members.begins
        here = names[rows] == members
        lengths = np.where(here[begins], order.members.lengths, 0)
    there = np.flatnonzero(lengths)
    return Located(order.windows.take(there), rows, begins[there], lengths[there])


def gather(plan: Plan, order: ExecuteKeyed, table: pa.Table, rows_at_once: int) -> Iterator[Gathered]:
    """The windows of the keys in the table, with their rows. ``table``: see :func:`locate`.

    Yields some at a time: windows with at most ``rows_at_once`` rows together, or a single window.
    """
    windows, rows, begins, lengths = locate(plan, order, table)
    for some in _stretches(lengths, rows_at_once):
        offsets = np.concatenate(([0], np.cumsum(lengths[some])))
        yield Gathered(windows.take(_numbers(some)), rows[ranges(begins[some], lengths[some])], offsets)


def panes(plan: Plan, order: ExecuteKeyed, table: pa.Table, rows_at_once: int) -> Iterator[pa.RecordBatch]:
    """The panes of windows that are computed from partials.

    Windows that overlap (per record, by count) share runs of rows that are combined once, as overlapping periodic
    windows share slices. So a window of n rows costs O(log n). Partials that cannot be combined in any grouping are
    combined from single rows.
    """
    layout = plan.layout
    assert layout is not None
    windows, rows, begins, lengths = locate(plan, order, table)
    if not len(lengths):
        return
    trees = _trees(plan, table, rows, begins, lengths, rows_at_once)
    taken = [spans(tree.starts, begins, begins + lengths) for tree in trees]
    for some in _stretches(np.sum([part.lengths.sum(axis=1) for part in taken], axis=0), rows_at_once):
        count = some.stop - some.start
        states: dict[Partial, States] = {}
        for tree, part in zip(trees, taken, strict=True):
            own = part.rows(some)
            groups = Groups(own.window_of, count)
            at = own.rows if len(tree.starts) > 1 else _in_order(plan, table, rows, own.rows, groups)
            states = layout.merge(groups, tree.taken(at), tree.partials, states)
        outputs = list(layout.lower(states).values())
        shown = windows.take(_numbers(some))
        yield _rows(plan, order.definition, order.kind, shown, outputs, shown["closes"])


def _trees(plan: Plan, table: pa.Table, rows: Ints, begins: Ints, lengths: Ints, rows_at_once: int) -> list[SliceTree]:
    """Trees over the rows in their order, as if each row were a slice.

    One tree is for the partials that may be combined beforehand, another for those that may not.
    """
    layout = plan.layout
    assert layout is not None
    take = None if np.array_equal(rows, np.arange(table.num_rows)) else pa.array(rows)
    columns = {}
    for name in (name for names in layout.partials.values() for name in names):
        column = combined(table.column(name))
        columns[name] = column if take is None else column.take(take)
    keys, starts = np.zeros(len(rows), np.int64), np.arange(len(rows) + 1)

    def tree(partials: Collection[Partial]) -> SliceTree:
        return SliceTree(layout, partials, columns, keys, 1, starts)

    in_any_order = layout.commutative or plan.cell_us is None
    limit_bytes = rows_at_once * max(table.nbytes // max(table.num_rows, 1), 1)
    return trees_for(tree, begins, begins + lengths, limit_bytes, "auto" if in_any_order else "lazy")


def _stretches(lengths: Ints, rows_at_once: int) -> Iterator[slice]:
    """Splits windows into stretches. Each has at most ``rows_at_once`` rows, or is a single window."""
    upto = np.cumsum(lengths)
    start = 0
    while start < len(lengths):
        done = int(upto[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(upto, done + rows_at_once, side="right")))
        yield slice(start, end)
        start = end


def _numbers(some: slice) -> Ints:
    return np.arange(some.start, some.stop)


def _in_order(plan: Plan, table: pa.Table, rows: Ints, taken: Ints, groups: Groups) -> Ints:
    """Sorts the rows of each window for partials whose order matters: by slice, cell and arrival.

    Compaction does not change this order. ``taken``: indexes into ``rows``.
    """
    assert plan.layout is not None
    if plan.layout.commutative or plan.cell_us is None:
        return taken
    own = rows[taken]
    firsts = plan.instants(table)[0][own]
    seqs = table.column(SEQ).to_numpy()[own]
    return taken[np.lexsort((own, seqs, firsts // plan.cell_us, plan.grid.starts(firsts), groups.ids))]


def retractions(plan: Plan, order: Retract) -> pa.RecordBatch:
    """A row without values for each window that no longer exists. A sink that upserts by key and window deletes it."""
    zeros = np.zeros(len(order.windows), np.int64)
    windows = order.windows.replaced(events=zeros, late_events=zeros)
    return _rows(plan, order.definition, PaneKind.RETRACTED, windows, None, None)


def _rows(
    plan: Plan,
    definition: int,
    kind: PaneKind,
    windows: Table,
    outputs: Sequence[Any] | None,
    closes_us: Ints | None,
) -> pa.RecordBatch:
    return pane_rows(
        plan,
        keys=windows.keys,
        outputs=outputs,
        windows=WindowColumns(np.full(len(windows), definition), windows["start"], windows["end"], closes_us),
        which=np.arange(len(windows)),
        pane=windows["pane"].astype(np.int32),
        kind=pa.repeat(kind.value, len(windows)),
        events=windows["events"],
        late_events=windows["late_events"],
    )
