"""The life of sessions over shared slices: which slices still take part, what is yielded, what is retracted. Pure.

A session of gap g lives until the watermark is the bound past its end. Then its slices are closed for g: events that
come later begin a new session, however near they are. Because a larger gap lives longer, one number per slice is
enough: its ``level`` says for how many gaps, from the smallest on, it is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from aion.core.slicing.ranges import running_max
from aion.core.slicing.sessions import Intervals, merge_intervals
from aion.core.windows import Session
from aion.slicing.folds import Fold, Values
from aion.slicing.panes import Computed, Kind, computed, stacked
from aion.slicing.rows import Rows, Table
from aion.slicing.stores import Store, ranges_of

Index = npt.NDArray[np.intp]
Ranges = Callable[[Index, Index], tuple[Values, dict[str, Values]]]


class SessionLife:
    """Sessions of any number of gaps; ``definitions``: with their numbers among all of an operator's."""

    def __init__(
        self, definitions: Sequence[tuple[int, Session]], bound_us: int, folds: Mapping[str, Fold], dtype: npt.DTypeLike
    ) -> None:
        self.gaps_us = sorted({session.gap_us for _, session in definitions})
        self._numbers = [[n for n, session in definitions if session.gap_us == gap] for gap in self.gaps_us]
        self._bound_us = bound_us
        self._folds = folds
        # Of each gap, the live sessions of which a pane was yielded, as it was yielded last; in order of their starts.
        nothing = np.empty(0, np.int64)
        empty = computed(0, nothing, nothing, True, nothing, {name: np.empty(0, dtype) for name in folds})
        self._yielded = [empty for _ in self.gaps_us]

    @property
    def closed(self) -> int:
        """The level of slices that no session takes part in any more."""
        return len(self.gaps_us)

    def levels_of_late(self, new: Rows, rows: Table, watermark_us: int) -> Values:
        """The level of each slice of a late batch: for which gaps it comes too late.

        It does not for a gap of which it joins a live session, or makes up one that is live with others of its batch.
        """
        levels = np.full(len(new["first"]), self.closed, np.int64)
        accepted = np.arange(len(levels))
        for level in reversed(range(self.closed)):
            # What is accepted for a gap is accepted for all larger ones: its sessions are parts of theirs.
            live = np.flatnonzero(rows["level"] <= level)
            gap = self.gaps_us[level]
            firsts = np.concatenate((rows["first"][live], new["first"][accepted]))
            lasts = np.concatenate((rows["last"][live], new["last"][accepted]))
            made, of = merge_intervals(Intervals(np.zeros_like(firsts), firsts, lasts), gap)
            # One with a live session in it lives: that ends as late as its last event says, or later.
            lives = made.lasts + gap + self._bound_us > watermark_us
            accepted = accepted[lives[of[len(live) :]]]
            levels[accepted] = level
        return levels

    def advance(self, store: Store, before_us: int, watermark_us: int) -> list[Computed]:
        """Sessions that ended or changed, and retractions of those that are no more; then closes what is gone."""
        found: list[Computed] = []
        for level, gap_us in enumerate(self.gaps_us):
            found += self._advance_gap(level, gap_us, store, before_us, watermark_us)
        return found

    def _advance_gap(self, level: int, gap_us: int, store: Store, before_us: int, watermark_us: int) -> list[Computed]:
        rows: Table | Rows = store.rows
        ranges: Ranges = store.ranges
        levels, members = rows["level"], None
        if len(levels) and levels.max() > level:
            members = np.flatnonzero(levels <= level)
            rows = some = {name: rows[name][members] for name in ("first", "last", "news", "events", *self._folds)}
            ranges = lambda begins, ends: ranges_of(some, self._folds, begins, ends)  # noqa: E731
        if not len(rows["first"]):
            return []
        reach = running_max(rows["last"])
        begins = np.flatnonzero(np.concatenate(([True], rows["first"][1:] - reach[:-1] > gap_us)))
        ends = np.append(begins[1:], len(reach))
        firsts, lasts = rows["first"][begins], reach[ends - 1]

        yielded = self._yielded[level]
        current = np.searchsorted(firsts, yielded.start_us, side="right") - 1
        same = (firsts[current] == yielded.start_us) & (lasts[current] + gap_us == yielded.end_us)
        known = np.zeros(len(firsts), np.bool_)
        known[current[same]] = True
        due = (lasts + gap_us <= watermark_us) & (~known | np.logical_or.reduceat(rows["news"], begins))
        which = np.flatnonzero(due)
        on_time = lasts[which] + gap_us > before_us
        events, partials = ranges(begins[which], ends[which])
        panes = computed(0, firsts[which], lasts[which] + gap_us, on_time, events, partials)

        gone = lasts + gap_us + self._bound_us <= watermark_us
        if gone.any():
            at = np.flatnonzero(np.repeat(gone, ends - begins))
            store.rows["level"][at if members is None else members[at]] = level + 1
        kept = same & ~due[current] & ~gone[current]
        both = stacked([yielded.take(kept), panes.take(~gone[which])])
        self._yielded[level] = both.take(np.argsort(both.start_us, kind="stable"))
        return [
            part.of_definition(number)
            for number in self._numbers[level]
            for part in (yielded.take(~same).as_kind(Kind.RETRACTED), panes)
            if len(part)
        ]
