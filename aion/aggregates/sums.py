"""Sums of integers (overflow is an error), of decimals, and of doubles with twice their precision; variance. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aion.aggregates.doubled import Pair, add_by_group, add_double, divided, sum_by_group, sums_are_exact
from aion.aggregates.groups import Groups, total_by_group
from aion.aggregates.partial import Counted, Done, Partial, Rows, States, by_kernel, present
from aion.aggregates.values import Doubles, Ints, Mask, spread, to_int64
from aion.errors import IntegerOverflow

_I64_MIN, _I64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True)
class _Sum(Partial):
    column: str
    invertible = True

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)


@dataclass(frozen=True)
class IntegerSum(_Sum):
    """The sum as a 64-bit integer; null without values. Raises IntegerOverflow."""

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (pa.int64(),)

    def lift(self, rows: Rows, done: Done) -> States:
        kept = rows.present(self.column)
        return [_integer_sums(kept.groups, to_int64(kept.values[0]))]

    def combine(self, groups: Groups, old: Mapping[Partial, States], done: Done) -> States:
        groups, values, _ = present(groups, *old[self])
        return [_integer_sums(groups, to_int64(values[0]))]


def _integer_sums(groups: Groups, values: Ints) -> pa.Array:
    if not len(values) or max(-int(values.min()), int(values.max())) * groups.most <= _I64_MAX:
        return spread(total_by_group(groups, values), groups.nonempty)
    # The sums may overflow, so the low and high halves of the numbers are added separately; these sums cannot.
    return joined(total_by_group(groups, values >> 32), total_by_group(groups, values & 0xFFFFFFFF), groups.nonempty)


def joined(high: Ints, low: Ints, valid: Mask | None) -> pa.Array:
    """Returns sums from those of the high and the low 32 bits of numbers. Raises IntegerOverflow."""
    high = high + (low >> 32)
    beyond = np.flatnonzero((high < -(2**31)) | (high >= 2**31))
    if len(beyond):
        total = (int(high[beyond[0]]) << 32) + (int(low[beyond[0]]) & 0xFFFFFFFF)
        raise IntegerOverflow(f"{total} does not fit into a bigint; cast the column to decimal or double")
    return spread((high << 32) | (low & 0xFFFFFFFF), valid)


@dataclass(frozen=True)
class DoubleSum(_Sum):
    """The sum as a pair of doubles: it is high plus low. ``high`` is null without values."""

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (pa.float64(), pa.float64())

    def lift(self, rows: Rows, done: Done) -> States:
        groups = rows.present(self.column).groups
        high, low = sum_by_group(groups, rows.doubles(self.column), rows.magnitude(self.column))
        return [spread(high, groups.nonempty), pa.array(low)]

    def combine(self, groups: Groups, old: Mapping[Partial, States], done: Done) -> States:
        groups, (highs, lows), _ = present(groups, *old[self])
        high, low = sum_by_group(groups, highs.to_numpy())
        low_values = lows.to_numpy()
        if low_values.any():
            # Plain addition of the low parts rounds, but the error is as small as the precision of a pair.
            total = add_double(high, low, add_by_group(groups, low_values))
            fits = np.isfinite(high)
            high, low = np.where(fits, total[0], high), np.where(fits, total[1], 0.0)
        return [spread(high, groups.nonempty), pa.array(low)]

    def is_exact_for(self, states: States, most: int) -> bool:
        """Returns True if every sum of the states fits into a pair: then no order of additions rounds."""
        high, low = (column.fill_null(0.0).to_numpy(zero_copy_only=False) for column in states)
        return sums_are_exact(np.concatenate((high, low)), most)


@dataclass(frozen=True)
class DecimalSum(_Sum):
    """The exact sum of decimals of up to 38 digits; null without values. Raises IntegerOverflow."""

    scale: int

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (pa.decimal128(38, self.scale),)

    def lift(self, rows: Rows, done: Done) -> States:
        kept = rows.present(self.column)
        return [self._sums(kept.groups, kept.values[0])]

    def combine(self, groups: Groups, old: Mapping[Partial, States], done: Done) -> States:
        groups, values, _ = present(groups, *old[self])
        return [self._sums(groups, values[0])]

    def _sums(self, groups: Groups, values: pa.Array) -> pa.Array:
        type_ = self.types[0]
        values = values.cast(type_)
        if not _may_overflow(values, groups.most):
            return by_kernel(groups, values, "sum")
        total = by_kernel(groups, values.cast(pa.decimal256(76, self.scale)), "sum")
        for value in pc.min_max(total).as_py().values():
            if value is not None and abs(_unscaled(value, self.scale)) >= 10**38:
                raise IntegerOverflow(f"{value} does not fit into {type_}; cast the column to double")
        return total.cast(type_)


def _may_overflow(values: pa.Array, most: int) -> bool:
    extremes = [abs(_unscaled(v, values.type.scale)) for v in pc.min_max(values).as_py().values() if v is not None]
    return max(extremes, default=0) * most >= 10**38


def _unscaled(value: Decimal, scale: int) -> int:
    """Returns a decimal's digits as an integer, without the decimal point."""
    with localcontext() as context:
        context.prec = 80
        return int(value.scaleb(scale))


# -- lower ------------------------------------------------------------------------------------------------


def lower_mean(total: States, n: States) -> pa.Array:
    return pc.divide(total[0], n[0].cast(pa.float64(), safe=False))


def decimal_sum_type(source: pa.Decimal128Type) -> pa.DataType:
    return pa.decimal128(min(source.precision + 10, 38), source.scale)


def decimal_mean_type(source: pa.Decimal128Type) -> pa.DataType:
    # Spark's DecimalType.bounded(p + 4, s + 4): each at most 38.
    return pa.decimal128(min(source.precision + 4, 38), min(source.scale + 4, 38))


def lower_decimal_sum(total: States, result: pa.DataType) -> pa.Array:
    try:
        return total[0].cast(result)
    except pa.ArrowInvalid:
        raise IntegerOverflow(f"a sum does not fit into {result}; cast the column to double") from None


def lower_decimal_mean(total: States, n: States, result: pa.Decimal128Type) -> pa.Array:
    # Computed with Python's decimals, one result per group, because Arrow's division has no rounding mode.
    step = Decimal(1).scaleb(-result.scale)
    with localcontext() as context:
        context.prec = 76
        values = [
            None if t is None or not c else (t / c).quantize(step, rounding=ROUND_HALF_UP)
            for t, c in zip(total[0].to_pylist(), n[0].to_pylist(), strict=True)
        ]
    try:
        return pa.array(values, result)
    except pa.ArrowInvalid:
        raise IntegerOverflow(f"a mean does not fit into {result}; cast the column to double") from None


def plain(values: Any) -> pa.Array:
    """Lowers a state whose single column is already the result."""
    return values[0]


@dataclass(frozen=True)
class SquaredDeviations(Partial):
    """The sum of the squared distances of a column's values from their mean; 0 without values.

    A batch is lifted in two passes: sums, then squared distances from the group's mean, with a correction for the
    rounding of the mean (T. F. Chan, G. H. Golub, R. J. LeVeque 1983, "corrected two-pass"). Partials are merged by the
    pairwise rule of the same paper, for any number of partials at once: the squares are added, and for each partial
    ``n (mean - common mean)^2``. All terms are positive, and the means come from sums with twice the precision of a
    double. So there is no cancellation, however far the values are from 0.
    """

    column: str
    invertible = True
    exact = False  # each merge rounds

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (pa.float64(),)

    @property
    def needs(self) -> tuple[Partial, ...]:
        return (DoubleSum(self.column), Counted(self.column))

    def entered(self, states: Mapping[Partial, States]) -> pa.Array:
        return states[self.needs[1]][0]

    def lift(self, rows: Rows, done: Done) -> States:
        groups = rows.present(self.column).groups
        n = np.maximum(groups.counts, 1)
        with np.errstate(invalid="ignore", over="ignore"):
            means = _doubles(done[self.needs[0]][0]) / n
            distances = rows.doubles(self.column) - means[groups.ids]
            error = add_by_group(groups, distances)
            distances *= distances
            squares = add_by_group(groups, distances)
            # Squares that are too large for a double stay infinite: the square of their error may be so, too.
            corrected = np.where(np.isinf(squares), squares, squares - error * (error / n))
            return [pa.array(_at_least_0(corrected))]

    def combine(self, groups: Groups, old: Mapping[Partial, States], done: Done) -> States:
        sums, counted = self.needs
        common = _means(done[sums], done[counted])
        n = _doubles(old[counted][0])
        means = _means(old[sums], old[counted])
        with np.errstate(invalid="ignore", over="ignore"):
            distances = (means[0] - common[0][groups.ids]) + (means[1] - common[1][groups.ids])
            terms = _doubles(old[self][0]) + np.where(n == 0, 0.0, n * distances * distances)
            return [pa.array(add_by_group(groups, terms))]


def _means(sums: States, counts: States) -> Pair:
    n = np.maximum(_doubles(counts[0]), 1.0)
    return divided((_doubles(sums[0]), _doubles(sums[1])), n)


def _doubles(values: pa.Array) -> Doubles:
    values = values.cast(pa.float64(), safe=False)
    found: Doubles = (values.fill_null(0.0) if values.null_count else values).to_numpy(zero_copy_only=False)
    return found


def _at_least_0(squares: Doubles) -> Doubles:
    return np.where(squares < 0, 0.0, squares)


def lower_variance(squares: States, counts: States, *, sample: bool, root: bool) -> pa.Array:
    """Returns the variance, divided by n - 1 (``sample``; null for a single value) or by n. ``root``: its square
    root.
    """
    n = counts[0].to_numpy() - sample
    with np.errstate(invalid="ignore"):
        result = squares[0].to_numpy() / np.maximum(n, 1)
        if root:
            result = np.sqrt(result)
    return spread(result, n > 0)
