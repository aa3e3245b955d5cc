"""What the operator knows of windows of any kind. Pure.

The operator has a list of these. Those of windows of time (:mod:`aion.core.timed`) hold all definitions whose windows
are the same for all keys, and there is one for each definition of windows of keys (:mod:`aion.core.keyed`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from aion.core.life.arrival import Arrival
from aion.core.life.late_work import LateWork
from aion.core.life.lifecycle import Counters

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Orders: TypeAlias = Iterable[Any]
"""Actions, and orders for windows of keys. They may be decided as they are asked for: ask for all."""

ALL_ROWS = 1 << 61
"""So many rows of a interval of time are needed, if it is not known how many."""


class Turn(NamedTuple):
    """The state of the shard at which windows decide. There is one clock and one numbering for all.

    ``at_us``: the watermark, and ``before_us`` where it was before it moved there; None before the first one.
    ``step_us``: how far the last advance went. ``next_seq``: the number of the next block. ``late_work``: how much late
    work the batch may still do.
    """

    at_us: int | None
    step_us: int
    next_seq: int
    late_work: LateWork
    before_us: int | None = None


class TimeRanges(NamedTuple):
    """Intervals of event time ``[start, end)``, as columns, in µs."""

    starts_us: Ints
    ends_us: Ints

    @classmethod
    def of(cls, *intervals: tuple[int, int]) -> TimeRanges:
        return cls(*np.array(intervals, np.int64).reshape(-1, 2).T)


class Claim(NamedTuple):
    """What windows take of an arrival, and what they drop.

    ``blocks``: the numbers of the blocks from which they take events. ``open_blocks``: the blocks from which windows
    take events that have not ended. It is None if all blocks count whose segments open windows may need. ``drops``:
    orders to emit events as dropped. ``dropped``: by block, how many events come too late for some window. ``late``:
    how many events come late, those that come too late among them. ``taken``: what the windows themselves know of it.
    ``rows``: a mask of the rows that they take, if they take single rows. ``orders``: what else follows from it.
    """

    blocks: frozenset[int] = frozenset()
    open_blocks: frozenset[int] | None = frozenset()
    drops: Sequence[Any] = ()
    dropped: Mapping[int, int] = {}
    late: int = 0
    taken: Any = None
    rows: Flags | None = None
    orders: Sequence[Any] = ()


class Distinguished(NamedTuple):
    """What compaction must know of a segment.

    ``cuts``: blocks that windows distinguish from those before. ``ended``: whether all windows there have ended.
    ``by_rows``: whether windows need single rows of it, so that the others are waste. It is None if no window needs
    anything of it.
    """

    cuts: Iterable[int] = ()
    ended: bool = True
    by_rows: bool | None = None


class DefinedWindows(Protocol):
    """The windows of one definition in one shard, or of several that are decided together.

    In a batch the watermark comes first (:meth:`advance` of all, then :meth:`close` of all), then events
    (:meth:`arrive` and :meth:`keep`, any number of times), then :meth:`join` and :meth:`end_batch`.
    """

    def count_in(self, counters: Counters) -> None:
        """Sets the counters of the shard."""

    def arrive(self, arrival: Arrival, rows: Any, turn: Turn) -> Claim:
        """Decides about an arrival. ``rows``: the rows of single events, None if there are none."""

    def keep(self, claim: Claim, seqs: Mapping[int, int], turn: Turn) -> TimeRanges:
        """Takes what was claimed. ``seqs``: the number of each block of the arrival that is kept.

        Returns the intervals of windows whose execution these events announce, so that they can be staged.
        """

    def join(self, turn: Turn) -> int:
        """All events of the batch are there. Returns how many came late that no claim has counted."""

    def advance(self, turn: Turn) -> Orders:
        """The watermark has moved. Returns what runs on time, and what cannot wait."""

    def end_batch(self, turn: Turn, *, ends_run: bool, batch_follows: bool) -> Orders:
        """Returns the executions that wait for the end of the batch. Its arguments: see BatchEnded."""

    # -- what is due --------------------------------------------------------------------------------------

    def due(self, turn: Turn, watermark_us: int) -> list[TimeRanges]:
        """The intervals that are read if the watermark gets there and nothing arrives, in the order of executions."""

    def leave(self, turn: Turn, watermark_us: int) -> None:
        """What is :meth:`due` then is being staged. Anything else is far from memory from now on."""

    def next_due_us(self, turn: Turn) -> int:
        """The next watermark at which something happens even if no event comes. NEVER: there is none."""

    @property
    def waits(self) -> bool:
        """Whether an execution that is due waits for a later batch."""

    # -- which segments -----------------------------------------------------------------------------------

    def needed_in(self, starts_us: Ints, ends_us: Ints) -> Ints:
        """How many rows of each interval are needed, at most. 0: none is, and none ever will be."""

    def are_open(self, starts_us: Ints, ends_us: Ints, turn: Turn) -> Flags:
        """A mask of the intervals that windows may need that have not ended."""

    def first_ends(self, starts_us: Ints, ends_us: Ints, turn: Turn) -> Ints:
        """The first end of an open window in each interval. NEVER: there is none."""

    def left(self) -> TimeRanges:
        """The intervals that open windows have left since the last call."""

    def freed(self) -> TimeRanges:
        """The intervals that windows which are gone have left since the last call."""

    def removed(self) -> TimeRanges:
        """The rows that the last watermark removed: their first and last events."""

    def distinguished(self, start_us: int, end_us: int, turn: Turn) -> Distinguished:
        """What compaction must know of a segment."""

    def write(self) -> None:
        """Writes what changed to the map. Call it at the end of a batch."""

    def snapshot(self) -> dict[str, Any]:
        """What a restart needs besides the map, as JSON values."""
