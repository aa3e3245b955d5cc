"""A tree of partials over the slices of overlapping windows: the eager aggregate store (Scotty section V). Pure.

Lazily, a window is combined of the rows of all its slices, so that overlap multiplies rows. Eagerly, runs of 2, 4, 8
and more neighbouring slices are combined first, a level at a time and all runs and keys of it at once; then a window
takes at most two runs of each level, and what is left at the top. The tree is made for one pass over some windows, of
just so many levels as :func:`choose_height` finds worth their cost, and forgotten: nothing of it is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from aion.aggregates import Layout
from aion.aggregates.groups import Part, pack
from aion.aggregates.partial import Partial
from aion.aggregates.values import Ints, Mask
from aion.errors import IntegerOverflow

Aggregation: TypeAlias = Literal["auto", "lazy", "eager"]
"""Which way overlapping windows are combined; auto: by what each costs."""

ROWS_PER_LEVEL = 15_000
"""What a level costs beside its rows, as so many rows of a window: 0.3 ms, where a row takes 20 ns. To combine a row
into a level costs as much as to combine it into a window.

By that, of windows of which 100 end at once, a pass took this share of the lazy way's time (``aion experiment slicing
--legs operator``, medians of 5 runs; in brackets the whole call of LocalOperator)::

    overlap           20             100            600          600, one late event
    10 keys       1.09 (1.01)    0.64 (0.74)    0.39 (0.58)    0.52 (0.41)
    1,000 keys    0.42 (0.46)    0.09 (0.14)    0.05 (0.08)    0.28 (0.48)
"""


class Spans(NamedTuple):
    """Rows ``[begins, begins + lengths)`` of each window, by slice; two axes: windows, and spans of each."""

    begins: Ints
    lengths: Ints

    def rows(self, windows: slice) -> Rows:
        """The rows of some of the windows, which are counted from the first of them on."""
        begins, lengths = self.begins[windows], self.lengths[windows]
        window_of = np.repeat(np.arange(len(begins)), lengths.sum(axis=1))
        return Rows(window_of, ranges(begins.ravel(), lengths.ravel()))


class Rows(NamedTuple):
    """Rows of a tree, and the number of the window that each is taken for."""

    window_of: Ints
    rows: Ints

    def some(self, which: Mask) -> Rows:
        return Rows(self.window_of[which], self.rows[which])


def spans(starts: Sequence[Ints], begins: Ints, ends: Ints) -> Spans:
    """What each window is combined of, in the order of its slices, which ``begins`` and ``ends`` count.

    ``starts``: of each level where its runs begin among the rows, and where the last one ends. From below upwards a
    window takes the run at its edge of which the other half of the parent is outside (on the left a right child, on the
    right a left child), and at the top all that is left between.
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
    """1 for each window that takes a run at its left edge, and at its right edge, before it goes up; 0 for others."""
    by_left = (left & 1) & (left < right)
    return by_left, (right & 1) & (left + by_left < right)


def choose_height(rows: Ints, keys: int, begins: Ints, ends: Ints, aggregation: Aggregation) -> int:
    """How many levels above the slices pay; 0: windows are combined of the rows of their slices.

    ``rows`` of each slice, of ``keys`` keys in all. A run has at most a row for each key; that it has as many is taken
    for granted, so keys that are seldom seen again, which a tree would not help, are not mistaken for a gain. With
    ``eager`` the tree is as high as any window can use.
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
    """Levels of partials: the rows of single slices, and above them, once it is grown, of runs of 2, 4, 8, ... slices.

    ``partials``: those that the tree is of. ``columns``: their states by slice, in the order of arrival; ``keys``: of
    each row the number of its key, below ``key_count``. ``starts``: where each slice begins among the rows, and where
    the last one ends.
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
        """Builds so many levels, or fewer, where they take more than ``limit_bytes``.

        Raises IntegerOverflow where a run overflows, though perhaps no window does.
        """
        bottom = self.starts[0]
        run_of, keys = np.repeat(np.arange(len(bottom) - 1), np.diff(bottom)), self.keys
        all_keys = [keys]
        while len(self.starts) <= height and limit_bytes > 0:
            at, count = int(self.starts[-1][-1]), len(self.starts[-1]) >> 1
            groups, (run_of, keys) = pack([Part(run_of >> 1, count), Part(keys, self.key_count)])
            states = self.layout.merge(groups, self._levels[-1].__getitem__, self.partials)
            level = {
                name: column
                for partial in self.partials
                for name, column in zip(self.layout.partials[partial], states[partial], strict=True)
            }
            self._levels.append(level)
            # Groups come by run, also where they were hashed: then in the order in which they are met.
            self.starts.append(at + np.searchsorted(run_of, np.arange(count + 1)))
            all_keys.append(keys)
            limit_bytes -= sum(column.nbytes for column in level.values())
        self.keys = np.concatenate(all_keys)

    def column(self, name: str) -> pa.Array:
        """A column of the partials, the levels one after the other."""
        if name not in self._whole:
            pieces = [level[name] for level in self._levels]
            self._whole[name] = pa.concat_arrays(pieces) if len(pieces) > 1 else pieces[0]
        return self._whole[name]

    def taken(self, rows: Ints) -> Callable[[str], pa.Array]:
        """A column of some rows, by its name."""
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
    """Trees from which windows are combined: of as many levels as pay, of what may be combined in any grouping (eager).

    The others, and all where runs overflow though perhaps no window does, are combined of single slices: of a tree
    without levels (lazy). ``tree``: makes one of some partials. ``begins``, ``ends``: the slices of each window,
    counted from the first one on.
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
    """``begins[i], begins[i] + 1, ...`` of each length, one after the other."""
    before = np.cumsum(lengths) - lengths
    found: Ints = np.arange(int(lengths.sum())) + np.repeat(begins - before, lengths)
    return found


def _starts(lengths: Ints) -> Ints:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
