"""The live segments of one grid of a plan, and which of them windows need. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from aion.base.numbers import MOST, NEVER
from aion.core.compaction import BlockCompaction
from aion.core.life.definition import ALL_ROWS, Claim, DefinedWindows, Flags, Ints, TimeRanges, Turn
from aion.core.slicing.grid import LiveSegments, SliceGrid


class Segments:
    """The segments that hold blocks of one grid. All arguments and results are names, unless they are in µs.

    ``name_offset_us``: a segment's name minus its start (:data:`aion.core.slicing.grid.EVENT_ROWS_US`). ``names``: the
    segments that there are. ``definitions``: the windows that take events from these blocks. ``compaction`` compacts
    the blocks. It is None if they are never compacted.
    """

    def __init__(
        self,
        grid: SliceGrid,
        *,
        name_offset_us: int = 0,
        names: Iterable[int] = (),
        compaction: BlockCompaction | None = None,
    ) -> None:
        self.grid, self.name_offset_us, self.compaction = grid, name_offset_us, compaction
        self.live = LiveSegments(grid, [name - name_offset_us for name in names])
        self.definitions: Sequence[DefinedWindows] = ()

    def __iter__(self) -> Iterator[int]:
        return (start_us + self.name_offset_us for start_us in self.live)

    def __contains__(self, name: int) -> bool:
        return name - self.name_offset_us in self.live

    def add(self, name: int) -> int:
        """Adds a segment. Returns its start in µs."""
        self.live.add(name - self.name_offset_us)
        return name - self.name_offset_us

    def within(self, intervals: TimeRanges) -> tuple[int, ...]:
        """The segments that overlap any of these intervals, in order."""
        found = self.live.within_any(*intervals)
        return tuple(start_us + self.name_offset_us for start_us in found) if self.name_offset_us else found

    def sizes(self, intervals: TimeRanges) -> Ints:
        """The encoded bytes that compaction has left in the segments that lie in each interval."""
        assert self.compaction is not None
        starts = np.sort(np.array(list(self.live), np.int64))
        upto = np.concatenate(([0.0], np.cumsum(np.array(self.compaction.sizes(starts.tolist()), np.float64))))
        first = np.searchsorted(self.grid.ends(starts), intervals.starts_us, side="right")
        last = np.searchsorted(starts, intervals.ends_us)
        return np.asarray(np.minimum(upto[np.maximum(last, first)] - upto[first], float(MOST // 2)), np.int64)

    # -- what open windows need ---------------------------------------------------------------------------

    def are_open(self, names: Sequence[int], turn: Turn) -> Flags:
        """A mask of the segments that windows may need that have not ended."""
        bounds = self._bounds(names)
        are_open = np.zeros(len(names), np.bool_)
        for definition in self.definitions:
            are_open |= definition.are_open(*bounds, turn)
        return are_open

    def is_open(self, name: int, index: int, claims: Sequence[Claim], turn: Turn) -> bool:
        """Whether windows that have not ended claim a block. ``index``: its number. ``claims``: of the definitions."""
        if any(claim.open_blocks is not None and index in claim.open_blocks for claim in claims):
            return True
        bounds = self._bounds([name])
        return any(
            claim.open_blocks is None and index in claim.blocks and definition.are_open(*bounds, turn)[0]
            for definition, claim in zip(self.definitions, claims, strict=True)
        )

    def open_first(self, turn: Turn) -> list[int]:
        """The segments of windows that have not ended. The segments that are needed soonest come first."""
        names = list(self)
        bounds = self._bounds(names)
        soonest = np.full(len(names), NEVER)
        for definition in self.definitions:
            soonest = np.minimum(soonest, definition.first_ends(*bounds, turn))
        order = np.argsort(soonest, kind="stable")[: int((soonest < NEVER).sum())]
        return [names[place] for place in order.tolist()]

    def left(self, turn: Turn) -> list[int]:
        """The segments that open windows have left since the last call, and that none needs any more."""
        left = dict.fromkeys(name for d in self.definitions for name in self.within(d.left()))
        return [name for name, is_open in zip(left, self.are_open([*left], turn), strict=True) if not is_open]

    # -- what any window needs ----------------------------------------------------------------------------

    def free(self, *, all_: bool) -> list[int]:
        """Lets go of the segments that windows have left since the last call, and that none needs any more.

        ``all_``: of any that none needs.
        """
        freed = dict.fromkeys(name for d in self.definitions for name in self.within(d.freed()))
        free = self.unneeded(self if all_ else freed)
        self.live.drop([name - self.name_offset_us for name in free])
        if self.compaction is not None:
            self.compaction.forget(free)
        return free

    def unneeded(self, names: Iterable[int]) -> list[int]:
        """The segments, out of these, that no window needs."""
        names = [*names]
        return [name for name, rows in zip(names, self._needed(names).tolist(), strict=True) if not rows]

    def _needed(self, names: Sequence[int]) -> Ints:
        """How many rows of each segment are needed, at most."""
        starts, ends = self._bounds(names)
        needed = np.zeros(len(names), np.int64)
        for definition in self.definitions:
            rest = np.flatnonzero(needed < ALL_ROWS)
            if len(rest):
                needed[rest] += definition.needed_in(starts[rest], ends[rest])
        return needed

    def swept(self) -> list[int]:
        """The segments to compact as a whole, because windows still need at most half of their rows.

        Also tells the compaction how many rows of each segment the last watermark removed.
        """
        if self.compaction is None:
            return []
        for definition in self.definitions:
            firsts_us, lasts_us = definition.removed()
            if len(firsts_us):
                gone = self.within(TimeRanges.of((int(firsts_us.min()), int(lasts_us.max()) + 1)))
                rows = overlapping(firsts_us, lasts_us, *self._bounds(gone))
                for name, wasted in zip(gone, rows.tolist(), strict=True):
                    if wasted:
                        self.compaction.wasted(name, wasted)
        wasteful = self.compaction.wasteful
        needed = self._needed(wasteful).tolist()
        old = [(name, rows) for name, rows in zip(wasteful, needed, strict=True) if rows < ALL_ROWS]
        return [name for name, rows in old if self.compaction.sweep(name, rows)]

    def cuts(self, name: int, turn: Turn) -> tuple[set[int], bool, bool]:
        """What compaction must know of a segment: cuts, whether all windows there ended, and whether it is swept."""
        start_us = name - self.name_offset_us
        all_of = [d.distinguished(start_us, self.grid.end(start_us), turn) for d in self.definitions]
        by_rows = {found.by_rows for found in all_of}
        cuts = {seq for found in all_of for seq in found.cuts}
        return cuts, all(found.ended for found in all_of), True in by_rows and False not in by_rows

    def _bounds(self, names: Sequence[int]) -> tuple[Ints, Ints]:
        """The start and end of each segment, in µs."""
        starts = np.array(names, np.int64) - self.name_offset_us
        return starts, self.grid.ends(starts)


def overlapping(firsts_us: Ints, lasts_us: Ints, starts_us: Ints, ends_us: Ints) -> Ints:
    """How many of the intervals ``[first, last]``, ends included, overlap each of those ``[start, end)``."""
    begun = np.searchsorted(np.sort(firsts_us), ends_us)
    return np.asarray(begun - np.searchsorted(np.sort(lasts_us), starts_us))
