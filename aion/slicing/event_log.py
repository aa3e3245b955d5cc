"""Windows that depend on single events, over a log of them: count windows and windows per record. Pure.

The log is kept in event-time order, equal times in the order of arrival, each event once for all such windows. An
event may come too late for one definition and not for another: it is remembered what the watermark was when it came.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from aion.core.slicing.counts import count_windows
from aion.core.slicing.per_record import record_windows
from aion.core.windows import Count, PerRecord
from aion.slicing.folds import Fold, Values
from aion.slicing.panes import Computed, Kind, computed, stacked
from aion.slicing.rows import Table

Micros = npt.NDArray[np.int64]
Index = npt.NDArray[np.intp]


class EventLog:
    """Columns ``time``, ``came`` (the watermark at arrival), ``news``, and ``value`` (0 where nothing is folded)."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.rows = Table({"time": np.int64, "came": np.int64, "news": np.bool_, "value": dtype})
        self._any_late = False

    def add(self, times_us: Micros, values: Values | None, watermark_us: int) -> None:
        earliest = int(times_us.min())
        self._any_late |= earliest < watermark_us
        at = int(np.searchsorted(self.rows["time"], earliest, side="right"))
        old = self.rows.tail(at)
        new = {
            "time": times_us,
            "came": np.full(len(times_us), watermark_us),
            "news": np.ones(len(times_us), np.bool_),
            "value": np.zeros(len(times_us), old["value"].dtype) if values is None else values,
        }
        both = {name: np.concatenate((column, new[name])) for name, column in old.items()}
        order = np.argsort(both["time"], kind="stable")
        self.rows.replace_tail(at, {name: column[order] for name, column in both.items()})

    def in_time(self, reach_us: int, bound_us: int) -> Index | slice:
        """The events that came in time for windows that end up to ``reach_us`` after them."""
        if not self._any_late:
            return slice(None)
        return np.flatnonzero(self.rows["time"] + (reach_us + bound_us) > self.rows["came"])


class CountLife:
    """The windows of one count definition. An event comes in time if a window that ends with it would be live."""

    reach_us = 1

    def __init__(self, number: int, window: Count, bound_us: int, folds: Mapping[str, Fold]) -> None:
        self._number = number
        self._window = window
        self._bound_us = bound_us
        self._folds = folds
        # How many events counted and are no longer in the log; the first window that is not gone.
        self._dropped = self._first = 0
        # Of the windows from there on, those of which a pane was yielded, as it was yielded last.
        self._yielded: Computed | None = None

    def advance(self, log: EventLog, before_us: int, watermark_us: int) -> list[Computed]:
        chosen = log.in_time(self.reach_us, self._bound_us)
        times, values = log.rows["time"][chosen], log.rows["value"][chosen]
        dropped, first = (np.array([n], np.intp) for n in (self._dropped, self._first))
        keys, news = np.zeros(len(times), np.int64), log.rows["news"][chosen]
        windows = count_windows(keys, news, self._window, dropped, first)
        starts_us, ends_us = times[windows.begins], times[windows.ends - 1] + 1
        known = 0 if self._yielded is None else len(self._yielded)
        is_known = np.arange(len(ends_us)) < known
        which = np.flatnonzero((ends_us <= watermark_us) & (windows.changed | ~is_known))
        begins, ends = windows.begins[which], windows.ends[which]
        panes = computed(
            self._number, starts_us[which], ends_us[which], ends_us[which] > before_us, ends - begins,
            {name: fold.ranges(values, begins, ends) for name, fold in self._folds.items()}, windows.numbers[which],
        )  # fmt: skip
        found = [panes]
        if self._yielded is not None:
            moved = (self._yielded.start_us != starts_us[:known]) | (self._yielded.end_us != ends_us[:known])
            found.insert(0, self._yielded.take(moved).as_kind(Kind.RETRACTED))
            panes = stacked([self._yielded.take(~windows.changed[:known]), panes])
        self._first += int((ends_us + self._bound_us <= watermark_us).sum())
        self._yielded = panes.take(np.argsort(panes.number, kind="stable"))
        self._yielded = self._yielded.take(self._yielded.number >= self._first)
        return found

    def needed_from(self, log: EventLog, watermark_us: int) -> int:
        """The first row of the log that a window may still need."""
        at = self._first * self._window.slide - self._dropped
        chosen = log.in_time(self.reach_us, self._bound_us)
        if isinstance(chosen, slice):
            return min(at, len(log.rows))
        return int(chosen[at]) if at < len(chosen) else len(log.rows)

    def forget(self, log: EventLog, rows: int) -> None:
        """The first rows of the log are about to be dropped."""
        chosen = log.in_time(self.reach_us, self._bound_us)
        self._dropped += rows if isinstance(chosen, slice) else int(np.searchsorted(chosen, rows))


class RecordLife:
    """The windows per record of one definition. An event comes in time if some live window could hold it.

    A window needs no memory of what was yielded: its bounds never change.
    """

    def __init__(self, number: int, window: PerRecord, bound_us: int, folds: Mapping[str, Fold]) -> None:
        self._number = number
        self._size_us = window.size_us
        # The last window that can hold an event is that of a record ``size`` later; both ends are inclusive.
        self.reach_us = window.size_us + 1
        self._bound_us = bound_us
        self._folds = folds

    def advance(self, log: EventLog, before_us: int, watermark_us: int) -> list[Computed]:
        chosen = log.in_time(self.reach_us, self._bound_us)
        times, values, news = (log.rows[name][chosen] for name in ("time", "value", "news"))
        windows = record_windows(np.zeros(len(times), np.int64), times, self._size_us)
        due_us = windows.ends_us + 1
        fresh = np.concatenate(([0], np.cumsum(news)))
        changed = (fresh[windows.ends] > fresh[windows.begins]) & (due_us + self._bound_us > before_us)
        which = np.flatnonzero((due_us <= watermark_us) & ((due_us > before_us) | changed))
        begins, ends = windows.begins[which], windows.ends[which]
        partials = {name: fold.ranges(values, begins, ends) for name, fold in self._folds.items()}
        on_time = due_us[which] > before_us
        return [
            computed(self._number, windows.starts_us[which], windows.ends_us[which], on_time, ends - begins, partials)
        ]

    def needed_from(self, log: EventLog, watermark_us: int) -> int:
        """The first row of the log that a window may still need: no live one reaches back before it."""
        return int(np.searchsorted(log.rows["time"], watermark_us - self._bound_us - self.reach_us, side="right"))

    def forget(self, log: EventLog, rows: int) -> None:
        """Nothing that is dropped was counted."""
