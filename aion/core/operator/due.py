"""What of the windows of a shard is late, what waits, and what is due soon and must be staged for it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from aion.base.numbers import MOST, NEVER
from aion.core.compaction import BlockCompaction
from aion.core.keyed.shard import KeyedShard
from aion.core.keyed.slices import PartSegments
from aion.core.life.actions import Prestage
from aion.core.life.rules import Rules
from aion.core.life.watermark import Watermark
from aion.core.life.window_table import WindowTable
from aion.core.slicing.grid import SliceGrid
from state_backends.thresholds import threshold

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
FEW_PENDING = threshold(16, 2)
"""If less than one in this many of a window's events are pending, they likely have few keys, and lie in few blocks."""


class Due:
    """Looks at the windows of an operator, and changes nothing.

    ``seeks``: blocks are compacted, so the blocks of a few keys can be found. ``prestages_late``: late events announce
    an execution. ``prestages_due``: the blocks of later executions are staged, too (:meth:`planned`).
    """

    def __init__(
        self,
        windows: WindowTable,
        rules: Rules,
        watermark: Watermark,
        grid: SliceGrid,
        parts: Sequence[PartSegments],
        keyed: KeyedShard,
        *,
        seeks: bool,
        prestages_late: bool,
        prestages_due: bool,
    ) -> None:
        self._windows = windows
        self._rules = rules
        self._watermark = watermark
        self._grid = grid
        self._parts = parts
        self._shared = parts[0]
        self._keyed = keyed
        self._seeks = seeks
        self._prestages_late = prestages_late
        self._prestages_due = prestages_due

    def segments_of(self, rows: Ints) -> tuple[int, ...]:
        """The segments that some windows overlap."""
        return self._shared.live.within_any(self._windows["start_us"][rows], self._windows["end_us"][rows])

    def planned(self, watermark_us: int) -> list[Ints]:
        """Returns the rows of the windows to stage before the watermark gets there, in the order in which they run.

        Windows that run on time come first, then early ones, then final ones, then late ones and those that wait. If
        blocks are compacted, windows that read only a few keys are left out (:meth:`_are_read_whole`).
        """
        windows, late = self._windows, self.late()
        until = max(windows.ended_by(watermark_us), late)
        rows = np.arange(until)
        dies = windows["end_us"][:until] + windows["bound_us"][:until] <= watermark_us
        final = dies & (windows["pending"][:until] > 0)
        on_time = (rows >= late) & (not self._rules.final_only)
        waiting = self.waiting()
        again = np.zeros(until, np.bool_)
        again[waiting[(self._dues_us(waiting) <= watermark_us) | (windows["owed"][waiting] > 0)]] = True
        early = self._rules.early_by(windows, until, watermark_us)
        kinds = (np.flatnonzero(on_time), early, np.flatnonzero(final), np.flatnonzero(again))
        return [rows[self._are_read_whole(rows)] for rows in kinds]

    def staged(self, planned: Sequence[Ints], watermark_us: int) -> Prestage | None:
        """Returns the segments of these windows in order, then those of windows of keys. None if there are none."""
        slices: dict[int, None] = {}
        for rows in planned:
            slices |= dict.fromkeys(self.segments_of(rows))
        for part in self._parts:
            slices |= dict.fromkeys(sorted(part.due_by(self._watermark.at_us, watermark_us)))
        return Prestage(tuple(slices)) if slices else None

    def sizes(self, rows: Ints, stored: BlockCompaction | None) -> Ints:
        """The encoded bytes that each of these windows may read. ``stored``: knows what compaction has left of them."""
        if stored is None or not len(rows):
            return np.asarray(self._windows["size_bytes"][rows])
        starts = np.sort(np.array(list(self._shared.live), np.int64))
        upto = np.concatenate(([0.0], np.cumsum(np.array(stored.sizes(starts.tolist()), np.float64))))
        first = np.searchsorted(self._grid.ends(starts), self._windows["start_us"][rows], side="right")
        last = np.searchsorted(starts, self._windows["end_us"][rows])
        sizes = np.minimum(upto[np.maximum(last, first)] - upto[first], float(MOST // 2))
        return np.asarray(sizes, np.int64)

    def _are_read_whole(self, rows: Ints) -> Flags:
        """A mask of the windows whose next execution reads nearly all blocks: the first, or one with many events.

        For the others, the blocks of the changed keys are staged when the events arrive. More would be in vain.
        """
        if not self._seeks:
            return np.ones(len(rows), np.bool_)
        pending, events, executed = (self._windows[name][rows] for name in ("pending", "events", "executed_seq"))
        return np.asarray((pending >= -(-events // FEW_PENDING)) | (executed < 0))

    def active_slices(self) -> tuple[int, ...]:
        """The segments of windows that have not ended. The segments that are needed soonest come first."""
        order = np.array(list(self._shared.live), np.int64)
        soonest = self._windows.first_ends(order, self._grid.ends(order), self.late())
        first = order[np.argsort(soonest, kind="stable")][: int((soonest < NEVER).sum())].tolist()
        known = set(first)
        return (*first, *(name for part in self._parts for name in part.active(self._watermark.at_us, but=known)))

    @property
    def next_due_us(self) -> int | None:
        """The next watermark at which something happens even if no event comes. None if there is none."""
        windows, late = self._windows, self.late()
        dues = [int(self._dues_us(self.waiting()).min(initial=NEVER)), *windows["end_us"][late : late + 1].tolist()]
        dues.append(self._rules.next_early_us(windows, late))
        if self._watermark.at_us is not None and (self._keyed.waits or (windows["owed"] > 0).any()):
            dues.append(self._watermark.at_us + 1)
        dues.append(int((windows["end_us"][:late] + windows["bound_us"][:late]).min(initial=NEVER)))
        keyed = self._keyed.next_due_us(self._watermark.at_us, self._watermark.step_us)
        dues += [keyed] if keyed is not None else []
        return soonest if (soonest := min(dues)) < NEVER else None

    def late(self) -> int:
        """The number of late windows. They are at the front of the table."""
        return 0 if self._watermark.at_us is None else self._windows.ended_by(self._watermark.at_us)

    def waiting(self) -> Ints:
        """The rows of late windows that got events since their last execution. They wait for the trigger."""
        if self._rules.final_only:
            return np.empty(0, np.int64)
        return np.flatnonzero(self._windows["pending"][: self.late()] > 0)

    def _dues_us(self, waiting: Ints) -> Ints:
        """The watermarks at which the trigger checks these windows again even if no event comes. NEVER: none."""
        now = self._watermark.at_us
        return waiting if now is None else self._rules.dues_us(self._windows, waiting, now, self._watermark.step_us)

    def announced(self, first: Ints, rows: Ints) -> tuple[int, ...]:
        """The segments to stage for late windows: their first event since an execution announces the next one.

        ``first``: the rows of windows that got such an event now. ``rows``: of all windows that got events now.
        """
        if not self._prestages_late or self._watermark.at_us is None or self._rules.final_only:
            return ()
        rows = rows if self._prestages_due else first
        rows = rows[(rows < self.late()) & (self._windows["pending"][rows] > 0)]
        if self._prestages_due and len(rows):
            due = self._rules.due(self._windows, rows, self._watermark.at_us, self._watermark.step_us)
            rows = rows[due | ~self._are_read_whole(rows)]
        return self.segments_of(rows)
