"""The histogram of lateness since the query began, for the metrics. Pure.

Observations fade (:mod:`aion.core.lateness.observe`), but the counts of a Prometheus histogram must never decrease.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from aion.base.numbers import plus

EDGES_S = (0.1, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3_600.0, 21_600.0, 86_400.0, 604_800.0)
"""The largest lateness of each bucket, in seconds. One more bucket, ``+Inf``, holds everything later."""

_EDGES_US = tuple(int(edge * 1e6) for edge in EDGES_S)
LABELS = (*(f"{edge:g}" for edge in EDGES_S), "+Inf")


class LatenessHistogram:
    """``events``: counts by bucket, not cumulated. ``seconds``: the sum of all latenesses."""

    def __init__(self, snapshot: Mapping[str, Any] | None = None) -> None:
        known = snapshot or {"events": {}, "seconds": 0.0}
        self.events: dict[str, int] = {label: known["events"].get(label, 0) for label in LABELS}
        self.seconds: float = known["seconds"]

    def observe(self, lateness_us: int, events: int) -> None:
        """Count ``events`` events of one lateness. A negative lateness counts as zero."""
        lateness_us = max(0, lateness_us)
        label = LABELS[bisect_left(_EDGES_US, lateness_us)]
        self.events[label] = plus(self.events[label], events)
        self.seconds += lateness_us / 1e6 * events

    def to_json(self) -> dict[str, Any]:
        return {"events": dict(self.events), "seconds": self.seconds}
