"""The realised coverage of bounds, and the level that keeps it where it was asked to be. Pure.

A bound that is learnt from the past covers what was asked only if the future is like the past. Adaptive conformal
inference drops that assumption (Gibbs, Candes: "Adaptive conformal inference under distribution shift", NeurIPS 2021,
arXiv 2106.00170): ask the model for the quantile at level ``1 - miss``, and after each period of windows move ``miss``
by ``step * (wanted - err)``, where ``err`` is the share of the period's late events that were later than the bound its
windows had. As long as ``miss`` is not at a limit, the mean of ``err`` over T periods differs from ``wanted`` by at
most ``(largest - smallest miss) / (step * T)``, whatever the data do.

Feedback comes late here: an event that is later than the bound shows it only then. A period is judged when its windows
ended four times their bound ago. The guarantee holds for the periods that were judged. Events that come even later are
no longer counted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from aion.base.numbers import plus

STEP = 0.0015
"""How far the level moves for a period (gamma). Larger steps follow single storms, and cost bytes: see the flights."""
JUDGED_AFTER = 4
"""In multiples of the bound. With a heavy tail, a third of what misses the bound is later than twice the bound."""
PERIODS_PER_BOUND = 8
SHORTEST_US = 1_000_000
CAUTION = 0.85
"""The wanted share of misses is this part of the allowed one. So the coverage is rarely below what was asked."""
LEAST, MOST = 0.1, 4.0
"""The limits of the level, as multiples of the allowed share of misses."""
MOST_PERIODS = 128


class _Period:
    """Windows that were created from ``begin_us`` on, with one bound, and their late events so far."""

    __slots__ = ("begin_us", "bound_us", "late", "missed")

    def __init__(self, begin_us: int, bound_us: int, late: int = 0, missed: int = 0) -> None:
        self.begin_us, self.bound_us, self.late, self.missed = begin_us, bound_us, late, missed


class Conformal:
    """``allowed``: the share of late events that may be lost, above 0 and below 1.

    ``miss``: the level to ask the model for. ``late``, ``missed``: the late events of the periods that were judged, and
    those of them that came after the bound: ``1 - missed / late`` is the realised coverage.
    """

    def __init__(self, allowed: float, snapshot: Mapping[str, Any] | None = None) -> None:
        self.allowed = self.miss = allowed
        self.late = self.missed = self.judged = 0
        self._periods: list[_Period] = []
        if snapshot is not None:
            self.late, self.missed, self.judged = snapshot["late"], snapshot["missed"], snapshot["judged"]
            if snapshot["allowed"] == allowed:
                self.miss = snapshot["miss"]
            self._periods = [_Period(*period) for period in snapshot["periods"]]

    def observe(self, created_us: int, lateness_us: int, events: int) -> None:
        """Late events came for a window that was created at ``created_us``."""
        at = bisect_right(self._periods, created_us, key=lambda period: period.begin_us) - 1
        if at >= 0:
            period = self._periods[at]
            period.late = plus(period.late, events)
            period.missed = plus(period.missed, events if lateness_us >= period.bound_us else 0)

    def advance(self, at_us: int, bound_us: int, ahead_us: int) -> None:
        """The watermark is at ``at_us``, and new windows get this bound. They end within ``ahead_us``."""
        periods = self._periods
        while len(periods) > 1:
            ends_us = periods[1].begin_us + ahead_us
            if ends_us + JUDGED_AFTER * periods[0].bound_us > at_us and len(periods) <= MOST_PERIODS:
                break
            self._judge(periods.pop(0))
        if not periods or periods[-1].bound_us != bound_us or at_us >= periods[-1].begin_us + _length_us(bound_us):
            periods.append(_Period(at_us, bound_us))

    def restart(self) -> None:
        """Lateness has changed: what bounds lost before says nothing of those that are learnt anew."""
        self.miss, self._periods = self.allowed, []

    def _judge(self, period: _Period) -> None:
        if not period.late:
            return
        self.judged += 1
        self.late, self.missed = plus(self.late, period.late), plus(self.missed, period.missed)
        # A period with few events says little: it moves the level by less, and one with many by more.
        size = min(4.0, period.late * self.judged / self.late)
        moved = self.miss + STEP * size * (CAUTION * self.allowed - period.missed / period.late)
        self.miss = min(MOST * self.allowed, max(LEAST * self.allowed, moved))

    def to_json(self) -> dict[str, Any]:
        return {
            "allowed": self.allowed,
            "miss": self.miss,
            "late": self.late,
            "missed": self.missed,
            "judged": self.judged,
            "periods": [[p.begin_us, p.bound_us, p.late, p.missed] for p in self._periods],
        }


def _length_us(bound_us: int) -> int:
    return max(SHORTEST_US, bound_us // PERIODS_PER_BOUND)
