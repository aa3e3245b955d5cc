"""Windows computed from partials: those of their slices, combined by window and key. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from aion.actions import Execute
from aion.aggregates import Layout
from aion.aggregates.groups import Groups, Part, number, pack, total_by_group
from aion.aggregates.values import Ints, combined
from aion.plan import Plan
from aion.rows import pane_rows

# Windows whose partials are combined in one pass: enough to share slices, few enough to stay small.
WINDOWS_AT_ONCE = 64
# Of windows that hold values of the events, so many events: one load of their slices has to fit in memory.
EVENTS_AT_ONCE = 1 << 20

_SLICE, _SEQ = "\0slice", "\0seq"


def windows_at_once(layout: Layout, executes: Sequence[Execute]) -> Iterator[Sequence[Execute]]:
    """The executions in stretches of which each slice is read and decoded once."""
    start = events = 0
    for i, execute in enumerate(executes):
        full = i - start == WINDOWS_AT_ONCE or (layout.holistic and events + execute.events > EVENTS_AT_ONCE)
        if full and i > start:
            yield executes[start:i]
            start, events = i, 0
        events += execute.events
    if len(executes) > start:
        yield executes[start:]


class Loaded:
    """Partials of some stretch of slices, of all keys or of some: by slice, and in the order of arrival.

    ``slices`` and ``seqs`` say for each row of the table which slice it is of, and which block it came with. Keys are
    numbered once for all windows.
    """

    def __init__(self, plan: Plan, table: pa.Table, slices: Ints, seqs: Ints) -> None:
        self._plan = plan
        self._table = table.combine_chunks()
        self.slices = slices
        self._seqs = seqs
        self._events: Ints = self._table.column("p0").to_numpy()
        self._keys = number([combined(self._table.column(field.name)) for field in plan.key_fields], table.num_rows)

    @classmethod
    def of_blocks(cls, plan: Plan, blocks: Sequence[tuple[int, int, pa.RecordBatch]]) -> Loaded:
        """Of blocks, each with its seq and its slice."""
        rows = [batch.num_rows for _, _, batch in blocks]
        table = pa.Table.from_batches([batch for _, _, batch in blocks], plan.block_schema)
        return cls(plan, table, np.repeat([s for _, s, _ in blocks], rows), np.repeat([q for q, _, _ in blocks], rows))

    @classmethod
    def of_tagged(cls, plan: Plan, batches: Sequence[pa.RecordBatch]) -> Loaded:
        """Of what :func:`tagged` made."""
        table = pa.Table.from_batches(batches)
        slices, seqs = (table.column(name).to_numpy() for name in (_SLICE, _SEQ))
        return cls(plan, table.drop_columns([_SLICE, _SEQ]), slices, seqs)

    def windows(self, executes: Sequence[Execute], limit_bytes: int) -> Iterator[pa.RecordBatch]:
        """The rows of the executions, of keys that changed since the ones before.

        What is made at once stays near ``limit_bytes``, unless one window is larger by itself.
        """
        if not self._table.num_rows:
            return
        begins = np.searchsorted(self.slices, [e.slices[0] for e in executes], side="left")
        lengths = np.searchsorted(self.slices, [e.slices[-1] for e in executes], side="right") - begins
        # A window takes its rows out of the table, so that overlapping windows multiply them.
        most = max(limit_bytes // max(self._table.nbytes // self._table.num_rows, 1), 1)
        start = 0
        while start < len(executes):
            end = max(start + 1, start + int(np.searchsorted(np.cumsum(lengths[start:]), most, side="right")))
            some = slice(start, end)
            yield self._panes(executes[some], begins[some], lengths[some])
            start = end

    def _panes(self, executes: Sequence[Execute], begins: Ints, lengths: Ints) -> pa.RecordBatch:
        layout = self._plan.layout
        assert layout is not None
        window_of = np.repeat(np.arange(len(executes)), lengths)
        rows: Any = _ranges(begins, lengths)
        groups, (windows, keys) = self._grouped(window_of, rows, len(executes))
        newest = np.full(groups.count, -1, np.int64)
        np.maximum.at(newest, groups.ids, self._seqs[rows])
        changed = newest > np.array([e.changed_since for e in executes], np.int64)[windows]
        if not changed.all():
            kept = changed[groups.ids]
            rows, window_of = rows[kept], window_of[kept]
            groups, (windows, keys) = self._grouped(window_of, rows, len(executes))
        late = self._seqs[rows] >= np.array([e.late_from for e in executes], np.int64)[window_of]
        take = None if self._are_all(rows) else pa.array(rows)

        def column(name: str) -> pa.Array:
            whole = combined(self._table.column(name))
            return whole if take is None else whole.take(take)

        states = layout.merge(groups, column)
        return pane_rows(
            self._plan,
            keys=[values.take(pa.array(keys)) for values in self._keys.keys],
            outputs=list(layout.lower(states).values()),
            windows=[e.window for e in executes],
            which=windows,
            pane=np.array([e.pane for e in executes], np.int32)[windows],
            kind=pa.array([e.kind.value for e in executes]).take(pa.array(windows)),
            events=total_by_group(groups, self._events[rows]),
            late_events=total_by_group(groups, np.where(late, self._events[rows], 0)),
        )

    def _grouped(self, window_of: Ints, rows: Ints, windows: int) -> tuple[Groups, list[Ints]]:
        return pack([Part(window_of, windows), Part(self._keys.ids[rows], self._keys.count)])

    def _are_all(self, rows: Ints) -> bool:
        return len(rows) == self._table.num_rows and bool((rows[1:] > rows[:-1]).all())


def tagged(batch: pa.RecordBatch, slice_us: int, seq: int) -> pa.RecordBatch:
    """Partials of a block with its slice and seq in every row, for when rows of several blocks get mixed."""
    n = batch.num_rows
    columns = [*batch.columns, pa.array(np.full(n, slice_us)), pa.array(np.full(n, seq))]
    return pa.RecordBatch.from_arrays(columns, [*batch.schema.names, _SLICE, _SEQ])


def _ranges(begins: Ints, lengths: Ints) -> Ints:
    """``begins[i], begins[i] + 1, ...`` of each length, one after the other."""
    before = np.cumsum(lengths) - lengths
    ranges: Ints = np.arange(int(lengths.sum())) + np.repeat(begins - before, lengths)
    return ranges
