"""Which tumbling and sliding windows end in a stretch of time, for all definitions at once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aion.core.slicing.edges import EdgeSet, Micros, assign
from aion.core.windows import Periodic

Index = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]

# Windows that turn out to be empty are cheap to name, up to a point: past it they are looked for where events are.
_EMPTY_PER_FULL = 8
_AT_ONCE = 1 << 20


class Due(NamedTuple):
    """Windows by the number of their definition, their start, end, and the rows ``[begin, end)`` they are made of."""

    definition: Micros
    start_us: Micros
    end_us: Micros
    begins: Index
    ends: Index


class PeriodicWindows:
    """Definitions by their number among all of an operator's."""

    def __init__(self, windows: Sequence[tuple[int, Periodic]]) -> None:
        self.edges = EdgeSet(family for _, window in windows for family in window.families())
        self._numbers = np.array([number for number, _ in windows], np.int64)
        self._sizes = np.array([window.size_us for _, window in windows], np.int64)
        self._slides = np.array([window.slide_us for _, window in windows], np.int64)
        # Of the end of window 0: window k ends at phase + k * slide.
        self._phases = np.array([window.offset_us + window.size_us for _, window in windows], np.int64)
        self._overlap = int((-(-self._sizes // self._slides)).sum())
        self.longest_us = max((window.size_us for _, window in windows), default=0)

    def __bool__(self) -> bool:
        return len(self._numbers) > 0

    def last_ends(self, slices_us: Micros) -> Micros:
        """The end of the last window of any definition that each slice is part of."""
        result = np.empty(len(slices_us), np.int64)
        step = max(_AT_ONCE // len(self._numbers), 1)
        for begin in range(0, len(slices_us), step):
            slices = slices_us[begin : begin + step, None]
            starts = slices - (slices - self._phases + self._sizes) % self._slides
            result[begin : begin + step] = (starts + self._sizes).max(axis=1)
        return result

    def ending(self, after_us: int, until_us: int, rows_us: Micros, among: Flags | None = None) -> Due:
        """The windows that end in ``(after_us, until_us]`` and have a row; with ``among``, one of those rows.

        ``rows_us``: the starts of all slices that there are, in order. In order of definition, then of time.
        """
        # Rows before these are in windows that ended before.
        skipped = int(np.searchsorted(rows_us, after_us - self.longest_us))
        rows_us, among = rows_us[skipped:], None if among is None else among[skipped:]
        nothing = np.empty(0, np.int64)
        if not len(rows_us) or (among is not None and not among.any()):
            return Due(nothing, nothing, nothing, nothing, nothing)
        first, last = int(rows_us[0]), int(rows_us[-1])
        # Clipped to windows with a row: however far a watermark jumps, empty ones are not gone through.
        after_us = max(after_us, first)
        until_us = min(until_us, last + self.longest_us)
        if until_us <= after_us:
            return Due(nothing, nothing, nothing, nothing, nothing)
        lowest = (after_us - self._phases) // self._slides + 1
        highest = np.minimum(until_us - self._phases, last - self._phases + self._sizes) // self._slides
        counts = np.maximum(highest - lowest + 1, 0)
        inhabited = rows_us if among is None else rows_us[among]
        if int(counts.sum()) <= _EMPTY_PER_FULL * len(inhabited) * self._overlap:
            which = np.repeat(np.arange(len(counts)), counts)
            numbers = np.arange(len(which)) + np.repeat(lowest - (np.cumsum(counts) - counts), counts)
        else:
            which, numbers = self._holding(inhabited, lowest, highest)
        ends_us = self._phases[which] + numbers * self._slides[which]
        starts_us = ends_us - self._sizes[which]
        # The first row at or after each bound.
        begins, ends = np.split(assign(np.concatenate((starts_us, ends_us)) - 1, rows_us) + 1, 2)
        if among is None:
            full = ends > begins
        else:
            before = np.concatenate(([0], np.cumsum(among)))
            full = before[ends] > before[begins]
        if not full.all():
            kept = np.flatnonzero(full)
            which, starts_us, ends_us, begins, ends = (a[kept] for a in (which, starts_us, ends_us, begins, ends))
        return Due(self._numbers[which], starts_us, ends_us, begins + skipped, ends + skipped)

    def _holding(self, rows_us: Micros, lowest: Micros, highest: Micros) -> tuple[Index, Micros]:
        """The windows of each definition, numbered ``lowest`` to ``highest``, that any of the rows is part of."""
        parts = []
        step = max(_AT_ONCE // self._overlap, 1)
        for begin in range(0, len(rows_us), step):
            rows = rows_us[begin : begin + step, None]
            newest = (rows - self._phases + self._sizes) // self._slides
            oldest = np.maximum((rows - self._phases) // self._slides + 1, lowest)
            counts = np.maximum(np.minimum(newest, highest) - oldest + 1, 0)
            flat = counts.ravel()
            which = np.repeat(np.broadcast_to(np.arange(counts.shape[1]), counts.shape).ravel(), flat)
            numbers = np.arange(len(which)) + np.repeat(oldest.ravel() - (np.cumsum(flat) - flat), flat)
            parts.append(_distinct(which, numbers))
        if len(parts) == 1:
            return parts[0]
        return _distinct(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _distinct(which: Index, numbers: Micros) -> tuple[Index, Micros]:
    """Each pair once, in order."""
    order = np.lexsort((numbers, which))
    which, numbers = which[order], numbers[order]
    first = np.ones(len(which), np.bool_)
    first[1:] = (which[1:] != which[:-1]) | (numbers[1:] != numbers[:-1])
    return which[first], numbers[first]
