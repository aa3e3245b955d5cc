"""Variance: sums of squared deviations from the mean, merged by Chan's rule. Pure.

A batch is lifted in two passes: sums, then squared distances from the group's mean, with a correction for the rounding
of the mean (T. F. Chan, G. H. Golub, R. J. LeVeque 1983, "corrected two-pass"). Partials are merged by the pairwise
rule of the same paper, for any number of partials at once: the squares are added, and for each partial
``n (mean - common mean)^2``. All terms are positive, and the means come from sums with twice the precision of a double.
So there is no cancellation, however far the values are from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from aion.aggregates.doubled import Pair, add_by_group, divided
from aion.aggregates.groups import Groups
from aion.aggregates.partial import Counted, Done, Partial, Rows, States
from aion.aggregates.sums import DoubleSum
from aion.aggregates.values import Doubles, spread


@dataclass(frozen=True)
class SquaredDeviations(Partial):
    """The sum of the squared distances of a column's values from their mean; 0 without values."""

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
