"""Plans of when to execute a late window so that its result is never too stale (paper 3.4). Pure.

Staleness between two executions is ``(t * n) / (T * N)``, where ``t`` is the time between them, ``n`` the late events
that came in between, ``T`` the horizon (how late an event may be), and ``N`` all late events expected. A plan is in
shares: of ``T`` for time, of ``N`` for events. So it is the same for all windows with the same distribution and bound,
whatever their units.

How executions are counted: the on-time execution, at lateness 0, starts the first interval and is not counted. ``k``
executions end ``k`` intervals. The last one is the final execution, at the horizon, or at the last late event if the
distribution ends earlier. An execution at an atom (events that all come at the same instant) is either just before it
or just after it. One just before an atom counts even if nothing has come since the previous execution, because it
starts a new interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from aion.core.trigger.distribution import Floats, LateDistribution

MOST_EXECUTIONS = 1000
"""More are of no use: staleness is below 1 / 1000**2 then, but for instants at which many late events come."""
BALANCE = 1e-8
"""The intervals of a plan are equally stale, up to about twice this relative difference.

Exceptions: a distribution with atoms, and one with a gap so early that the instant inside it depends on the last bit of
the bound. The maximum is always as exact as the bits allow.
"""
FINEST = 2.3e-16
FINEST_AT_ATOMS = 1e-10
"""The relative precision of the search for the bound where no balance exists. A steep piece needs full precision. With
atoms full precision would gain nothing."""


@dataclass(frozen=True)
class TriggerPlan:
    """Executions of a late window, in shares of its horizon and of its late events.

    ``instants``: the lateness of each execution, ascending, (k,). ``shares``: the share that has come by then, (k,); at
    an atom it shows whether the execution is before or after it. ``after`` and ``already``: the lateness of the
    previous execution, and the share that it saw.
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
        """The staleness of each interval, (k,)."""
        times, events = np.append(self.after, self.instants), np.append(self.already, self.shares)
        return np.diff(times) * np.diff(events)

    @cached_property
    def maximum(self) -> float:
        """The largest staleness of an interval; 0 without executions."""
        return float(self.staleness.max(initial=0.0))

    def instants_us(self, horizon_us: int) -> NDArray[np.int64]:
        """Returns the instants of a window with this horizon, in microseconds after its end."""
        return np.ceil(self.instants * horizon_us).astype(np.int64)


def check(bound: float | None, executions: int | None) -> None:
    """Raises ValueError unless exactly one of ``bound`` (above 0) and ``executions`` (1 or more) is given."""
    if (bound is None) == (executions is None):
        raise ValueError("give either a bound or a number of executions")
    if bound is not None and not bound > 0:
        raise ValueError(f"a bound of {bound} is not above 0: no number of executions keeps it")
    if executions is not None and executions < 1:
        raise ValueError(f"{executions} executions are less than 1")


def plan(
    late: LateDistribution,
    *,
    bound: float | None = None,
    executions: int | None = None,
    after: float | None = None,
) -> TriggerPlan:
    """Returns the plan with the fewest executions that keep ``bound``, or with ``executions`` executions.

    Either way they are placed so that the maximum of staleness is smallest. There may be fewer than ``executions`` if
    more are of no use. ``after``: the lateness of the last late execution, or None if there was only the on-time one.
    Raises ValueError as :func:`check` does.
    """
    check(bound, executions)
    placed = fewest(late, bound, after=after) if bound is not None else None
    number = placed.executions if placed is not None else min(executions or 0, MOST_EXECUTIONS)
    if not number:
        return _plan(late, after, [], [])
    found = balanced(late, number, after=after, bound=bound)
    return placed if placed is not None and bound is not None and found.maximum > bound else found


def fewest(late: LateDistribution, bound: float, *, after: float | None = None) -> TriggerPlan:
    """Places each execution as late as ``bound`` allows, one after the other.

    No plan that keeps the bound has fewer executions. In any other one, the i-th execution is never later than the i-th
    here, because an interval that begins later may also end later.
    """
    # Without atoms 1 / sqrt(bound) executions are enough (Cauchy-Schwarz). Each atom adds at most one.
    return _plan(late, after, *late.place(after, bound, 2 + math.ceil(bound**-0.5) + len(late.lateness)))


def balanced(
    late: LateDistribution, executions: int, *, after: float | None = None, bound: float | None = None
) -> TriggerPlan:
    """Returns the plan of ``executions`` executions with the smallest maximum of staleness, found by bisecting the
    bound.

    ``bound``: one that this number is known to keep. To test a bound, place all executions but the last as late as it
    allows. The bound can be kept if and only if the last interval then keeps it too.
    """
    last, already = late.seen(after)
    most = math.sqrt(max(late.end - last, 0.0) * (1.0 - already))
    if executions == 1 or not most:
        return _plan(late, after, *late.place(after, math.inf, 1))

    placed: tuple[list[float], list[float]] = ([], [])
    best, best_root = placed, math.inf

    # Work with square roots: the root for the last interval is nearly linear in that of the bound, so interpolation is
    # fast.
    def excess(root: float) -> float:
        """Returns how far the root of the last interval's staleness exceeds ``root``, the root of the others'
        staleness.

        Half the tolerance is added, so that the search ends at a bound that is kept, not a rounding error below it.
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
        # Only atoms need more than an even share. One interval over everything always suffices.
        low, low_excess, high = high, high_excess, min(2 * high, most)
    # The guess spreads the excess evenly over all intervals.
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
    """Search for the root of ``excess`` between ``low`` and ``high``, each a pair (point, excess there).

    It returns nothing, since ``excess`` remembers its best call. Chandrupatla's method (1997): inverse quadratic
    interpolation where that is safe, else bisection. So neither the bends of a smooth distribution nor the jumps at
    atoms make it slow. It begins with ``guess``. It ends when the excess is within BALANCE of 0, or the point within
    ``finest`` of a jump across 0.
    """
    # a: the latest point, b: a point on the other side of the root, c: the previous point.
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
