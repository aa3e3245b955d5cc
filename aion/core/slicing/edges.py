"""The edges of all aligned windows, and the slice of each event (Scotty section III). Pure.

The edges of a stretch of time are computed once and looked up in a table. So the cost of an event does not depend on
the number of windows.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd

import numpy as np
import numpy.typing as npt

from aion.core.calendars import CalendarEdges
from aion.core.periodic import Family
from state_backends.thresholds import threshold

Micros = npt.NDArray[np.int64]
Index = npt.NDArray[np.intp]

# A lookup grid with more cells than this per event or edge costs more than it saves.
CELLS_PER_EVENT = threshold(4, 1)
MIN_CELLS = threshold(1 << 14, 2)
# A cell with several edges takes one correcting pass for each. With more passes than this, a search is as fast.
_CORRECTIONS = threshold(4, 1)
# Temporary arrays of this many events stay in the cache.
_AT_ONCE = threshold(1 << 15)


class EdgeSet:
    """The union of the edges of some families and calendars.

    ``families``, ``calendars``: without those that add no edge. ``unit_us``: every edge of a family is ``origin_us``
    plus a multiple of it (0 without families). ``density``: an upper bound on the edges per microsecond.
    """

    def __init__(self, families: Iterable[Family], calendars: Iterable[CalendarEdges] = ()) -> None:
        self.families = _without_redundant({Family(f.period_us, f.phase_us % f.period_us) for f in families})
        self._periods = np.array([f.period_us for f in self.families], np.int64)
        self._phases = np.array([f.phase_us for f in self.families], np.int64)
        self.calendars = _without_redundant_calendars(calendars)
        self.density = float((1 / self._periods).sum()) + sum(1 / c.steps.shortest_us for c in self.calendars)
        self.unit_us = self.origin_us = 0
        if self.families:
            first = self.families[0].phase_us
            self.unit_us = gcd(*(f.period_us for f in self.families), *(f.phase_us - first for f in self.families))
            self.origin_us = first % self.unit_us

    def __len__(self) -> int:
        """Returns how many families and calendars there are."""
        return len(self.families) + len(self.calendars)

    def between(self, low_us: int, high_us: int) -> Micros:
        """Returns the last edge at or before ``low_us``, then all edges up to ``high_us``, in order and each once.

        Time and memory are proportional to the number of edges; ``density`` says how many to expect.
        """
        if not self.calendars:
            return self._between(low_us, high_us)
        parts = [calendar.between(low_us, high_us) for calendar in self.calendars]
        if self.families:
            parts.append(self._between(low_us, high_us))
        if len(parts) == 1:
            return parts[0]
        edges = np.unique(np.concatenate(parts))
        return edges[np.searchsorted(edges, max(int(part[0]) for part in parts)) :]

    def _between(self, low_us: int, high_us: int) -> Micros:
        """Returns the same for the families alone."""
        below = (low_us - self._phases) // self._periods
        floors = below * self._periods + self._phases
        counts = (high_us - self._phases) // self._periods - below
        before = np.cumsum(counts) - counts
        total = int(counts.sum())
        firsts, periods = floors + self._periods, self._periods
        if len(self.families) > 1:
            firsts, periods, before = (np.repeat(a, counts) for a in (firsts, periods, before))
        edges = firsts + (np.arange(total) - before) * periods
        floor = int(floors.max())
        if len(self.families) == 1:
            return np.concatenate(([floor], edges))
        return np.concatenate(([floor], _distinct(edges, low_us, high_us, self.unit_us, self.origin_us)))

    def starts(self, times_us: Micros) -> Micros:
        """Returns the slice start of each event time. Times may be in any order."""
        if (len(self.families) == 1 and not self.calendars) or not len(times_us):
            return self.floors(times_us)
        edges = self.covering(times_us)
        return self.floors(times_us) if edges is None else edges[assign(times_us, edges)]

    def slots(self, times_us: Micros, extent: tuple[int, int]) -> tuple[Index, Micros]:
        """Returns the number of each event time's slice, and the start of the slice of each number, ascending.

        Some numbers may have no event. ``extent``: the earliest and the latest time.
        """
        edges = self.covering(times_us, extent)
        if edges is None:
            starts, numbers = np.unique(self.floors(times_us), return_inverse=True)
            return numbers, starts
        return assign(times_us, edges, extent), edges

    def covering(self, times_us: Micros, extent: tuple[int, int] | None = None) -> Micros | None:
        """Enough edges to find the slice of each of these times. None if there would be too many edges.

        Edges may be missing in stretches without an event. So a few instants far apart do not cost all edges between
        them.
        """
        low, high = extent or (int(times_us.min()), int(times_us.max()))
        affordable = CELLS_PER_EVENT * len(times_us) + MIN_CELLS
        if self.density * (high - low) <= affordable:
            return self.between(low, high)
        in_order = times_us if is_sorted(times_us) else np.sort(times_us)
        steps = np.diff(in_order)
        holes = np.sort(np.argpartition(steps, -min(16, len(steps)))[-16:]) if len(steps) else np.empty(0, np.intp)
        if self.density * (high - low - float(steps[holes].sum())) > affordable:
            return None
        firsts = in_order[np.concatenate(([0], holes + 1))].tolist()
        lasts = in_order[np.concatenate((holes, [len(in_order) - 1]))].tolist()
        runs = [self.between(first, last) for first, last in zip(firsts, lasts, strict=True)]
        # Two runs inside one slice both begin with its start.
        return np.unique(np.concatenate(runs))

    def floors(self, times_us: Micros) -> Micros:
        """:meth:`starts`, by a pass or two over the times for each family. For when there are too many edges."""
        result: Micros | None = None
        for period, phase in self.families:
            floor = (times_us - phase) // period * period + phase
            result = floor if result is None else np.maximum(result, floor, out=result)
        for calendar in self.calendars:
            floor = calendar.floors(times_us)
            result = floor if result is None else np.maximum(result, floor, out=result)
        assert result is not None, "without families and calendars there are no edges"
        return result

    def afters(self, times_us: Micros) -> Micros:
        """Returns the first edge after each instant."""
        following = [times_us + p - (times_us - phase) % p for p, phase in self.families]
        following += [calendar.afters(times_us) for calendar in self.calendars]
        return np.asarray(np.minimum.reduce(following))

    @property
    def longest_us(self) -> int:
        """An upper bound on the distance between neighbouring edges."""
        return min([*(f.period_us for f in self.families), *(c.longest_us for c in self.calendars)])


def assign(times_us: Micros, edges: Micros, extent: tuple[int, int] | None = None) -> Index:
    """Returns, for each time, the number of the last of the sorted ``edges`` at or before it; -1 before the first edge.

    ``extent``: the earliest and the latest time, if known.

    It uses the first method that fits: integer division if edges are evenly spaced, counting if times are sorted, a
    lookup grid, or a search if even a fine grid has many edges in one cell.
    """
    if not len(edges) or not len(times_us):
        return np.full(len(times_us), -1, np.intp)
    if len(edges) == 1 and extent is not None and extent[0] >= edges[0]:
        return np.zeros(len(times_us), np.intp)
    if edges[0] == edges[-1]:
        return np.where(times_us >= edges[0], len(edges) - 1, -1)
    spacings = np.diff(edges)
    if (spacings == spacings[0]).all():
        slots = times_us - edges[0]
        np.floor_divide(slots, spacings[0], out=slots)
        fits = extent is not None and edges[0] <= extent[0] and extent[1] < edges[-1] + spacings[0]
        return slots if fits else np.asarray(np.clip(slots, -1, len(edges) - 1), np.intp)
    if len(edges) < len(times_us) and is_sorted(times_us):
        bounds = np.concatenate(([0], np.searchsorted(times_us, edges), [len(times_us)]))
        return np.repeat(np.arange(-1, len(edges)), np.diff(bounds))
    found = _through_grid(times_us, edges, spacings)
    return np.asarray(np.searchsorted(edges, times_us, side="right") - 1) if found is None else found


def is_sorted(times_us: Micros) -> bool:
    """Returns whether the times ascend. Looks at the first few first, since disorder usually shows there."""
    head = times_us[:256]
    return bool((head[1:] >= head[:-1]).all() and (times_us[1:] >= times_us[:-1]).all())


def _through_grid(times_us: Micros, edges: Micros, spacings: Micros) -> Index | None:
    """:func:`assign` by a table of equally wide cells, from the first edge on. None if that would be too coarse."""
    low, span = int(edges[0]), int(edges[-1] - edges[0])
    affordable = CELLS_PER_EVENT * len(times_us) + MIN_CELLS
    unit = int(np.gcd.reduce(spacings))
    aligned = span // unit < affordable
    # If every edge begins a cell, each cell lies in one slice. Otherwise cells are so narrow that few hold two edges.
    affordable = min(affordable, 64 * len(edges))
    shift = max(span.bit_length() - affordable.bit_length() + 1, 0)
    counts = np.bincount((edges - low) // unit if aligned else (edges - low) >> shift)
    corrections = 0 if aligned else int(counts.max())
    if corrections > _CORRECTIONS:
        return None
    # The last entry is for cell -1: all times before the first edge.
    table = np.append(np.cumsum(counts) - (1 if aligned else counts + 1), -1)
    following = np.append(edges[1:], (np.iinfo(np.int64).max, edges[0]))
    found = np.empty(len(times_us), np.intp)
    for begin in range(0, len(times_us), _AT_ONCE):
        times = times_us[begin : begin + _AT_ONCE]
        cells = times - low
        cells = np.floor_divide(cells, unit, out=cells) if aligned else np.right_shift(cells, shift, out=cells)
        np.minimum(np.maximum(cells, -1, out=cells), len(counts) - 1, out=cells)
        some = table.take(cells, out=found[begin : begin + _AT_ONCE], mode="wrap")
        for _ in range(corrections):
            some += times >= following.take(some, mode="wrap")
    return found


def _distinct(edges: Micros, low_us: int, high_us: int, unit_us: int, origin_us: int) -> Micros:
    """Returns the edges in ``(low_us, high_us]``, sorted, each once. Marks them on a grid if that is cheaper than
    sorting.
    """
    if not len(edges):
        return edges
    base = (low_us - origin_us) // unit_us * unit_us + origin_us
    cells = (high_us - base) // unit_us + 1
    if cells > 64 * len(edges):
        return np.unique(edges)
    marks = np.zeros(cells, np.bool_)
    marks[(edges - base) // unit_us] = True
    return np.asarray(np.flatnonzero(marks) * unit_us + base)


def _without_redundant(families: set[Family]) -> tuple[Family, ...]:
    """Without the families whose edges are all edges of another family."""
    kept = sorted(families)
    periods = np.array([f.period_us for f in kept], np.int64)
    phases = np.array([f.phase_us for f in kept], np.int64)
    return tuple(
        f
        for number, f in enumerate(kept)
        # A finer family has a shorter period, so it comes earlier. The set has no two with the same period and phase.
        if not ((f.period_us % periods[:number] == 0) & ((f.phase_us - phases[:number]) % periods[:number] == 0)).any()
    )


def _without_redundant_calendars(calendars: Iterable[CalendarEdges]) -> tuple[CalendarEdges, ...]:
    """Without the calendars whose edges are all edges of another calendar."""
    kept: list[CalendarEdges] = []
    for one in sorted(dict.fromkeys(calendars), key=lambda c: c.steps.shortest_us):
        if not any(finer.makes_redundant(one) for finer in kept):
            kept.append(one)
    return tuple(kept)
