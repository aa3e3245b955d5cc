"""The aligned windows that cover given slices, for all definitions at once (Scotty section IV). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aion.base.numbers import NEVER
from aion.core.periodic import Periodic
from aion.core.windows import Aligned, Calendar
from state_backends.thresholds import threshold

Ints = npt.NDArray[np.int64]

_EMPTY_PER_FULL = threshold(8, 1)
"""List all windows from the first slice to the last, unless there are more than this many for each non-empty one."""
_AT_ONCE = threshold(1 << 20)
_ONE = (1, 1, 1, 0)


class Covering(NamedTuple):
    """Windows in the order of their ends. Window i holds ``slices[begins[i]:ends[i]]``."""

    definition: Ints
    start_us: Ints
    end_us: Ints
    begins: Ints
    ends: Ints


class AlignedWindows:
    """Window definitions by their number in the operator.

    The windows of a definition are numbered by their ends, with the formula of :mod:`aion.core.periodic`. A calendar
    has one window at a time; in that formula it stands with lengths and an offset in windows instead of µs.
    """

    def __init__(self, windows: Mapping[int, Aligned], limits: Mapping[int, tuple[int, int]] | None = None) -> None:
        """``limits``: by number, from when on and before when the windows of a definition begin. Default: always."""
        always = (-NEVER, NEVER)
        self._limits = np.array([(limits or {}).get(number, always) for number in windows], np.int64).reshape(-1, 2)
        self._limited = bool(limits)
        self._numbers = np.array(list(windows), np.int64)
        periodic = [
            (w.shortest_us, w.slide_us, w.start_every_us, w.offset_us) if isinstance(w, Periodic) else _ONE
            for w in windows.values()
        ]
        columns = np.array(periodic, np.int64).reshape(-1, 4).T.copy()
        self._shortest, self._slides, self._starts_every, self._offsets = columns
        self._calendars = {place: w.edges for place, w in enumerate(windows.values()) if isinstance(w, Calendar)}
        self._places = {number: place for place, number in enumerate(windows)}
        self._overlap = sum(w.overlap if isinstance(w, Periodic) else 1 for w in windows.values())

    def covering(self, slices_us: Ints) -> Covering:
        """Returns all windows that hold any of the slices. The starts of the slices ascend, each once."""
        if not len(self._numbers) or not len(slices_us):
            nothing = np.empty(0, np.int64)
            return Covering(nothing, nothing, nothing, nothing, nothing)
        first, last = int(slices_us[0]), int(slices_us[-1])
        oldest, newest = self._oldest(np.array([first]))[0], self._newest(np.array([last]))[0]
        counts = newest - oldest + 1
        if float(counts.sum(dtype=np.float64)) <= _EMPTY_PER_FULL * len(slices_us) * self._overlap:
            which = np.repeat(np.arange(len(counts)), counts)
            numbers = np.arange(len(which)) + np.repeat(oldest - (np.cumsum(counts) - counts), counts)
        else:
            which, numbers = self._windows_of_each(slices_us)
        starts, ends = self._bounds(which, numbers)
        order = np.lexsort((which, ends))
        which, starts, ends = which[order], starts[order], ends[order]
        low, high = np.searchsorted(slices_us, starts), np.searchsorted(slices_us, ends)
        full = high > low
        if self._limited:
            since, before = self._limits[which].T
            full &= (starts >= since) & (starts < before)
        if not full.all():
            which, starts, ends, low, high = which[full], starts[full], ends[full], low[full], high[full]
        return Covering(self._numbers[which], starts, ends, low, high)

    # -- windows of one definition, whether or not they hold slices ----------------------------------------

    def ending(self, number: int, after_us: Ints, by_us: Ints) -> tuple[Ints, Ints]:
        """Returns the first and the last number of the windows of a definition that end after an instant, up to
        another. If there is none, the first is larger.
        """
        place = self._places[number]
        # The first window that holds an instant is the first one that ends after it.
        return self._oldest(after_us)[:, place], self._oldest(by_us)[:, place] - 1

    def holding(self, number: int, slices_us: Ints) -> tuple[Ints, Ints]:
        """Returns the first and the last number of the windows of a definition that hold each slice."""
        place = self._places[number]
        return self._oldest(slices_us)[:, place], self._newest(slices_us)[:, place]

    def last_ends(self, number: int, slices_us: Ints) -> Ints:
        """Returns the end of the last window of a definition that holds each slice."""
        return self.bounds(number, self._newest(slices_us)[:, self._places[number]])[1]

    def first_from(self, number: int, instant_us: int) -> int:
        """Returns the first start of a window of a definition that is not before an instant."""
        newest = self._newest(np.array([instant_us - 1]))[:, self._places[number]]
        return int(self.bounds(number, newest + 1)[0][0])

    def bounds(self, number: int, numbers: Ints) -> tuple[Ints, Ints]:
        """Returns the start and the end of windows of a definition, by their numbers."""
        return self._bounds(np.full(len(numbers), self._places[number]), numbers)

    def existing(self, number: int, numbers: Ints) -> tuple[Ints, Ints]:
        """Returns the same for those of the windows that there are: no empty ones of a calendar, and none out of the
        limits of the definition.
        """
        starts, ends = self.bounds(number, numbers)
        since, before = self._limits[self._places[number]]
        there = (starts < ends) & (starts >= since) & (starts < before)
        return starts[there], ends[there]

    # -- numbers -------------------------------------------------------------------------------------------

    def _oldest(self, slices_us: Ints) -> Ints:
        """Returns a row for each slice: for each definition, the number of the first window that holds the slice."""
        rows = slices_us[:, None]
        found: Ints = (rows - self._offsets - self._shortest) // self._slides + 1
        for place, calendar in self._calendars.items():
            found[:, place] = calendar.numbers(slices_us)
        return found

    def _newest(self, slices_us: Ints) -> Ints:
        """Returns the same for the last window."""
        rows = slices_us[:, None]
        started = (rows - self._offsets) // self._starts_every + 1
        found: Ints = started * self._starts_every // self._slides - 1
        for place, calendar in self._calendars.items():
            found[:, place] = calendar.numbers(slices_us)
        return found

    def _bounds(self, which: Ints, numbers: Ints) -> tuple[Ints, Ints]:
        """Returns the start and end of each window."""
        instants, every = numbers * self._slides[which], self._starts_every[which]
        starts = self._offsets[which] + instants // every * every
        ends = self._offsets[which] + instants + self._shortest[which]
        for place, calendar in self._calendars.items():
            own = which == place
            starts[own], ends[own] = calendar.starts(numbers[own]), calendar.starts(numbers[own] + 1)
        return starts, ends

    def _windows_of_each(self, slices_us: Ints) -> tuple[Ints, Ints]:
        """Definition and number of each window that holds any of the slices, found slice by slice."""
        parts = []
        step = max(_AT_ONCE // self._overlap, 1)
        for begin in range(0, len(slices_us), step):
            rows = slices_us[begin : begin + step]
            oldest = self._oldest(rows)
            counts = self._newest(rows) - oldest + 1
            flat = counts.ravel()
            which = np.repeat(np.broadcast_to(np.arange(counts.shape[1]), counts.shape).ravel(), flat)
            numbers = np.arange(len(which)) + np.repeat(oldest.ravel() - (np.cumsum(flat) - flat), flat)
            parts.append(_distinct(which, numbers))
        which, numbers = (np.concatenate(column) for column in zip(*parts, strict=True))
        return _distinct(which, numbers)


def _distinct(which: Ints, numbers: Ints) -> tuple[Ints, Ints]:
    """Returns each pair once, in order."""
    order = np.lexsort((numbers, which))
    which, numbers = which[order], numbers[order]
    first = np.ones(len(which), np.bool_)
    first[1:] = (which[1:] != which[:-1]) | (numbers[1:] != numbers[:-1])
    return which[first], numbers[first]
