"""The baselines for slicing (Scotty section VII): buckets as in Flink, and FlatFAT. Sums of one column, one key.

Both are vectorised as far as their design allows. Buckets add every event to each of its windows. FlatFAT keeps a tree
over single events and has to insert an event that is out of order. Neither handles late events: all events of a stream
come before the watermark passes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from aion.core.periodic import Tumbling
from aion.core.slicing.sessions import Grouped, Intervals, merge_intervals
from aion.core.windows import Definition, Session
from aion.errors import WindowError
from state_backends.thresholds import threshold

Ints = npt.NDArray[np.int64]
Index = npt.NDArray[np.intp]

LONG_AGO = -(2**62)
# Find cells in a grid of keys by cells, without sorting, if the grid has at most this many places per event.
_PLACES_PER_EVENT = threshold(4, 1)
_MIN_PLACES = threshold(1 << 14, 2)


class Panes(NamedTuple):
    """A row for each window that has ended. ``definition``: the index of its definition."""

    definition: Ints
    start_us: Ints
    end_us: Ints
    events: Ints
    total: Ints


class _Windows(Protocol):
    """The buckets of one definition. ``ended``: removes ended buckets; returns their starts, ends, events and sums."""

    def add(self, times_us: Ints, values: Ints) -> None: ...
    def ended(self, now_us: int) -> tuple[Ints, Ints, Ints, Ints]: ...


class Buckets:
    """One bucket per window. An event is added to each of its buckets."""

    def __init__(self, windows: Sequence[Definition]) -> None:
        self._of: list[_Windows] = [_TumblingBuckets(w) if isinstance(w, Tumbling) else _sessions(w) for w in windows]

    def process(self, times_us: Ints, values: Ints) -> None:
        if len(times_us):
            for one in self._of:
                one.add(times_us, values)

    def advance(self, watermark_us: int) -> Panes:
        return _stacked([one.ended(watermark_us) for one in self._of])


class _TumblingBuckets:
    """A run of neighbouring windows, from the first one that has not ended."""

    def __init__(self, window: Tumbling) -> None:
        self._size_us, self._offset_us = window.size_us, window.offset_us
        self._first = 0
        self._events = self._sums = np.zeros(0, np.int64)

    def add(self, times_us: Ints, values: Ints) -> None:
        numbers = (times_us - self._offset_us) // self._size_us
        low, high = int(numbers.min()), int(numbers.max())
        if not len(self._events):
            self._first = low
        before = max(self._first - low, 0)
        after = max(high - self._first + 1 - len(self._events), 0)
        self._first -= before
        self._events, self._sums = np.pad(self._events, (before, after)), np.pad(self._sums, (before, after))
        numbers -= self._first
        np.add.at(self._events, numbers, 1)
        np.add.at(self._sums, numbers, values)

    def ended(self, now_us: int) -> tuple[Ints, Ints, Ints, Ints]:
        until = min(max((now_us - self._offset_us) // self._size_us - self._first, 0), len(self._events))
        which = np.flatnonzero(self._events[:until])
        starts_us = (self._first + which) * self._size_us + self._offset_us
        found = starts_us, starts_us + self._size_us, self._events[which], self._sums[which]
        self._first += until
        self._events, self._sums = self._events[until:], self._sums[until:]
        return found


def session_cells(keys: Ints, times_us: Ints, gap_us: int) -> Grouped:
    """Group events into intervals without sorting: one interval for each key and cell of time as wide as the gap.

    No gap fits inside a cell, so the first and the last event describe it completely. ``keys``: numbers from 0 on. In
    the result, ``of`` is the interval of each event, by which its values can be added up. With several gaps pass the
    smallest.
    """
    if not len(times_us):
        return Grouped(Intervals(keys, times_us, times_us), np.empty(0, np.intp))
    cells = times_us // gap_us
    lowest = int(cells.min())
    width, n_keys = int(cells.max()) - lowest + 1, int(keys.max()) + 1
    if n_keys * width >= 2**63:  # a place would overflow: renumber keys and cells densely
        present, keys_anew = np.unique(keys, return_inverse=True)
        inhabited, cells_anew = np.unique(cells, return_inverse=True)
        places = keys_anew * len(inhabited) + cells_anew
        size = len(present) * len(inhabited)
    else:
        places, size = keys * width + (cells - lowest), n_keys * width
    if size <= _PLACES_PER_EVENT * len(times_us) + _MIN_PLACES:
        taken = np.zeros(size, np.bool_)
        taken[places] = True
        numbers = np.cumsum(taken) - 1
        of, count = numbers[places], int(numbers[-1]) + 1
    else:
        distinct, of = np.unique(places, return_inverse=True)
        count = len(distinct)
    of_key = np.empty(count, np.int64)
    of_key[of] = keys
    firsts, lasts = np.full(count, np.iinfo(np.int64).max), np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(firsts, of, times_us)
    np.maximum.at(lasts, of, times_us)
    return Grouped(Intervals(of_key, firsts, lasts), of)


class _SessionBuckets:
    """Sessions that have not ended. The sessions of a batch are formed first, then merged with the existing ones."""

    def __init__(self, gap_us: int) -> None:
        self._gap_us = gap_us
        self._firsts = self._lasts = self._events = self._sums = np.zeros(0, np.int64)

    def add(self, times_us: Ints, values: Ints) -> None:
        cells = session_cells(np.zeros(len(times_us), np.int64), times_us, self._gap_us)
        firsts = np.concatenate((self._firsts, cells.made.firsts))
        lasts = np.concatenate((self._lasts, cells.made.lasts))
        merged = merge_intervals(Intervals(np.zeros(len(firsts), np.int64), firsts, lasts), self._gap_us)
        count, known = len(merged.made.firsts), len(self._firsts)
        sums_of_cells = np.zeros(len(firsts) - known, np.int64)
        np.add.at(sums_of_cells, cells.of, values)
        events, sums = np.zeros(count, np.int64), np.zeros(count, np.int64)
        np.add.at(events, merged.of, np.concatenate((self._events, np.bincount(cells.of))))
        np.add.at(sums, merged.of, np.concatenate((self._sums, sums_of_cells)))
        self._firsts, self._lasts, self._events, self._sums = merged.made.firsts, merged.made.lasts, events, sums

    def ended(self, now_us: int) -> tuple[Ints, Ints, Ints, Ints]:
        until = int(np.searchsorted(self._lasts, now_us - self._gap_us, side="right"))
        found = self._firsts[:until], self._lasts[:until] + self._gap_us, self._events[:until], self._sums[:until]
        self._firsts, self._lasts = self._firsts[until:], self._lasts[until:]
        self._events, self._sums = self._events[until:], self._sums[until:]
        return found


class FlatFat:
    """A tree with a leaf for each event, in event-time order. Windows are ranges of leaves.

    ``whole_batches``: sort a batch, merge it with the leaves, and rebuild the tree above. FlatFAT itself inserts each
    event that is out of order alone, so this is kinder than the papers.
    """

    def __init__(self, windows: Sequence[Definition], *, whole_batches: bool = False) -> None:
        self._windows = [w if isinstance(w, Tumbling) else _session(w) for w in windows]
        self._leaves = _Leaves()
        self._now_us = LONG_AGO
        # By window: events before this belong to sessions that have ended, which nothing joins any more.
        self._open_from_us = dict.fromkeys(range(len(windows)), LONG_AGO)
        self.whole_batches = whole_batches

    def process(self, times_us: Ints, values: Ints) -> None:
        if not len(times_us):
            return
        if self.whole_batches:
            order = np.argsort(times_us, kind="stable")
            self._leaves.merge(times_us[order], values[order])
            return
        # Append runs of events that are in order. Insert an event that is out of order by itself.
        latest = np.maximum.accumulate(np.concatenate((self._leaves.times[-1:], times_us)))[-len(times_us) :]
        done = 0
        for at in np.flatnonzero(times_us < latest).tolist():
            for some in (slice(done, at), slice(at, at + 1)):
                if some.stop > some.start:
                    self._leaves.merge(times_us[some], values[some])
            done = at + 1
        if done < len(times_us):
            self._leaves.merge(times_us[done:], values[done:])

    def advance(self, watermark_us: int) -> Panes:
        before_us, self._now_us = self._now_us, max(watermark_us, self._now_us)
        found, unneeded = [], len(self._leaves.times)
        for number, window in enumerate(self._windows):
            if isinstance(window, Tumbling):
                panes, needed_from = self._tumbling(window, before_us)
            else:
                panes, needed_from = self._sessions(window, number)
            found.append(panes)
            unneeded = min(unneeded, needed_from)
        self._leaves.drop_front(unneeded)
        return _stacked(found)

    def _tumbling(self, window: Tumbling, before_us: int) -> tuple[tuple[Ints, Ints, Ints, Ints], int]:
        times, size_us, offset_us = self._leaves.times, window.size_us, window.offset_us
        if not len(times):
            return _NOTHING, 0
        # Only windows that hold an event, and end after the previous watermark and up to this one.
        first = (max(int(times[0]), before_us) - offset_us) // size_us
        until = (min(int(times[-1]) + size_us, self._now_us) - offset_us) // size_us
        starts = np.arange(first, until) * size_us + offset_us
        begins, ends = np.searchsorted(times, starts), np.searchsorted(times, starts + size_us)
        full = ends > begins
        starts, begins, ends = starts[full], begins[full], ends[full]
        open_from = (self._now_us - offset_us) // size_us * size_us + offset_us
        panes = starts, starts + size_us, ends - begins, self._leaves.sums(begins, ends)
        return panes, int(np.searchsorted(times, open_from))

    def _sessions(self, window: Session, number: int) -> tuple[tuple[Ints, Ints, Ints, Ints], int]:
        front = int(np.searchsorted(self._leaves.times, self._open_from_us[number]))
        times = self._leaves.times[front:]
        if not len(times):
            return _NOTHING, front
        cuts = np.flatnonzero(np.diff(times) > window.gap_us) + 1
        begins, ends = np.concatenate(([0], cuts)), np.append(cuts, len(times))
        ends_us = times[ends - 1] + window.gap_us
        due = ends_us <= self._now_us
        needed_from = len(times) if due.all() else int(begins[~due][0])
        begins, ends, ends_us = begins[due], ends[due], ends_us[due]
        if len(ends):
            self._open_from_us[number] = int(times[ends[-1] - 1]) + 1
        return (
            times[begins],
            ends_us,
            ends - begins,
            self._leaves.sums(begins + front, ends + front),
        ), front + needed_from


class _Leaves:
    """Events in order of time, and the tree above them. ``_front``: the position of the first one in the buffers."""

    def __init__(self) -> None:
        self._times = self._values = np.empty(0, np.int64)
        self._front = self._end = 0
        self._tree = SumTree()

    @property
    def times(self) -> Ints:
        return self._times[self._front : self._end]

    def merge(self, times_us: Ints, values: Ints) -> None:
        """Adds events, which are in order of time. They come after existing ones of equal time."""
        at = self._front + int(np.searchsorted(self.times, times_us[0], side="right"))
        times = np.concatenate((self._times[at : self._end], times_us))
        order = np.argsort(times, kind="stable")
        self._write(at, times[order], np.concatenate((self._values[at : self._end], values))[order])

    def sums(self, begins: Index, ends: Index) -> Ints:
        return self._tree.ranges(begins + self._front, ends + self._front)

    def drop_front(self, leaves: int) -> None:
        self._front += leaves

    def _write(self, at: int, times_us: Ints, values: Ints) -> None:
        if at + len(times_us) > len(self._times):
            kept = slice(self._front, at)
            times_us = np.concatenate((self._times[kept], times_us))
            values = np.concatenate((self._values[kept], values))
            self._times, self._values = (np.empty(2 * len(times_us) + 1024, np.int64) for _ in range(2))
            self._front = at = 0
            self._tree = SumTree()
        self._end = at + len(times_us)
        self._times[at : self._end], self._values[at : self._end] = times_us, values
        self._tree.write(at, values)


class SumTree:
    """Sums over ranges of a growing column in O(log n). Writing m neighbours is O(m + log n) (Scotty reference 9)."""

    def __init__(self) -> None:
        self._levels = [np.zeros(2, np.int64)]

    def write(self, begin: int, values: Ints) -> None:
        """Sets the leaves from ``begin`` on, and all nodes above them."""
        end = begin + len(values)
        if end >= len(self._levels[0]):
            self._grow(end)
        self._levels[0][begin:end] = values
        self._lift(begin, end)

    def ranges(self, begins: Index, ends: Index) -> Ints:
        """The sum of the leaves ``[begin, end)`` of each range; none may be empty."""
        left, right = begins.copy(), ends.copy()
        result = np.zeros(len(begins), np.int64)
        for level in self._levels:
            # Take a first node that is a right child, and a last one that is a left child: their parents would reach
            # beyond the range.
            is_open = left < right
            if not is_open.any():
                break
            nothing = len(level) - 1
            takes = is_open & ((left & 1) == 1)
            result += level[np.where(takes, left, nothing)]
            left += takes
            takes = is_open & ((right & 1) == 1)
            right -= takes
            result += level[np.where(takes, right, nothing)]
            left >>= 1
            right >>= 1
        return result

    def _grow(self, size: int) -> None:
        """Grows to a power of two of leaves. Each level has one extra entry, which stays 0."""
        leaves, capacity = self._levels[0][:-1], 1 << (size - 1).bit_length()
        self._levels = []
        while capacity:
            self._levels.append(np.zeros(capacity + 1, np.int64))
            capacity >>= 1
        self._levels[0][: len(leaves)] = leaves
        self._lift(0, len(leaves))

    def _lift(self, begin: int, end: int) -> None:
        for lower, upper in zip(self._levels, self._levels[1:], strict=False):
            begin, end = begin >> 1, (end + 1) >> 1
            np.add(lower[2 * begin : 2 * end : 2], lower[2 * begin + 1 : 2 * end : 2], out=upper[begin:end])


_NOTHING = (np.zeros(0, np.int64),) * 4


def _stacked(parts: Sequence[tuple[Ints, Ints, Ints, Ints]]) -> Panes:
    definition = np.repeat(np.arange(len(parts)), [len(part[0]) for part in parts])
    return Panes(definition, *(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _session(window: Definition) -> Session:
    if not isinstance(window, Session):
        raise WindowError(f"{window}: the baselines only support tumbling windows and sessions")
    return window


def _sessions(window: Definition) -> _SessionBuckets:
    return _SessionBuckets(_session(window).gap_us)
