"""Slices as rows of columns: a growing table of them, and how those of a batch join those that are there. Pure.

A row is a slice: ``edge`` (the last edge of a periodic window at or before it), ``events``, ``news`` (whether something
came since the last execution) and one column of partials for each ufunc, called by its name. Where there are sessions,
also ``first`` and ``last`` (the times of its first and last event) and ``level`` (for how many of the sessions' gaps,
from the smallest on, it is closed).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.core.slicing.ranges import running_max
from aion.slicing.folds import Fold

Values = npt.NDArray[Any]
Index = npt.NDArray[np.intp]
Rows = dict[str, Values]


class Table:
    """Rows in order, appended to and changed at the tail, dropped from the front, both in amortised O(1) per row.

    ``front``: where the first row lies in the buffers; it goes back to 0 when they are made anew, and ``moves`` counts
    how often that was.
    """

    def __init__(self, dtypes: Mapping[str, npt.DTypeLike]) -> None:
        self._buffers = {name: np.empty(0, dtype) for name, dtype in dtypes.items()}
        self.front = self._end = self.moves = 0

    def __len__(self) -> int:
        return self._end - self.front

    def __getitem__(self, name: str) -> Values:
        """All rows of a column, as a view: to be written to, but not to be kept over a change."""
        return self._buffers[name][self.front : self._end]

    def tail(self, at: int) -> Rows:
        return {name: buffer[self.front + at : self._end] for name, buffer in self._buffers.items()}

    def replace_tail(self, at: int, rows: Rows) -> None:
        """The rows from ``at`` on become ``rows``, which must not be views of them."""
        kept, new = self.front + at, len(next(iter(rows.values())))
        if kept + new > len(next(iter(self._buffers.values()))):
            self._make_room(at, new)
            kept = at
        for name, buffer in self._buffers.items():
            buffer[kept : kept + new] = rows[name]
        self._end = kept + new

    def drop_front(self, rows: int) -> None:
        self.front += rows

    def _make_room(self, kept: int, new: int) -> None:
        capacity = max(2 * (kept + new), 1024)
        for name, buffer in self._buffers.items():
            self._buffers[name] = np.empty(capacity, buffer.dtype)
            self._buffers[name][:kept] = buffer[self.front : self.front + kept]
        self.front, self._end = 0, kept
        self.moves += 1


def join_by_edge(old: Rows, new: Rows, folds: Mapping[str, Fold]) -> Rows:
    """Rows of the same edge become one; both sides are in order of their edges, each of which is there once."""
    if not len(old["edge"]):
        return new
    both = _stacked(old, new)
    order = np.argsort(both["edge"], kind="stable")
    edges = both["edge"][order]
    begins = np.flatnonzero(np.concatenate(([True], edges[1:] != edges[:-1])))
    return _reduced(both, order, begins, folds)


def join_by_gap(old: Rows, new: Rows, gap_us: int, folds: Mapping[str, Fold]) -> Rows:
    """Rows with no more than ``gap_us`` between them, of the same edge and level, become one (Scotty section VI.B).

    What is joined once stays joined, whatever comes between. The result is in order of the first event.
    """
    both = _stacked(old, new) if len(old["edge"]) else new
    levels = both["level"]
    mixed = bool((levels != levels[0]).any())
    order = np.lexsort((both["first"], levels)) if mixed else np.argsort(both["first"], kind="stable")
    edges, firsts, lasts = (both[name][order] for name in ("edge", "first", "last"))
    apart = edges[1:] != edges[:-1]
    if mixed:
        levels = levels[order]
        bounds = np.flatnonzero(np.diff(levels)) + 1
        apart[bounds - 1] = True
        reach = np.concatenate([running_max(part) for part in np.split(lasts, bounds)])
    else:
        reach = running_max(lasts)
    apart |= firsts[1:] - reach[:-1] > gap_us
    joined = _reduced(both, order, np.flatnonzero(np.concatenate(([True], apart))), folds)
    if mixed:
        again = np.argsort(joined["first"], kind="stable")
        joined = {name: column[again] for name, column in joined.items()}
    return joined


def _stacked(old: Rows, new: Rows) -> Rows:
    return {name: np.concatenate((column, new[name])) for name, column in old.items()}


def _reduced(rows: Rows, order: Index, begins: Index, folds: Mapping[str, Fold]) -> Rows:
    result: Rows = {}
    for name, column in rows.items():
        if name in ("edge", "level"):
            result[name] = column[order[begins]]
        else:
            reduce_ = _REDUCE.get(name) or folds[name].stretches
            result[name] = reduce_(column[order], begins)
    return result


_REDUCE: dict[str, Any] = {
    "events": np.add.reduceat,
    "news": np.logical_or.reduceat,
    "first": np.minimum.reduceat,
    "last": np.maximum.reduceat,
}
