"""What stream slicing is measured against (Scotty section VII): buckets as in Flink, and FlatFAT. Same panes.

Both are vectorised as far as their design goes. Buckets add every event to every window it is in; FlatFAT keeps a tree
over single events, into which an event that is out of order has to be inserted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from aion.core.slicing.edges import EdgeSet
from aion.core.slicing.ranges import RangeTree
from aion.core.windows import Definition, Family, Periodic
from aion.errors import ConfigError
from aion.slicing import Fold, Panes, Slicer
from aion.slicing.batch import slice_batch
from aion.slicing.folds import Values, as_values
from aion.slicing.panes import Computed, Micros, computed, lowered
from aion.slicing.rows import Index, Rows, Table
from aion.slicing.stores import LazyStore


class Buckets:
    """One bucket per window; an event is added to all of its buckets. Other than periodic windows each by itself."""

    def __init__(
        self, windows: Sequence[Definition], aggregates: Mapping[str, Fold] | None = None, *, bound_us: int = 0
    ) -> None:
        self._aggregates = dict(aggregates or {})
        self._of = [
            _PeriodicBuckets(window, self._aggregates, bound_us)
            if isinstance(window, Periodic)
            else Slicer([window], self._aggregates, bound_us=bound_us, store="lazy")
            for window in windows
        ]

    def process(self, times_us: Micros, values: npt.ArrayLike | None = None) -> None:
        for one in self._of:
            one.process(times_us, values)

    def advance(self, watermark_us: int) -> Panes:
        parts = [one.advance(watermark_us) for one in self._of]
        return Panes(
            definition=np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
            number=np.concatenate([part.number for part in parts]),
            start_us=np.concatenate([part.start_us for part in parts]),
            end_us=np.concatenate([part.end_us for part in parts]),
            kind=np.concatenate([part.kind for part in parts]),
            events=np.concatenate([part.events for part in parts]),
            values={name: np.concatenate([part.values[name] for part in parts]) for name in self._aggregates},
        )


class _PeriodicBuckets:
    """The buckets of one definition, as rows by the starts of their windows."""

    def __init__(self, window: Periodic, aggregates: Mapping[str, Fold], bound_us: int) -> None:
        self._window = window
        self._aggregates = aggregates
        self._folds = {fold.combine.__name__: Fold(fold.combine) for fold in aggregates.values()}
        self._bound_us = bound_us
        self._starts = EdgeSet([Family(window.slide_us, window.offset_us)])
        self._now_us = -(2**62)
        self._store: LazyStore | None = None

    def process(self, times_us: Micros, values: npt.ArrayLike | None = None) -> None:
        if not len(times_us):
            return
        if values is None and self._folds:
            raise ConfigError(f"values: none given, but {', '.join(self._aggregates)} need them")
        column = as_values(values) if values is not None and self._folds else None
        if self._store is None:
            self._store = LazyStore(self._folds, np.float64 if column is None else column.dtype, None)
        size_us, slide_us = self._window.size_us, self._window.slide_us
        for earlier in range(-(-size_us // slide_us)):
            # Moved back by so many slides, an event lies in the first slide of that window, if it is in it at all.
            moved, some = times_us - earlier * slide_us if earlier else times_us, column
            if (earlier + 1) * slide_us > size_us:
                inside = times_us < self._starts.starts(moved) + size_us
                moved, some = moved[inside], None if column is None else column[inside]
            if not len(moved):
                continue
            rows = slice_batch(moved, some, self._starts, None, self._folds)
            rows["news"] = np.ones(len(rows["edge"]), np.bool_)
            in_time = rows["edge"] + size_us + self._bound_us > self._now_us
            if in_time.any():
                self._store.add({name: rows_[in_time] for name, rows_ in rows.items()})

    def advance(self, watermark_us: int) -> Panes:
        before_us, self._now_us = self._now_us, max(self._now_us, min(watermark_us, 2**62))
        nothing = np.empty(0, np.int64)
        found = computed(0, nothing, nothing, True, nothing, dict.fromkeys(self._folds, nothing))
        if self._store is not None:
            found = self._due(self._store.rows, before_us)
        return lowered(found, self._aggregates)

    def _due(self, rows: Table, before_us: int) -> Computed:
        starts_us = rows["edge"]
        ends_us = starts_us + self._window.size_us
        which = np.flatnonzero((ends_us <= self._now_us) & rows["news"])
        rows["news"][which] = False
        partials = {name: rows[name][which] for name in self._folds}
        events, on_time = rows["events"][which], ends_us[which] > before_us
        found = computed(0, starts_us[which], ends_us[which], on_time, events, partials)
        rows.drop_front(int(np.searchsorted(ends_us, self._now_us - self._bound_us, side="right")))
        return found


class FlatFat(Slicer):
    """A tree over the events in event-time order, each its own leaf; windows are ranges of leaves.

    ``whole_batches``: an event that is out of order is not inserted by itself, as FlatFAT does, but a sorted batch is
    merged with what is there, and the tree above rebuilt: kinder than the papers, who do not have it.
    """

    def __init__(
        self,
        windows: Sequence[Definition],
        aggregates: Mapping[str, Fold] | None = None,
        *,
        bound_us: int = 0,
        whole_batches: bool = False,
    ) -> None:
        super().__init__(windows, aggregates, bound_us=bound_us, store="lazy")
        self.whole_batches = whole_batches
        self._make_store = lambda folds, dtype, gap_us: _EventTree(self, folds, dtype, gap_us)

    def sliced(self, times_us: Micros, values: Values | None, extent: tuple[int, int]) -> Rows:
        order = np.argsort(times_us, kind="stable")
        times = times_us[order]
        ones = np.ones(len(times), np.int64)
        rows: Rows = {"edge": times, "events": ones, "news": ones.astype(np.bool_), "arrival": order}
        if self._sessions is not None:
            rows |= {"first": times, "last": times}
        return rows if values is None else rows | dict.fromkeys(self._partials, values[order])


class _EventTree:
    """The store of a FlatFAT: events as rows, and a tree of each column of values."""

    def __init__(self, owner: FlatFat, folds: Mapping[str, Fold], dtype: npt.DTypeLike, gap_us: int | None) -> None:
        self._owner = owner
        self.rows = LazyStore(folds, dtype, gap_us).rows
        self._folds = dict(folds)
        self._trees = {name: RangeTree(fold.combine, dtype) for name, fold in folds.items()}
        self.news_from = 0

    def add(self, new: Rows) -> None:
        arrival = new.pop("arrival")
        if self._owner.whole_batches:
            self._merge(new)
            return
        in_arrival = np.argsort(arrival)
        times = new["edge"][in_arrival]
        # Events that come in order are appended together; one that does not is inserted by itself.
        latest = np.maximum.accumulate(np.concatenate((self.rows["edge"][-1:], times)))
        done = 0
        for at in np.flatnonzero(times < latest[-len(times) :]).tolist():
            for some in (in_arrival[done:at], in_arrival[at : at + 1]):
                if len(some):
                    self._merge({name: column[some] for name, column in new.items()})
            done = at + 1
        if done < len(times):
            self._merge({name: column[in_arrival[done:]] for name, column in new.items()})

    def _merge(self, new: Rows) -> None:
        """Rows in order of time, behind those of equal times."""
        at = int(np.searchsorted(self.rows["edge"], new["edge"][0], side="right"))
        tail = self.rows.tail(at)
        if len(tail["edge"]):
            both = {name: np.concatenate((column, new[name])) for name, column in tail.items()}
            order = np.argsort(both["edge"], kind="stable")
            new = {name: column[order] for name, column in both.items()}
        self.news_from = min(self.news_from, at)
        moves = self.rows.moves
        self.rows.replace_tail(at, new)
        if self.rows.moves != moves:
            at = 0
        for name, tree in self._trees.items():
            tree.write(self.rows.front + at, self.rows[name][at:])

    def ranges(self, begins: Index, ends: Index) -> tuple[Values, dict[str, Values]]:
        at, until = begins + self.rows.front, ends + self.rows.front
        return ends - begins, {name: tree.ranges(at, until) for name, tree in self._trees.items()}

    def drop_front(self, rows: int) -> None:
        self.rows.drop_front(rows)
        self.news_from = max(self.news_from - rows, 0)

    def fuse_front(self, rows: int) -> None:
        """Single events cannot be fused."""
