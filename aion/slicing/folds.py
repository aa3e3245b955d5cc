"""Aggregates as numpy knows them: one column of values, one ufunc that combines (Scotty section II). Pure.

``lift`` is the value itself, ``combine`` a ufunc, ``lower`` a function of the combined value and the number of events.
The number of events is kept in any case. Integers are 64 bits wide, and a sum that leaves them raises IntegerOverflow;
floats are doubles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.core.slicing.ranges import identity, reduce_ranges
from aion.errors import ConfigError, IntegerOverflow

Values = npt.NDArray[Any]
Index = npt.NDArray[np.intp]

_I64_MIN, _I64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True, slots=True)
class Fold:
    """An associative and commutative ufunc over a column of int64 or double; NaN makes NaN of what it is in.

    ``lower``: of the combined values and the numbers of events, both one per result; None: the combined value itself.
    """

    combine: np.ufunc
    lower: Callable[[Values, Values], Values] | None = None

    def __post_init__(self) -> None:
        if self.combine not in (np.add, np.minimum, np.maximum):
            raise ConfigError(f"a fold of {self.combine!r}: only np.add, np.minimum and np.maximum are known")

    def at(self, slots: Index, values: Values, size: int) -> Values:
        """The values of each of ``size`` slots combined; the identity where a slot has none."""
        if self.may_overflow(values):
            wide = np.full(size, 0, object)
            np.add.at(wide, slots, values.astype(object))
            return _narrow(wide)
        result = np.full(size, identity(self.combine, values.dtype), values.dtype)
        self.combine.at(result, slots, values)
        return result

    def stretches(self, values: Values, begins: Index) -> Values:
        """The values from each of the ascending ``begins`` up to the next combined, of the last one to the end."""
        if not len(begins):
            return values[:0]
        if self.may_overflow(values):
            return _narrow(np.add.reduceat(values.astype(object), begins))
        return self.combine.reduceat(values, begins)

    def ranges(self, values: Values, begins: Index, ends: Index) -> Values:
        """The values of each range ``[begin, end)`` combined; ranges may overlap, none may be empty."""
        if self.may_overflow(values):
            return _narrow(reduce_ranges(self.combine, values.astype(object), begins, ends))
        return reduce_ranges(self.combine, values, begins, ends)

    def may_overflow(self, values: Values) -> bool:
        """Whether the sum of all could leave 64 bits, judged by the extremes: cheap, and never wrong."""
        if self.combine is not np.add or values.dtype.kind != "i" or not len(values):
            return False
        return max(-int(values.min()), int(values.max())) * len(values) > _I64_MAX


def _mean(total: Values, events: Values) -> Values:
    return total / np.maximum(events, 1)


SUM = Fold(np.add)
MIN = Fold(np.minimum)
MAX = Fold(np.maximum)
MEAN = Fold(np.add, _mean)


def as_values(values: npt.ArrayLike) -> Values:
    """As int64 or double; raises ConfigError for what is neither, and IntegerOverflow for what does not fit."""
    array = np.asarray(values)
    if array.dtype.kind in "bi":
        return array.astype(np.int64, copy=False)
    if array.dtype.kind == "f":
        return array.astype(np.float64, copy=False)
    if array.dtype.kind == "u":
        if len(array) and int(array.max()) > _I64_MAX:
            raise IntegerOverflow(f"{array.max()} does not fit into 64 bits with a sign; cast the values to double")
        return array.astype(np.int64)
    raise ConfigError(f"values of type {array.dtype} cannot be folded; give integers or floats")


def _narrow(wide: Values) -> Values:
    for value in wide.tolist():
        if not _I64_MIN <= value <= _I64_MAX:
            raise IntegerOverflow(f"sum: {value} does not fit into 64 bits; cast the values to double")
    return wide.astype(np.int64)
