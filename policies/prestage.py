"""Decides when to fetch a window from disk before its execution (paper section 3.2, proactive caching). Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class PrestagePolicy(Protocol):
    """The interface of a class that ``prestage.class`` in a policy file names."""

    def start_at_s(self, due_s: float, size_bytes: int, pessimistic_s: float) -> float:
        """Returns when to start fetching ``size_bytes`` for an execution at ``due_s``. A time in the past means now.

        ``pessimistic_s``: the time to start if nothing is known about the speed. In the paper that is when the previous
        window has fully expired.
        """

    def observe(self, size_bytes: int, seconds: float) -> None:
        """Learns how many seconds it took to fetch ``size_bytes``, from the request to the last byte."""


@dataclass(slots=True)
class _Pace:
    """Moving means of the seconds per byte and of their absolute deviation."""

    s_per_byte: float
    deviation_s_per_byte: float = 0.0

    def learn(self, s_per_byte: float, weight: float) -> None:
        error = s_per_byte - self.s_per_byte
        self.s_per_byte += weight * error
        self.deviation_s_per_byte += weight * (abs(error) - self.deviation_s_per_byte)


@dataclass(slots=True)
class StagingSpeed:
    """Learns how fast staging is, by size class: windows of 2^k to 2^(k+1) bytes share one moving mean.

    Small windows take more time per byte than large ones, because of fixed costs. So a class without observations is
    estimated from the nearest *smaller* class with some: the estimate is then rather too long, so staging starts rather
    too early. ``weight``: how much the newest observation counts in the exponentially weighted mean, above 0 and at
    most 1.
    """

    weight: float = 0.3
    _paces: dict[int, _Pace] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight {self.weight}: must be above 0 and at most 1")

    def observe(self, size_bytes: int, seconds: float) -> None:
        """Learns from one fetch. Ignores empty ones, and negative times, which come from a clock that was set back."""
        if size_bytes <= 0 or seconds < 0:
            return
        size_class, s_per_byte = size_bytes.bit_length() - 1, seconds / size_bytes
        if (pace := self._paces.get(size_class)) is None:
            self._paces[size_class] = _Pace(s_per_byte)
        else:
            pace.learn(s_per_byte, self.weight)

    def estimate_s(self, size_bytes: int) -> float | None:
        """Returns how many seconds fetching will take, or None if nothing of this size class or a smaller one was
        observed.
        """
        if size_bytes <= 0:
            return 0.0
        pace = self._pace(size_bytes)
        return None if pace is None else size_bytes * pace.s_per_byte

    def deviation_s(self, size_bytes: int) -> float:
        """Returns the mean error of the estimate in seconds. 0 if it is unknown."""
        pace = self._pace(size_bytes)
        return 0.0 if pace is None else max(0, size_bytes) * pace.deviation_s_per_byte

    def bytes_per_s(self, size_bytes: int, margin: float = 0.0) -> float | None:
        """Returns the speed for windows of this size. None if it is unknown, or too high to be measured.

        ``margin``: how many mean deviations slower than the mean.
        """
        pace = self._pace(size_bytes)
        s_per_byte = 0.0 if pace is None else pace.s_per_byte + margin * pace.deviation_s_per_byte
        return 1 / s_per_byte if s_per_byte > 0 else None

    def _pace(self, size_bytes: int) -> _Pace | None:
        known = [k for k in self._paces if k < size_bytes.bit_length()]
        return self._paces[max(known)] if known else None


@dataclass(slots=True)
class JustInTimePrestage:
    """Starts just early enough: the time that staging will probably take before the execution is due.

    If the speed is unknown, it starts at the pessimistic time. ``margin``: how many mean deviations it starts earlier
    than the mean says, because half of the times are longer than the mean.
    """

    speed: StagingSpeed = field(default_factory=StagingSpeed)
    margin: float = 2.0

    def __post_init__(self) -> None:
        if not self.margin >= 0:
            raise ValueError(f"margin {self.margin}: must be 0 or more")

    def start_at_s(self, due_s: float, size_bytes: int, pessimistic_s: float) -> float:
        """See :class:`PrestagePolicy`. Never later than ``due_s`` minus the estimate."""
        estimate_s = self.speed.estimate_s(size_bytes)
        if estimate_s is None:
            return min(pessimistic_s, due_s)
        return due_s - estimate_s - self.margin * self.speed.deviation_s(size_bytes)

    def observe(self, size_bytes: int, seconds: float) -> None:
        self.speed.observe(size_bytes, seconds)
