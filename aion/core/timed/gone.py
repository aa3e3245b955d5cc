"""Remembers which windows are gone for good. It stays small, however long a query runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.base.numbers import NEVER
from aion.core.intervals import Runs
from aion.core.windows import Aligned

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Gone:
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
                (value,) = self._windows[number].run_values(starts_us[row : row + 1]).tolist()
                gone[row] = value in self._purged[number]
        return gone

    def add(self, definition: Ints, starts_us: Ints, ends_us: Ints) -> None:
        """Notes that these windows were purged."""
        alone = ends_us > self.closed_us[definition]
        for number in np.unique(definition[alone]).tolist():
            for value in self._windows[number].run_values(starts_us[alone & (definition == number)]).tolist():
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
