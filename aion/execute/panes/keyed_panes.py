"""Turns rows of blocks into the panes of windows of single keys. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from aion.aggregates.groups import Groups
from aion.aggregates.partial import Partial, States
from aion.aggregates.values import combined
from aion.base.numbers import at_once
from aion.core.keyed.orders import ExecuteKeyed, Retract
from aion.core.keyed.table import Ints, Places, Table, coded
from aion.core.life.actions import PaneKind
from aion.core.query.plan import Plan
from aion.core.slicing.tree import SliceTree, spans, trees_for
from aion.core.windows import Count
from aion.execute.panes.rows import RowFacts, WindowColumns, pane_rows, with_entered
from aion.execute.spill.held_rows import HeldRows, Located, stretches

SEQ, ROW = "\0seq", "\0row"
_ROWS_PER_BLOCK = 1 << 32


def placed(batch: pa.RecordBatch, seq: int) -> pa.RecordBatch:
    """The rows of a block. Each gets two more columns: the block's seq, and its own position in the block."""
    n = batch.num_rows
    columns = [*batch.columns, pa.array(np.full(n, seq)), pa.array(np.arange(n))]
    return pa.RecordBatch.from_arrays(columns, [*batch.schema.names, SEQ, ROW])


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


def panes(plan: Plan, order: ExecuteKeyed, held: HeldRows, limit_bytes: int) -> Iterator[pa.RecordBatch]:
    """The panes of windows that are computed from partials. ``held``: see :func:`locate`.

    Windows that overlap (per record, by count) share runs of rows that are combined once, as overlapping periodic
    windows share slices. So a window of n rows costs O(log n). Partials that cannot be combined in any grouping are
    combined from single rows.
    """
    layout = plan.layout
    assert layout is not None
    for located in stretches(locate(plan, order, held.table), held, limit_bytes):
        windows, numbers, begins, lengths = located
        table = held.take(numbers)
        rows_at_once = max(limit_bytes // max(table.nbytes // max(table.num_rows, 1), 1), 1)
        trees = _trees(plan, table, begins, lengths, limit_bytes)
        taken = [spans(tree.starts, begins, begins + lengths) for tree in trees]
        for some in at_once(np.sum([part.lengths.sum(axis=1) for part in taken], axis=0), rows_at_once):
            count = some.stop - some.start
            states: dict[Partial, States] = {}
            for tree, part in zip(trees, taken, strict=True):
                own = part.rows(some)
                groups = Groups(own.window_of, count)
                at = own.rows if len(tree.starts) > 1 else _in_order(plan, table, numbers, own.rows, groups)
                states = layout.merge(groups, tree.taken(at), tree.partials, states)
            outputs = list(layout.lower(states).values())
            shown = windows.take(np.arange(some.start, some.stop))
            # The events of a count window are others when one of the same time takes another's place.
            counts = plan.changes and not isinstance(plan.keyed[order.definition], Count)
            rows = _rows(plan, (order.definition, order.kind), shown, outputs, shown["closes"])
            yield with_entered(rows, layout.entered(states)) if counts else rows


def _trees(plan: Plan, table: pa.RecordBatch, begins: Ints, lengths: Ints, limit_bytes: int) -> list[SliceTree]:
    """Trees over the rows, as if each row were a slice.

    One tree is for the partials that may be combined beforehand, another for those that may not.
    """
    layout = plan.layout
    assert layout is not None
    columns = {name: table.column(name) for names in layout.partials.values() for name in names}
    keys, starts = np.zeros(table.num_rows, np.int64), np.arange(table.num_rows + 1)

    def tree(partials: Collection[Partial]) -> SliceTree:
        return SliceTree(layout, partials, columns, keys, 1, starts)

    in_any_order = layout.commutative or plan.cell_us is None
    return trees_for(tree, begins, begins + lengths, limit_bytes, "auto" if in_any_order else "lazy")


def _in_order(plan: Plan, table: pa.RecordBatch, numbers: Ints, taken: Ints, groups: Groups) -> Ints:
    """Sorts the rows of each window for partials whose order matters: by slice, cell and arrival.

    Compaction does not change this order. ``taken``: rows of the table. ``numbers``: their places in the order of
    arrival.
    """
    assert plan.layout is not None
    if plan.layout.commutative or plan.cell_us is None:
        return taken
    firsts = plan.instants(table)[0][taken]
    seqs = table.column(SEQ).to_numpy()[taken]
    return taken[np.lexsort((numbers[taken], seqs, firsts // plan.cell_us, plan.grid.starts(firsts), groups.ids))]


def retractions(plan: Plan, order: Retract) -> pa.RecordBatch:
    """A row without values for each window that no longer exists. A sink that upserts by key and window deletes it."""
    zeros = np.zeros(len(order.windows), np.int64)
    windows = order.windows.replaced(events=zeros, late_events=zeros)
    return _rows(plan, (order.definition, PaneKind.RETRACTED), windows, None, None)


def _rows(
    plan: Plan, of: tuple[int, PaneKind], windows: Table, outputs: Sequence[Any] | None, closes_us: Ints | None
) -> pa.RecordBatch:
    """``of``: the number of the definition, and the kind of the panes."""
    definition, kind = of
    return pane_rows(
        plan,
        windows.keys,
        WindowColumns(np.full(len(windows), definition), windows["start"], windows["end"], closes_us),
        RowFacts(kind, windows["events"], windows["late_events"], windows["pane"]),
        outputs,
    )
