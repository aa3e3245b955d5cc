"""Slices, and the segments that they are stored in (Scotty section IV). Pure, vectorised.

A *slice* is the stretch between two neighbouring edges of the windows. Its start identifies it. All events of a slice
belong to the same windows, so everything is stored once for each slice.

A *segment* is a stretch of whole slices that is stored, moved and dropped as one: a block holds events of one segment.
If the windows have one family of edges, each slice is a segment. If they have several, slices are many and short, and a
segment is as long as the shortest window. Then a window lies in few segments and shares little with its neighbours.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.core.packing import table, untable
from aion.core.periodic import Family, Periodic
from aion.core.slicing.edges import EdgeSet
from aion.core.windows import Aligned, Calendar, Definition

Micros = npt.NDArray[np.int64]

LEAST_KEYED_US = 60_000_000
"""The shortest slice for windows of single keys: a minute."""

# The slices of events without a time, of those with a text that is not UTF-8, of those that earlier windows dropped, of
# events whose time is ahead of the clock (:func:`aion.watermark`), and of those with a time out of range. No window
# covers them.
NO_SLICE = -(2**63)
TEXT_SLICE = 2**63 - 4
DROPPED_SLICE = 2**63 - 3
AHEAD_SLICE = 2**63 - 2
BEYOND_SLICE = 2**63 - 1
FLAGGED_SLICES = (TEXT_SLICE, DROPPED_SLICE, AHEAD_SLICE)
"""Those of events that may have a time in range."""


EVENT_ROWS_US = 5 << 60
"""Rows of single events that are kept beside partials have segments of their own.

They are named this much later than they begin. No event has a time that late (:mod:`aion.base.numbers`), so no name
stands for both.
"""


def is_timed(slice_us: int) -> bool:
    """Returns whether the events of a slice have a time, and one in range."""
    return NO_SLICE < slice_us < TEXT_SLICE


def has_event_rows(slice_us: int) -> bool:
    """Returns whether a segment holds rows of single events beside the partials of others."""
    return EVENT_ROWS_US // 5 * 3 <= slice_us < TEXT_SLICE


def start_of(slice_us: int) -> int:
    """Returns the instant at which a segment with this name begins."""
    return slice_us - EVENT_ROWS_US if has_event_rows(slice_us) else slice_us


class SliceGrid:
    """Slices for a fixed sequence of window definitions. A definition's number is its index.

    Windows of single keys (sessions, counts, ...) have no edges. For them slices are kept short, so that reading a
    window does not read much more than it needs. ``segmented``: whether several slices may share a block. A mapping
    gives only some of the definitions, by their numbers.

    If definitions have changed (:mod:`aion.core.query.evolution`): ``ends`` of the segments that earlier ones made;
    ``always``: even with one family of edges, blocks name their slices; ``limits``: by number, from when on and before
    when the windows of a definition begin.
    """

    def __init__(
        self,
        windows: Sequence[Definition] | Mapping[int, Definition],
        *,
        segmented: bool = True,
        ends: Mapping[int, int] | None = None,
        always: bool = False,
        limits: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        self._ends, self._always, self.limits = ends or {}, always, limits or {}
        numbered = windows if isinstance(windows, Mapping) else dict(enumerate(windows))
        self.aligned = {number: w for number, w in numbered.items() if isinstance(w, Aligned)}
        periodic = [w for w in self.aligned.values() if isinstance(w, Periodic)]
        calendars = [w for w in self.aligned.values() if isinstance(w, Calendar)]
        families = {family for window in periodic for family in window.families()}
        reaches = [window.reach_us for window in numbered.values() if not isinstance(window, Aligned)]
        if reaches:
            families.add(Family(max(min(reaches), LEAST_KEYED_US), 0))
        self._segment: EdgeSet | None = None
        # Blocks outlive the rules of a zone, so their layout must not depend on more than the definitions.
        several = always or len(EdgeSet(families, (w.edges.without_fixed for w in calendars))) > 1
        if segmented and several and self.aligned:
            shortest = min(self.aligned.values(), key=_length)
            # Every segment boundary is an edge, so that no slice lies in two segments.
            if isinstance(shortest, Periodic):
                segment = Family(shortest.shortest_us, shortest.offset_us % shortest.shortest_us)
                families.add(segment)
                self._segment = EdgeSet([segment])
            else:
                self._segment = EdgeSet([], shortest.all_edges)
        self.edges = EdgeSet(families, (edges for window in calendars for edges in window.all_edges))

    @property
    def families(self) -> tuple[Family, ...]:
        """The families of edges, without those that add no edge."""
        return self.edges.families

    @property
    def has_segments(self) -> bool:
        """Whether a block may hold several slices. Then each of its rows names its slice."""
        return self._segment is not None

    @property
    def has_changed(self) -> bool:
        """Whether definitions came or went. Then segments may be left that no window needs."""
        return self._always

    @property
    def overlaps(self) -> bool:
        """Whether segments may overlap, because earlier windows made some of them."""
        return bool(self._ends)

    @cached_property
    def longest_us(self) -> int:
        """An upper bound on the length of a segment."""
        known = max((end_us - start_us for start_us, end_us in self._ends.items()), default=0)
        return max((self._segment or self.edges).longest_us, known)

    def starts(self, times_us: Micros) -> Micros:
        """Returns the slice start of each event time."""
        return self.edges.starts(times_us)

    def starts_of(self, instants_us: Micros) -> Micros:
        """:meth:`starts`, but slices without a usable time are allowed and stay as they are."""
        timed = (instants_us > NO_SLICE) & (instants_us < TEXT_SLICE)
        if timed.all():
            return self.starts(instants_us)
        found = instants_us.copy()
        found[timed] = self.starts(instants_us[timed])
        return found

    def segments(self, slices_us: Micros) -> Micros:
        """Returns the segment of each slice. Those without a usable time stay as they are."""
        if self._segment is None:
            return slices_us
        timed = (slices_us > NO_SLICE) & (slices_us < TEXT_SLICE)
        if timed.all():
            return self._segment.floors(slices_us)
        found = slices_us.copy()
        found[timed] = self._segment.floors(slices_us[timed])
        return found

    @cached_property
    def _bins(self) -> EdgeSet:
        # Rules of a zone may change while rows are counted in bins, so no bin depends on them.
        families = (self._segment or self.edges).families
        return EdgeSet(families or self.edges.families)

    def bins(self, times_us: Micros) -> tuple[Micros, Micros]:
        """The start and the end of the stretch in which rows that begin or end at these times are counted.

        It is a segment, unless calendars have edges of their own.
        """
        starts = self._bins.floors(times_us)
        return starts, self._bins.afters(starts)

    def ends(self, segments_us: Micros) -> Micros:
        """Returns the exclusive end of each segment."""
        found = (self._segment or self.edges).afters(segments_us)
        if not self._ends:
            return found
        return np.maximum(found, [self._ends.get(start_us, start_us) for start_us in segments_us.tolist()])

    def end(self, segment_us: int) -> int:
        """Returns the exclusive end of a segment."""
        edges = self._segment or self.edges
        found = [family.after(segment_us) for family in edges.families]
        if edges.calendars:
            segment = np.array([segment_us], np.int64)
            found += [int(calendar.afters(segment)[0]) for calendar in edges.calendars]
        return max(min(found), self._ends.get(segment_us, segment_us))


def _length(window: Aligned) -> tuple[int, int, int]:
    """Orders windows by length, and otherwise in a way that stays the same over restarts."""
    if isinstance(window, Periodic):
        return window.shortest_us, 0, window.offset_us
    return window.edges.steps.shortest_us, 1, 0


class LiveSegments:
    """The segments that have stored blocks, in order of time."""

    def __init__(self, grid: SliceGrid, starts_us: Iterable[int] = ()) -> None:
        self._grid = grid
        self._known = set(starts_us)
        self._order: list[int] | None = None

    def __contains__(self, start_us: int) -> bool:
        return start_us in self._known

    def __iter__(self) -> Iterator[int]:
        return iter(self._in_order())

    def __len__(self) -> int:
        return len(self._known)

    def add(self, start_us: int) -> None:
        if start_us not in self._known:
            self._known.add(start_us)
            self._order = None

    def drop(self, starts_us: Iterable[int]) -> None:
        self._known.difference_update(starts_us)
        self._order = None

    def between(self, start_us: int, end_us: int) -> tuple[int, ...]:
        """Returns the segments that overlap ``[start_us, end_us)``."""
        order = self._in_order()
        first = bisect_left(order, start_us - self._grid.longest_us + 1)
        last = bisect_left(order, end_us)
        if self._grid.overlaps:
            return tuple(found for found in order[first:last] if self._grid.end(found) > start_us)
        while first < last and self._grid.end(order[first]) <= start_us:
            first += 1
        return tuple(order[first:last])

    def within_any(self, starts_us: Micros, ends_us: Micros) -> tuple[int, ...]:
        """Returns the segments that overlap any of the stretches ``[start, end)``."""
        if not len(starts_us) or not self._known:
            return ()
        if len(starts_us) == 1:
            return self.between(int(starts_us[0]), int(ends_us[0]))
        order = np.array(self._in_order(), np.int64)
        # Windows that begin before a segment's end, without those that end by its start.
        begun = np.searchsorted(np.sort(starts_us), self._grid.ends(order))
        over = np.searchsorted(np.sort(ends_us), order, side="right")
        return tuple(order[begun > over].tolist())

    def _in_order(self) -> list[int]:
        if self._order is None:
            self._order = sorted(self._known)
        return self._order


def slices_to_json(slices: Iterable[int]) -> dict[str, Any]:
    return table({"slice": sorted(slices)})


def slices_from_json(value: Mapping[str, Any]) -> list[int]:
    return untable(value)["slice"]
