"""Any windows over one stream in one process: each event is put into one slice, aggregated once, shared (Scotty).

Pure, vectorised, without keys: what the operator builds on, and what ``aion experiment slicing`` measures. Batches of
events come in any order, late or not; watermarks say when windows end; panes come out as columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.core.operator.watermark import Watermark
from aion.core.windows import Count, Definition, Periodic, PerRecord, Session
from aion.errors import ConfigError, WindowError
from aion.slicing.batch import slice_batch
from aion.slicing.event_log import CountLife, EventLog, RecordLife
from aion.slicing.folds import Fold, Values, as_values
from aion.slicing.panes import Computed, Panes, computed, lowered, stacked
from aion.slicing.periodic import PeriodicWindows
from aion.slicing.rows import Rows
from aion.slicing.session_life import SessionLife
from aion.slicing.stores import STORES, Store, choose_store

Micros = npt.NDArray[np.int64]

# A time, a size and a bound add up to less than 64 bits; a watermark beyond the second one says no more than it does.
_FARTHEST_US = 2**60
_BEYOND_US = 2**62

_SETTLED = 64
"""Fewer slices than this are not worth joining."""


class Slicer:
    """``windows`` are told apart by their position; ``aggregates`` are named by the user.

    ``bound_us``: how late an event may be for a window, counted from the window's end. ``store``: ``lazy``, ``eager``,
    or ``auto`` for what suits the windows. ``dropped``: events so far that came too late for every window. Raises
    WindowError for a definition that it cannot slice, ConfigError for a store or a bound that cannot be.
    """

    def __init__(
        self,
        windows: Sequence[Definition],
        aggregates: Mapping[str, Fold] | None = None,
        *,
        bound_us: int = 0,
        store: str = "auto",
    ) -> None:
        self._windows = tuple(windows)
        self._aggregates = dict(aggregates or {})
        self._bound_us = bound_us
        self._check_definition(store)
        self.store = choose_store(self._windows) if store == "auto" else store
        self._make_store: Callable[..., Store] = STORES[self.store]
        self.watermark = Watermark()
        self._now_us = -_BEYOND_US
        self.dropped = 0
        self._partials = {fold.combine.__name__: Fold(fold.combine) for fold in self._aggregates.values()}
        self._periodic = PeriodicWindows([(n, w) for n, w in enumerate(self._windows) if isinstance(w, Periodic)])
        self._dtype: np.dtype[Any] | None = None
        self._store: Store | None = None
        self._sessions: SessionLife | None = None
        self._log: EventLog | None = None
        self._lives: list[CountLife | RecordLife] = []

    def _check_definition(self, store: str) -> None:
        if not self._windows:
            raise WindowError("windows: none given; e.g. [aion.Tumbling('1 minute')]")
        for window in self._windows:
            if not isinstance(window, Periodic | Session | Count | PerRecord):
                raise WindowError(f"windows: {window!r} cannot be told from the times of events alone")
            lengths = (getattr(window, name, 0) for name in ("size_us", "offset_us", "gap_us"))
            if max(lengths) > _FARTHEST_US:
                raise WindowError(f"windows: {window!r} is too long to be counted in 64 bits of microseconds")
        if store not in (*STORES, "auto"):
            raise ConfigError(f"store: {store!r} is none of {', '.join(STORES)}, auto")
        if not 0 <= self._bound_us <= _FARTHEST_US:
            raise ConfigError(f"bound_us: {self._bound_us} is no bound; 0 allows no lateness")

    @property
    def slices(self) -> Rows:
        """Copies of the columns of all slices that are kept, in order of time."""
        return {} if self._store is None else {name: c.copy() for name, c in self._store.rows.tail(0).items()}

    def process(self, times_us: Micros, values: npt.ArrayLike | None = None) -> None:
        """Takes a batch: int64 microseconds in any order, and a value for each (none if nothing is folded).

        A batch is a set: which of its events come too late does not depend on their order. Raises ConfigError where
        times and values do not fit together, IntegerOverflow where a sum leaves 64 bits.
        """
        times_us = np.ascontiguousarray(times_us, np.int64)
        column = self._checked(times_us, values)
        if not len(times_us):
            return
        low, high = int(times_us.min()), int(times_us.max())
        if low < -_FARTHEST_US or high > _FARTHEST_US:
            raise ConfigError(f"event time {low if low < -_FARTHEST_US else high} is too far from the epoch")
        if low < self._now_us:
            self._add_late(times_us, column, (low, high))
            return
        if self._store is not None:
            rows = self.sliced(times_us, column, (low, high))
            if self._sessions is not None:
                rows["level"] = np.zeros(len(rows["edge"]), np.int64)
            self._store.add(rows)
        if self._log is not None:
            self._log.add(times_us, column, self._now_us)

    def advance(self, watermark_us: int) -> Panes:
        """Panes of the windows that have ended by now, and of those that late events have changed since.

        Those of periodic windows first, then of sessions, then of the others. A watermark that is no progress yields
        only what late events changed.
        """
        before_us = self._now_us
        self.watermark.advance(watermark_us)
        assert self.watermark.at_us is not None
        now_us = self._now_us = max(-_BEYOND_US, min(self.watermark.at_us, _BEYOND_US))
        found: list[Computed] = []
        if self._store is not None and len(self._store.rows):
            if self._periodic:
                found += self._periodic_panes(self._store, before_us, now_us)
            if self._sessions is not None:
                found += self._sessions.advance(self._store, before_us, now_us)
            self._store.rows["news"][self._store.news_from :] = False
            self._store.news_from = len(self._store.rows)
            self._let_go(self._store, now_us)
        if self._log is not None and len(self._log.rows):
            for life in self._lives:
                found += life.advance(self._log, before_us, now_us)
            self._log.rows["news"][:] = False
            unneeded = max(min(life.needed_from(self._log, now_us) for life in self._lives), 0)
            for life in self._lives:
                life.forget(self._log, unneeded)
            self._log.rows.drop_front(unneeded)
        return lowered(stacked([self._nothing(), *found]), self._aggregates)

    def sliced(self, times_us: Micros, values: Values | None, extent: tuple[int, int]) -> Rows:
        """The slices of a batch as rows, in order, without their level. ``extent``: its first and last time."""
        gap_us = None if self._sessions is None else self._sessions.gaps_us[0]
        rows = slice_batch(times_us, values, self._periodic.edges, gap_us, self._partials, extent)
        rows["news"] = np.ones(len(rows["edge"]), np.bool_)
        return rows

    # -- state --------------------------------------------------------------------------------------------

    def _checked(self, times_us: Micros, values: npt.ArrayLike | None) -> Values | None:
        if not self._partials:
            column = None
        elif values is None:
            raise ConfigError(f"values: none given, but {', '.join(self._aggregates)} need them")
        else:
            column = as_values(values)
            if len(column) != len(times_us):
                raise ConfigError(f"values: {len(column)} of them for {len(times_us)} event times")
        dtype = np.dtype(np.float64) if column is None else column.dtype
        if self._dtype is None:
            self._begin(dtype)
        elif dtype != self._dtype:
            raise ConfigError(f"values: {dtype} after {self._dtype}; give all batches the same type")
        return column

    def _begin(self, dtype: np.dtype[Any]) -> None:
        """The type of the values is known with the first batch; everything is made for it."""
        self._dtype = dtype
        sessions = [(n, window) for n, window in enumerate(self._windows) if isinstance(window, Session)]
        if sessions:
            self._sessions = SessionLife(sessions, self._bound_us, self._partials, dtype)
        if sessions or self._periodic:
            gap_us = None if self._sessions is None else self._sessions.gaps_us[0]
            self._store = self._make_store(self._partials, dtype, gap_us)
        for number, window in enumerate(self._windows):
            if isinstance(window, Count):
                self._lives.append(CountLife(number, window, self._bound_us, self._partials))
            elif isinstance(window, PerRecord):
                self._lives.append(RecordLife(number, window, self._bound_us, self._partials))
        if self._lives:
            self._log = EventLog(dtype)

    def _add_late(self, times_us: Micros, values: Values | None, extent: tuple[int, int]) -> None:
        """A batch of which some events are behind the watermark: keeps what comes in time for any window."""
        in_time = np.zeros(len(times_us), np.bool_)
        if self._store is not None:
            rows = self.sliced(times_us, values, extent)
            kept = np.zeros(len(rows["edge"]), np.bool_)
            if self._periodic:
                kept |= self._periodic.last_ends(rows["edge"]) + self._bound_us > self._now_us
            if self._sessions is not None:
                rows["level"] = self._sessions.levels_of_late(rows, self._store.rows, self._now_us)
                kept |= rows["level"] < self._sessions.closed
            # All events of a slice share its fate.
            begins = rows["edge" if self._sessions is None else "first"]
            in_time |= kept[np.searchsorted(begins, times_us, side="right") - 1]
            if kept.any():
                self._store.add({name: column[kept] for name, column in rows.items()})
        if self._log is not None:
            reach_us = max(life.reach_us for life in self._lives) + self._bound_us
            logged = times_us + reach_us > self._now_us
            in_time |= logged
            if logged.any():
                self._log.add(times_us[logged], None if values is None else values[logged], self._now_us)
        self.dropped += len(times_us) - int(in_time.sum())

    # -- panes --------------------------------------------------------------------------------------------

    def _periodic_panes(self, store: Store, before_us: int, now_us: int) -> list[Computed]:
        edges = store.rows["edge"]
        found = []
        if store.news_from < len(edges) and edges[store.news_from] < before_us:
            late_news = store.rows["news"] & (edges < before_us)
            found.append((self._periodic.ending(before_us - self._bound_us, before_us, edges, late_news), False))
        found.append((self._periodic.ending(before_us, now_us, edges), True))
        return [
            computed(due.definition, due.start_us, due.end_us, on_time, *store.ranges(due.begins, due.ends))
            for due, on_time in found
        ]

    def _let_go(self, store: Store, now_us: int) -> None:
        """Drops slices from the front on that no window needs, and joins those that only a session still does."""
        rows = store.rows
        settled = len(rows)
        if self._periodic:
            gone_us = now_us - self._bound_us - self._periodic.longest_us
            settled = int(np.searchsorted(rows["edge"], gone_us, side="right"))
        if self._sessions is None:
            store.drop_front(settled)
            return
        live = rows["level"][:settled] < self._sessions.closed
        unneeded = int(live.argmax()) if live.any() else settled
        store.drop_front(unneeded)
        # Joining moves all that is behind as well, so it waits until it pays.
        if self._periodic and settled - unneeded >= max(_SETTLED, len(rows) // 2):
            store.fuse_front(settled - unneeded)

    def _nothing(self) -> Computed:
        none = np.empty(0, np.int64)
        dtype = np.float64 if self._dtype is None else self._dtype
        return computed(0, none, none, True, none, {name: np.empty(0, dtype) for name in self._partials})
