"""The models of `aion experiment staleness`: distributions, the other triggers as placements, brute force."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammainc, ndtr

from aion.core.trigger.distribution import Floats, LateDistribution
from aion.core.trigger.planner import TriggerPlan, balanced, fewest, plan
from experiments.staleness.descent import descent

HORIZON = 17.0
"""T of the log-normal distribution, in units of its median. The paper gives no value; this one gives its figures."""
MOST_EXECUTIONS = 200
BOUNDS = (0.1, 0.05, 0.01)
DISTRIBUTIONS = ("lnorm", "unif", "norm", "bursts")
TRIGGERS = ("exact", "descent", "interval", "count")
BURSTS = ((0.15, 0.02, 0.5), (0.45, 0.02, 0.3), (0.80, 0.02, 0.2))
"""Mean, standard deviation and share of each normal distribution in the mix, in shares of T."""
NORMAL = (0.5, 1 / 6)


def paper_distribution(name: str, horizon: float = HORIZON) -> LateDistribution:
    """A distribution of figure 9, in shares of the horizon. Only ``lnorm`` depends on ``horizon``."""
    if name == "lnorm":
        return LateDistribution.sampled(lambda x: ndtr(np.log(np.maximum(x, 1e-300))), horizon=horizon)
    if name == "unif":
        return LateDistribution.uniform()
    parts = ((*NORMAL, 1.0),) if name == "norm" else BURSTS
    return LateDistribution.sampled(
        lambda x: sum(weight * (ndtr((x - mean) / sd) - ndtr(-mean / sd)) for mean, sd, weight in parts), horizon=1.0
    )


# -- placements -------------------------------------------------------------------------------------------


def placed_by(trigger: str, late: LateDistribution, executions: int) -> TriggerPlan:
    """The plan of ``executions`` executions by one of TRIGGERS. The last one is at the end."""
    if trigger == "exact":
        return balanced(late, executions)
    if trigger == "descent":
        return descent(late, executions).plan
    steps = np.arange(1, executions + 1) / executions
    if trigger == "interval":
        return TriggerPlan(steps, late.at_all(steps))
    if trigger == "count":
        return TriggerPlan(np.append([late.quantile(s) for s in steps[:-1].tolist()], 1.0), steps)
    raise ValueError(f"unknown trigger {trigger}; use {', '.join(TRIGGERS)}")


def fewest_by(trigger: str, late: LateDistribution, bound: float) -> int | None:
    """The fewest executions with which a trigger keeps the bound. None: more than MOST_EXECUTIONS."""
    if trigger == "exact":
        return plan(late, bound=bound).executions
    tried = range(1, MOST_EXECUTIONS + 1)
    return next((k for k in tried if placed_by(trigger, late, k).maximum <= bound), None)


# -- streams ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Learnt:
    """A forecast that knows the truth: the distribution up to ``bound_us``, and the expected number of late events."""

    late: LateDistribution
    bound_us: int
    expected: float
    version: int = 1

    def late_share(self, lateness_us: Floats) -> Floats:
        return self.late.at_all(lateness_us / self.bound_us)

    def expected_late(self, on_time_events: NDArray[np.int64]) -> Floats:
        return np.full(len(on_time_events), self.expected)


def stream(late: LateDistribution, expected: float, bound_us: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """The lateness of each late event of one window, ascending, in microseconds: Poisson(``expected``) of them."""
    drawn = np.interp(np.sort(rng.random(rng.poisson(expected))), late.share, late.lateness)
    return np.floor(drawn * bound_us).astype(np.int64)


def fewest_in_hindsight(lateness_us: NDArray[np.int64], bound_us: int, bound: float) -> int:
    """The fewest executions that would have kept the bound if the stream had been known. Exact."""
    return fewest(LateDistribution(lateness_us, np.arange(1, len(lateness_us) + 1), horizon=bound_us), bound).executions


# -- brute force ------------------------------------------------------------------------------------------


def grid(late: LateDistribution, points: int) -> tuple[Floats, Floats]:
    """About ``2 * points`` places for executions, as the lateness and the share of each, ascending.

    They are spaced in time and in events, evenly and more densely towards both ends, with one before and one after each
    atom.
    """
    dense = np.geomspace(1e-7, 0.5, points // 4)
    even = np.union1d(np.linspace(0.0, 1.0, points // 2), np.concatenate([dense, 1.0 - dense]))
    in_time = even * late.end
    in_events = np.interp(even, late.share, late.lateness)
    whole = np.abs(late.at_all(in_events) - even) < 1e-12  # not inside an atom
    atoms = np.flatnonzero(np.diff(late.lateness) == 0)
    ends = np.union1d(atoms, atoms + 1)
    x = np.concatenate([in_time, in_events[whole], late.lateness[ends], [0.0, late.end]])
    f = np.concatenate([late.at_all(in_time), even[whole], late.share[ends], [0.0, 1.0]])
    order = np.lexsort((f, x))
    return x[order], f[order]


def brute_force(places: tuple[Floats, Floats], executions: int) -> Floats:
    """The smallest maximum of staleness on a grid, for 1 to ``executions`` executions, (executions,).

    Exact, by dynamic programming over all pairs of places: the best way to a place is the best way to an earlier place,
    plus the interval between them.
    """
    x, f = places
    between = (x[None, :] - x[:, None]) * (f[None, :] - f[:, None])
    between[np.tril_indices(len(x), -1)] = np.inf  # an interval goes forward
    best = between[0]
    found = [best[-1]]
    for _ in range(executions - 1):
        best = np.maximum(best[:, None], between).min(axis=0)
        found.append(best[-1])
    return np.array(found)


@dataclass(frozen=True, slots=True)
class Compared:
    """A distribution's plans compared with brute force.

    ``better``: how many placements on the grid beat a plan. ``untrue``: how many plans do not have the staleness they
    claim, or exceed their bound. ``ratio``: the grid's smallest maximum over ours, for each number of executions.
    """

    better: int
    untrue: int
    ratio: Floats

    @property
    def holds(self) -> bool:
        return not self.better and not self.untrue


def compare(late: LateDistribution, points: int, bounds: Sequence[float] = BOUNDS) -> Compared:
    """Compares the plans for ``bounds``, and for each smaller number of executions, with brute force."""
    plans = {bound: plan(late, bound=bound) for bound in bounds}
    most = max(p.executions for p in plans.values())
    on_grid = brute_force(grid(late, points), most)
    best = [plan(late, executions=k) for k in range(1, most + 1)]
    ours = np.array([p.maximum for p in best])
    # The bisection stops within 1e-8 of its root.
    better = int((on_grid < ours * (1 - 1e-7) - 1e-15).sum())
    better += sum(p.executions > 1 and on_grid[p.executions - 2] <= bound for bound, p in plans.items())
    untrue = sum(not is_true(late, p) for p in (*best, *plans.values()))
    untrue += sum(p.maximum > bound for bound, p in plans.items())
    return Compared(better, untrue, np.divide(on_grid, ours, out=np.ones(most), where=ours > 1e-12))


def is_true(late: LateDistribution, found: TriggerPlan) -> bool:
    """Whether a plan covers its distribution, and its shares are those just before or at each instant."""
    at = late.at_all(found.instants)
    before = np.interp(found.instants, late.lateness, late.share)
    atoms = np.isin(found.instants, late.lateness[:-1][np.diff(late.lateness) == 0])
    before = np.where(atoms, [late.share[np.searchsorted(late.lateness, x)] for x in found.instants], before)
    seen = np.minimum(np.abs(found.shares - at), np.abs(found.shares - before)) < 1e-9
    return bool(seen.all() and found.shares[-1] == 1.0 and (np.diff(found.instants, prepend=0.0) >= 0).all())


# -- random distributions ---------------------------------------------------------------------------------


def random_distributions(number: int, rng: np.random.Generator) -> Iterator[tuple[str, LateDistribution]]:
    """``number`` distributions of five kinds in turn, each with the name of its kind."""
    kinds: dict[str, Callable[[np.random.Generator], LateDistribution]] = {
        "smooth": _smooth,
        "spiky": _spiky,
        "gaps": _gaps,
        "heavy-tailed": _heavy,
        "atoms": _atoms,
    }
    names = list(kinds)
    for i in range(number):
        name = names[i % len(names)]
        yield name, kinds[name](rng)


def _weights(rng: np.random.Generator, parts: int) -> NDArray[np.float64]:
    return rng.dirichlet(np.ones(parts))


def _smooth(rng: np.random.Generator) -> LateDistribution:
    parts = int(rng.integers(1, 5))
    weights, shapes, scales = _weights(rng, parts), rng.uniform(0.8, 8, parts), rng.uniform(0.01, 0.2, parts)
    return LateDistribution.sampled(
        lambda x: (weights * gammainc(shapes, x[:, None] / scales)).sum(axis=1), horizon=1.0
    )


def _spiky(rng: np.random.Generator) -> LateDistribution:
    parts = int(rng.integers(1, 9))
    weights, at, floor = _weights(rng, parts), rng.uniform(0.01, 0.99, parts), rng.uniform(0, 0.3)
    widths = 10.0 ** rng.uniform(-6, -2, parts)
    return LateDistribution.sampled(
        lambda x: floor * x + (1 - floor) * (weights * ndtr((x[:, None] - at) / widths)).sum(axis=1), horizon=1.0
    )


def _gaps(rng: np.random.Generator) -> LateDistribution:
    blocks = int(rng.integers(2, 7))
    edges = np.sort(rng.uniform(0, 1, 2 * blocks))
    shares = np.cumsum(_weights(rng, blocks))
    return LateDistribution(edges, np.append(0.0, np.repeat(shares, 2)[:-1]))


def _heavy(rng: np.random.Generator) -> LateDistribution:
    scale, shape = 10.0 ** rng.uniform(-5, -1), rng.uniform(0.3, 2)
    if rng.random() < 0.5:
        return LateDistribution.sampled(lambda x: 1 - (1 + x / scale) ** -shape, horizon=1.0)
    sd = rng.uniform(1, 3)
    return LateDistribution.sampled(lambda x: ndtr(np.log(np.maximum(x, 1e-300) / scale) / sd), horizon=1.0)


def _atoms(rng: np.random.Generator) -> LateDistribution:
    """Events that come together: at random places, or at the steps of a watermark; with or without an even floor."""
    atoms = int(rng.integers(1, 30))
    at = np.arange(1, atoms + 1) / (atoms + 1) if rng.random() < 0.5 else np.sort(rng.uniform(0, 1, atoms))
    at[0] *= rng.integers(2)  # also at lateness 0: in the batch of the on-time execution
    floor = rng.choice([0.0, rng.uniform(0, 0.5)])
    shares = np.cumsum(_weights(rng, atoms)) * (1 - floor)
    x = np.concatenate([[0.0], np.repeat(at, 2), [1.0]])
    return LateDistribution(x, np.append(0.0, np.repeat(np.append(0.0, shares), 2)[1:]) + floor * x)
