"""Sums of doubles as if computed with twice the digits, in any order and any split. Pure, vectorised.

A sum is a pair ``high + low`` of doubles whose sum is exact to about 106 bits ("double-double"; T. J. Dekker 1971;
M. Joldes, J.-M. Muller, V. Popescu 2017, algorithms 4 and 6). Instead of carrying the compensation from value to value,
as Kahan and Neumaier do, which no vector unit can, values are cut into slabs of bits so few that the slabs of a
group add up without any rounding (S. M. Rump, T. Ogita, S. Oishi 2008, ExtractVector). Two or three slabs are all of
the bits of ordinary data; only values with bits left go through another one.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from aion.aggregates.groups import Groups
from aion.aggregates.values import Doubles

Pair: TypeAlias = tuple[Doubles, Doubles]

# Above this a slab's unit could overflow; what is beyond is added up scaled down, all of its bits being far from 0.
_LARGE = 2.0**900
_SCALE = 2.0**-200
# Of the 106 that a pair has; slabs may be twice as large as the sum, and either part rounded up.
_EXACT_BITS = 102
# Rows of one group in a row wait for one another; if they are this many, they are better added as a stretch.
_LONG_RUN = 256


def sum_by_group(groups: Groups, values: Doubles, largest: float | None = None) -> Pair:
    """The sum of each group, 0 for an empty one, as (high, low); infinities and NaN as IEEE 754 adds them.

    ``largest``: the :func:`magnitude` of the values, if it is known.
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
    """The largest of the absolute values; NaN if there is one among them, and 0 if there is none at all."""
    return float(np.maximum(values.max(), -values.min())) if len(values) else 0.0


def sums_are_exact(values: Doubles, most: int) -> bool:
    """Whether pairs hold all sums of up to ``most`` of the values, and of such sums, without any rounding.

    All values are multiples of the lowest bit that any of them has, and so is what additions make of them. As long as a
    sum has no more than _EXACT_BITS above that bit, its low part is such a multiple below 2**53 of them, so each double
    addition in :func:`add_double` is exact. Infinities and NaN do not count: they decide their sums in any order.
    """
    mantissas, exponents = np.frexp(values[np.isfinite(values) & (values != 0)])
    if not len(mantissas):
        return True
    bits = np.ldexp(mantissas, 53).astype(np.int64)
    lowest = int((exponents - 53 + np.frexp((bits & -bits).astype(np.float64))[1]).min()) - 1
    highest = int(exponents.max()) + int(most).bit_length()
    return highest - lowest <= _EXACT_BITS and float(np.ldexp(1.0, min(highest, 1023))) <= _LARGE


def add_by_group(groups: Groups, values: Doubles) -> Doubles:
    """The plain sum of each group, 0 for an empty one: in an order of numpy's own."""
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
    # 2**spare is more than the rows of any group, so a slab of that many bits less than a double has cannot carry out.
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
            rest, groups = rest[rows], groups.of(rows)
        values, unit = rest, unit * 2.0 ** (spare - 53)


def _sum_with_extremes(groups: Groups, values: Doubles) -> Pair:
    """Infinities and NaN decide their groups; very large values are added up scaled down."""
    finite = np.isfinite(values)
    large = finite & (np.abs(values) > _LARGE)
    small = finite & ~large
    high, low = sum_by_group(groups.of(small), values[small])
    if large.any():
        scaled = values[large] * _SCALE
        more = _sum(groups.of(large), scaled, float(np.abs(scaled).max()))
        more = more[0] / _SCALE, more[1] / _SCALE
        together = add_pairs((high, low), more)
        fits = np.isfinite(together[0])
        high, low = np.where(fits, together[0], high + more[0]), np.where(fits, together[1], 0.0)
    special = groups.of(~finite)
    high = np.where(special.counts > 0, add_by_group(special, values[~finite]), high)
    return high, np.where(np.isfinite(high), low, 0.0)


@np.errstate(over="ignore", invalid="ignore")
def add_double(high: Doubles, low: Doubles, other: Doubles) -> Pair:
    """Pair plus double, exact to 2**-105 of the result (Joldes et al., algorithm 4)."""
    total, error = _two_sum(high, other)
    return _fast_two_sum(total, low + error)


@np.errstate(over="ignore", invalid="ignore")
def add_pairs(a: Pair, b: Pair) -> Pair:
    """Pair plus pair, exact to 2**-104 of the result where the signs agree (Joldes et al., algorithm 6)."""
    high, error = _two_sum(a[0], b[0])
    low, rest = _two_sum(a[1], b[1])
    high, error = _fast_two_sum(high, error + low)
    return _fast_two_sum(high, rest + error)


@np.errstate(over="ignore", invalid="ignore")
def divided(a: Pair, by: Doubles) -> Pair:
    """Pair divided by integers below 2**53, exact to about 2**-100."""
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
    """The product and its rounding error, by Dekker's splitting of both factors."""
    product = a * b
    (a1, a2), (b1, b2) = _halves(a), _halves(b)
    return product, a2 * b2 - (((product - a1 * b1) - a2 * b1) - a1 * b2)


def _halves(a: Doubles) -> Pair:
    scaled = a * (2.0**27 + 1)
    high = scaled - (scaled - a)
    return high, a - high
