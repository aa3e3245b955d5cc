"""Decides for each slice in an arrival whether windows take it, and whether it is late or too late. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.base.numbers import MOST, sum_of, sums_by
from aion.core.compaction import BlockFact
from aion.core.keyed.shard import Verdict
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

    def mark_taken(self, begins: Ints, ends: Ints, active: Flags | None) -> None:
        """Notes that windows take these stretches of slices.

        ``active``: a mask of the windows that have not ended. None: no window has ended.
        """
        if active is None:
            self._active |= _covered(begins, ends, len(self.slices_us))
        else:
            self._active |= _covered(begins[active], ends[active], len(self.slices_us))
            self._late |= _covered(begins[~active], ends[~active], len(self.slices_us))

    def mark_too_late(self, begins: Ints, ends: Ints) -> tuple[int, ...]:
        """Notes that the windows of these stretches of slices are gone. Returns the blocks that hold such slices."""
        lost = _covered(begins, ends, len(self.slices_us))
        self._too_late |= lost
        return tuple(np.unique(self.block[lost[self._of]]).tolist())

    def kept_blocks(self, also: Iterable[int]) -> list[int]:
        """The blocks that any window takes events from, in order. ``also``: blocks that are kept for other reasons."""
        taken = self.block[(self._active | self._late)[self._of]]
        return sorted({*taken.tolist(), *also})

    def active_blocks(self) -> frozenset[int]:
        """The blocks from which a window that has not ended takes events."""
        return frozenset(self.block[self._active[self._of]].tolist())

    def count(self, tally: Tally, verdict: Verdict) -> None:
        """Counts the events that came late, and those that came too late."""
        lost = self._too_late[self._of]
        tally.dropped += sum_of(self.events[lost])
        own, lost_blocks = {*self.block.tolist()}, {*self.block[lost].tolist()}
        for block, events in verdict.dropped_events.items():
            if block not in own:
                tally.dropped_rows += events
            elif block not in lost_blocks:
                tally.dropped += events
        tally.late += sum_of(self.events[lost | self._late[self._of]])
        tally.came_late(verdict.too_late)


class Tally:
    """Counts events of one batch, which may arrive in parts.

    ``late``: late for windows of all keys. ``dropped``: too late. ``dropped_rows``: too late, counted by the rows of
    single events that came beside partials of the same events.
    """

    def __init__(self) -> None:
        self.late = self.dropped = self.dropped_rows = 0
        self._late_for_keys: dict[int, int] = {}

    def came_late(self, events: Mapping[int, int]) -> None:
        """Adds late events, those that are too late among them, by definition of windows of single keys."""
        for definition, count in events.items():
            self._late_for_keys[definition] = self._late_for_keys.get(definition, 0) + count

    def end(self, counters: Counters) -> None:
        """The batch is over. An event counts once, however many definitions it is late for.

        What comes late or too late is what is old enough. So the events of one definition are among those of another
        one, but for a few: a session that goes on may still take some.
        """
        counters.drop(max(self.dropped, self.dropped_rows))
        counters.came_late(max(self.late, *self._late_for_keys.values(), 0))


def _covered(begins: Ints, ends: Ints, size: int) -> Flags:
    """For each number below ``size``: whether any stretch ``[begins[i], ends[i])`` contains it."""
    steps = np.zeros(size + 1, np.int64)
    np.add.at(steps, begins, 1)
    np.add.at(steps, ends, -1)
    return np.asarray(np.cumsum(steps)[:-1] > 0)
