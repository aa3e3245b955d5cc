"""Remembers which windows are gone for good. It stays small, however long a query runs. Pure.

What stands for a window (``run_values``) is stored as runs of neighbours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.base.numbers import NEVER
from aion.core.windows import Aligned


class Runs:
    """A set of multiples of ``step`` (plus a constant), stored as ``[first, last]`` runs."""

    __slots__ = ("_firsts", "_lasts", "_step")

    def __init__(self, step: int, runs: Iterable[tuple[int, int]] = ()) -> None:
        self._step = step
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in runs:
            self._firsts.append(first)
            self._lasts.append(last)

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def __contains__(self, value: int) -> bool:
        i = bisect_right(self._firsts, value) - 1
        return i >= 0 and value <= self._lasts[i]

    def add(self, value: int) -> None:
        if value in self:
            return
        i = bisect_right(self._firsts, value)
        joins_before = i > 0 and self._lasts[i - 1] == value - self._step
        joins_after = i < len(self._firsts) and self._firsts[i] == value + self._step
        if joins_before and joins_after:
            self._lasts[i - 1] = self._lasts[i]
            del self._firsts[i], self._lasts[i]
        elif joins_before:
            self._lasts[i - 1] = value
        elif joins_after:
            self._firsts[i] = value
        else:
            self._firsts.insert(i, value)
            self._lasts.insert(i, value)

    def forget_to(self, value: int) -> None:
        """Remove everything up to and including ``value``."""
        gone = bisect_right(self._lasts, value)
        del self._firsts[:gone], self._lasts[:gone]
        if self._firsts and self._firsts[0] <= value:
            self._firsts[0] += (value - self._firsts[0]) // self._step * self._step + self._step

    def to_json(self) -> list[list[int]]:
        return [list(pair) for pair in zip(self._firsts, self._lasts, strict=True)]


Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Purged:
    """The windows that never come back. Ask only about windows that are not kept: those may count as gone, too.

    A window that ended at least a bound before the watermark is gone, even if it never existed. It stays gone when
    bounds get longer. All these windows of a definition are remembered as one instant, ``closed_us``. Only purged
    windows that end after that instant are remembered one by one. They exist because bounds are longer now than theirs
    was, and they all end within one bound, so they are few.

    ``snapshot``: of the operator.
    """

    def __init__(self, windows: Mapping[int, Aligned], snapshot: Mapping[str, Any] | None = None) -> None:
        self._windows = windows
        self.closed_us: Ints = np.full(max(windows, default=0) + 1, -NEVER)
        purged: dict[int, Any] = {}
        if snapshot is not None:
            # Definitions that were added later are not there; those that are over are not needed.
            closed_us = snapshot["closed_us"][: len(self.closed_us)]
            self.closed_us[: len(closed_us)] = closed_us
            purged = dict(zip(snapshot["purged_of"], snapshot["purged"], strict=False))
        self._purged = {number: Runs(w.run_step, purged.get(number, ())) for number, w in windows.items()}

    def contains(self, definition: Ints, starts_us: Ints, ends_us: Ints) -> Flags:
        """A mask of the windows that are gone."""
        gone: Flags = ends_us <= self.closed_us[definition]
        if any(self._purged.values()):
            for row in np.flatnonzero(~gone).tolist():
                number = int(definition[row])
                (value,) = self._windows[number].run_values(starts_us[row : row + 1], ends_us[row : row + 1]).tolist()
                gone[row] = value in self._purged[number]
        return gone

    def add(self, definition: Ints, starts_us: Ints, ends_us: Ints) -> None:
        """Notes that these windows were purged."""
        alone = ends_us > self.closed_us[definition]
        for number in np.unique(definition[alone]).tolist():
            own = alone & (definition == number)
            for value in self._windows[number].run_values(starts_us[own], ends_us[own]).tolist():
                self._purged[number].add(value)

    def close(self, us: Ints) -> None:
        """Notes that all windows that end by then are gone. ``us``: for each definition, by its number."""
        self.closed_us = np.maximum(self.closed_us, us)
        for number, runs in self._purged.items():
            runs.forget_to(self._windows[number].ended_run_value(int(self.closed_us[number])))

    def remembered(self, number: int) -> list[int]:
        """The values (``run_values``) of the purged windows of a definition that are remembered one by one."""
        runs, step = self._purged[number].to_json(), self._windows[number].run_step
        return [value for first, last in runs for value in range(first, last + 1, step)]

    def to_json(self) -> dict[str, Any]:
        """Its part of the operator's snapshot."""
        return {
            "closed_us": self.closed_us.tolist(),
            "purged": [runs.to_json() for runs in self._purged.values()],
            "purged_of": list(self._purged),
        }
