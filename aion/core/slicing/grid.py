"""The edges that all windows of an operator share (Scotty section IV). Pure, vectorised.

A slice is the stretch between two neighbouring edges, named by its start. All events of a slice
belong to the same windows, so whatever is stored, it is stored once per slice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from aion.core.packing import table, untable
from aion.core.windows import Definition, Family, Periodic

Micros = npt.NDArray[np.int64]
V = TypeVar("V")

LEAST_KEYED_US = 60_000_000
"""Slices for windows of single keys are at least a minute long."""

# The slices of events without a time, and of those whose time is out of range: no window covers them.
NO_SLICE = -(2**63)
BEYOND_SLICE = 2**63 - 1


def is_timed(slice_us: int) -> bool:
    """Whether the events of a slice have a time that windows are made for."""
    return NO_SLICE < slice_us < BEYOND_SLICE


class SliceGrid:
    """Slices for a fixed sequence of window definitions (their index is the definition's number).

    Windows that each key has its own of have no edges; where there are some, slices are no longer than is good for
    reading what they need.
    """

    def __init__(self, windows: Sequence[Definition]) -> None:
        self.periodic = {number: w for number, w in enumerate(windows) if isinstance(w, Periodic)}
        edges = {family for window in self.periodic.values() for family in window.families()}
        reaches = [window.reach_us for window in windows if not isinstance(window, Periodic)]
        if reaches:
            edges.add(Family(max(min(reaches), LEAST_KEYED_US), 0))
        families = sorted(edges)
        # An edge family whose edges are all edges of another one adds nothing.
        self.families = tuple(
            f
            for f in families
            if not any(
                g != f and f.period_us % g.period_us == 0 and (f.phase_us - g.phase_us) % g.period_us == 0
                for g in families
            )
        )

    @property
    def longest_us(self) -> int:
        """No slice is longer."""
        return min(family.period_us for family in self.families)

    def starts(self, times_us: Micros) -> Micros:
        """The slice start of each event time; one or two numpy passes per edge family."""
        result: Micros | None = None
        for family in self.families:
            floor = _floor(times_us, family.period_us, family.phase_us)
            result = floor if result is None else np.maximum(result, floor, out=result)
        assert result is not None
        return result

    def end(self, start_us: int) -> int:
        """The exclusive end of the slice that starts at ``start_us``."""
        return min(family.after(start_us) for family in self.families)

    def covering(self, start_us: int) -> list[tuple[int, int]]:
        """(definition number, window start) of every window that the slice is part of."""
        if not is_timed(start_us):
            return []
        return [
            (number, window_start)
            for number, window in self.periodic.items()
            for window_start in window.starts_covering(start_us)
        ]


class LiveSlices(dict[int, V]):
    """Something of each slice that is kept, by its start; also in their order, which is made when it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._order: list[int] | None = None

    def __setitem__(self, start_us: int, value: V) -> None:
        if start_us not in self:
            self._order = None
        super().__setitem__(start_us, value)

    def __delitem__(self, start_us: int) -> None:
        self._order = None
        super().__delitem__(start_us)

    def between(self, start_us: int, end_us: int) -> tuple[int, ...]:
        """Slices that start in this stretch, in their order."""
        if self._order is None:
            self._order = sorted(self)
        return tuple(self._order[bisect_left(self._order, start_us) : bisect_left(self._order, end_us)])


def slices_to_json(slices: Iterable[int]) -> dict[str, Any]:
    return table({"slice": sorted(slices)})


def slices_from_json(value: Any) -> list[int]:
    """Also those of a version of before they were packed."""
    return list(value) if isinstance(value, list | tuple) else untable(value)["slice"]


def _floor(times_us: Micros, period_us: int, phase_us: int) -> Micros:
    # numpy turns division by one scalar into multiplications; `%` has no such path and is 6 times slower.
    if not phase_us:
        return times_us // period_us * period_us
    return (times_us - phase_us) // period_us * period_us + phase_us
