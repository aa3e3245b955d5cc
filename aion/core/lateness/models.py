"""Distributions of lateness with a few parameters, fitted to what was learnt (paper section 3.4). Pure.

A model knows a quantile better than order statistics do from the same events, if it is right. So it is fitted, tested
and only then believed:

- Fit: maximum likelihood (Fisher scoring) on some forty cells of lateness that have about equal shares, finer in the
  tail, given that an event is no later than anything could be seen (:mod:`aion.core.lateness.estimate`).
- Choice (``auto``): the smallest BIC of those that pass a goodness-of-fit test on these cells (likelihood ratio against
  any other shares, level 1 %); of a mixture only if nothing simpler passes. The test takes every event for independent:
  where many are delayed together, which makes it reject too often, no smooth model shall pass for the truth. When none
  passes, or there is too little to test, what was seen itself: ``empirical``.
- Confidence: *if the model is right*, a share later than b is at most ``later * exp(t * se)``, with the standard error
  of its logarithm from the parameters' (Fisher information, delta method). That is what the confidence of a bound
  from a model means; the empirical one's holds for any distribution.

A watermark that moves in steps rounds lateness down. Where a step is not small against it, no model fits what is seen,
and it is what is seen that a bound has to cover.

scipy is imported when something is fitted, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from aion.core.lateness.estimate import Arrivals
from aion.core.lateness.observe import Floats
from aion.core.lateness.sketch import Ints

CELLS = 32
FEWEST_EVENTS = 100
"""Independent late events below which nothing is fitted."""
MOST_EVENTS = 20_000
"""Independent late events above which ``auto`` fits nothing: they know each percent to a tenth of it."""
FIT_LEVEL = 0.01
MOST_STEPS = 25
_STEP = 1e-6

Cdf = Callable[[Floats, Floats], Floats]
"""(x, parameters) -> share up to x; x above 0 and of the size of 1, parameters any real numbers."""


@dataclass(frozen=True, slots=True)
class Family:
    """A distribution on x > 0 and where its fit starts from; parameters are unbounded transforms of the usual ones."""

    name: str
    cdf: Cdf
    start: Callable[[Floats, Floats], Floats]
    """(x, weights that sum to 1) -> parameters."""


def _moments(x: Floats, weights: Floats) -> tuple[float, float]:
    mean = float(weights @ x)
    return mean, float(np.sqrt(np.maximum(1e-12, weights @ (x - mean) ** 2)))


def _lognormal(x: Floats, p: Floats) -> Floats:
    """Mean and log of the standard deviation of the logarithm."""
    from scipy.special import ndtr

    return np.asarray(ndtr((np.log(x) - p[0]) / np.exp(p[1])))


def _lognormal_start(x: Floats, weights: Floats) -> Floats:
    mean, sd = _moments(np.log(x), weights)
    return np.array([mean, np.log(sd)])


def _gamma(x: Floats, p: Floats) -> Floats:
    """Logs of shape and scale."""
    from scipy.special import gammainc

    return np.asarray(gammainc(np.exp(p[0]), x / np.exp(p[1])))


def _gamma_start(x: Floats, weights: Floats) -> Floats:
    mean, sd = _moments(x, weights)
    shape = float(min(50.0, max(0.05, (mean / sd) ** 2)))
    return np.array([np.log(shape), np.log(mean / shape)])


def _weibull(x: Floats, p: Floats) -> Floats:
    """Logs of shape and scale."""
    return np.asarray(-np.expm1(-((x / np.exp(p[1])) ** np.exp(p[0]))))


def _weibull_start(x: Floats, weights: Floats) -> Floats:
    # The logarithm of a Weibull variable is Gumbel: its standard deviation is pi / sqrt(6) / shape.
    mean, sd = _moments(np.log(x), weights)
    shape = 1.2825 / max(sd, 0.05)
    return np.array([np.log(shape), mean + 0.5772 / shape])


def _pareto(x: Floats, p: Floats) -> Floats:
    """Logs of shape and scale of a Pareto distribution that begins at 0 (Lomax)."""
    return np.asarray(-np.expm1(-np.exp(p[0]) * np.log1p(x / np.exp(p[1]))))


def _pareto_start(x: Floats, weights: Floats) -> Floats:
    return np.array([np.log(1.5), np.log(max(1e-6, float(weights @ np.minimum(x, 10))))])


def _mixture(x: Floats, p: Floats) -> Floats:
    """Two normals, given that x > 0: logit of the first's weight, their means, logs of their standard deviations."""
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
    """A family with the parameters that suit best. ``scale_us``: what x = 1 is.

    ``covariance``: of the parameters, None if they cannot be told from one another. ``bic``: smaller is better, between
    fits to the same. ``p``: how often events of this very distribution would look no more like it than these do.
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
        """The share of late events that is at most so late, of any shape."""
        at = np.asarray(lateness_us, np.float64)
        # What is seen as 7 us late is less than 8 us late.
        x = (np.maximum(at, 0.0) + 1.0) / self.scale_us
        with np.errstate(all="ignore"):
            return np.where(at < 0, 0.0, self.family.cdf(x, self.parameters))


@dataclass(frozen=True, slots=True)
class Modelled(Arrivals):
    """What was learnt, with a model's shares in the place of those that were seen; made by :func:`modelled`."""

    fit: Fit

    @property
    def source(self) -> str:
        return self.fit.family.name

    def later_than(self, lateness_us: Any) -> Floats:
        return np.asarray(self.later[0] * (1.0 - self.fit.up_to(lateness_us)))

    def at_most(self, confidence: float) -> Floats:
        """An upper confidence bound on :attr:`later`, (K,), descending, if the model is right."""
        from scipy.special import stdtrit

        assert self.fit.covariance is not None, "only a fit that passes says how sure it is"
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


def modelled(known: Arrivals, fit: Fit) -> Modelled:
    """The same history as ``fit``, which has to pass, would have it."""
    values = {field.name: getattr(known, field.name) for field in fields(Arrivals)}
    late = float(known.later[0])
    values["later"] = late * (1.0 - fit.up_to(known.edges_us))
    values["unseen"] = late * (1.0 - float(fit.up_to(known.watched_us)))
    return Modelled(**values, fit=fit)


def fit(known: Arrivals, names: Sequence[str] = tuple(FAMILIES)) -> dict[str, Fit]:
    """Each family that can be fitted to the late events, by name; empty when there are too few of them."""
    late = known.later[0]
    if late <= 0 or len(known.edges_us) < 4:
        return {}
    # Given that it is late, and no later than could be seen.
    upto = np.clip((late - known.later) / max(1e-12, late - known.unseen), 0.0, 1.0)
    events = _independent(known) * float(late)
    if events < FEWEST_EVENTS:
        return {}
    ends, shares = _cells(known.edges_us, upto, known.watched_us)
    if len(shares) < 4:
        return {}
    # The median, but not one of zero, which a watermark that moves in steps gives to many.
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


def choose(known: Arrivals) -> Fit | None:
    """The one with the smallest BIC of those that pass, a mixture only if nothing simpler does; None if none does."""
    independent = _independent(known)
    if independent < known.weighed / 2 or independent * float(known.later[0]) > MOST_EVENTS:
        # Events come together, and no smooth distribution would pass; or order statistics are as good as any model.
        return None
    for names in (SIMPLE, ("mixture",)):
        fits = fit(known, names).values()
        best = min((f for f in fits if f.passes), key=lambda f: f.bic, default=None)
        if best is not None:
            return best
    return None


def _independent(known: Arrivals) -> float:
    """As how many independent events, of all, the events count: where some of the late ones are later, and some not."""
    resolved = (known.later > known.unseen) & (known.later < known.later[0])
    return float(np.median(known.independent[resolved])) if resolved.any() else 0.0


def _cells(edges_us: Ints, upto: Floats, watched_us: int) -> tuple[Floats, Floats]:
    """Right ends (in us) and shares of cells: equal shares, and halves of halves in the tail."""
    wanted = np.concatenate([np.arange(1, CELLS) / CELLS, 1 - 0.5 ** np.arange(1, 8) / CELLS])
    at = np.unique(np.searchsorted(upto, wanted))
    at = at[(at > 0) & (at < len(upto) - 1)]
    ends = np.concatenate([edges_us[at], [watched_us]]) + 1.0
    shares = np.diff(np.concatenate([[0.0], upto[at], [1.0]]))
    return ends, shares


def _fit(
    family: Family, ends: Floats, shares: Floats, x: Floats, events: float, tested: float
) -> tuple[Floats, Floats | None, float, float] | None:
    """Parameters, their covariance, BIC and the test's p; None if it does not fit at all."""
    from scipy.special import chdtrc

    def cells(p: Floats) -> Floats:
        """Shares of the cells under the model, given that an event is no later than the last cell's end."""
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
    """Maximum likelihood by Fisher scoring: parameters, minus the log-likelihood of one event, its information."""

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
    """The statistic and its degrees of freedom before parameters; cells with less than 5 events expected are joined."""
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
    """The covariance; None unless the information is positive definite, and by a margin."""
    if not np.isfinite(information).all():
        return None
    values, vectors = np.linalg.eigh(information)
    if values[0] <= 1e-6 * values[-1]:
        return None
    return np.asarray((vectors / values) @ vectors.T / events)
