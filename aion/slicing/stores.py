"""Two aggregate stores over the same slices: ``lazy`` and ``eager`` (Scotty sections V and VII). Pure.

The lazy one keeps slices in order and combines those of a window when it is asked for. The eager one keeps a tree of
partials over them as well: a batch costs it the nodes above what changed, and any window O(log n).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from aion.core.slicing.ranges import RangeTree
from aion.core.windows import Periodic
from aion.slicing.folds import Fold
from aion.slicing.rows import Rows, Table, join_by_edge, join_by_gap

Values = npt.NDArray[Any]
Index = npt.NDArray[np.intp]

EAGER_FROM_SLICES = 1 << 18
"""Where a window has so many slices, going through them for each batch costs more than keeping a tree. Measured with
batches of 1,000 events and 50 windows: about equal here, 2 to 3 times as much at four times as many slices."""

_SUM = np.add.__name__
# Sums of which the addends are no larger than this, together and without their signs, stay within 64 bits.
_SURELY_FITS = 2.0**62


class Store(Protocol):
    """Slices in order; ``rows`` shows them, ``ranges`` aggregates over stretches of them.

    ``news_from``: no row before this one has news.
    """

    rows: Table
    news_from: int

    def add(self, new: Rows) -> None: ...
    def ranges(self, begins: Index, ends: Index) -> tuple[Values, dict[str, Values]]: ...
    def drop_front(self, rows: int) -> None: ...
    def fuse_front(self, rows: int) -> None: ...


class LazyStore:
    """``gap_us``: the smallest gap of any session, with which neighbouring slices are joined; None without sessions."""

    def __init__(self, folds: Mapping[str, Fold], dtype: npt.DTypeLike, gap_us: int | None) -> None:
        self._folds = dict(folds)
        self._gap_us = gap_us
        columns: dict[str, npt.DTypeLike] = {"edge": np.int64, "events": np.int64, "news": np.bool_}
        if gap_us is not None:
            columns |= {"first": np.int64, "last": np.int64, "level": np.int64}
        self.rows = Table(columns | dict.fromkeys(self._folds, dtype))
        self.news_from = 0

    def add(self, new: Rows) -> None:
        """Slices of a batch join those that are there; only rows from the first of them on are touched."""
        at = int(np.searchsorted(self.rows["edge"], new["edge"][0]))
        if self._gap_us is None:
            joined = join_by_edge(self.rows.tail(at), new, self._folds)
        else:
            at = self._joinable_from(at, int(new["first"][0]))
            joined = join_by_gap(self.rows.tail(at), new, self._gap_us, self._folds)
        self._replace_tail(at, joined)

    def ranges(self, begins: Index, ends: Index) -> tuple[Values, dict[str, Values]]:
        """The events and the partials of each range ``[begin, end)`` of rows; none may be empty."""
        return ranges_of(self.rows, self._folds, begins, ends)

    def drop_front(self, rows: int) -> None:
        self.rows.drop_front(rows)
        self.news_from = max(self.news_from - rows, 0)

    def fuse_front(self, rows: int) -> None:
        """Joins what is left of the first rows for sessions only: no edge between them matters any more."""
        assert self._gap_us is not None
        every = self.rows.tail(0)
        front = {name: column[:rows] for name, column in every.items()}
        front["edge"] = np.full(rows, every["edge"][0])
        fused = join_by_gap({name: column[:0] for name, column in front.items()}, front, self._gap_us, self._folds)
        self._replace_tail(0, {name: np.concatenate((fused[name], every[name][rows:])) for name in every})

    def _replace_tail(self, at: int, rows: Rows) -> None:
        self.rows.replace_tail(at, rows)
        self.news_from = min(self.news_from, at)

    def _joinable_from(self, at: int, first_us: int) -> int:
        """Where rows are disjoint in time, only those that end a gap before the new ones, or later, can join them."""
        assert self._gap_us is not None
        levels = self.rows["level"][at:]
        if len(levels) and (levels == levels[0]).all():
            at += int(np.searchsorted(self.rows["last"][at:], first_us - self._gap_us))
        return at


class EagerStore(LazyStore):
    """As the lazy one, and a tree of each column of partials."""

    def __init__(self, folds: Mapping[str, Fold], dtype: npt.DTypeLike, gap_us: int | None) -> None:
        super().__init__(folds, dtype, gap_us)
        self._trees = {name: RangeTree(fold.combine, dtype) for name, fold in self._folds.items()}
        self._trees["events"] = RangeTree(np.add, np.int64)
        self._mass = 0.0

    def ranges(self, begins: Index, ends: Index) -> tuple[Values, dict[str, Values]]:
        at, until = begins + self.rows.front, ends + self.rows.front
        found = {}
        for name, fold in self._folds.items():
            column = self.rows[name]
            # The tree's sums wrap around; where that could happen, they are made again, and checked.
            wraps = fold.combine is np.add and column.dtype.kind == "i" and self._may_wrap(column)
            found[name] = fold.ranges(column, begins, ends) if wraps else self._trees[name].ranges(at, until)
        return self._trees["events"].ranges(at, until), found

    def _replace_tail(self, at: int, rows: Rows) -> None:
        moves = self.rows.moves
        super()._replace_tail(at, rows)
        if self.rows.moves != moves:
            at = 0  # All rows lie elsewhere now. That is as rare as the table's growing.
        for name, tree in self._trees.items():
            written = self.rows[name][at:]
            tree.write(self.rows.front + at, written)
            if name == _SUM:
                self._mass += float(np.abs(written.astype(np.float64)).sum())

    def _may_wrap(self, column: Values) -> bool:
        """Whether sums may leave 64 bits. What was written again counts twice, until that is found out."""
        if self._mass >= _SURELY_FITS:
            self._mass = float(np.abs(column.astype(np.float64)).sum())
        return self._mass >= _SURELY_FITS


def ranges_of(
    rows: Table | Rows, folds: Mapping[str, Fold], begins: Index, ends: Index
) -> tuple[Values, dict[str, Values]]:
    events = Fold(np.add).ranges(rows["events"], begins, ends)
    return events, {name: fold.ranges(rows[name], begins, ends) for name, fold in folds.items()}


STORES = {"lazy": LazyStore, "eager": EagerStore}


def choose_store(windows: Sequence[object]) -> str:
    """``eager`` where a window spans very many slices, otherwise ``lazy``.

    Slices are counted as if events were everywhere; sessions add few.
    """
    periodic = [window for window in windows if isinstance(window, Periodic)]
    density = sum(1 / family.period_us for family in {f for window in periodic for f in window.families()})
    longest = max((window.size_us for window in periodic), default=0)
    return "eager" if longest * density >= EAGER_FROM_SLICES else "lazy"
