"""Computes windows whose events replace earlier ones (:mod:`aion.core.query.updates`): from the newest events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from aion.aggregates.groups import number
from aion.aggregates.values import Ints, Mask, combined
from aion.core.life.actions import Execution, PaneKind
from aion.core.query.plan import Plan
from aion.core.query.updates import ORDER, RETRACTED, visible
from aion.execute.panes.rows import RowFacts, WindowColumns, pane_rows
from aion.execute.spill.grouping import Group, keys_of

_SEQ, _KEY = "\0seq", "\0key"


def with_seq(rows: pa.RecordBatch, seq: int) -> pa.RecordBatch:
    """Returns the events of a block with the number of the block. :class:`Newest` needs it."""
    return rows.append_column(_SEQ, pa.array(np.full(rows.num_rows, seq)))


class Newest(NamedTuple):
    """The keys of a window that have changed since its last execution, and their newest events.

    ``keys``: their columns. ``events``: sorted by key, then by arrival; event i is of key ``key_of[i]``. ``late``:
    which of them came late. ``seen``: which keys were in an earlier execution.
    """

    keys: list[pa.Array]
    events: pa.Table
    key_of: Ints
    late: Mask
    seen: Mask

    @classmethod
    def of(cls, plan: Plan, execute: Execution, batches: Sequence[pa.RecordBatch]) -> Newest:
        """Finds them among all events of some keys, from :func:`with_seq`."""
        assert plan.updates is not None
        table = pa.Table.from_batches(batches).combine_chunks()
        n = table.num_rows
        of_key = number([combined(table.column(name)) for name in plan.key], n)
        same = number([combined(table.column(name)) for name in plan.updates.identity], n)
        seqs = table.column(_SEQ).to_numpy()
        is_new = seqs > execute.changed_since
        changed, seen = (np.bincount(of_key.ids[mask], minlength=of_key.count) > 0 for mask in (is_new, ~is_new))
        orders = table.column(ORDER).to_numpy()
        newest = np.full(same.count, -1, np.int64)
        np.maximum.at(newest, same.ids, orders)
        last = np.flatnonzero(orders == newest[same.ids])  # a pane may have several rows
        gone = combined(table.column(RETRACTED)).to_numpy(zero_copy_only=False)
        kept = last[changed[of_key.ids[last]] & ~gone[last]]
        kept = kept[np.lexsort((orders[kept], of_key.ids[kept]))]
        return cls(
            [column.filter(pa.array(changed)) for column in of_key.keys],
            table.select(visible(plan)).take(pa.array(kept)),
            (np.cumsum(changed) - 1)[of_key.ids[kept]],
            seqs[kept] >= execute.late_from,
            seen[changed],
        )

    def groups(self, plan: Plan) -> Iterator[Group]:
        """The events of each key. Also keys that have none any more."""
        count = len(self.seen)
        names = keys_of(plan.key, self.keys) if plan.key else [()] * count
        events = self.events.combine_chunks().to_batches()
        ends = np.cumsum(np.bincount(self.key_of, minlength=count))
        late = np.bincount(self.key_of[self.late], minlength=count).tolist()
        begin = 0
        for number_, end in enumerate(ends.tolist()):
            own = [events[0].slice(begin, end - begin)] if end > begin else []
            yield Group(names[number_], iter(own), end - begin, late[number_], bool(self.seen[number_]))
            begin = end

    def panes(self, plan: Plan, execute: Execution) -> Iterator[pa.RecordBatch]:
        """The result rows with the aggregates of each key, and those that retract keys without events."""
        assert plan.updates is not None and plan.updates.layout is not None
        layout, count = plan.updates.layout, len(self.seen)
        late = np.bincount(self.key_of[self.late], minlength=count)
        there = np.unique(self.key_of)
        if len(there):
            columns = {name: combined(self.events.column(name)) for name in layout.columns}
            states = layout.lift({_KEY: pa.array(self.key_of)}, columns)
            which = states.column(_KEY).to_numpy()
            outputs = list(layout.lower(layout.states(states)).values())
            counted = RowFacts(execute.kind, states.column("p0"), late[which])
            yield self._rows(plan, execute, which, counted, outputs)
        gone = np.setdiff1d(np.flatnonzero(self.seen), there)
        if len(gone):
            none = np.zeros(len(gone), np.int64)
            yield self._rows(plan, execute, gone, RowFacts(PaneKind.RETRACTED, none, none))

    def _rows(
        self,
        plan: Plan,
        execute: Execution,
        which: Ints,
        counted: RowFacts,
        outputs: list[pa.Array] | None = None,
    ) -> pa.RecordBatch:
        n = len(which)
        windows = WindowColumns.of([execute.window])
        if outputs is not None:
            windows = windows._replace(closes_us=np.array([execute.closes_us], np.int64))
        return pane_rows(
            plan,
            [column.take(pa.array(which)) for column in self.keys],
            windows.take(np.zeros(n, np.int64)),
            counted._replace(pane=np.full(n, execute.pane)),
            outputs,
        )
