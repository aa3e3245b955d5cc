"""Rows of keys for windows without events: carries out what the operator says about them (docs/reference/panes.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from aion.aggregates.values import combined
from aion.core.ingest.encoding import decode
from aion.core.keyed.table import Ints, Table, codes_of, hashes_of, stacked
from aion.core.life.actions import Execute, FillGaps, ForgetFilled, KeepFilled, PaneKind
from aion.core.operator.filled_keys import FilledKeys, Gaps, drop_all
from aion.core.query.plan import Plan
from aion.core.slicing.aligned import AlignedWindows
from aion.core.slicing.tree import ranges
from aion.core.timed.filled import spans_of
from aion.execute.panes.rows import RowFacts, WindowColumns, pane_rows
from state_backends.format.block import Block
from state_backends.format.ordered_map import OrderedMap
from state_backends.thresholds import threshold

_ROWS_AT_ONCE = threshold(1 << 17, 3)
_ZERO = ("count", "sum", "count_distinct", "approx_count_distinct")
"""The functions of aggregates that are 0 for no events."""
_SLICE = "slice"


class Filler:
    """The keys of one shard, and the rows that they have for want of events. ``values``: the map of the shard.

    ``over``: the numbers of definitions that have no windows any more, if the map may still have keys of them.
    """

    def __init__(self, plan: Plan, values: OrderedMap, over: Sequence[int] = ()) -> None:
        self._plan = plan
        windows = plan.grid.aligned
        self._fills = {number: w.fill for number, w in windows.items() if w.fill is not None}
        self._aligned = AlignedWindows(windows, plan.grid.limits)
        types = [field.type for field in plan.key_fields]
        self._kept = {number: FilledKeys(values, number, types) for number in self._fills}
        self._values, self._over = values, list(over)
        self._came: dict[int, list[Table]] = {}
        self._gaps: dict[int, tuple[Table, Gaps]] = {}

    # -- which keys have rows -----------------------------------------------------------------------------

    def came(self, orders: Sequence[KeepFilled], blocks: Sequence[Block]) -> None:
        """Notes the keys of an arrival. They are kept with :meth:`settle`."""
        rows = self._rows_of(blocks)
        for order in orders:
            own = rows.take(np.isin(rows[_SLICE], order.slices_us))
            self._came.setdefault(order.definition, []).append(own)

    def _rows_of(self, blocks: Sequence[Block]) -> Table:
        """The key and the slice of each row of blocks."""
        names = [field.name for field in self._plan.key_fields]
        tables = [Table.empty([field.type for field in self._plan.key_fields], [_SLICE])]
        for block in blocks:
            if not self._plan.holds(block.header.slice_us):
                continue
            batch = decode(block, self._plan.block_schema)
            slices = self._plan.slices_of(batch)
            if slices is None:
                slices = np.full(batch.num_rows, block.header.slice_us)
            tables.append(Table([combined(batch.column(name)) for name in names], {_SLICE: slices}))
        return stacked(tables)

    def settle(self) -> None:
        """Keeps the keys that came since the last call."""
        for number in self._over:
            drop_all(self._values, number)
        came, self._came, self._over = self._came, {}, []
        for number, tables in came.items():
            keys = stacked(tables)
            if not len(keys):
                continue
            spans = spans_of(self._aligned, number, self._fills[number].for_us, keys[_SLICE])
            keys = keys.replaced(first=spans.firsts_us, until=spans.untils_us, hash=hashes_of(keys))
            self._gaps[number] = keys, self._kept[number].add(keys)

    def end_batch(self) -> None:
        """Keeps the keys that came since the last call. What they were given is shown, or is not to be."""
        self.settle()
        self._gaps.clear()

    def forget(self, order: ForgetFilled) -> None:
        """Lets go of keys whose windows are gone."""
        self._kept[order.definition].forgotten_us = order.by_us
        if order.all_:
            self._kept[order.definition].drop()

    # -- rows ---------------------------------------------------------------------------------------------

    def fills(self, order: Execute) -> bool:
        """Whether an execution shows keys without events, too."""
        return order.kind is PaneKind.ON_TIME or (order.kind is PaneKind.FINAL and self._plan.final_only)

    def rows(self, order: Execute, shown: Shown) -> Iterator[pa.RecordBatch]:
        """The rows of the keys that an execution has not ``shown``, because they have no events in its windows."""
        for number, kept in self._kept.items():
            windows = np.flatnonzero(order.definition == number)
            if not len(windows):
                continue
            ends_us = order.end_us[windows]  # ascending, as windows of one kind run in the order of their ends
            there = shown.of(number)
            there = there.replaced(window=np.searchsorted(ends_us, there[_END]), hash=hashes_of(there))
            for keys in kept.every():
                first, last = (np.searchsorted(ends_us, keys[name], side="right") for name in ("first", "until"))
                for of, window in _pairs(first, last):
                    lacking = ~_among(keys, of, window, there)
                    if lacking.any():
                        yield self._row(order, keys, of[lacking], windows[window[lacking]])

    def gaps(self, order: FillGaps) -> Iterator[pa.RecordBatch]:
        """The rows of keys that late events gave windows without events."""
        self.settle()
        gaps, self._gaps = self._gaps, {}
        for number, (keys, found) in gaps.items():
            windows = np.flatnonzero(order.order.definition == number)
            if not len(windows):
                continue
            ends_us = order.order.end_us[windows]
            of, after_us, by_us = found
            first, last = (np.searchsorted(ends_us, us, side="right") for us in (after_us, by_us))
            there = self._with_events(number, keys, ends_us)
            for gap, window in _pairs(first, last):
                lacking = ~_among(keys, of[gap], window, there)
                if lacking.any():
                    yield self._row(order.order, keys, of[gap[lacking]], windows[window[lacking]])

    def _with_events(self, number: int, keys: Table, ends_us: Ints) -> Table:
        """The windows, by the numbers of their ends, that hold the slices of the rows of a table, with their keys."""
        first, last = self._aligned.holding(number, keys[_SLICE])
        begins = self._aligned.bounds(number, first)[1]
        after = self._aligned.bounds(number, last)[1]
        low, high = np.searchsorted(ends_us, begins), np.searchsorted(ends_us, after, side="right")
        of, window = np.repeat(np.arange(len(keys)), high - low), ranges(low, high - low)
        return keys.take(of).replaced(window=window)

    def _row(self, order: Execute, keys: Table, of: Ints, windows: Ints) -> pa.RecordBatch:
        """A row of each of these keys for one of these windows of an order."""
        n, at = len(of), pa.array(of)
        nothing = pa.array(np.zeros(n, np.int64))
        fill = self._fills[int(order.definition[windows[0]])]
        return pane_rows(
            self._plan,
            [key.take(at) for key in keys.keys],
            WindowColumns.of_execution(order).take(windows),
            RowFacts(order.kind, nothing, nothing, order.pane[windows]),
            list(of_nothing(self._plan, n, zero=fill.value == "zero")),
        )


_END = "end"


class Shown:
    """The keys and windows of the rows that an execution has shown, of the definitions that fill."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._tables: dict[int, list[Table]] = {}

    def add(self, rows: pa.RecordBatch) -> None:
        """Notes rows of a result."""
        edges = (combined(rows.column(f"window_{edge}")).cast(pa.int64()) for edge in ("start", "end"))
        starts, ends = (column.to_numpy() for column in edges)
        numbers = self._plan.numbers_of(rows.column("window"), starts)
        keys = [combined(rows.column(name)) for name in self._plan.key]
        for number in np.unique(numbers).tolist():
            own = np.flatnonzero(numbers == number)
            at = pa.array(own)
            self._tables.setdefault(number, []).append(Table([key.take(at) for key in keys], {_END: ends[own]}))

    def of(self, number: int) -> Table:
        """The keys and the ends of the windows of a definition."""
        types = [field.type for field in self._plan.key_fields]
        return stacked([Table.empty(types, [_END]), *self._tables.get(number, [])])


def of_nothing(plan: Plan, rows: int, *, zero: bool) -> Iterator[pa.Array]:
    """Yields the results of aggregates over no events. ``zero``: counts and sums are 0, in place of null."""
    assert plan.layout is not None, "fill= needs aggregates"
    for bound in plan.layout.bound:
        if zero and bound.aggregate.function in _ZERO:
            yield pa.repeat(pa.scalar(0, bound.type), rows)
        else:
            yield pa.nulls(rows, bound.type)


def _pairs(first: Ints, last: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yields each row i with each number from ``first[i]`` up to ``last[i]``, exclusive, some at a time."""
    lengths = np.maximum(last - first, 0)
    upto = np.cumsum(lengths)
    start = 0
    while start < len(lengths):
        done = int(upto[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(upto, done + _ROWS_AT_ONCE, side="right")))
        some = slice(start, stop)
        if upto[stop - 1] > done:
            yield np.repeat(np.arange(start, stop), lengths[some]), ranges(first[some], lengths[some])
        start = stop


def _among(keys: Table, of: Ints, window: Ints, there: Table) -> Any:
    """A mask of the pairs of a key, by its row, and a window that are among those of another table."""
    if not len(there) or not len(of):
        return np.zeros(len(of), np.bool_)
    rows, which = np.unique(of, return_inverse=True)
    mine = keys.take(rows)
    # Only keys with these hashes can be the same.
    near = there.take(np.isin(there["hash"], mine["hash"]))
    codes, others = codes_of(mine, near)
    width = int(max(window.max(), near["window"].max(initial=0))) + 1
    return np.isin(codes[which] * width + window, others * width + near["window"])
