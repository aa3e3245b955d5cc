"""A tree of partials over the slices of overlapping windows: the eager aggregate store (Scotty section V). Pure.

Lazy: combine each window from the rows of all its slices. Then a slice is read once for each window that overlaps it.
Eager: first combine runs of 2, 4, 8 and more neighbouring slices, one level at a time, all runs and keys of a level at
once. Then a window takes at most two runs of each level, and the rest from the top. A tree is made for one pass over
some windows, with as many levels as :func:`choose_height` finds worth their cost. It is never stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from aion.aggregates.groups import Digit, pack
from aion.aggregates.layout import Layout
from aion.aggregates.partial import Partial
from aion.aggregates.values import Ints, Mask
from aion.errors import IntegerOverflow
from state_backends.thresholds import threshold

Aggregation: TypeAlias = Literal["auto", "lazy", "eager"]
"""How overlapping windows are combined. auto: the cheaper way."""

ROWS_PER_LEVEL = threshold(15_000, 1)
"""The fixed cost of a level, in rows of a window: 0.3 ms, where a row takes 20 ns. Combining a row into a level costs
as much as combining it into a window.

With this constant, and 100 windows that end at once, a pass took this share of the lazy time (``aion experiment slicing
--legs operator``, medians of 5 runs; in brackets the whole call of LocalOperator)::

    overlap           20             100            600          600, one late event
    10 keys       1.09 (1.01)    0.64 (0.74)    0.39 (0.58)    0.52 (0.41)
    1,000 keys    0.42 (0.46)    0.09 (0.14)    0.05 (0.08)    0.28 (0.48)
"""


class Spans(NamedTuple):
    """The rows of each window, as spans ``[begins, begins + lengths)``. Shape: windows, spans of each window."""

    begins: Ints
    lengths: Ints

    def rows(self, windows: slice) -> SpanRows:
        """Returns the rows of some of the windows. The first of them has number 0."""
        begins, lengths = self.begins[windows], self.lengths[windows]
        window_of = np.repeat(np.arange(len(begins)), lengths.sum(axis=1))
        return SpanRows(window_of, ranges(begins.ravel(), lengths.ravel()))


class SpanRows(NamedTuple):
    """Rows of a tree, and for each the number of the window that uses it."""

    window_of: Ints
    rows: Ints

    def some(self, which: Mask) -> SpanRows:
        return SpanRows(self.window_of[which], self.rows[which])


def spans(starts: Sequence[Ints], begins: Ints, ends: Ints) -> Spans:
    """Returns the rows that each window is combined from, in the order of its slices ``[begin, end)``.

    ``starts``: for each level, the row where each run begins, and where the last one ends. From the bottom up, a window
    takes a run at its edge if the other half of the run's parent lies outside the window: on the left a right child, on
    the right a left child. At the top it takes everything in between.
    """
    lefts: list[tuple[Ints, Ints]] = []
    rights: list[tuple[Ints, Ints]] = []
    left, right = begins, np.maximum(begins, ends)
    for level in starts[:-1]:
        by_left, by_right = _edges(left, right)
        lefts.append((level[left], level[left + by_left]))
        rights.append((level[right - by_right], level[right]))
        left, right = (left + by_left) >> 1, (right - by_right) >> 1
    ordered = [*lefts, (starts[-1][left], starts[-1][right]), *reversed(rights)]
    first = np.stack([begin for begin, _ in ordered], axis=1)
    return Spans(first, np.stack([end for _, end in ordered], axis=1) - first)


def _edges(left: Ints, right: Ints) -> tuple[Ints, Ints]:
    """Returns, for each window, 1 or 0: whether it takes a run of this level at its left edge, and at its right
    edge.
    """
    by_left = (left & 1) & (left < right)
    return by_left, (right & 1) & (left + by_left < right)


def choose_height(rows: Ints, keys: int, begins: Ints, ends: Ints, aggregation: Aggregation) -> int:
    """Returns how many levels above the slices are worth their cost; 0: combine windows from the rows of their slices.

    ``rows``: of each slice. ``keys``: how many keys there are in all. A run has at most one row for each key, and this
    assumes that it has as many as possible. So keys that are seldom seen again, where a tree does not help, do not look
    like a gain. With ``eager`` the tree is as high as any window can use.
    """
    starts = _starts(rows)
    left, right = begins, np.maximum(begins, ends)
    height = best = taken = 0
    built, least = 0, int(np.sum(starts[right] - starts[left]))
    while aggregation != "lazy" and int((right - left).max(initial=0)) >= 2:
        by_left, by_right = _edges(left, right)
        taken += int(np.sum(starts[left + by_left] - starts[left] + starts[right] - starts[right - by_right]))
        left, right = (left + by_left) >> 1, (right - by_right) >> 1
        built += ROWS_PER_LEVEL + int(rows.sum())
        rows = np.minimum(np.add.reduceat(rows, np.arange(0, len(rows), 2)), keys)
        starts = _starts(rows)
        height += 1
        cost = built + taken + int(np.sum(starts[right] - starts[left]))
        if aggregation == "eager" or cost < least:
            best, least = height, cost
    return best


class SliceTree:
    """Levels of partials: single slices, and after :meth:`grow` also runs of 2, 4, 8, ... slices.

    ``partials``: the partials of the tree. ``columns``: their states, ordered by slice, then by arrival. ``keys``: the
    number of each row's key, below ``key_count``. ``starts``: the row where each slice begins, and where the last ends.
    """

    def __init__(
        self,
        layout: Layout,
        partials: Collection[Partial],
        columns: Mapping[str, pa.Array],
        keys: Ints,
        key_count: int,
        starts: Ints,
    ) -> None:
        self.layout = layout
        self.partials = partials
        self._levels: list[Mapping[str, pa.Array]] = [columns]
        self._whole: dict[str, pa.Array] = {}
        self.key_count = key_count
        self.keys = keys
        self.starts = [starts]

    def grow(self, height: int, limit_bytes: int) -> None:
        """Builds up to ``height`` levels. Stops early when they take more than ``limit_bytes``.

        Raises IntegerOverflow if a run overflows, even if no window does.
        """
        bottom = self.starts[0]
        run_of, keys = np.repeat(np.arange(len(bottom) - 1), np.diff(bottom)), self.keys
        all_keys = [keys]
        while len(self.starts) <= height and limit_bytes > 0:
            at, count = int(self.starts[-1][-1]), len(self.starts[-1]) >> 1
            groups, (run_of, keys) = pack([Digit(run_of >> 1, count), Digit(keys, self.key_count)])
            states = self.layout.merge(groups, self._levels[-1].__getitem__, self.partials)
            level = {
                name: column
                for partial in self.partials
                for name, column in zip(self.layout.partials[partial], states[partial], strict=True)
            }
            self._levels.append(level)
            # Groups are in the order of their runs, also if they were hashed: hashing keeps the order of first sight.
            self.starts.append(at + np.searchsorted(run_of, np.arange(count + 1)))
            all_keys.append(keys)
            limit_bytes -= sum(column.nbytes for column in level.values())
        self.keys = np.concatenate(all_keys)

    def column(self, name: str) -> pa.Array:
        """Returns a column of the partials, all levels one after the other."""
        if name not in self._whole:
            pieces = [level[name] for level in self._levels]
            self._whole[name] = pa.concat_arrays(pieces) if len(pieces) > 1 else pieces[0]
        return self._whole[name]

    def taken(self, rows: Ints) -> Callable[[str], pa.Array]:
        """Returns a function from a column's name to that column for the given rows."""
        are_all = len(rows) == len(self.keys) and bool((rows[1:] > rows[:-1]).all())
        take = None if are_all else pa.array(rows)
        return lambda name: self.column(name) if take is None else self.column(name).take(take)


def trees_for(
    tree: Callable[[Collection[Partial]], SliceTree],
    begins: Ints,
    ends: Ints,
    limit_bytes: int,
    aggregation: Aggregation,
) -> list[SliceTree]:
    """Returns the trees that windows are combined from.

    Partials that may be combined in any grouping get a tree with as many levels as are worth it (eager). The other
    partials get a tree without levels (lazy). So do all partials if a run overflows, since perhaps no window does.
    ``tree``: makes a tree of some partials. ``begins``, ``ends``: the slices of each window.
    """
    lazy = tree(())
    layout, starts = lazy.layout, lazy.starts[0]
    height = choose_height(np.diff(starts), lazy.key_count, begins, ends, aggregation)
    eager: frozenset[Partial] = frozenset()
    if height:
        eager = layout.regroupable(lazy.column, int((starts[ends] - starts[begins]).max()))
    found = []
    if eager:
        high = tree(eager)
        try:
            high.grow(height, limit_bytes)
        except IntegerOverflow:
            eager = frozenset()
        else:
            found.append(high)
    rest = [partial for partial in layout.partials if partial not in eager]
    return [*found, tree(rest)] if rest else found


def ranges(begins: Ints, lengths: Ints) -> Ints:
    """Returns the numbers ``begins[i], begins[i] + 1, ...``, ``lengths[i]`` of them, for each i in turn."""
    before = np.cumsum(lengths) - lengths
    found: Ints = np.arange(int(lengths.sum())) + np.repeat(begins - before, lengths)
    return found


def _starts(lengths: Ints) -> Ints:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
