"""What is known of lateness, and how late an event may be before its window is gone (paper 3.4). Pure.

Lateness is the watermark at arrival minus the end of the event's window, never negative.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class LatenessHistogram:
    """Counts of late events by powers of two of their lateness in microseconds; mergeable, 64 bins.

    Bin b holds latenesses of ``[2**(b-1), 2**b)`` µs, bin 0 those of exactly zero.
    """

    __slots__ = ("counts",)

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self.counts: dict[int, int] = dict(counts or {})

    def observe(self, lateness_us: int, events: int) -> None:
        bin_ = max(lateness_us, 0).bit_length()
        self.counts[bin_] = self.counts.get(bin_, 0) + events

    def merge(self, other: LatenessHistogram) -> None:
        for bin_, events in other.counts.items():
            self.counts[bin_] = self.counts.get(bin_, 0) + events

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def quantile_us(self, share: float) -> int:
        """An upper bound of the lateness that ``share`` of the late events did not exceed; 0 without any."""
        if not self.counts:
            return 0
        bins = sorted(self.counts)
        cumulated = np.cumsum([self.counts[b] for b in bins])
        position = int(np.searchsorted(cumulated, share * cumulated[-1]))
        return (1 << bins[min(position, len(bins) - 1)]) - 1

    def to_json(self) -> dict[str, int]:
        return {str(b): n for b, n in sorted(self.counts.items())}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LatenessHistogram:
        return cls({int(b): int(n) for b, n in value.items()})


class FixedBound:
    """Every new window gets the same bound: ``lateness.initial_bound``."""

    __slots__ = ("bound_us",)

    def __init__(self, bound_us: int) -> None:
        self.bound_us = bound_us

    def bound_for_new_window(self) -> int:
        return self.bound_us
