"""How the late events of the latest windows differ from history, and the bound that follows from that. Pure.

A bound that is learnt from days is wrong for the hour in which lateness is another: at night, or after a change until
it is noticed. Windows that ended a few minutes ago show it before any of their events can miss the bound. So the usual
distribution of lateness is *carried over* to the latest windows, and the bound with it.

**The hypotheses.** In logarithms, the latest late events come from the usual distribution after a shift and a stretch:
``log u' = m + shift + stretch * (log u - m)``, where m is the usual median. That holds for any distribution. A window
of age a shows only events of at most that lateness, so each epoch's likelihood is conditional on that (right
truncation, as in :mod:`aion.core.lateness.estimate`). The prior has its mass where nothing has changed, and heavy
tails: without clear evidence the bound stays about what it was, and with it the bound moves at once.

**Events that come together** are worth fewer. The log-likelihood is divided by the variance of the score of
neighbouring epochs over what independent events would have. Differences of neighbours do not see a slow drift, which is
what is looked for.

**The bound.** The mean over the hypotheses says which share comes later than each lateness. Where the latest windows
are old enough to show that themselves, they count: their product-limit estimate with the mean as a prior that is worth
``PRIOR_EVENTS`` events (a beta-neutral prior; Lagakos, Barraj, De Gruttola 1988 for the estimate). The carried bound is
the quantile at the share that the usual bound loses, or at ``LEAST_SHARE`` of what may be lost if that is more. So its
margin is smaller than that of a history with drift inside: the latest windows have shown that drift.

Localized conformal prediction has the same idea: examples near the new one count more (Guan: "Localized conformal
prediction", Biometrika 2023). What error remains, :mod:`aion.core.lateness.conformal` removes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from aion.core.lateness.observe import Floats, Lateness
from aion.core.lateness.shared import Outlook
from aion.core.lateness.sketch import Ints

EVALUATED_PER_BOUND = 16
HALF_LIFE = 2.0
"""In multiples of the bound, the age at which a window counts half."""
FEWEST_EVENTS = 20
"""The fewest events, worth as many independent ones, from which anything is concluded."""
FEWEST_EPOCHS = 8
"""The fewest epochs. With fewer it cannot be known how many events come together."""
PRIOR_SHIFT, PRIOR_STRETCH, PRIOR_POWER = 0.1, 0.06, 5.0
"""The density of a hypothesis falls like 1 / (1 + (shift / a)^2 + (log stretch / b)^2)^power."""
PRIOR_EVENTS = 200.0
LEAST_SHARE = 0.8
"""A carried bound is expected to lose at least this part of the share that may be lost."""
SHORTER = 0.85
"""A bound that history supports is shortened only to less than this part of it."""
MOVED = 0.02
"""A bound that differs by less is not replaced."""

_SHIFTS = np.arange(-20, 29) * 0.125
_STRETCHES = np.exp(np.arange(-4, 6) * 0.14)
_LEVELS = np.concatenate([1 - np.arange(1, 12) / 12, 0.5 ** np.arange(0.5, 6, 0.5) / 12])
_BEYOND = np.arange(1, 7) * 0.3
_SLOWEST_FALL = -0.5
_TINY = 1e-12


class _Table(NamedTuple):
    """Shares for J latenesses, the cuts, under H hypotheses. A cell reaches from one cut to the next.

    ``step_us``: the smallest lateness above zero, about a step of the watermark. A lateness of u stands for up to
    u + step, so its logarithm is that of u + step. ``log_us``: the logarithms of the cuts, (J,). ``usual``: the
    logarithm of the usual share that is later, (J,). ``upto``, ``cells``: the share up to each cut, and between it and
    the one before, (H, J). ``prior``: the logarithm of the prior, (H,).
    """

    step_us: int
    log_us: Floats
    usual: Floats
    upto: Floats
    cells: Floats
    prior: Floats


class Drift:
    """The late events of the latest windows, and what they do to the bound.

    ``bound_us``: the bound that fits the latest windows, or None if they do not differ from history. ``later``: the
    share of their late events that is expected to come after it. ``snapshot``: from :meth:`to_json`.
    """

    def __init__(self, snapshot: Mapping[str, Any] | None = None) -> None:
        self.bound_us: int | None = None
        self.later = 0.0
        self._latest = Lateness(1)
        self._next_us: int | None = None
        self._usual: Outlook | None = None
        self._table: _Table | None = None
        if snapshot is not None:
            self.bound_us, self.later, self._next_us = (snapshot[name] for name in ("bound_us", "later", "next_us"))
            self._latest = Lateness.from_json(snapshot["latest"], snapshot["half_life_us"])

    def observe(self, end_us: int, at_us: int, events: int) -> None:
        """See :meth:`aion.core.lateness.observe.Lateness.observe`."""
        self._latest.observe(end_us, at_us, events)

    def forget_before(self, us: int) -> None:
        """See :meth:`aion.core.lateness.observe.Lateness.forget_before`."""
        self._latest.forget_before(us)

    def due(self, at_us: int) -> bool:
        return self._next_us is None or at_us >= self._next_us

    def follow(self, at_us: int, usual: Outlook, usual_us: int, miss: float, *, suffices: bool) -> None:
        """Find the bound anew. All arrivals up to the watermark ``at_us`` have been observed.

        ``usual``, ``usual_us``: how late late events usually are, and the bound that was learnt from that. ``miss``:
        the share of late events that may be lost. ``suffices``: whether the usual bound is still good if nothing else
        is known.
        """
        latest, before_us = self._latest, usual_us if self.bound_us is None else self.bound_us
        self._next_us = at_us + max(1, before_us // EVALUATED_PER_BOUND)
        # Epochs reach back far enough to show what comes as late as the bound, and are short enough to show it in time.
        reach_us = max(1, usual_us, before_us)
        if latest.half_life_us > 4 * reach_us:
            latest.restart(at_us)
            latest.half_life_us = 1
        latest.half_life_us = max(latest.half_life_us, reach_us)
        if usual is not self._usual:
            self._usual, self._table = usual, _table(usual)
        later = None if self._table is None else self._later(self._table, at_us, before_us, suffices=suffices)
        if self._table is None or later is None:
            self.bound_us = None
            return
        step_us, log_us = self._table.step_us, self._table.log_us
        level = float(np.interp(np.log(usual_us + step_us), log_us, self._table.usual))
        level = max(level, float(np.log(LEAST_SHARE * miss)))
        bound_us = int(max(0.0, np.exp(np.interp(-level, -later, log_us)) - step_us))
        if suffices and SHORTER * usual_us < bound_us < usual_us:
            bound_us = usual_us  # covers enough with confidence; the shorter one only on average
        if abs(bound_us - before_us) <= MOVED * before_us:
            bound_us = before_us
        self.bound_us = None if suffices and abs(bound_us - usual_us) <= MOVED * usual_us else bound_us
        self.later = float(np.exp(np.interp(np.log(max(0, bound_us) + step_us), log_us, later)))

    def _later(self, table: _Table, at_us: int, bound_us: int, *, suffices: bool) -> Floats | None:
        """Returns the logarithm of the share of the latest late events that is later than each cut, or None if nothing
        is known.
        """
        cohorts = self._latest.cohorts(at_us)
        cells = len(table.log_us)
        # Cell j reaches up to cut j. A cohort shows the cells that end before its age.
        cuts_us = np.exp(table.log_us) - table.step_us
        seen = np.arange(cells) < np.searchsorted(cuts_us, cohorts.ages_us, side="right")[:, None]
        events = np.zeros((len(cohorts.ages_us), cells + 1))
        np.add.at(events.T, np.searchsorted(cuts_us, cohorts.edges_us), cohorts.late.T)
        events = events[:, :cells] * seen
        some = events.any(axis=1)
        if some.sum() < FEWEST_EPOCHS:
            return None
        events, seen, ages_us = events[some], seen[some], cohorts.ages_us[some]
        last = seen.sum(axis=1) - 1
        weights = np.exp2((ages_us.min() - ages_us) / (HALF_LIFE * max(1, bound_us)))[:, None]

        log_cells, log_upto = np.log(table.cells), np.log(table.upto)
        truncated = np.bincount(last, (weights * events).sum(axis=1), minlength=cells)
        likelihood = log_cells @ (weights * events).sum(axis=0) - log_upto @ truncated
        best = int(np.argmax(likelihood + table.prior))
        together = _together(table, best, events, last)
        worth = float(truncated.sum()) / together
        if worth < (FEWEST_EVENTS if suffices else PRIOR_EVENTS / 2):
            return None
        posterior = likelihood / together + table.prior
        posterior = np.exp(posterior - posterior.max())
        upto = (posterior / posterior.sum()) @ table.upto

        # The product-limit estimate of the latest windows, with that as its prior.
        inside = (weights * events).sum(axis=0) / together
        at_risk = (weights * np.cumsum(events, axis=1) * seen).sum(axis=0) / together
        shares = np.diff(upto, prepend=0.0) / upto
        shares = (inside + PRIOR_EVENTS * shares) / (at_risk + PRIOR_EVENTS)
        stays = np.append(np.cumprod((1.0 - shares)[:0:-1])[::-1], 1.0)
        return np.asarray(np.minimum.accumulate(np.log(np.maximum(1.0 - upto[-1] * stays, _TINY))))

    def to_json(self) -> dict[str, Any]:
        return {
            "bound_us": self.bound_us,
            "later": self.later,
            "next_us": self._next_us,
            "half_life_us": self._latest.half_life_us,
            "latest": self._latest.to_json(),
        }


def _table(usual: Outlook) -> _Table | None:
    """Returns None if the usual distribution has fewer than two points."""
    known = (usual.lateness_us >= 0) & (usual.later > 0)
    if known.sum() < 2:
        return None
    step_us = int(usual.lateness_us[usual.lateness_us > 0][0])
    x, later = np.log(usual.lateness_us[known] + step_us), np.log(np.minimum(usual.later[known], 1 - 1e-9))
    far = max(0, len(x) - 4)
    falls = min(_SLOWEST_FALL, float((later[-1] - later[far]) / (x[-1] - x[far])))

    def log_later(at: Floats) -> Floats:
        found = np.interp(at, x, later)
        found = np.where(at > x[-1], later[-1] + falls * (at - x[-1]), found)
        nearest = np.log1p(np.expm1(later[0]) * np.exp(np.minimum(0.0, at - x[0])))
        return np.asarray(np.where(at < x[0], nearest, found))

    quantiles = np.interp(-np.log(_LEVELS), -later, x)
    log_us = np.unique(np.concatenate([quantiles, x[-1] + _BEYOND]))
    middle = float(np.interp(np.log(2.0), -later, x))
    moved = (log_us - middle - _SHIFTS[:, None, None]) / _STRETCHES[:, None] + middle
    upto = np.clip(-np.expm1(log_later(moved)), _TINY, 1.0).reshape(-1, len(log_us))
    cells = np.maximum(np.diff(upto, axis=1, prepend=0.0), 1e-9)
    far_off = (_SHIFTS[:, None] / PRIOR_SHIFT) ** 2 + (np.log(_STRETCHES) / PRIOR_STRETCH) ** 2
    return _Table(step_us, log_us, log_later(log_us), upto, cells, -PRIOR_POWER * np.log1p(far_off).ravel())


def _together(table: _Table, best: int, events: Floats, last: Ints) -> float:
    """Returns how many events come together: the variance of the score by epoch over that of independent events. At
    least 1.

    The score is that of the shift, at the best hypothesis. ``events``: by epoch and cell, (C, J). ``last``: the last
    cell that an epoch shows, (C,).
    """
    aside = len(_STRETCHES)
    at = min(max(best, aside), len(table.prior) - aside - 1)
    slope = np.log(table.cells[at + aside] / table.cells[at - aside])
    upto_slope = np.log(table.upto[at + aside] / table.upto[at - aside])
    sizes = events.sum(axis=1)
    scores = events @ slope - sizes * upto_slope[last]
    share, mean, square = (np.cumsum(table.cells[at] * slope**power) for power in range(3))
    alone = sizes * (square / share - (mean / share) ** 2)[last]
    return max(1.0, float((np.diff(scores) ** 2).sum() / max(_TINY, float((alone[1:] + alone[:-1]).sum()))))
