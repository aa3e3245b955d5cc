"""Which rows of two tables match: those with the same hash whose times are in an interval. Pure, over whole columns."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from state_backends.thresholds import threshold

Ints = npt.NDArray[np.int64]
PAIRS_AT_ONCE = threshold(1 << 16, 3)


class Sorted:
    """Rows by hash and time, to be searched. ``hashes``, ``times``: (N,)."""

    def __init__(self, hashes: Ints, times: Ints) -> None:
        self._order = np.lexsort((times, hashes))
        self._groups, of = np.unique(hashes[self._order], return_inverse=True)
        self._instants, rank = np.unique(times[self._order], return_inverse=True)
        self._codes = of * (len(self._instants) + 1) + rank

    def _between(self, hashes: Ints, first: Ints, last: Ints) -> tuple[Ints, Ints]:
        """For each search, the places ``[begin, end)`` in the order of the rows that it finds."""
        begin = np.zeros(len(hashes), np.int64)
        end = begin.copy()
        if len(self._groups):
            group = np.minimum(np.searchsorted(self._groups, hashes), len(self._groups) - 1)
            at = np.flatnonzero(self._groups[group] == hashes)
            base = group[at] * (len(self._instants) + 1)
            begin[at] = np.searchsorted(self._codes, base + np.searchsorted(self._instants, first[at], "left"))
            end[at] = np.searchsorted(self._codes, base + np.searchsorted(self._instants, last[at], "right"))
        return begin, np.maximum(begin, end)

    def pairs(self, hashes: Ints, first: Ints, last: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Yields which searches find which rows, some at a time. ``first``, ``last``: the times that are searched for,
        both included.
        """
        begin, end = self._between(hashes, first, last)
        edges = np.cumsum(end - begin)
        total = int(edges[-1]) if len(edges) else 0
        for at in range(0, total, PAIRS_AT_ONCE):
            numbers = np.arange(at, min(at + PAIRS_AT_ONCE, total))
            search = np.searchsorted(edges, numbers, "right")
            yield search, self._order[end[search] - (edges[search] - numbers)]

    def newest(self, hashes: Ints, first: Ints, last: Ints) -> Ints:
        """Returns for each search the row with the largest time that it finds, or -1."""
        begin, end = self._between(hashes, first, last)
        if not len(self._order):
            return np.full(len(hashes), -1)
        return np.where(end > begin, self._order[np.maximum(end - 1, 0)], -1)
