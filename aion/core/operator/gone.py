"""Which windows are gone for good: small however long a query runs, and however many windows came and went. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aion.core.intervals import Runs
from aion.core.operator.actions import WindowRef
from aion.core.operator.lifecycle import NEVER
from aion.core.windows import Periodic


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

    def __contains__(self, ref: WindowRef) -> bool:
        return ref.end_us <= self.closed_us or ref.start_us in self._purged[ref.definition]

    def add(self, ref: WindowRef) -> None:
        """It was purged."""
        if ref.end_us > self.closed_us:
            self._purged[ref.definition].add(ref.start_us)

    def close(self, us: int) -> None:
        """All that end by then are gone."""
        self.closed_us = max(self.closed_us, us)
        for number, runs in self._purged.items():
            runs.forget_to(self.closed_us - self._windows[number].size_us)

    def to_json(self) -> dict[str, Any]:
        """What of it is in the operator's snapshot."""
        return {"closed_us": self.closed_us, "purged": [runs.to_json() for runs in self._purged.values()]}
