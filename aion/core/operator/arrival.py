"""The slices of the blocks that arrive together, and what becomes of each. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.core.numbers import MOST, sum_of, sums_by
from aion.core.operator.actions import BlockFact, EmitUntimed, Ints, SliceFacts
from aion.core.operator.keyed.shard import Verdict
from aion.core.operator.lifecycle import Counters
from aion.core.slicing.grid import BEYOND_SLICE, NO_SLICE, has_event_rows

Flags = npt.NDArray[np.bool_]


UNTIMED = {NO_SLICE: "the event time is null", BEYOND_SLICE: "the event time is out of range"}
"""Why events of these slices are dropped."""


def untimed(blocks: Sequence[BlockFact], counters: Counters) -> list[EmitUntimed]:
    """Counts all events, and orders to drop those without a time that windows are made for.

    The rows of single events that stand beside partials are of the same events, which count once.
    """
    drops = []
    for index, block in enumerate(blocks):
        if has_event_rows(block.slice_us):
            continue
        counters.came(block.events)
        if block.slice_us in UNTIMED:
            counters.drop(block.events)
            drops.append(EmitUntimed(index, UNTIMED[block.slice_us]))
    return drops


class Arrival:
    """The timed slices of an arrival, without those of event rows, and what becomes of each."""

    def __init__(self, facts: SliceFacts) -> None:
        self.block, self.slice_us, self.events = facts
        self.slices_us, self._of = np.unique(self.slice_us, return_inverse=True)
        counts = len(self.slices_us)
        events: Any = sums_by(self._of, self.events, counts)
        if float(events.sum(dtype=np.float64)) >= MOST / 2:
            events = events.astype(object)  # sums of counts that 64 bits may not hold
        self._upto = np.concatenate(([0], np.cumsum(events)))
        self._active, self._late, self._too_late = (np.zeros(counts, np.bool_) for _ in range(3))

    @classmethod
    def of(cls, blocks: Sequence[BlockFact], facts: SliceFacts | None) -> Arrival:
        if facts is None:
            columns = [(i, b.slice_us, b.events) for i, b in enumerate(blocks) if not has_event_rows(b.slice_us)]
            facts = SliceFacts(*np.array(columns, np.int64).reshape(-1, 3).T)
        timed = (facts.slice_us > NO_SLICE) & (facts.slice_us < BEYOND_SLICE)
        return cls(facts if timed.all() else SliceFacts(*(column[timed] for column in facts)))

    def events_of(self, begins: Ints, ends: Ints) -> Ints:
        """The events of each range of slices."""
        found = self._upto[ends] - self._upto[begins]
        return np.asarray(np.minimum(found, MOST), np.int64)

    def mark_taken(self, begins: Ints, ends: Ints, active: Flags | None) -> None:
        """Windows take these ranges of slices; ``active``: which windows have not ended, None: none has."""
        if active is None:
            self._active |= _covered(begins, ends, len(self.slices_us))
        else:
            self._active |= _covered(begins[active], ends[active], len(self.slices_us))
            self._late |= _covered(begins[~active], ends[~active], len(self.slices_us))

    def mark_too_late(self, begins: Ints, ends: Ints) -> tuple[int, ...]:
        """Windows that are gone would have taken these ranges of slices; returns the blocks that hold any of them."""
        lost = _covered(begins, ends, len(self.slices_us))
        self._too_late |= lost
        return tuple(np.unique(self.block[lost[self._of]]).tolist())

    def kept_blocks(self, also: Iterable[int]) -> list[int]:
        """The blocks that any window takes something of, in order."""
        taken = self.block[(self._active | self._late)[self._of]]
        return sorted({*taken.tolist(), *also})

    def active_blocks(self) -> frozenset[int]:
        """The blocks that a window takes something of that has not ended."""
        return frozenset(self.block[self._active[self._of]].tolist())

    def count(self, counters: Counters, verdict: Verdict) -> None:
        """Counts events that came late or too late for any window."""
        of_keys = np.isin(self.block, list(verdict.blocks))
        lost = self._too_late[self._of]
        dropped, of_event_rows = sum_of(self.events[lost]), 0
        own, lost_blocks = {*self.block.tolist()}, {*self.block[lost].tolist()}
        for block, events in verdict.dropped_events.items():
            if block not in own:
                of_event_rows += events
            elif block not in lost_blocks:
                dropped += events
        # The same events, as a rule: they came twice, as partials and as rows.
        counters.drop(max(dropped, of_event_rows))
        none = ~(self._active | self._late)[self._of] & ~of_keys
        counters.came_late(sum_of(self.events[lost | none | self._late[self._of]]))


def _covered(begins: Ints, ends: Ints, size: int) -> Flags:
    """For each place from 0 to ``size``: whether any of the ranges covers it."""
    steps = np.zeros(size + 1, np.int64)
    np.add.at(steps, begins, 1)
    np.add.at(steps, ends, -1)
    return np.asarray(np.cumsum(steps)[:-1] > 0)
