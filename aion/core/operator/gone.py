"""Which windows are gone for good: small however long a query runs, and however many windows came and went. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.core.intervals import Runs
from aion.core.operator.lifecycle import NEVER
from aion.core.windows import Periodic

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Gone:
    """Windows that never come again. Of those that are still kept it knows nothing.

    A window that ended a bound before the watermark is gone, whether there was one or not, and it stays gone when
    bounds get longer: that is one instant, ``closed_us``. What has to be remembered one by one are windows that were
    purged and end after that instant, since bounds are longer now than theirs was: no more than end within a bound.

    ``snapshot``: the operator's.
    """

    def __init__(self, windows: Mapping[int, Periodic], snapshot: Mapping[str, Any] | None = None) -> None:
        self._windows = windows
        self.closed_us: int = -NEVER if snapshot is None else snapshot.get("closed_us", -NEVER)
        purged = [[] for _ in windows] if snapshot is None else snapshot["purged"]
        self._purged = {
            number: Runs(window.slide_us, runs) for (number, window), runs in zip(windows.items(), purged, strict=True)
        }

    def contains(self, definition: Ints, starts_us: Ints, ends_us: Ints) -> Flags:
        """Which of these windows are gone."""
        found: Flags = ends_us <= self.closed_us
        if any(self._purged.values()):
            for row in np.flatnonzero(~found).tolist():
                found[row] = int(starts_us[row]) in self._purged[int(definition[row])]
        return found

    def add(self, definition: Ints, starts_us: Ints, ends_us: Ints) -> None:
        """They were purged."""
        alone = ends_us > self.closed_us
        for number, start_us in zip(definition[alone].tolist(), starts_us[alone].tolist(), strict=True):
            self._purged[number].add(start_us)

    def close(self, us: int) -> None:
        """All that end by then are gone."""
        self.closed_us = max(self.closed_us, us)
        for number, runs in self._purged.items():
            runs.forget_to(self.closed_us - self._windows[number].size_us)

    def to_json(self) -> dict[str, Any]:
        """What of it is in the operator's snapshot."""
        return {"closed_us": self.closed_us, "purged": [runs.to_json() for runs in self._purged.values()]}
