"""Sums of doubles with twice the precision of a double, equal for every order and every split. Pure, vectorised.

A sum is a pair of doubles, ``high + low``, exact to about 106 bits ("double-double"; T. J. Dekker 1971; M. Joldes,
J.-M. Muller, V. Popescu 2017, algorithms 4 and 6). Kahan and Neumaier carry a compensation from value to value, which
cannot be vectorised. Here, values are cut into slabs of so few bits that the slabs of a group add up without rounding
(S. M. Rump, T. Ogita, S. Oishi 2008, ExtractVector). Ordinary data needs two or three slabs. Only values that have bits
left go through another one.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from aion.aggregates.groups import Groups
from aion.aggregates.values import Doubles
from state_backends.thresholds import threshold

Pair: TypeAlias = tuple[Doubles, Doubles]

# Above this, a slab's unit could overflow. Larger values are scaled down and then added. They lose no bits by that.
_LARGE = 2.0**900
_SCALE = 2.0**-200
# A pair has 106 bits. Four are left because slabs may be twice as large as the sum, and either part may be rounded up.
_EXACT_BITS = 102
# If groups are sorted and have at least this many rows on average, it is faster to add each group as one run of rows.
_LONG_RUN = threshold(256, 2)


def sum_by_group(groups: Groups, values: Doubles, largest: float | None = None) -> Pair:
    """Returns the sum of each group as (high, low), 0 for an empty group. Infinities and NaN add up as in IEEE 754.

    ``largest``: the :func:`magnitude` of the values, if already computed.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if not len(values):
            return np.zeros(groups.count), np.zeros(groups.count)
        if largest is None:
            largest = magnitude(values)
        if largest <= _LARGE:
            return _sum(groups, values, largest)
        return _sum_with_extremes(groups, values)


def magnitude(values: Doubles) -> float:
    """Returns the largest absolute value. NaN if a value is NaN, and 0 without values."""
    return float(np.maximum(values.max(), -values.min())) if len(values) else 0.0


def sums_are_exact(values: Doubles, most: int) -> bool:
    """Returns whether a pair holds every sum of up to ``most`` of the values, and every intermediate sum, without
    rounding.

    All values are multiples of the lowest bit that is set in any of them, and so are their sums. If a sum has at most
    _EXACT_BITS above that bit, its low part is less than 2**53 such multiples, so each addition in :func:`add_double`
    is exact. Infinities and NaN are ignored: a sum that contains one does not depend on the order.
    """
    mantissas, exponents = np.frexp(values[np.isfinite(values) & (values != 0)])
    if not len(mantissas):
        return True
    bits = np.ldexp(mantissas, 53).astype(np.int64)
    lowest = int((exponents - 53 + np.frexp((bits & -bits).astype(np.float64))[1]).min()) - 1
    highest = int(exponents.max()) + int(most).bit_length()
    return highest - lowest <= _EXACT_BITS and float(np.ldexp(1.0, min(highest, 1023))) <= _LARGE


def add_by_group(groups: Groups, values: Doubles) -> Doubles:
    """Returns the plain sum of each group, 0 for an empty one. numpy chooses the order of the additions."""
    sums = np.zeros(groups.count)
    with np.errstate(over="ignore", invalid="ignore"):
        if len(values) > _LONG_RUN * groups.count and groups.are_sorted:
            some = np.flatnonzero(groups.counts)
            sums[some] = np.add.reduceat(values, groups.offsets[some]) if len(some) else 0.0
        else:
            np.add.at(sums, groups.ids, values)
    return sums


def _sum(groups: Groups, values: Doubles, largest: float) -> Pair:
    high: Doubles | None = None
    low = np.zeros(groups.count)
    # 2**spare exceeds the rows of any group. So slabs with ``spare`` bits less than a double add up without overflow.
    spare = int(groups.most + 2).bit_length()
    unit = float(np.ldexp(1.0, int(np.frexp(largest)[1]) + spare))
    while True:
        slab = values + unit
        slab -= unit
        sums = add_by_group(groups, slab)
        if high is None:
            high = sums
        else:
            high, low = add_double(high, low, sums)
        rest = np.subtract(values, slab, out=slab)
        left = np.count_nonzero(rest)
        if not left:
            return high, low
        if 2 * left < len(rest):
            rows = np.flatnonzero(rest)
            rest, groups = rest[rows], groups.select(rows)
        values, unit = rest, unit * 2.0 ** (spare - 53)


def _sum_with_extremes(groups: Groups, values: Doubles) -> Pair:
    """Does what :func:`_sum` does, but very large values are scaled down first, and infinities and NaN are added
    separately.
    """
    finite = np.isfinite(values)
    large = finite & (np.abs(values) > _LARGE)
    small = finite & ~large
    high, low = sum_by_group(groups.select(small), values[small])
    if large.any():
        scaled = values[large] * _SCALE
        more = _sum(groups.select(large), scaled, float(np.abs(scaled).max()))
        more = more[0] / _SCALE, more[1] / _SCALE
        together = add_pairs((high, low), more)
        fits = np.isfinite(together[0])
        high, low = np.where(fits, together[0], high + more[0]), np.where(fits, together[1], 0.0)
    special = groups.select(~finite)
    high = np.where(special.counts > 0, add_by_group(special, values[~finite]), high)
    return high, np.where(np.isfinite(high), low, 0.0)


@np.errstate(over="ignore", invalid="ignore")
def add_double(high: Doubles, low: Doubles, other: Doubles) -> Pair:
    """Pair plus double, with a relative error of at most 2**-105 (Joldes et al., algorithm 4)."""
    total, error = _two_sum(high, other)
    return _fast_two_sum(total, low + error)


@np.errstate(over="ignore", invalid="ignore")
def add_pairs(a: Pair, b: Pair) -> Pair:
    """Pair plus pair. If the signs agree, the relative error is at most 2**-104 (Joldes et al., algorithm 6)."""
    high, error = _two_sum(a[0], b[0])
    low, rest = _two_sum(a[1], b[1])
    high, error = _fast_two_sum(high, error + low)
    return _fast_two_sum(high, rest + error)


@np.errstate(over="ignore", invalid="ignore")
def divided(a: Pair, by: Doubles) -> Pair:
    """Pair divided by integers below 2**53, with a relative error of about 2**-100."""
    quotient = a[0] / by
    product, error = _two_product(quotient, by)
    high, low = _fast_two_sum(quotient, ((a[0] - product) - error + a[1]) / by)
    fits = np.isfinite(low)
    return np.where(fits, high, quotient), np.where(fits, low, 0.0)


def _two_sum(a: Doubles, b: Doubles) -> Pair:
    total = a + b
    virtual = total - a
    return total, (a - (total - virtual)) + (b - virtual)


def _fast_two_sum(a: Doubles, b: Doubles) -> Pair:
    total = a + b
    return total, b - (total - a)


def _two_product(a: Doubles, b: Doubles) -> Pair:
    """Returns the product and its rounding error, by Dekker's splitting of both factors."""
    product = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return product, a2 * b2 - (((product - a1 * b1) - a2 * b1) - a1 * b2)


def _halves(a: Doubles) -> Pair:
    scaled = a * (2.0**27 + 1)
    high = scaled - (scaled - a)
    return high, a - high
