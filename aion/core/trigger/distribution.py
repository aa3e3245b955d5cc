"""The distribution of a window's late events over lateness. Exact where it jumps, and where nothing comes. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

RESOLUTION = 4e-6
"""The most staleness (width times height) inside one linear piece of a sampled distribution."""


class LateDistribution:
    """The share of a window's late events that have come by a given lateness, which is a share of the horizon.

    The curve is linear between knots. Two knots at the same lateness are an atom: events that all come at that instant.
    Two knots of the same share are a gap, in which nothing comes. Events beyond the horizon are left out, since the
    window is gone by then, and the rest is scaled to 1. ``lateness`` and ``share``: the knots, from (0, 0) to where the
    share becomes 1. ``atoms``: whether there are any.
    """

    def __init__(self, lateness: ArrayLike, events: ArrayLike, *, horizon: float = 1.0) -> None:
        """``lateness`` (in the unit of ``horizon``) and cumulated ``events`` (in any unit): (n,), never descending.

        No event comes before the first knot, and none after the last. Raises ValueError for any other input, and if no
        event comes up to the horizon.
        """
        x, f = np.asarray(lateness, dtype=np.float64), np.asarray(events, dtype=np.float64)
        if x.ndim != 1 or x.shape != f.shape or not x.size or not (np.isfinite(x).all() and np.isfinite(f).all()):
            raise ValueError(f"knots must be two rows of finite numbers, equally long; got {x.shape} and {f.shape}")
        if x[0] < 0 or f[0] < 0 or (np.diff(x) < 0).any() or (np.diff(f) < 0).any():
            raise ValueError("lateness and cumulated events must begin at 0 or above and never descend")
        if not (math.isfinite(horizon) and horizon > 0):
            raise ValueError(f"a horizon of {horizon} is not above 0")
        x = x / horizon
        if x[-1] > 1:
            inside = int(np.searchsorted(x, 1.0, side="right"))
            # Interpolate up to the horizon. Events exactly at the horizon count.
            at_horizon = np.interp(1.0, x[inside - 1 : inside + 1], f[inside - 1 : inside + 1]) if inside else 0.0
            x, f = np.append(x[:inside], 1.0), np.append(f[:inside], at_horizon)
        if not f[-1] > 0:
            raise ValueError("no late event comes up to the horizon")
        x, f = np.concatenate([[0.0, x[0]], x]), np.concatenate([[0.0, 0.0], f / f[-1]])
        end = int(np.searchsorted(f, 1.0)) + 1
        x, f = x[:end], f[:end]
        new = np.append(True, (np.diff(x) > 0) | (np.diff(f) > 0))
        x, f = x[new], f[new]
        # An atom jumps over its whole height at once, so knots inside it carry no information.
        inside_atom = np.zeros(len(x), dtype=bool)
        inside_atom[1:-1] = (x[1:-1] == x[:-2]) & (x[1:-1] == x[2:])
        self._keep(x[~inside_atom], f[~inside_atom])

    def _keep(self, x: Floats, f: Floats) -> None:
        self.lateness, self.share = x, f
        self.atoms = bool((np.diff(x) == 0).any())
        # A plan takes few, scalar steps. For those, lists are several times as fast as arrays.
        self._x: list[float] = self.lateness.tolist()
        self._f: list[float] = self.share.tolist()

    def to_horizon(self) -> LateDistribution:
        """Returns the same distribution, but it ends at the horizon, where the final execution before the purge is."""
        late = LateDistribution.__new__(LateDistribution)
        late._keep(np.append(self.lateness, 1.0), np.append(self.share, 1.0))
        return late

    @classmethod
    def uniform(cls) -> LateDistribution:
        """Late events come evenly up to the horizon: the assumption before anything is known."""
        return cls([0.0, 1.0], [0.0, 1.0])

    @classmethod
    def sampled(
        cls, share: Callable[[Floats], ArrayLike], *, horizon: float, resolution: float = RESOLUTION
    ) -> LateDistribution:
        """Sample ``share``, a function from an array of latenesses in [0, horizon] to the share that has come by then.

        The share may be in any unit. Steep parts get more samples, until no piece between two knots holds more
        staleness than ``resolution``. That takes about ``1 / sqrt(resolution)`` knots, wherever the function is steep.
        A jump becomes a piece narrower than ``resolution`` divided by its height.
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
        # A computed distribution may descend by a rounding error.
        return cls(x, np.maximum.accumulate(np.maximum(f, 0.0)))

    @property
    def end(self) -> float:
        """The lateness of the last late event, or the horizon."""
        return self._x[-1]

    def at(self, lateness: float) -> float:
        """Returns the share that has come by ``lateness``, including events at that instant."""
        above = bisect_right(self._x, lateness)
        if above == len(self._x):
            return 1.0
        if not above:
            return 0.0
        x, f = self._x, self._f
        along = (lateness - x[above - 1]) / (x[above] - x[above - 1])
        return f[above - 1] + along * (f[above] - f[above - 1])

    def at_all(self, lateness: ArrayLike) -> Floats:
        """:meth:`at` for an array of any shape."""
        wanted = np.asarray(lateness, dtype=np.float64)
        x, f = np.append(self.lateness, np.inf), np.append(self.share, 1.0)
        above = np.clip(np.searchsorted(x, wanted, side="right"), 1, len(x) - 1)
        along = (wanted - x[above - 1]) / np.where(np.isinf(x[above]), 1.0, x[above] - x[above - 1])
        return np.where(wanted < 0, 0.0, f[above - 1] + along * (f[above] - f[above - 1]))

    def density(self, lateness: float) -> float:
        """Returns the slope to the right of ``lateness``; 0 outside [0, end)."""
        above = bisect_right(self._x, lateness)
        if not 0 < above < len(self._x):
            return 0.0
        x, f = self._x, self._f
        return (f[above] - f[above - 1]) / (x[above] - x[above - 1])

    def quantile(self, share: float) -> float:
        """Returns the earliest lateness by which ``share`` (in [0, 1]) has come."""
        x, f = self._x, self._f
        above = bisect_left(f, share)
        if not above:
            return x[0]
        return x[above - 1] + (share - f[above - 1]) / (f[above] - f[above - 1]) * (x[above] - x[above - 1])

    def first(self, per_time: ArrayLike, per_share: ArrayLike, target: ArrayLike) -> Floats:
        """Returns the earliest lateness x with ``per_time * x + per_share * at(x) >= target``; inf where there is none.

        For each row of the three columns. ``per_time`` and ``per_share`` are 0 or above.
        """
        a, b, t = (np.asarray(column, dtype=np.float64) for column in (per_time, per_share, target))
        x, f = self.lateness, self.share
        last = len(x) - 1
        # Bisects for the last knot below the target and the next one, for all rows at once.
        low, high = np.full(len(t), -1), np.full(len(t), last + 1)
        for _ in range(len(x).bit_length()):
            middle = np.clip((low + high) // 2, 0, last)
            reached = a * x[middle] + b * f[middle] >= t
            open_ = high - low > 1
            high = np.where(open_ & reached, middle, high)
            low = np.where(open_ & ~reached, middle, low)
        left, right = np.maximum(low, 0), np.minimum(high, last)
        missing = t - a * x[left] - b * f[left]
        gained = a * (x[right] - x[left]) + b * (f[right] - f[left])
        inside = (low >= 0) & (high <= last)
        along = np.divide(missing, gained, out=np.zeros(len(t)), where=inside)
        between = x[left] + (x[right] - x[left]) * np.minimum(along, 1.0)
        beyond = np.divide(t - b, a, out=np.full(len(t), np.inf), where=a > 0)
        return np.asarray(np.where(high == 0, x[0], np.where(inside, between, beyond)))

    # -- placement ----------------------------------------------------------------------------------------

    def seen(self, after: float | None) -> tuple[float, float]:
        """Returns the lateness of an execution, and the share of late events that it saw.

        ``after``: its lateness, or None for the on-time execution. That one saw no late event, another one those until
        it.
        """
        return (0.0, 0.0) if after is None else (after, self.at(after))

    def place(self, after: float | None, bound: float, at_most: int) -> tuple[list[float], list[float]]:
        """Place executions after ``after`` (see :meth:`seen`), each as late as the staleness ``bound`` allows.

        Returns the lateness and the share of each. Stops after the last late event, or after ``at_most`` executions.
        """
        x, f = self._x, self._f
        last = len(x) - 1
        at, by = self.seen(after)
        low = 0 if after is None else bisect_right(x, at) - 1
        times: list[float] = []
        shares: list[float] = []
        while len(times) < at_most and low < last and by < 1.0:
            # Find the last knot at which staleness is within the bound; it only grows from here on.
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
                # On a linear piece staleness is quadratic: a u² + b u = rest, with u from 0 to 1 along the piece.
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
