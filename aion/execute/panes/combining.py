"""Computes windows from partials: combines those of their slices by window and key. Pure.

If windows overlap, a pass over some of them may first build a tree of partials (:mod:`aion.core.slicing.tree`): that is
the eager way. The tree does not say which keys have changed or which events are late. The few blocks that came since
the last execution say that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import pyarrow as pa

from aion.aggregates.groups import Digit, Groups, Numbered, number, pack
from aion.aggregates.partial import EVENTS, Partial
from aion.aggregates.values import Ints, Mask, combined
from aion.base.numbers import sums_by
from aion.core.life.actions import Execute
from aion.core.query.plan import Plan
from aion.core.slicing.tree import Aggregation, SliceTree, SpanRows, ranges, spans, trees_for
from aion.execute.panes.rows import RowFacts, WindowColumns, pane_rows, with_entered
from state_backends.thresholds import threshold

# How many windows are always combined in one pass: enough to share slices, few enough to stay small.
WINDOWS_AT_ONCE = threshold(64, 2)
# A pass takes more windows while all of them together have at most this many times the segments of the longest one, or
# at most this many segments.
TIMES_THE_LONGEST, SEGMENTS_AT_ONCE = 2, 64
# The most events in a pass over windows whose partials hold values: one load of their slices has to fit in memory.
EVENTS_AT_ONCE = threshold(1 << 20)

_SLICE, _SEQ = "\0slice", "\0seq"


def windows_at_once(plan: Plan, order: Execute) -> Iterator[Execute]:
    """Splits the windows of an order into passes. A pass reads and decodes each of its segments once."""
    assert plan.layout is not None
    segments = np.array(order.slices, np.int64)
    firsts = np.searchsorted(plan.grid.ends(segments), order.start_us, side="right")
    lasts = np.searchsorted(segments, order.end_us)
    events = order.events if plan.layout.holistic else None
    start = 0
    while start < len(order):
        end = _stretch(firsts[start:], lasts[start:], None if events is None else events[start:]) + start
        low, high = int(firsts[start:end].min()), int(lasts[start:end].max())
        yield order.some(slice(start, end), order.slices[low:high])
        start = end


def _stretch(firsts: Ints, lasts: Ints, events: Ints | None) -> int:
    """How many windows, from the first one on, are in one pass. Window i reads segments ``[firsts[i], lasts[i])``."""
    looked = 4 * WINDOWS_AT_ONCE
    while True:
        first, last = firsts[:looked], lasts[:looked]
        union = np.maximum.accumulate(last) - np.minimum.accumulate(first)
        full = union > np.maximum(TIMES_THE_LONGEST * np.maximum.accumulate(last - first), SEGMENTS_AT_ONCE)
        full[:WINDOWS_AT_ONCE] = False
        if events is not None:
            full[1:] |= np.cumsum(events[:looked], dtype=np.float64)[1:] > EVENTS_AT_ONCE
        if full.any():
            return int(full.argmax())
        if looked >= len(firsts):
            return len(firsts)
        looked *= 4


class Loaded:
    """Decoded partials of a stretch of slices, for all keys or some. They are sorted by slice and arrival.

    ``slices``, ``seqs``: the slice of each row of the table, and the number of its block. ``numbered``: the numbers of
    the keys, if they are known. Keys are numbered once for all windows.
    """

    def __init__(self, plan: Plan, table: pa.Table, slices: Ints, seqs: Ints, numbered: Numbered | None = None) -> None:
        assert plan.layout is not None
        self._plan = plan
        self._layout = plan.layout
        if plan.cell_us is not None and not plan.layout.commutative:
            # If there are also sessions, compaction sorts rows by cell. Sort all rows the same way.
            order = np.lexsort((seqs, plan.instants(table)[0] // plan.cell_us, slices))
            table, slices, seqs = table.take(pa.array(order)), slices[order], seqs[order]
        elif bool((slices[1:] < slices[:-1]).any()) or plan.grid.overlaps:
            # If segments overlap, rows of a slice may lie in two, and the later segment may have the earlier rows.
            order = np.lexsort((seqs, slices)) if plan.grid.overlaps else np.argsort(slices, kind="stable")
            table, slices, seqs = table.take(pa.array(order)), slices[order], seqs[order]
        self._table = table.combine_chunks()
        self.slices = slices
        self._seqs = seqs
        if numbered is None:
            numbered = number([combined(self._table.column(f.name)) for f in plan.key_fields], table.num_rows)
        self._keys, self._key_ids, self._key_count = numbered.keys, numbered.ids, max(numbered.count, 1)

    @classmethod
    def of_blocks(cls, plan: Plan, blocks: Sequence[tuple[int, int, pa.RecordBatch]]) -> Loaded:
        """Makes it from blocks: each with its seq, its segment and its rows."""
        rows = [batch.num_rows for _, _, batch in blocks]
        table = pa.Table.from_batches([batch for _, _, batch in blocks], plan.block_schema)
        slices = plan.slices_of(table)
        if slices is None:
            slices = np.repeat([s for _, s, _ in blocks], rows)
        return cls(plan, table, slices, np.repeat([q for q, _, _ in blocks], rows))

    @classmethod
    def of_tagged(cls, plan: Plan, batches: Sequence[pa.RecordBatch]) -> Loaded:
        """Makes it from batches of :func:`tagged`."""
        table = pa.Table.from_batches(batches)
        slices, seqs = (table.column(name).to_numpy() for name in (_SLICE, _SEQ))
        return cls(plan, table.drop_columns([_SLICE, _SEQ]), slices, seqs)

    def windows(
        self, executes: Execute, limit_bytes: int, aggregation: Aggregation = "lazy"
    ) -> Iterator[pa.RecordBatch]:
        """The result rows of the executions, for keys that changed since the executions before.

        It uses about ``limit_bytes`` at once, or more if a single window needs more.
        """
        if not self._table.num_rows:
            return
        changed = self._since(executes.changed_since + 1, executes)
        loaded = self if changed.all_of.any() else self._of_keys(changed.candidates)
        if loaded._table.num_rows:
            yield from loaded._windows(executes, limit_bytes, aggregation)

    def _windows(self, executes: Execute, limit_bytes: int, aggregation: Aggregation) -> Iterator[pa.RecordBatch]:
        changed = self._since(executes.changed_since + 1, executes)
        late = self._since(executes.late_from, executes)
        row_bytes = max(self._table.nbytes // self._table.num_rows, 1)
        edges = np.flatnonzero(np.diff(self.slices)) + 1
        starts = np.concatenate((np.zeros(1, np.int64), edges, np.full(1, len(self.slices))))
        begins, ends = (np.searchsorted(starts, rows) for rows in self._rows_of(executes))
        layout = self._layout
        columns = {name: combined(self._table.column(name)) for names in layout.partials.values() for name in names}

        def tree(partials: Collection[Partial]) -> SliceTree:
            return SliceTree(layout, partials, columns, self._key_ids, self._key_count, starts)

        trees = trees_for(tree, begins, ends, limit_bytes, aggregation)
        taken = [spans(tree.starts, begins, ends) for tree in trees]
        # Each window takes a copy of its rows from the trees and the table, so rows in several windows count for each.
        lengths = sum(part.lengths.sum(axis=1) for part in taken) + late.counts + changed.counts
        start, most = 0, max(limit_bytes // row_bytes, 1)
        while start < len(executes):
            end = max(start + 1, start + int(np.searchsorted(np.cumsum(lengths[start:]), most, side="right")))
            some = slice(start, end)
            rows = [part.rows(some) for part in taken]
            yield self._panes(executes.some(some), trees, rows, changed.some(some), late.some(some))
            start = end

    def _panes(
        self, executes: Execute, trees: Sequence[SliceTree], rows: Sequence[SpanRows], changed: _Since, late: _Since
    ) -> pa.RecordBatch:
        first, taken = trees[0], rows[0]
        groups, windows, keys = self._grouped(taken.window_of, first.keys[taken.rows], len(executes))
        if not changed.all_of.all():
            whose = changed.all_of[windows]
            whose[self._groups_of(windows, keys, *changed.rows())] = True
            if not whose.all():
                taken = taken.some(whose[groups.ids])
                groups, windows, keys = self._grouped(taken.window_of, first.keys[taken.rows], len(executes))
        states = self._layout.merge(groups, first.taken(taken.rows), first.partials)
        for tree, other in zip(trees[1:], rows[1:], strict=True):
            none = np.full(len(other.rows), -1)
            at = self._groups_of(windows, keys, other.window_of, other.rows) if len(windows) else none
            own = other if (at >= 0).all() else other.some(at >= 0)
            own_groups = Groups(at[at >= 0], len(windows))
            states = self._layout.merge(own_groups, tree.taken(own.rows), tree.partials, states)
        events: Ints = states[EVENTS][0].to_numpy()
        late_events = np.where(late.all_of[windows], events, self._late_events(windows, keys, *late.rows()))
        shown = pane_rows(
            self._plan,
            [values.take(pa.array(keys)) for values in self._keys],
            WindowColumns.of_execution(executes).take(windows),
            RowFacts(executes.kind, events, late_events, executes.pane[windows]),
            list(self._layout.lower(states).values()),
        )
        return with_entered(shown, self._layout.entered(states)) if self._plan.changes else shown

    def _late_events(self, windows: Ints, keys: Ints, window_of: Ints, rows: Ints) -> Ints:
        """The number of events in these rows, for each result row (window and key)."""
        if not len(rows) or not len(windows):
            return np.zeros(len(windows), np.int64)
        at = self._groups_of(windows, keys, window_of, rows)
        counted = at >= 0
        events: Ints = self._table.column("p0").to_numpy()[rows[counted]]
        return sums_by(at[counted], events, len(windows))

    def _groups_of(self, windows: Ints, keys: Ints, window_of: Ints, rows: Ints) -> Ints:
        """The number of the result row (window and key) that each row belongs to. -1: none."""
        codes = windows * self._key_count + keys
        order = np.argsort(codes, kind="stable")
        wanted = window_of * self._key_count + self._key_ids[rows]
        at = order[np.minimum(np.searchsorted(codes, wanted, sorter=order), len(order) - 1)]
        return np.where(codes[at] == wanted, at, -1)

    def _grouped(self, window_of: Ints, key_ids: Ints, windows: int) -> tuple[Groups, Ints, Ints]:
        groups, (windows_of, keys) = pack([Digit(window_of, windows), Digit(key_ids, self._key_count)])
        return groups, windows_of, keys

    def _rows_of(self, executes: Execute) -> tuple[Ints, Ints]:
        return np.searchsorted(self.slices, executes.start_us), np.searchsorted(self.slices, executes.end_us)

    def _since(self, numbers: Ints, executes: Execute) -> _Since:
        return _Since.of(self._seqs, numbers, *self._rows_of(executes))

    def _of_keys(self, rows: Ints) -> Loaded:
        """The partials of only those keys that these rows have. Blocks also hold other keys."""
        wanted = np.zeros(self._key_count, bool)
        wanted[self._key_ids[rows]] = True
        kept = wanted[self._key_ids]
        if kept.all():
            return self
        ids = (np.cumsum(wanted) - 1)[self._key_ids[kept]]
        keys = [values.filter(pa.array(wanted)) for values in self._keys]
        table = self._table.filter(pa.array(kept))
        numbered = Numbered(ids, int(wanted.sum()), keys)
        return Loaded(self._plan, table, self.slices[kept], self._seqs[kept], numbered)


class _Since:
    """For each window, the rows from blocks with at least a given number. Each window has its own number.

    ``all_of``: a mask of the windows for which these are all rows. Their rows are not listed. ``counts``: the number of
    rows of each other window. ``candidates``: row numbers that include all listed rows. One may occur several times.
    """

    def __init__(self, all_of: Mask, candidates: Ints, first: Ints, counts: Ints) -> None:
        self.all_of = all_of
        self.candidates = candidates
        self.counts = counts
        self._first = first

    @classmethod
    def of(cls, seqs: Ints, numbers: Ints, begins: Ints, ends: Ints) -> _Since:
        first, counts = np.zeros(len(numbers), np.int64), np.zeros(len(numbers), np.int64)
        all_of = numbers <= seqs.min()
        candidates, size = [np.zeros(0, np.int64)], 0
        # Windows that were executed together have the same number.
        for number_ in np.unique(numbers[~all_of & (numbers <= seqs.max())]):
            which = np.flatnonzero(numbers == number_)
            low = int(begins[which].min())
            rows = low + np.flatnonzero(seqs[low : int(ends[which].max())] >= number_)
            begin, end = np.searchsorted(rows, begins[which]), np.searchsorted(rows, ends[which])
            first[which], counts[which] = size + begin, end - begin
            candidates.append(rows)
            size += len(rows)
        return cls(all_of, np.concatenate(candidates), first, counts)

    def some(self, windows: slice) -> _Since:
        return _Since(self.all_of[windows], self.candidates, self._first[windows], self.counts[windows])

    def rows(self) -> tuple[Ints, Ints]:
        """The window and the row number of each listed row."""
        return np.repeat(np.arange(len(self.counts)), self.counts), self.candidates[ranges(self._first, self.counts)]


def tagged(plan: Plan, batch: pa.RecordBatch, segment_us: int, seq: int) -> pa.RecordBatch:
    """The partials of a block. Each row gets its slice and the block's seq, so rows of several blocks can be mixed."""
    n = batch.num_rows
    slices = plan.slices_of(batch)
    columns = [
        *batch.columns,
        pa.array(np.full(n, segment_us) if slices is None else slices),
        pa.array(np.full(n, seq)),
    ]
    return pa.RecordBatch.from_arrays(columns, [*batch.schema.names, _SLICE, _SEQ])
