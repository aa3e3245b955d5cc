"""The share of events that comes later than a given lateness, with a confidence bound (paper section 3.4). Pure.

**The estimate.** A window that ended an hour ago cannot have shown an event that is two hours late yet. So each epoch
of windows (:mod:`aion.core.lateness.observe`) contributes only latenesses up to its age. It shows how the events up to
that lateness are distributed. The product-limit estimator for right-truncated data combines the epochs (Lagakos,
Barraj, De Gruttola: "Nonparametric analysis of truncated survival data", Biometrika 1988; insurers call it chain
ladder). With ``g(u)`` = events of lateness u / events of lateness up to u, both over the epochs that are at least u
old,

    share that is at most b late  =  product over u > b of (1 - g(u))

**The unseen tail.** Latenesses are used up to the age A that a quarter of the epochs has reached. How many events are
later than A is unknown. The estimate assumes that the tail goes on falling as it did over the last five octaves,
(A/32, A/16] to (A/2, A], that is, as a power law. This overestimates lighter tails, which is the safe side. The unseen
share is *added* to every share. If it is large, the history supports no bound (policies.cleanup).

**The confidence.** If events were independent, the number of events later than b would be binomial, and the usual bound
on a quantile from order statistics (distribution-free and exact: Clopper-Pearson read backwards) would do. They are not
independent: an outage delays thousands together, nights differ from days, and old events weigh less. So the binomial
bound is taken with an effective number of *independent* events, which would make the estimate vary as much as it does:

- The variance of the estimate is that of its linearisation by epoch (each epoch's contribution to the error), with the
  covariances of epochs up to two apart (Newey-West, Bartlett weights). It is never less than without the covariances,
  and never less than that of independent events.
- independent = S (1 - S) / variance. Estimating the variance from few epochs costs a factor of (z / t) squared on it,
  where t has the degrees of freedom of a Bartlett window (Korn, Graubard: "Confidence intervals for proportions with
  small expected number of positive counts estimated from survey data", Survey Methodology 1998).
- Where fewer than 20 events are later, the ratio to the variance of independent events cannot be measured. There, use
  the ratio at the largest lateness where it can. It is on the high side for anything that delays many events together.

For independent, unfaded events of old epochs all of this reduces to the plain order statistic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.core.lateness.observe import Cohorts, Floats
from aion.core.lateness.sketch import Ints

LAGS = 2
FEW_EVENTS = 20
OCTAVES = 5
SLOWEST_FALL = 7 / 8
"""The slowest fall of the tail from octave to octave, like 1 / x ** 0.19. A few outliers may look heavier than that."""

_TINY = 1e-300


@dataclass(frozen=True, slots=True)
class LateArrivals:
    """The distribution of lateness, estimated from the past, at ``K`` latenesses: -1 ("in time"), then those seen.

    ``edges_us``: the latenesses, (K,), ascending. ``later``: the share of events later than each, (K,), descending; of
    all events if ``of_all``, else of the late ones. ``independent``: the effective number of independent events behind
    each share, (K,). ``clustered``: where that number was estimated from the variance between epochs, (K,), with
    ``degrees`` degrees of freedom. ``late_share``: the share of *all* events that are late. ``watched_us``: the largest
    lateness that could have been seen. ``unseen``: the part of ``later`` that is assumed to lie beyond it.
    ``longest_us``: the largest lateness seen, -1 if none. ``events``: how many events ``later`` is based on, unfaded,
    from ``epochs`` epochs. ``weighed``: how many events they are worth after fading (Kish).
    """

    edges_us: Ints
    later: Floats
    independent: Floats
    clustered: npt.NDArray[np.bool_]
    degrees: float
    late_share: float
    watched_us: int
    unseen: float
    longest_us: int
    events: int
    epochs: int
    weighed: float
    of_all: bool

    @property
    def source(self) -> str:
        """Where the shares come from. Here: from observations alone."""
        return "empirical"

    def at_most(self, confidence: float) -> Floats:
        """Returns a one-sided upper confidence bound on :attr:`later`, (K,), descending."""
        from scipy.special import betaincinv, ndtri, stdtrit

        paid = (ndtri(confidence) / stdtrit(self.degrees, confidence)) ** 2 if confidence > 0.5 else 1.0
        n = np.where(self.clustered, self.independent * paid, self.independent)
        x = self.later * n
        upper = betaincinv(x + 1.0, np.maximum(n - x, 1e-9), confidence)
        return np.asarray(np.maximum.accumulate(upper[::-1])[::-1])

    def later_than(self, lateness_us: Any) -> Floats:
        """Returns the share that is later than ``lateness_us`` (any shape), interpolated linearly."""
        return np.asarray(np.interp(lateness_us, self.edges_us, self.later))


def arrivals(cohorts: Cohorts, *, of_all: bool = False) -> LateArrivals | None:
    """Returns the estimate from these epochs, for late events or ``of_all`` events. None if they have no such
    events.
    """
    if not len(cohorts.ages_us):
        return None
    # The oldest come first. At least one epoch, and at least a quarter of them, is this old.
    watched_us = int(cohorts.ages_us[len(cohorts.ages_us) // 4])
    longest_us = int(cohorts.edges_us[-1]) if len(cohorts.edges_us) else -1
    edges = np.concatenate([np.array([-1], np.int64), cohorts.edges_us])
    edges = edges[edges <= watched_us]
    seen = edges[None, :] <= np.minimum(cohorts.ages_us, watched_us)[:, None]
    on_time = cohorts.on_time[:, None]
    n = np.concatenate([on_time if of_all else on_time * 0.0, cohorts.late], axis=1)[:, : len(edges)] * seen
    weight = cohorts.weights[:, None]
    late_share = _late_share(n[:, 1:], seen[:, 1:], weight, on_time)
    rows = n.sum(axis=1) > 0
    if not rows.any():
        return None
    n, seen, weight = n[rows], seen[rows], weight[rows]

    upto = np.cumsum(n, axis=1)
    at_risk = np.maximum((seen * weight * upto).sum(axis=0), _TINY)
    share = (weight * n).sum(axis=0) / at_risk  # g(u)
    # Below the smallest lateness that was seen there are no events.
    first = int(np.argmax(n.sum(axis=0) > 0))
    share[: first + 1] = 0.0
    stays = np.maximum(1.0 - share, 1e-12)
    below = np.exp(_beyond(np.log(stays)))
    below[:first] = 0.0
    later = 1.0 - below

    scale = np.where(at_risk > _TINY, 1.0 / (at_risk * stays), 0.0)
    parts = below * _beyond(seen * weight * (n - share * upto) * scale)  # (C, K): each epoch's part in the error
    squares = (seen * weight**2 * upto).sum(axis=0)
    alone = below**2 * _beyond(squares * share * stays * scale**2)  # the variance of independent events
    together = _variance(parts)
    ratio = np.maximum(1.0, together / np.maximum(alone, _TINY))
    enough = np.flatnonzero(_beyond(n.sum(axis=0)) >= FEW_EVENTS)
    ratio[len(enough) :] = ratio[enough[-1]] if len(enough) else 1.0
    # Where nothing is later, it is what the weights make of the number of events (Kish).
    independent = np.where(
        alone > _TINY, later * below / np.maximum(alone, _TINY), at_risk**2 / np.maximum(squares, _TINY)
    )

    size = (weight * n).sum(axis=1)
    weighed = float(size.sum() ** 2 / np.maximum(_TINY, (weight**2 * n).sum()))
    independent[:first] = weighed
    unseen = _unseen(edges, later, watched_us)
    return LateArrivals(
        edges_us=edges,
        later=later + unseen * below,
        independent=independent / ratio,
        clustered=ratio > 1.0,
        degrees=1.5 / (LAGS + 1) * float(size.sum() ** 2 / (size**2).sum()),
        late_share=late_share,
        watched_us=watched_us,
        unseen=unseen,
        longest_us=longest_us,
        events=int(n.sum()),
        epochs=len(n),
        weighed=weighed,
        of_all=of_all,
    )


def _beyond(values: Floats) -> Floats:
    """Along the last axis, the sum of everything after each position."""
    sums = np.cumsum(values[..., ::-1], axis=-1)[..., ::-1]
    return np.asarray(sums - values)


def _variance(parts: Floats) -> Floats:
    """Returns the variance of the sum of the rows, with the covariances of neighbouring rows (Newey-West)."""
    alone = (parts**2).sum(axis=0)
    long_run = alone.copy()
    for lag in range(1, min(LAGS, len(parts) - 1) + 1):
        long_run += 2 * (1 - lag / (LAGS + 1)) * (parts[lag:] * parts[:-lag]).sum(axis=0)
    return np.asarray(np.maximum(alone, long_run) * len(parts) / max(1, len(parts) - 1))


def _late_share(late: Floats, seen: npt.NDArray[np.bool_], weight: Floats, on_time: Floats) -> float:
    """Returns the share of all events that are late, by the same product; 0 if none is."""
    at_risk = (seen * weight * (np.cumsum(late, axis=1) + on_time)).sum(axis=0)
    stays = 1.0 - (weight * late).sum(axis=0) / np.maximum(at_risk, _TINY)
    return float(1.0 - np.prod(stays))


def _unseen(edges: Ints, later: Floats, watched_us: int) -> float:
    """Returns the share that is later than ``watched_us``, if the tail goes on falling as it did. At most 1."""
    octaves = [watched_us >> k for k in range(OCTAVES, 0, -1)]
    beyond = later[np.searchsorted(edges, octaves, side="right") - 1]
    within = beyond - np.append(beyond[1:], 0.0)
    if not within[-1]:
        return 0.0
    falls = min(SLOWEST_FALL, within[1:].sum() / within[:-1].sum() if within[:-1].any() else 1.0)
    return float(min(1.0, within[-1] * falls / (1.0 - falls)))
