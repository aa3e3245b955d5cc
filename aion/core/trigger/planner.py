"""When to execute a late window so that its result is never too stale: plans (paper 3.4). Pure.

Staleness between two executions is ``(t * n) / (T * N)``: ``t`` the time between them, ``n`` the late events that came
between them, ``T`` the horizon (how late an event may be), ``N`` all late events expected. A plan is made in shares:
of ``T`` for time, of ``N`` for events. So it is the same for every window with the same distribution and bound,
whatever its units.

How executions are counted: the on-time execution, at lateness 0, is where staleness begins and is not counted. ``k``
executions are ``k`` intervals that end where nothing is expected any more: at the horizon, or at the last late event
of a distribution that ends before it. The last one is the final execution. An execution at an atom (events that come
all at the same instant) is either just before it or just after it; one before an atom counts even where nothing has
come since the one before, because staleness starts anew there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from aion.core.trigger.distribution import Floats, LateDistribution

Solver = Literal["exact", "descent"]
BALANCE = 1e-8
"""Staleness of a plan's intervals differs by no more than about twice this, relatively, where there are no atoms.

Nor a gap with so little before it that the instant in it hangs on the last bit of the bound. The maximum is always as
exact as the bits allow.
"""
FINEST = 2.3e-16
FINEST_AT_ATOMS = 1e-10
"""Where there is no balance the bound is bisected so far, relatively: a spike is one to its last bit, an atom never."""


@dataclass(frozen=True)
class TriggerPlan:
    """Executions of a late window, in shares of its horizon and of its late events.

    ``instants``: the lateness of each, ascending, (k,). ``shares``: what has come by then; at an atom it says whether
    the execution is before or after it. ``after`` and ``already``: lateness of the execution before, and the share
    that it saw.
    """

    instants: Floats
    shares: Floats
    after: float = 0.0
    already: float = 0.0

    @property
    def executions(self) -> int:
        return len(self.instants)

    @cached_property
    def staleness(self) -> Floats:
        """Of each interval, (k,)."""
        times, events = np.append(self.after, self.instants), np.append(self.already, self.shares)
        return np.diff(times) * np.diff(events)

    @cached_property
    def maximum(self) -> float:
        """The largest staleness of an interval; 0 without any."""
        return float(self.staleness.max(initial=0.0))

    def instants_us(self, horizon_us: int) -> NDArray[np.int64]:
        """The executions of a window with that horizon, in microseconds after its end."""
        return np.ceil(self.instants * horizon_us).astype(np.int64)


def check(bound: float | None, executions: int | None, solver: str) -> None:
    """Raises ValueError unless exactly one of ``bound`` (above 0) and ``executions`` (1 or more) is given, and for a
    solver that there is not.
    """
    if (bound is None) == (executions is None):
        raise ValueError("give either a bound or a number of executions")
    if bound is not None and not bound > 0:
        raise ValueError(f"a bound of {bound} is not above 0: no number of executions keeps it")
    if executions is not None and executions < 1:
        raise ValueError(f"{executions} executions are less than 1")
    if solver not in ("exact", "descent"):
        raise ValueError(f"solver {solver!r}: there are 'exact' and 'descent'")


def plan(
    late: LateDistribution,
    *,
    bound: float | None = None,
    executions: int | None = None,
    after: float | None = None,
    solver: Solver = "exact",
) -> TriggerPlan:
    """The fewest executions for a ``bound``, or the given number of them, at the smallest maximum of staleness.

    ``after``: lateness of a late execution that already was; None: the on-time one. With ``executions`` at most so
    many; fewer where more are of no use. ``descent``: the paper's own way to the smallest maximum. It need not arrive
    there; where it ends above the bound, the executions are left where the bound put them. Raises ValueError as
    ``check`` does.
    """
    check(bound, executions, solver)
    placed = fewest(late, bound, after=after) if bound is not None else None
    number = placed.executions if placed is not None else executions
    if not number:
        return _plan(late, after, [], [])
    if solver == "descent":
        found = descent(late, number, after=after).plan
    else:
        found = balanced(late, number, after=after, bound=bound)
    return placed if placed is not None and bound is not None and found.maximum > bound else found


def fewest(late: LateDistribution, bound: float, *, after: float | None = None) -> TriggerPlan:
    """Each execution as late as ``bound`` allows, one after the other.

    No placement that keeps the bound has fewer: whatever another one does, its i-th execution is never later than the
    i-th here, because an interval that begins later reaches later.
    """
    # Without atoms 1 / sqrt(bound) are enough (Cauchy-Schwarz), and each atom stops at most one more.
    return _plan(late, after, *late.place(after, bound, 2 + math.ceil(bound**-0.5) + len(late.lateness)))


def balanced(
    late: LateDistribution, executions: int, *, after: float | None = None, bound: float | None = None
) -> TriggerPlan:
    """The smallest maximum of staleness for so many executions, by bisecting the bound.

    ``bound``: one that so many are known to keep. A bound is kept iff, with all executions but the last placed as late
    as it allows, the last interval keeps it too.
    """
    last, already = late.seen(after)
    most = math.sqrt(max(late.end - last, 0.0) * (1.0 - already))
    if executions == 1 or not most:
        return _plan(late, after, *late.place(after, math.inf, 1))

    placed: tuple[list[float], list[float]] = ([], [])
    best, best_root = placed, math.inf

    # All in square roots: there the last interval is nearly linear in the bound, and interpolation is fast.
    def excess(root: float) -> float:
        """By how much the root of the last interval's staleness exceeds ``root``, that of all others.

        Less half the tolerance: the search then ends at a bound that is kept, not a rounding error below it.
        """
        nonlocal placed, best, best_root
        placed = late.place(after, root * root, executions - 1)
        over = math.sqrt((late.end - placed[0][-1]) * (1.0 - placed[1][-1])) - root
        if over <= 0 and root < best_root:
            best, best_root = placed, root
        return over + BALANCE / 2 * root

    low, low_excess = 0.0, most
    high = math.sqrt(bound) if bound is not None else most / executions
    while (high_excess := excess(high)) > 0 and high < most:
        # Only atoms can ask for more than an even share; one interval over everything is always enough.
        low, low_excess, high = high, high_excess, min(2 * high, most)
    # Intervals whose roots keep their sum while they are made even.
    guess = high + high_excess / executions
    finest = FINEST_AT_ATOMS if late.atoms else FINEST
    _root(excess, (low, low_excess), (high, high_excess), guess, finest)
    times, shares = best
    if shares[-1] < 1.0:
        times, shares = [*times, late.end], [*shares, 1.0]
    return _plan(late, after, times, shares)


def _root(
    excess: Callable[[float], float], low: tuple[float, float], high: tuple[float, float], guess: float, finest: float
) -> None:
    """Calls ``excess`` ever closer to where it falls through 0, between ``low`` and ``high``: points and excess there.

    Chandrupatla's method (1997): inverse quadratic interpolation where that is safe, else bisection, so that neither
    the bends of a smooth distribution nor the jumps at atoms make it slow. It begins with ``guess``, and ends within
    BALANCE of 0 or ``finest`` of the jump across it.
    """
    # a: the latest point, b: the one across the root, c: the one before.
    (a, fa), (b, fb) = high, low
    smallest = finest * a / 100
    share = (guess - a) / (b - a)
    while abs(fa) > BALANCE / 2 * a and abs(b - a) > (least := max(finest * max(a, b), smallest)):
        margin = min(least / abs(b - a), 0.5)
        x = a + min(max(share, margin), 1 - margin) * (b - a)
        fx = excess(x)
        if (fx > 0) == (fa > 0):
            c, fc = a, fa
        else:
            (c, fc), (b, fb) = (b, fb), (a, fa)
        a, fa = x, fx
        along, rise = (a - b) / (c - b), (fa - fb) / (fc - fb)
        if rise**2 < along and (1 - rise) ** 2 < 1 - along:
            share = fa / (fb - fa) * fc / (fb - fc) + (c - a) / (b - a) * fa / (fc - fa) * fb / (fc - fb)
        else:
            share = 0.5


def _plan(late: LateDistribution, after: float | None, times: Sequence[float], shares: Sequence[float]) -> TriggerPlan:
    return TriggerPlan(np.array(times, dtype=np.float64), np.array(shares, dtype=np.float64), *late.seen(after))


# -- the paper's way --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Descent:
    """Where gradient descent ended. ``converged``: all intervals equally stale, to the tolerance that was asked."""

    plan: TriggerPlan
    iterations: int
    converged: bool


def descent(
    late: LateDistribution,
    executions: int,
    *,
    after: float | None = None,
    rate: float = 1.0,
    iterations: int = 1000,
    tolerance: float = 1e-6,
) -> Descent:
    """So many executions, balanced as the paper describes it (section 3.4): for comparison.

    They begin where the distribution is dense: at its quantiles. In order of time each one then moves against the
    gradient of the difference in staleness of the two intervals beside it (``rate`` 1: as far as would make them equal
    if that gradient did not change), until the standard deviation of all staleness is below ``tolerance`` times
    their mean, or for so many ``iterations``. The paper gives neither rate, tolerance nor number.
    """
    last, already = late.seen(after)
    if already == 1.0:
        return Descent(_plan(late, after, [], []), 0, True)
    wanted = already + (1.0 - already) * np.arange(1, executions) / executions
    t = [last, *(max(late.quantile(w), last) for w in wanted.tolist()), late.end]
    done = 0
    for done in range(iterations + 1):
        f = [already, *(late.at(x) for x in t[1:-1]), 1.0]
        staleness = np.diff(t) * np.diff(f)
        if staleness.std() <= tolerance * staleness.mean() or done == iterations:
            break
        for i in range(1, executions):
            x = t[i]
            share, density = late.at(x), late.density(x)
            left = (x - t[i - 1]) * (share - f[i - 1])
            right = (t[i + 1] - x) * (f[i + 1] - share)
            gradient = f[i + 1] - f[i - 1] + density * (t[i + 1] - t[i - 1])
            if gradient > 0:
                t[i] = min(max(x - rate * (left - right) / gradient, t[i - 1]), t[i + 1])
                f[i] = late.at(t[i])
    converged = bool(staleness.std() <= tolerance * staleness.mean())
    return Descent(_plan(late, after, t[1:], f[1:]), done, converged)
