"""When to fetch a window from the disk ahead of its execution (paper section 3.2, proactive caching). Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class PrestagePolicy(Protocol):
    """What ``prestage.class`` in a policy file names."""

    def start_at_s(self, due_s: float, size_bytes: int, pessimistic_s: float) -> float:
        """When to start fetching ``size_bytes`` for an execution at ``due_s``; what lies in the past means now.

        ``pessimistic_s``: when the window immediately before fully expires, the paper's choice as long as nothing
        is known of the speed.
        """

    def observe(self, size_bytes: int, seconds: float) -> None:
        """That fetching so many bytes took so long, from the request to the last byte."""


@dataclass(slots=True)
class _Pace:
    """Seconds per byte and their mean absolute deviation, both moving."""

    s_per_byte: float
    deviation_s_per_byte: float = 0.0

    def learn(self, s_per_byte: float, weight: float) -> None:
        error = s_per_byte - self.s_per_byte
        self.s_per_byte += weight * error
        self.deviation_s_per_byte += weight * (abs(error) - self.deviation_s_per_byte)


@dataclass(slots=True)
class StagingSpeed:
    """How fast staging is, learnt by size class: what is between 2^k and 2^(k+1) bytes shares one moving mean.

    ``weight``: how much the newest observation counts, above 0 and at most 1 (an exponentially weighted mean).
    A large window is fetched at another speed than a small one, of which the fixed costs are the most: a class that
    was never seen is estimated by the nearest *smaller* one that was, which errs to the early side. It serves for
    the speed of processing too, which sizing needs (:mod:`policies.sizing`).
    """

    weight: float = 0.3
    _paces: dict[int, _Pace] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise ValueError(f"weight {self.weight}: must be above 0 and at most 1")

    def observe(self, size_bytes: int, seconds: float) -> None:
        """Nothing is learnt from no bytes, nor from a time that a clock which was set back made negative."""
        if size_bytes <= 0 or seconds < 0:
            return
        size_class, s_per_byte = size_bytes.bit_length() - 1, seconds / size_bytes
        if (pace := self._paces.get(size_class)) is None:
            self._paces[size_class] = _Pace(s_per_byte)
        else:
            pace.learn(s_per_byte, self.weight)

    def estimate_s(self, size_bytes: int) -> float | None:
        """Seconds that it will take; None if nothing of that size or a smaller one was observed."""
        if size_bytes <= 0:
            return 0.0
        pace = self._pace(size_bytes)
        return None if pace is None else size_bytes * pace.s_per_byte

    def deviation_s(self, size_bytes: int) -> float:
        """Seconds by which the estimate was off, in the mean; 0 if it is not known."""
        pace = self._pace(size_bytes)
        return 0.0 if pace is None else max(0, size_bytes) * pace.deviation_s_per_byte

    def bytes_per_s(self, size_bytes: int) -> float | None:
        """The speed for that size; None if it is unknown, or too fast to have been measured."""
        pace = self._pace(size_bytes)
        return None if pace is None or pace.s_per_byte <= 0 else 1 / pace.s_per_byte

    def _pace(self, size_bytes: int) -> _Pace | None:
        known = [k for k in self._paces if k < size_bytes.bit_length()]
        return self._paces[max(known)] if known else None


@dataclass(slots=True)
class JustInTimePrestage:
    """Just early enough: the time that staging is expected to take before the execution is due.

    The first time, when nothing is known, pessimistically early. ``margin``: how many mean deviations earlier than
    the mean says, because a mean is exceeded half of the time.
    """

    speed: StagingSpeed = field(default_factory=StagingSpeed)
    margin: float = 2.0

    def __post_init__(self) -> None:
        if not self.margin >= 0:
            raise ValueError(f"margin {self.margin}: must be 0 or more")

    def start_at_s(self, due_s: float, size_bytes: int, pessimistic_s: float) -> float:
        """See :class:`PrestagePolicy`; never later than ``due_s`` less the estimate."""
        estimate_s = self.speed.estimate_s(size_bytes)
        if estimate_s is None:
            return min(pessimistic_s, due_s)
        return due_s - estimate_s - self.margin * self.speed.deviation_s(size_bytes)

    def observe(self, size_bytes: int, seconds: float) -> None:
        self.speed.observe(size_bytes, seconds)
