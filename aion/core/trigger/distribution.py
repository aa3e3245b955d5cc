"""When the late events of a window come: their distribution over lateness, exact where it jumps or rests. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

RESOLUTION = 4e-6
"""Staleness that a straight piece of a sampled distribution may hide: its width times its height."""


class LateDistribution:
    """The share of a window's late events that have come by a lateness in [0, horizon]; both as shares.

    Straight between knots. Two knots at one lateness are an atom, two of one share a gap. What lies beyond the horizon
    is left out, since the window is gone by then; the rest is scaled to 1. ``lateness`` and ``share``: the knots, from
    (0, 0) to where the share becomes 1; ``atoms``: whether there are any.
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
        new = np.append(True, (np.diff(x) > 0) | (np.diff(f) > 0))
        x, f = x[new], f[new]
        # An atom is all of its height at once: what is said of shares inside it says nothing.
        inside_atom = np.zeros(len(x), dtype=bool)
        inside_atom[1:-1] = (x[1:-1] == x[:-2]) & (x[1:-1] == x[2:])
        self._keep(x[~inside_atom], f[~inside_atom])

    def _keep(self, x: Floats, f: Floats) -> None:
        self.lateness, self.share = x, f
        self.atoms = bool((np.diff(x) == 0).any())
        # Steps of a plan are few and scalar: lists are several times as fast for them as arrays.
        self._x: list[float] = self.lateness.tolist()
        self._f: list[float] = self.share.tolist()

    def to_horizon(self) -> LateDistribution:
        """The same, but with the horizon for its end: the last execution is the one before the purge."""
        late = LateDistribution.__new__(LateDistribution)
        late._keep(np.append(self.lateness, 1.0), np.append(self.share, 1.0))
        return late

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
        """The lateness after which nothing comes any more, or the horizon."""
        return self._x[-1]

    def at(self, lateness: float) -> float:
        """The share that has come by ``lateness``, what comes at that instant included."""
        above = bisect_right(self._x, lateness)
        if above == len(self._x):
            return 1.0
        if not above:
            return 0.0
        x, f = self._x, self._f
        along = (lateness - x[above - 1]) / (x[above] - x[above - 1])
        return f[above - 1] + along * (f[above] - f[above - 1])

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
        x, f = self._x, self._f
        above = bisect_left(f, share)
        if not above:
            return x[0]
        return x[above - 1] + (share - f[above - 1]) / (f[above] - f[above - 1]) * (x[above] - x[above - 1])

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

    def seen(self, after: float | None) -> tuple[float, float]:
        """The lateness of an execution and the share that it saw.

        ``after``: its lateness; it saw what came at that instant. None: the on-time one, which saw nothing late.
        """
        return (0.0, 0.0) if after is None else (after, self.at(after))

    def place(self, after: float | None, bound: float, at_most: int) -> tuple[list[float], list[float]]:
        """Executions after one as of ``seen``, each as late as staleness ``bound`` allows: lateness and share of each.

        It stops where nothing comes any more, or after ``at_most``.
        """
        x, f = self._x, self._f
        last = len(x) - 1
        at, by = self.seen(after)
        low = 0 if after is None else bisect_right(x, at) - 1
        times: list[float] = []
        shares: list[float] = []
        while len(times) < at_most and low < last and by < 1.0:
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
                end_at, end_by = min(left + u * width, x[above]), min(bottom + u * height, f[above])
                while (end_at - at) * (end_by - by) > bound:
                    end_at, end_by = math.nextafter(end_at, left), math.nextafter(end_by, bottom)
            else:
                end_at, end_by = left, bottom
            at, by = end_at, end_by
            times.append(at)
            shares.append(by)
        return times, shares
