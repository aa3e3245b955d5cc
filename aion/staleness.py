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
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Solver = Literal["exact", "descent"]
Floats = NDArray[np.float64]

BALANCE = 1e-8
"""Staleness of a plan's intervals differs by no more than about twice this, relatively, where there are no atoms."""
RESOLUTION = 4e-6
"""Staleness that a straight piece of a sampled distribution may hide: its width times its height."""


class LateDistribution:
    """The share of a window's late events that have come by a lateness in [0, horizon]; both as shares.

    Straight between knots. Two knots at one lateness are an atom, two of one share a gap. What lies beyond the horizon
    is left out, since the window is gone by then; the rest is scaled to 1. ``lateness`` and ``share``: the knots, from
    (0, 0) to where the share becomes 1.
    """

    def __init__(self, lateness: ArrayLike, events: ArrayLike, *, horizon: float = 1.0) -> None:
        """``lateness`` in the unit of ``horizon`` and ``events`` (cumulated, in any unit): never descending, (n,).

        Nothing came before the first knot, nothing comes after the last. Raises ValueError for anything else, and
        when no event comes up to the horizon.
        """
        x, f = np.asarray(lateness, dtype=np.float64), np.asarray(events, dtype=np.float64)
        if x.ndim != 1 or x.shape != f.shape or not x.size or not (np.isfinite(x).all() and np.isfinite(f).all()):
            raise ValueError(f"knots are two rows of finite numbers, equally long; got {x.shape} and {f.shape}")
        if x[0] < 0 or f[0] < 0 or (np.diff(x) < 0).any() or (np.diff(f) < 0).any():
            raise ValueError("lateness and cumulated events begin at 0 or above and never descend")
        if not (math.isfinite(horizon) and horizon > 0):
            raise ValueError(f"a horizon of {horizon} is not above 0")
        x = x / horizon
        if x[-1] > 1:
            inside = int(np.searchsorted(x, 1.0, side="right"))
            # Straight on to the horizon; events that come exactly at it are within it.
            at_horizon = np.interp(1.0, x[inside - 1 : inside + 1], f[inside - 1 : inside + 1]) if inside else 0.0
            x, f = np.append(x[:inside], 1.0), np.append(f[:inside], at_horizon)
        if not f[-1] > 0:
            raise ValueError("no late event comes up to the horizon")
        x, f = np.concatenate([[0.0, x[0]], x]), np.concatenate([[0.0, 0.0], f / f[-1]])
        end = int(np.searchsorted(f, 1.0)) + 1
        x, f = x[:end], f[:end]
        # An atom is all of its height at once: knots inside it, and knots that say the same twice, are none.
        inner = np.zeros(end, dtype=bool)
        inner[1:-1] = (x[1:-1] == x[:-2]) & (x[1:-1] == x[2:])
        same = np.append((np.diff(x) == 0) & (np.diff(f) == 0), False)
        kept = ~(inner | same)
        self.lateness: Floats = x[kept]
        self.share: Floats = f[kept]
        # Steps of a plan are few and scalar: lists are several times as fast for them as arrays.
        self._x: list[float] = self.lateness.tolist()
        self._f: list[float] = self.share.tolist()

    @classmethod
    def uniform(cls) -> LateDistribution:
        """Late events come evenly up to the horizon: what to assume before anything is known."""
        return cls([0.0, 1.0], [0.0, 1.0])

    @classmethod
    def from_quantiles(cls, shares: ArrayLike, lateness: ArrayLike, *, horizon: float) -> LateDistribution:
        """From the ``lateness`` that each of ``shares`` (ascending, in [0, 1]) does not exceed; equal ones are atoms.

        Straight from lateness 0 to the first quantile, and from the last one to the horizon. Raises ValueError.
        """
        p, q = np.asarray(shares, dtype=np.float64), np.asarray(lateness, dtype=np.float64)
        if p.size and not (p[0] >= 0 and p[-1] <= 1):
            raise ValueError("shares lie in [0, 1]")
        if p.size and p[0] > 0:
            p, q = np.append(0.0, p), np.append(0.0, q)
        if p.size and p[-1] < 1 and q[-1] < horizon:
            p, q = np.append(p, 1.0), np.append(q, horizon)
        return cls(q, p, horizon=horizon)

    @classmethod
    def sampled(
        cls, share: Callable[[Floats], ArrayLike], *, horizon: float, resolution: float = RESOLUTION
    ) -> LateDistribution:
        """From a function of lateness in [0, horizon] (an array) to the share that has come by then (in any unit).

        Sampled more densely where more comes, until no piece between two knots hides more staleness than
        ``resolution``: about ``1 / sqrt(resolution)`` knots, wherever the function is steep. A jump ends up as a
        piece narrower than ``resolution`` over its height.
        """
        x = np.unique(np.concatenate([np.linspace(0, 1, 129), np.geomspace(1e-7, 1, 128)]))
        f = np.asarray(share(x * horizon), dtype=np.float64)
        scale = float(f.max())
        for _ in range(60):
            coarse = np.flatnonzero(np.diff(x) * np.diff(f) > resolution * scale)
            if not coarse.size:
                break
            between = (x[coarse] + x[coarse + 1]) / 2
            x = np.insert(x, coarse + 1, between)
            f = np.insert(f, coarse + 1, np.asarray(share(between * horizon), dtype=np.float64))
        # A distribution that is computed may descend by a rounding error.
        return cls(x, np.maximum.accumulate(np.maximum(f, 0.0)))

    @property
    def end(self) -> float:
        """The lateness after which nothing comes any more."""
        return self._x[-1]

    def at(self, lateness: float) -> float:
        """The share that has come by ``lateness``, what comes at that instant included."""
        above = bisect_right(self._x, lateness)
        if above == len(self._x):
            return 1.0
        if not above:
            return 0.0
        x, f = self._x, self._f
        slope = (f[above] - f[above - 1]) / (x[above] - x[above - 1])
        return f[above - 1] + slope * (lateness - x[above - 1])

    def at_all(self, lateness: ArrayLike) -> Floats:
        """``at`` for an array of any shape."""
        wanted = np.asarray(lateness, dtype=np.float64)
        x, f = np.append(self.lateness, np.inf), np.append(self.share, 1.0)
        above = np.clip(np.searchsorted(x, wanted, side="right"), 1, len(x) - 1)
        along = (wanted - x[above - 1]) / np.where(np.isinf(x[above]), 1.0, x[above] - x[above - 1])
        return np.where(wanted < 0, 0.0, f[above - 1] + along * (f[above] - f[above - 1]))

    def density(self, lateness: float) -> float:
        """The slope at ``lateness``, to its right; 0 outside of [0, end)."""
        above = bisect_right(self._x, lateness)
        if not 0 < above < len(self._x):
            return 0.0
        x, f = self._x, self._f
        return (f[above] - f[above - 1]) / (x[above] - x[above - 1])

    def quantile(self, share: float) -> float:
        """The earliest lateness by which ``share`` (in [0, 1]) has come."""
        return float(np.interp(share, self.share, self.lateness)) if share > 0 else self._x[0]

    def first(self, per_time: float, per_share: float, target: float) -> float:
        """The earliest lateness x with ``per_time * x + per_share * at(x) >= target``; inf when there is none."""
        x, f = self._x, self._f
        low, high = -1, len(x)
        while high - low > 1:
            middle = (low + high) // 2
            if per_time * x[middle] + per_share * f[middle] >= target:
                high = middle
            else:
                low = middle
        if high == 0:
            return x[0]
        if high == len(x):
            return (target - per_share) / per_time if per_time > 0 else math.inf
        missing = target - per_time * x[low] - per_share * f[low]
        gained = per_time * (x[high] - x[low]) + per_share * (f[high] - f[low])
        return x[low] + (x[high] - x[low]) * min(missing / gained, 1.0)

    # -- placement ----------------------------------------------------------------------------------------

    def place(self, after: float, bound: float, at_most: int) -> tuple[list[float], list[float]]:
        """Executions after one at ``after``, each as late as staleness ``bound`` allows: lateness and share of each.

        It stops at the end of the distribution, or after ``at_most``.
        """
        x, f = self._x, self._f
        last = len(x) - 1
        at, by = after, self.at(after)
        low = bisect_right(x, at) - 1
        times: list[float] = []
        shares: list[float] = []
        while len(times) < at_most and low < last:
            # Of the knots from here on, staleness at the first ones is within the bound, at the others above it.
            here, above = low, last + 1
            while above - low > 1:
                middle = (low + above) >> 1
                if (x[middle] - at) * (f[middle] - by) <= bound:
                    low = middle
                else:
                    above = middle
            if low == last:
                times.append(x[last])
                shares.append(1.0)
                break
            left, bottom = (x[low], f[low]) if low > here else (at, by)
            width, height = x[above] - left, f[above] - bottom
            if width > 0:
                # On a straight piece staleness is quadratic: a u² + b u = rest, u from 0 to 1 along the piece.
                a = width * height
                b = width * (bottom - by) + height * (left - at)
                rest = bound - (left - at) * (bottom - by)
                u = 2 * rest / (b + math.sqrt(b * b + 4 * a * rest))
                end_at, end_by = left + u * width, bottom + u * height
                while (end_at - at) * (end_by - by) > bound:
                    end_at, end_by = math.nextafter(end_at, left), math.nextafter(end_by, bottom)
            else:
                end_at, end_by = left, bottom
            at, by = end_at, end_by
            times.append(at)
            shares.append(by)
        return times, shares


@dataclass(frozen=True)
class Plan:
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


def plan(
    late: LateDistribution,
    *,
    bound: float | None = None,
    executions: int | None = None,
    after: float = 0.0,
    solver: Solver = "exact",
) -> Plan:
    """The fewest executions for a ``bound``, or the given number of them, at the smallest maximum of staleness.

    ``after``: lateness of an execution that already was. With ``executions`` at most so many; fewer where more are of
    no use. ``descent``: the paper's own way to the smallest maximum. It need not arrive there; where it ends above the
    bound, the executions are left where the bound put them. Raises ValueError unless exactly one of ``bound`` (above
    0) and ``executions`` (1 or more) is given, and for a solver that there is not.
    """
    if (bound is None) == (executions is None):
        raise ValueError("give either a bound or a number of executions")
    if bound is not None and not bound > 0:
        raise ValueError(f"a bound of {bound} is not above 0: no number of executions keeps it")
    if executions is not None and executions < 1:
        raise ValueError(f"{executions} executions are less than 1")
    if solver not in ("exact", "descent"):
        raise ValueError(f"solver {solver!r}: there are 'exact' and 'descent'")
    placed = fewest(late, bound, after=after) if bound is not None else None
    number = placed.executions if placed is not None else executions
    if not number:
        return _plan(late, after, [], [])
    if solver == "descent":
        found = descent(late, number, after=after).plan
    else:
        found = balanced(late, number, after=after, bound=bound)
    return placed if placed is not None and bound is not None and found.maximum > bound else found


def fewest(late: LateDistribution, bound: float, *, after: float = 0.0) -> Plan:
    """Each execution as late as ``bound`` allows, one after the other.

    No placement that keeps the bound has fewer: whatever another one does, its i-th execution is never later than the
    i-th here, because an interval that begins later reaches later.
    """
    # Without atoms 1 / sqrt(bound) are enough (Cauchy-Schwarz), and each atom stops at most one more.
    return _plan(late, after, *late.place(after, bound, 2 + math.ceil(bound**-0.5) + len(late.lateness)))


def balanced(late: LateDistribution, executions: int, *, after: float = 0.0, bound: float | None = None) -> Plan:
    """The smallest maximum of staleness for so many executions, by bisecting the bound.

    ``bound``: one that so many are known to keep. A bound is kept iff, with all executions but the last placed as late
    as it allows, the last interval keeps it too.
    """
    already = late.at(after)
    most = math.sqrt(max(late.end - after, 0.0) * (1.0 - already))
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
    _root(excess, low, low_excess, high, high_excess, guess)
    times, shares = best
    if shares[-1] < 1.0:
        times, shares = [*times, late.end], [*shares, 1.0]
    return _plan(late, after, times, shares)


def _root(
    excess: Callable[[float], float], low: float, low_excess: float, high: float, high_excess: float, guess: float
) -> None:
    """Calls ``excess`` ever closer to where it falls through 0, between ``low`` and ``high``, to BALANCE.

    Chandrupatla's method (1997): inverse quadratic interpolation where that is safe, else bisection, so that neither
    the bends of a smooth distribution nor the jumps at atoms make it slow. It begins with ``guess``.
    """
    # a: the latest point, b: the one across the root, c: the one before.
    (a, fa), (b, fb) = (high, high_excess), (low, low_excess)
    share = (guess - a) / (b - a)
    while abs(fa) > BALANCE / 2 * a and abs(b - a) > BALANCE * high:
        tolerance = BALANCE / 4 * high / abs(b - a)
        x = a + min(max(share, tolerance), 1 - tolerance) * (b - a)
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


def _plan(late: LateDistribution, after: float, times: Sequence[float], shares: Sequence[float]) -> Plan:
    return Plan(np.array(times, dtype=np.float64), np.array(shares, dtype=np.float64), after, late.at(after))


# -- the paper's way --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Descent:
    """Where gradient descent ended. ``converged``: all intervals equally stale, to the tolerance that was asked."""

    plan: Plan
    iterations: int
    converged: bool


def descent(
    late: LateDistribution,
    executions: int,
    *,
    after: float = 0.0,
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
    already = late.at(after)
    if after >= late.end:
        return Descent(_plan(late, after, [], []), 0, True)
    wanted = already + (1.0 - already) * np.arange(1, executions) / executions
    t = [after, *(max(late.quantile(w), after) for w in wanted.tolist()), late.end]
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
