"""Parametric distributions of lateness, fitted to the estimate (paper section 3.4). Pure.

A model that is right knows a quantile better than order statistics of the same events do. So a model is fitted, then
tested, and used only if it passes:

- Fit: maximum likelihood (Fisher scoring) on about forty cells of lateness with about equal shares, finer in the tail,
  conditional on the largest lateness that could have been seen (:mod:`aion.core.lateness.estimate`).
- Choice (``auto``): the smallest BIC among the families that pass a goodness-of-fit test on these cells (likelihood
  ratio against a saturated model, level 1 %). The mixture is tried only if nothing simpler passes. The test treats all
  events as independent, so it rejects too often where many are delayed together; that is intended, since no smooth
  model is right there. If none passes, or there are too few events to test, the estimate itself is used: ``empirical``.
- Confidence: *if the model is right*, the share later than b is at most ``later * exp(t * se)``, where ``se`` is the
  standard error of its logarithm (Fisher information, delta method). This is what the confidence of a modelled bound
  means. The confidence of the empirical bound holds for any distribution.

A watermark that moves in steps rounds lateness down. Where a step is not small against the lateness, no model fits the
observed latenesses, and a bound has to cover the observed ones.

scipy is imported only when a model is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from aion.core.lateness.estimate import LateArrivals
from aion.core.lateness.observe import Floats
from aion.core.lateness.sketch import Ints

CELLS = 32
FEWEST_EVENTS = 100
"""The fewest independent late events to which a model is fitted."""
MOST_EVENTS = 20_000
"""With more independent late events ``auto`` fits nothing: the events alone give each percent to within a tenth."""
FIT_LEVEL = 0.01
MOST_STEPS = 25
_STEP = 1e-6

Cdf = Callable[[Floats, Floats], Floats]
"""(x, parameters) -> share up to x. x is above 0 and of the order of 1; parameters are any real numbers."""


@dataclass(frozen=True, slots=True)
class Family:
    """A distribution on x > 0, and the start of its fit. Its parameters are unbounded transforms of the usual ones."""

    name: str
    cdf: Cdf
    start: Callable[[Floats, Floats], Floats]
    """(x, weights that sum to 1) -> parameters."""


def _moments(x: Floats, weights: Floats) -> tuple[float, float]:
    mean = float(weights @ x)
    return mean, float(np.sqrt(np.maximum(1e-12, weights @ (x - mean) ** 2)))


def _lognormal(x: Floats, p: Floats) -> Floats:
    """Parameters: mean, and log of the standard deviation, of the logarithm."""
    from scipy.special import ndtr

    return np.asarray(ndtr((np.log(x) - p[0]) / np.exp(p[1])))


def _lognormal_start(x: Floats, weights: Floats) -> Floats:
    mean, sd = _moments(np.log(x), weights)
    return np.array([mean, np.log(sd)])


def _gamma(x: Floats, p: Floats) -> Floats:
    """Parameters: logs of shape and scale."""
    from scipy.special import gammainc

    return np.asarray(gammainc(np.exp(p[0]), x / np.exp(p[1])))


def _gamma_start(x: Floats, weights: Floats) -> Floats:
    mean, sd = _moments(x, weights)
    shape = float(min(50.0, max(0.05, (mean / sd) ** 2)))
    return np.array([np.log(shape), np.log(mean / shape)])


def _weibull(x: Floats, p: Floats) -> Floats:
    """Parameters: logs of shape and scale."""
    return np.asarray(-np.expm1(-((x / np.exp(p[1])) ** np.exp(p[0]))))


def _weibull_start(x: Floats, weights: Floats) -> Floats:
    # The logarithm of a Weibull variable is Gumbel: its standard deviation is pi / sqrt(6) / shape.
    mean, sd = _moments(np.log(x), weights)
    shape = 1.2825 / max(sd, 0.05)
    return np.array([np.log(shape), mean + 0.5772 / shape])


def _pareto(x: Floats, p: Floats) -> Floats:
    """Returns a Pareto distribution that begins at 0 (Lomax). Parameters: logs of shape and scale."""
    return np.asarray(-np.expm1(-np.exp(p[0]) * np.log1p(x / np.exp(p[1]))))


def _pareto_start(x: Floats, weights: Floats) -> Floats:
    return np.array([np.log(1.5), np.log(max(1e-6, float(weights @ np.minimum(x, 10))))])


def _mixture(x: Floats, p: Floats) -> Floats:
    """Returns two normals, given x > 0. Parameters: logit of the first weight, both means, logs of both standard
    deviations.
    """
    from scipy.special import expit, ndtr

    share = expit(p[0])
    sds = np.exp(p[3:5])
    nothing = share * ndtr(-p[1] / sds[0]) + (1 - share) * ndtr(-p[2] / sds[1])
    whole = share * ndtr((x - p[1]) / sds[0]) + (1 - share) * ndtr((x - p[2]) / sds[1])
    return np.asarray((whole - nothing) / max(1e-12, 1 - nothing))


def _mixture_start(x: Floats, weights: Floats) -> Floats:
    """EM on the weighted bins, from the halves below and above the mean."""
    mean, sd = _moments(x, weights)
    low = x <= mean
    share = float(weights[low].sum())
    if not 0 < share < 1:
        return np.array([0.0, mean, mean, np.log(sd), np.log(sd)])
    (m1, s1), (m2, s2) = (_moments(x[side], weights[side] / weights[side].sum()) for side in (low, ~low))
    least = max(1e-3 * mean, 1e-9)
    for _ in range(100):
        s1, s2 = max(s1, least), max(s2, least)
        first = share / s1 * np.exp(-0.5 * ((x - m1) / s1) ** 2)
        second = (1 - share) / s2 * np.exp(-0.5 * ((x - m2) / s2) ** 2)
        belongs = first / np.maximum(first + second, 1e-300)
        before, share = share, float(np.clip(weights @ belongs, 1e-6, 1 - 1e-6))
        (m1, s1), (m2, s2) = (_moments(x, part / part.sum()) for part in (weights * belongs, weights * (1 - belongs)))
        if abs(share - before) < 1e-6:
            break
    s1, s2 = max(s1, least), max(s2, least)
    return np.array([np.log(share / (1 - share)), m1, m2, np.log(s1), np.log(s2)])


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("lognormal", _lognormal, _lognormal_start),
        Family("gamma", _gamma, _gamma_start),
        Family("weibull", _weibull, _weibull_start),
        Family("pareto", _pareto, _pareto_start),
        Family("mixture", _mixture, _mixture_start),
    )
}
SIMPLE = tuple(name for name in FAMILIES if name != "mixture")
NAMES = ("auto", "empirical", *FAMILIES)


@dataclass(frozen=True, slots=True)
class Fit:
    """A family with its best parameters. ``scale_us``: the lateness that x = 1 stands for.

    ``covariance``: of the parameters; None if they cannot be identified. ``bic``: compares fits to the same events;
    smaller is better. ``p``: the p-value of the goodness-of-fit test.
    """

    family: Family
    parameters: Floats
    scale_us: float
    covariance: Floats | None
    bic: float
    p: float

    @property
    def passes(self) -> bool:
        return self.covariance is not None and self.p >= FIT_LEVEL

    def up_to(self, lateness_us: Any) -> Floats:
        """Returns the share of late events that are at most ``lateness_us`` late (any shape)."""
        at = np.asarray(lateness_us, np.float64)
        # Lateness is in whole microseconds, rounded down: 7 us means less than 8 us.
        x = (np.maximum(at, 0.0) + 1.0) / self.scale_us
        with np.errstate(all="ignore"):
            return np.where(at < 0, 0.0, self.family.cdf(x, self.parameters))


@dataclass(frozen=True, slots=True)
class Modelled(LateArrivals):
    """An estimate whose shares are those of a fitted model. Made by :func:`modelled`."""

    fit: Fit

    @property
    def source(self) -> str:
        return self.fit.family.name

    def later_than(self, lateness_us: Any) -> Floats:
        return np.asarray(self.later[0] * (1.0 - self.fit.up_to(lateness_us)))

    def at_most(self, confidence: float) -> Floats:
        """Returns a one-sided upper confidence bound on :attr:`later`, (K,), descending, if the model is right."""
        from scipy.special import stdtrit

        assert self.fit.covariance is not None, "only a fit that passes has a confidence"
        p = self.fit.parameters

        def logarithm(parameters: Floats) -> Floats:
            moved = replace(self.fit, parameters=parameters)
            return np.asarray(np.log(np.maximum(1.0 - moved.up_to(self.edges_us), 1e-300)))

        slopes = np.empty((len(p), len(self.edges_us)))
        for i, step in enumerate(_STEP * np.maximum(1.0, np.abs(p))):
            moved = np.eye(len(p))[i] * step
            slopes[i] = (logarithm(p + moved) - logarithm(p - moved)) / (2 * step)
        variance = np.einsum("ik,ij,jk->k", slopes, self.fit.covariance, slopes)
        late = float(self.later[0])
        variance += (1.0 - late) / (late * float(self.independent[0]))
        upper = np.minimum(1.0, self.later * np.exp(stdtrit(self.degrees, confidence) * np.sqrt(variance)))
        return np.asarray(np.maximum.accumulate(upper[::-1])[::-1])


def modelled(known: LateArrivals, fit: Fit) -> Modelled:
    """Returns the same estimate with the shares of ``fit``, which must have passed its test."""
    values = {field.name: getattr(known, field.name) for field in fields(LateArrivals)}
    late = float(known.later[0])
    values["later"] = late * (1.0 - fit.up_to(known.edges_us))
    values["unseen"] = late * (1.0 - float(fit.up_to(known.watched_us)))
    return Modelled(**values, fit=fit)


def fit(known: LateArrivals, names: Sequence[str] = tuple(FAMILIES)) -> dict[str, Fit]:
    """Returns a fit of each family that can be fitted to the late events, by name. Empty if there are too few
    events.
    """
    late = known.later[0]
    if late <= 0 or len(known.edges_us) < 4:
        return {}
    # The share up to each lateness, among late events that could have been seen.
    upto = np.clip((late - known.later) / max(1e-12, late - known.unseen), 0.0, 1.0)
    events = _independent(known) * float(late)
    if events < FEWEST_EVENTS:
        return {}
    ends, shares = _cells(known.edges_us, upto, known.watched_us)
    if len(shares) < 4:
        return {}
    # The median, but never zero: a watermark that moves in steps makes many latenesses zero.
    scale_us = float(known.edges_us[max(2, int(np.searchsorted(upto, 0.5)))]) + 1.0
    middles = (np.concatenate([[0.0], ends[:-1]]) + ends) / 2 / scale_us
    tested = known.weighed * float(late)
    found: dict[str, Fit] = {}
    for name in names:
        fitted = _fit(FAMILIES[name], ends / scale_us, shares, middles, events, tested)
        if fitted is not None:
            p, covariance, bic, passed = fitted
            found[name] = Fit(FAMILIES[name], p, scale_us, covariance, bic, passed)
    return found


def choose(known: LateArrivals) -> Fit | None:
    """Returns the fit with the smallest BIC that passes its test; a mixture only if nothing simpler passes; or None."""
    independent = _independent(known)
    if independent < known.weighed / 2 or independent * float(known.later[0]) > MOST_EVENTS:
        # If events are delayed together, no smooth distribution fits. If there are enough events, order statistics are
        # as good as any model.
        return None
    for names in (SIMPLE, ("mixture",)):
        fits = fit(known, names).values()
        best = min((f for f in fits if f.passes), key=lambda f: f.bic, default=None)
        if best is not None:
            return best
    return None


def _independent(known: LateArrivals) -> float:
    """Returns how many independent events the estimate is worth: the median over latenesses inside the observed
    range.
    """
    resolved = (known.later > known.unseen) & (known.later < known.later[0])
    return float(np.median(known.independent[resolved])) if resolved.any() else 0.0


def _cells(edges_us: Ints, upto: Floats, watched_us: int) -> tuple[Floats, Floats]:
    """Right ends (in us) and shares of the cells: equal shares, and in the tail each half of the one before."""
    wanted = np.concatenate([np.arange(1, CELLS) / CELLS, 1 - 0.5 ** np.arange(1, 8) / CELLS])
    at = np.unique(np.searchsorted(upto, wanted))
    at = at[(at > 0) & (at < len(upto) - 1)]
    ends = np.concatenate([edges_us[at], [watched_us]]) + 1.0
    shares = np.diff(np.concatenate([[0.0], upto[at], [1.0]]))
    return ends, shares


def _fit(
    family: Family, ends: Floats, shares: Floats, x: Floats, events: float, tested: float
) -> tuple[Floats, Floats | None, float, float] | None:
    """Parameters, their covariance, BIC and p-value; None if the family cannot be fitted."""
    from scipy.special import chdtrc

    def cells(p: Floats) -> Floats:
        """Returns shares of the cells under the model, given that no event is later than the end of the last cell."""
        whole = family.cdf(ends, p)
        found = whole.copy()
        found[1:] -= whole[:-1]
        return np.asarray(np.maximum(found / np.maximum(1e-12, whole[-1]), 1e-12))

    with np.errstate(all="ignore"):
        p, loss, information = _scoring(cells, shares, family.start(x, shares))
        if not np.isfinite(loss):
            return None
        test, degrees = _likelihood_ratio(shares, cells(p), tested)
    degrees -= len(p)
    bic = 2 * events * loss + len(p) * float(np.log(events))
    return p, _inverse(information, events), bic, float(chdtrc(degrees, max(0.0, test))) if degrees >= 1 else 0.0


def _scoring(cells: Callable[[Floats], Floats], shares: Floats, p: Floats) -> tuple[Floats, float, Floats]:
    """Maximum likelihood by Fisher scoring: parameters, negative log-likelihood of one event, information matrix."""

    def loss(p: Floats) -> float:
        found = float(-shares @ np.log(cells(p)))
        return found if np.isfinite(found) else np.inf

    def slopes(p: Floats, at_p: Floats) -> Floats:
        steps = _STEP * np.maximum(1.0, np.abs(p))
        return np.stack([(cells(p + d) - at_p) / s for d, s in zip(np.diag(steps), steps, strict=True)])

    least = loss(p)
    for _ in range(MOST_STEPS):
        expected = cells(p)
        slope = slopes(p, expected)
        information = (slope / expected) @ slope.T
        if not np.isfinite(information).all() or np.trace(information) <= 0:
            return p, np.inf, information
        values, vectors = np.linalg.eigh(information)
        damped = np.maximum(values, 0.0) + 1e-8 * values[-1]
        step = vectors @ (vectors.T @ (slope @ (shares / expected)) / damped)
        gained = 0.0
        for halvings in range(12):
            tried = p + step * 0.5**halvings
            reached = loss(tried)
            if reached < least:
                p, gained, least = tried, least - reached, reached
                break
        if gained < 1e-8:
            break
    expected = cells(p)
    slope = slopes(p, expected)
    return p, least, (slope / expected) @ slope.T


def _likelihood_ratio(shares: Floats, expected: Floats, events: float) -> tuple[float, int]:
    """Returns the statistic, and its degrees of freedom not yet reduced by the parameters.

    Neighbouring cells are joined until each expects at least 5 events.
    """
    a, b, pairs = 0.0, 0.0, []
    for share, model in zip(shares.tolist(), expected.tolist(), strict=True):
        a, b = a + share, b + model
        if b * events >= 5:
            pairs.append((a, b))
            a = b = 0.0
    if pairs:
        pairs[-1] = (pairs[-1][0] + a, pairs[-1][1] + b)
    return 2 * events * sum(s * float(np.log(s / m)) for s, m in pairs if s > 0), len(pairs) - 1


def _inverse(information: Floats, events: float) -> Floats | None:
    """Returns the covariance of the parameters; None unless the information matrix is positive definite by a margin."""
    if not np.isfinite(information).all():
        return None
    values, vectors = np.linalg.eigh(information)
    if values[0] <= 1e-6 * values[-1]:
        return None
    return np.asarray((vectors / values) @ vectors.T / events)
