"""Which blocks of a slice are compacted into one run that is sorted by key, and when (docs/inside/window-costs.md).
Pure.

A *run* is either one block as it arrived, or the result of a compaction: blocks sorted by key, each with its range of
keys in its header. The runs of a slice, in the order of arrival, are compacted by the logarithmic method (Bentley and
Saxe 1980, "Decomposable searching problems"; O'Neil and others 1996, "The log-structured merge-tree"): once the runs
after a run hold more bytes than it does, it is compacted with all of them. So the runs after the first one of a stretch
are together never larger than the first one, which is no larger than the whole stretch compacted. At least every second
time that a byte is rewritten, it goes into a run at least 1.5 times as large. So a byte is written O(log n) times.

Large blocks that were handed over (docs/inside/hand-over.md) are sorted when they come. Those of one child are one run.
Their bytes are many, so they are compacted as tiered LSM trees do: a run that was handed over is only compacted when it
has at least ``FAN_IN`` runs after it, which hold more than ``FAN_IN`` times its bytes. So a slice has O(FAN_IN log n)
runs, and a byte is written again O(log n / log FAN_IN) times, mostly never. Other runs are not compacted across one
that was handed over.

A *stretch* is a sequence of runs that every window of the slice treats alike. Executed and pending blocks, or blocks
that were in time and late ones, are not compacted together while some window still has to tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from aion.core.packing import table, untable
from state_backends.thresholds import threshold

UNLIMITED = 2**63 - 1
WORTH_SORTING = threshold(1 << 18, 64)
"""More unsorted bytes than this are sorted once their slice has no active window: a late event then reads fewer."""
FAN_IN = threshold(8, 2)
_RUN = ("slice", "last_seq", "size_bytes", "order")


class BlockFact(NamedTuple):
    """A block that arrived: its segment, the number of events that its rows stand for, and its encoded size.

    ``keys``: its rows are sorted by the hashes of their keys, which are in this range, or None if they may not be.
    """

    slice_us: int
    events: int
    size_bytes: int
    keys: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Compact:
    """Compact the blocks of a slice with numbers above ``after`` and up to ``until`` into one run, sorted by key.

    ``size_bytes``: the size of those blocks. ``late``: the result goes straight to the p-bucket. ``sweeps``: leave out
    rows that no window of their key needs any more.
    """

    slice_us: int
    after: int
    until: int
    size_bytes: int
    late: bool
    sweeps: bool = False


@dataclass(frozen=True, slots=True)
class CompactionDone:
    """A compaction is done. ``size_bytes``: the size of its result."""

    compaction: Compact
    size_bytes: int


class RunOrder(IntEnum):
    """The order of a run's rows: as they arrived, or sorted by key, by a compaction or by a child."""

    ARRIVAL = 0
    COMPACTED = 1
    HANDED_OVER = 2


class Run(NamedTuple):
    """``last_seq``: the number of its last block."""

    last_seq: int
    size_bytes: int
    order: RunOrder

    @property
    def is_sorted(self) -> bool:
        return self.order is not RunOrder.ARRIVAL

    @property
    def was_handed_over(self) -> bool:
        return self.order is RunOrder.HANDED_OVER


class BlockCompaction:
    """The runs of a shard's slices, and what to compact.

    ``open_too``: also compact blocks of active windows. That pays for partials, since those of equal keys are combined.
    Kept events do not get smaller; they are sorted once, after the last window of their slice has ended.
    ``limit_bytes``: the most encoded bytes that are compacted at once, unless they are sorted already.
    """

    def __init__(
        self, *, open_too: bool, limit_bytes: int = UNLIMITED, snapshot: Mapping[str, Any] | None = None
    ) -> None:
        self._open_too = open_too
        self._limit_bytes = limit_bytes
        self._runs: dict[int, list[Run]] = {}
        self._touched: set[int] = set()
        # For each slice, how many stored rows are known to be no longer needed.
        self._waste: dict[int, int] = {}
        self._sweeping: set[int] = set()
        if snapshot is not None:
            if "waste" in snapshot:
                waste = untable(snapshot["waste"])
                self._waste = dict(zip(waste["slice"], waste["rows"], strict=True))
            runs = untable(snapshot)
            for slice_us, last_seq, size_bytes, order in zip(*(runs[name] for name in _RUN), strict=True):
                self._runs.setdefault(slice_us, []).append(Run(last_seq, size_bytes, RunOrder(order)))
        # The highest hash of the newest run of each slice, if more blocks may continue that run.
        self._highest: dict[int, int] = {}

    def arrived(self, block: BlockFact, seq: int, wasted_rows: int = 0) -> None:
        """A block was appended. ``wasted_rows`` of its rows came too late for any session."""
        slice_us, size_bytes, keys = block.slice_us, block.size_bytes, block.keys
        runs = self._runs.setdefault(slice_us, [])
        highest = self._highest.pop(slice_us, None)
        if keys is None:
            runs.append(Run(seq, size_bytes, RunOrder.ARRIVAL))
        else:
            if highest is not None and keys[0] >= highest:
                size_bytes += runs.pop().size_bytes
            runs.append(Run(seq, size_bytes, RunOrder.HANDED_OVER))
            self._highest[slice_us] = keys[1]
        self._touched.add(slice_us)
        if wasted_rows:
            self.wasted(slice_us, wasted_rows)

    def wasted(self, slice_us: int, rows: int) -> None:
        """``rows`` more rows of a slice are no longer needed."""
        self._waste[slice_us] = self._waste.get(slice_us, 0) + rows

    @property
    def wasteful(self) -> list[int]:
        """Slices with rows that are no longer needed."""
        return list(self._waste)

    def sweep(self, slice_us: int, needed: int) -> bool:
        """Whether to compact the whole slice, because at most half of its rows are still ``needed``.

        So at most one row is rewritten for each row that is removed.
        """
        runs = self._runs.get(slice_us)
        if runs and self._waste[slice_us] >= needed and all(run.size_bytes < UNLIMITED for run in runs):
            self._sweeping.add(slice_us)
        return slice_us in self._sweeping

    def leave(self, slices: Iterable[int], next_seq: int) -> None:
        """Never compact the present blocks of these slices, whose sizes are unknown, with later ones."""
        self._runs |= {slice_us: [Run(next_seq - 1, UNLIMITED, RunOrder.COMPACTED)] for slice_us in slices}

    def sizes(self, slices: Iterable[int]) -> list[int]:
        """The encoded bytes of the blocks of each slice, as far as they are known."""
        return [sum(run.size_bytes for run in self._runs.get(slice_us, ())) for slice_us in slices]

    def touched(self) -> list[int]:
        """Slices that got blocks since the last call."""
        # Windows are executed between batches, so later blocks may not continue these runs.
        found, self._touched, self._highest = sorted(self._touched), set(), {}
        return found

    def may_compact(self, slice_us: int) -> bool:
        """Whether the slice could have something to compact, wherever its cuts are. A single small block has not."""
        if slice_us in self._sweeping:
            return True
        runs = self._runs.get(slice_us, ())
        return len(runs) > 1 or any(not run.is_sorted and run.size_bytes > WORTH_SORTING for run in runs)

    def due(self, slice_us: int, cuts: Iterable[int], *, ended: bool, sweeps: bool = False) -> list[Compact]:
        """What to compact in a slice now.

        ``cuts``: the number of the first block of each stretch but the first. ``ended``: no window of the slice is
        active any more. ``sweeps``: rows that are no longer needed can be recognised, so leave them out.
        """
        runs = self._runs.get(slice_us, [])
        if slice_us in self._sweeping:
            return [self._compact(slice_us, runs, *part, ended, sweeps) for part in self._parts(runs, 0, len(runs))]
        if not runs or not (ended or self._open_too):
            return []
        edges = np.searchsorted([run.last_seq for run in runs], sorted(cuts)).tolist()
        found: list[Compact] = []
        for stretch in zip([0, *edges], [*edges, len(runs)], strict=True):
            for begin, end in _separate_ranges(runs, *stretch):
                first = begin if runs[begin].was_handed_over else _first_to_compact(runs, begin, end)
                unsorted = [i for i in range(begin, end) if not runs[i].is_sorted] if ended else []
                if sum(runs[i].size_bytes for i in unsorted) > WORTH_SORTING:
                    first = unsorted[0] if first is None else min(first, unsorted[0])
                if first is not None:
                    parts = self._parts(runs, first, end)
                    found += [self._compact(slice_us, runs, *part, ended, sweeps) for part in parts]
        return found

    def compacted(self, fact: CompactionDone) -> None:
        """A compaction is done: its runs are one run now."""
        compaction = fact.compaction
        runs = self._runs[compaction.slice_us]
        within = [i for i, run in enumerate(runs) if compaction.after < run.last_seq <= compaction.until]
        result = Run(compaction.until, fact.size_bytes, RunOrder.COMPACTED)
        runs[within[0] : within[-1] + 1] = [result] if fact.size_bytes else []
        if compaction.slice_us in self._sweeping and len(runs) < 2:
            self._sweeping.discard(compaction.slice_us)
            self._waste.pop(compaction.slice_us, None)

    def forget(self, slices: Iterable[int]) -> None:
        for slice_us in slices:
            self._runs.pop(slice_us, None)
            self._waste.pop(slice_us, None)
            self._touched.discard(slice_us)
            self._sweeping.discard(slice_us)

    def to_json(self) -> dict[str, Any]:
        rows = [(slice_us, *run) for slice_us in sorted(self._runs) for run in self._runs[slice_us]]
        value = table({name: [row[i] for row in rows] for i, name in enumerate(_RUN)})
        if self._waste:
            value["waste"] = table({"slice": list(self._waste), "rows": list(self._waste.values())})
        return value

    def _parts(self, runs: list[Run], first: int, end: int) -> list[tuple[int, int]]:
        """The ranges of runs to compact, each in one go.

        Up to the limit, that is one range. Above it, first compact the unsorted runs, in ranges within the limit. If
        there are no such ranges, compact all runs at once.
        """
        whole = [(first, end)]
        if sum(run.size_bytes for run in runs[first:end]) <= self._limit_bytes:
            return whole
        groups: list[tuple[int, int]] = []
        begin, size = first, 0
        for i in range(first, end):
            if runs[i].is_sorted or size + runs[i].size_bytes > self._limit_bytes:
                groups.append((begin, i))
                begin, size = i, 0
            if runs[i].is_sorted:
                begin = i + 1
            else:
                size += runs[i].size_bytes
        groups.append((begin, end))
        return [(a, b) for a, b in groups if b - a > 1] or whole

    @staticmethod
    def _compact(slice_us: int, runs: list[Run], first: int, end: int, ended: bool, sweeps: bool) -> Compact:
        after = runs[first - 1].last_seq if first else -1
        size = sum(run.size_bytes for run in runs[first:end])
        return Compact(slice_us, after, runs[end - 1].last_seq, size, ended, sweeps)


def _separate_ranges(runs: list[Run], begin: int, end: int) -> list[tuple[int, int]]:
    """Splits a stretch into ranges of runs that are compacted separately. Leaves out runs that were handed over.

    If many runs with far more bytes follow a run that was handed over, the last range begins with that run.
    """
    found: list[tuple[int, int]] = []
    behind, first = 0, None
    for i in range(end - 1, begin - 1, -1):
        if runs[i].was_handed_over and end - i > FAN_IN and behind > FAN_IN * runs[i].size_bytes:
            first = i
        behind += runs[i].size_bytes
    if first is not None:
        found.append((first, end))
        end = first
    for i in range(end - 1, begin - 1, -1):
        if runs[i].was_handed_over:
            if i + 1 < end:
                found.append((i + 1, end))
            end = i
    if begin < end:
        found.append((begin, end))
    return found[::-1]


def _first_to_compact(runs: list[Run], begin: int, end: int) -> int | None:
    """The first run of a stretch that is smaller than all runs after it together."""
    behind = 0
    found = None
    for i in range(end - 1, begin - 1, -1):
        if behind > runs[i].size_bytes:
            found = i
        behind += runs[i].size_bytes
    return found
