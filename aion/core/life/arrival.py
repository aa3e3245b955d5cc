"""Decides for each slice in an arrival whether windows take it, and whether it is late or too late. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.base.numbers import MOST, sum_of, sums_by
from aion.core.compaction import BlockFact
from aion.core.life.actions import EmitUntimed, Ints, SliceFacts
from aion.core.life.lifecycle import Counters
from aion.core.slicing.grid import (
    AHEAD_SLICE,
    BEYOND_SLICE,
    DROPPED_SLICE,
    NO_SLICE,
    TEXT_SLICE,
    has_event_rows,
)

Flags = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

UNTIMED = {
    NO_SLICE: "the event time is null",
    TEXT_SLICE: "a text is not UTF-8",
    DROPPED_SLICE: "the windows before dropped it",
    AHEAD_SLICE: "the event time is ahead of the clock",
    BEYOND_SLICE: "the event time is out of range",
}
"""The reasons why the events of these slices are dropped."""


def untimed(blocks: Sequence[BlockFact], counters: Counters) -> list[EmitUntimed]:
    """Counts all events, and orders to drop those without a time or with a time out of range.

    Rows of single events that are kept beside partials are not counted: the partials stand for the same events.
    """
    drops = []
    for index, block in enumerate(blocks):
        if has_event_rows(block.slice_us):
            continue
        counters.came(block.events)
        if block.slice_us in UNTIMED:
            counters.drop_untimed(block.events)
            drops.append(EmitUntimed(index, UNTIMED[block.slice_us]))
    return drops


class Arrival:
    """The slices of an arrival that windows of all keys may take.

    Slices without a time in range and slices of event rows are left out. ``slices_us`` holds each slice once, sorted.
    Methods get stretches of slices as indexes into it: stretch i is ``[begins[i], ends[i])``.
    ``bytes_per_event``: of each block, encoded.
    """

    def __init__(self, facts: SliceFacts, bytes_per_event: Floats) -> None:
        self.block, self.slice_us, self.events = facts
        self.slices_us, self._of = np.unique(self.slice_us, return_inverse=True)
        counts = len(self.slices_us)
        events: Any = sums_by(self._of, self.events, counts)
        if float(events.sum(dtype=np.float64)) >= MOST / 2:
            events = events.astype(object)  # the sums may not fit in 64 bits
        self._upto = np.concatenate(([0], np.cumsum(events)))
        sizes = np.bincount(self._of, bytes_per_event[self.block] * self.events, counts)
        self._size_upto = np.concatenate(([0], np.cumsum(sizes.astype(np.int64))))
        self._active, self._late, self._too_late = (np.zeros(counts, np.bool_) for _ in range(3))

    @classmethod
    def of(cls, blocks: Sequence[BlockFact], facts: SliceFacts | None) -> Arrival:
        if facts is None:
            columns = [(i, b.slice_us, b.events) for i, b in enumerate(blocks) if not has_event_rows(b.slice_us)]
            facts = SliceFacts(*np.array(columns, np.int64).reshape(-1, 3).T)
        timed = (facts.slice_us > NO_SLICE) & (facts.slice_us < TEXT_SLICE)
        bytes_per_event = np.array([block.size_bytes / max(block.events, 1) for block in blocks], np.float64)
        return cls(facts if timed.all() else SliceFacts(*(column[timed] for column in facts)), bytes_per_event)

    def events_of(self, begins: Ints, ends: Ints) -> Ints:
        """The number of events in each stretch of slices. At most ``MOST``."""
        events = self._upto[ends] - self._upto[begins]
        return np.asarray(np.minimum(events, MOST), np.int64)

    def bytes_of(self, begins: Ints, ends: Ints) -> Ints:
        """The encoded bytes of the events in each stretch of slices."""
        return np.asarray(self._size_upto[ends] - self._size_upto[begins])

    def slices_in(self, begins: Ints, ends: Ints) -> Ints:
        """The slices that lie in any of these stretches."""
        return np.asarray(self.slices_us[_covered(begins, ends, len(self.slices_us))])

    def mark_taken(self, begins: Ints, ends: Ints, active: Flags | None) -> None:
        """Notes that windows take these stretches of slices.

        ``active``: a mask of the windows that have not ended, or None if no window has ended.
        """
        if active is None:
            self._active |= _covered(begins, ends, len(self.slices_us))
        else:
            self._active |= _covered(begins[active], ends[active], len(self.slices_us))
            self._late |= _covered(begins[~active], ends[~active], len(self.slices_us))

    def mark_too_late(self, begins: Ints, ends: Ints) -> tuple[int, ...]:
        """Notes that the windows of these stretches of slices are gone. Returns the blocks that hold such slices."""
        return self._lose(_covered(begins, ends, len(self.slices_us)))

    def mark_left_out(self, begins: Ints, ends: Ints) -> tuple[tuple[int, ...], Ints]:
        """Notes that no window holds what is left of these stretches. Returns its blocks, and its slices."""
        lost = _covered(begins, ends, len(self.slices_us)) & self.untold()
        return self._lose(lost), self.slices_us[lost]

    def untold(self) -> Flags:
        """Returns a mask of the slices that no window has taken, and that have not come too late for one."""
        return ~(self._active | self._late | self._too_late)

    def _lose(self, lost: Flags) -> tuple[int, ...]:
        self._too_late |= lost
        return tuple(np.unique(self.block[lost[self._of]]).tolist())

    def kept_blocks(self) -> frozenset[int]:
        """The blocks that any window takes events from."""
        return frozenset(self.block[(self._active | self._late)[self._of]].tolist())

    def active_blocks(self) -> frozenset[int]:
        """The blocks from which a window that has not ended takes events."""
        return frozenset(self.block[self._active[self._of]].tolist())

    def late_events(self) -> int:
        """How many events came late, those that came too late among them."""
        return sum_of(self.events[(self._too_late | self._late)[self._of]])

    def lost_events(self) -> dict[int, int]:
        """By block, how many of its events came too late for some window."""
        lost = self._too_late[self._of]
        blocks, block_of = np.unique(self.block[lost], return_inverse=True)
        counts = sums_by(block_of, self.events[lost], len(blocks))
        return dict(zip(blocks.tolist(), counts.tolist(), strict=True))


class LateCounts:
    """Counts events of one batch, which may arrive in parts.

    An event counts once, however many definitions it is late for. What comes late or too late is what is old enough. So
    the events of one definition are among those of another one, but for a few: a session that goes on may still take
    some. Rows of single events that come beside partials of the same events are counted apart.
    """

    def __init__(self) -> None:
        self._dropped = [0, 0]
        self._late: dict[int, int] = {}

    def drop(self, blocks: Sequence[BlockFact], dropped: Iterable[Mapping[int, int]]) -> None:
        """Adds events that came too late. ``dropped``: what each definition drops of each block of an arrival."""
        most: dict[int, int] = {}
        for counts in dropped:
            for block, events in counts.items():
                most[block] = max(most.get(block, 0), events)
        for block, events in most.items():
            self._dropped[has_event_rows(blocks[block].slice_us)] += events

    def came_late(self, place: int, events: int) -> None:
        """Adds late events, those that are too late among them. ``place``: of the definition in the operator's list."""
        self._late[place] = self._late.get(place, 0) + events

    def end(self, counters: Counters) -> None:
        """The batch is over."""
        counters.drop(max(self._dropped))
        counters.came_late(max(self._late.values(), default=0))


def _covered(begins: Ints, ends: Ints, size: int) -> Flags:
    """For each number below ``size``: whether any stretch ``[begins[i], ends[i])`` contains it."""
    steps = np.zeros(size + 1, np.int64)
    np.add.at(steps, begins, 1)
    np.add.at(steps, ends, -1)
    return np.asarray(np.cumsum(steps)[:-1] > 0)
