"""Aggregates of many, overlapping ranges of one column at once. Pure.

Four ways, of which :func:`reduce_ranges` picks by what they cost: reduce each range by itself; prefix sums, where the
ufunc can be undone exactly; a sparse table, of which two entries cover any range where overlap does no harm, and
otherwise one for each binary digit of its length; a tree (FlatFAT, Scotty reference 9), whose nodes are twice the
column. :class:`RangeTree` is that tree, kept up to date instead of built for each question.

Floats are never summed by differences of prefixes: one large value, infinity or NaN would spoil all ranges behind it.
Sums come out of the table and the tree as by pairwise summation.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[Any]
Index = npt.NDArray[np.intp]

_I64 = np.iinfo(np.int64)
_TABLE_AT_MOST = 1 << 15
"""Longer columns make a table that leaves the cache; a tree is smaller."""


def identity(ufunc: np.ufunc, dtype: npt.DTypeLike) -> Any:
    """What changes nothing when ``np.add``, ``np.minimum`` or ``np.maximum`` combines it with an int64 or a double."""
    if ufunc is np.add:
        return 0
    if np.dtype(dtype).kind == "i":
        return _I64.max if ufunc is np.minimum else _I64.min
    return np.inf if ufunc is np.minimum else -np.inf


def running_max(values: Values) -> Values:
    """The maximum up to each place. What is sorted already, as most is, need not be gone through one by one."""
    return values if (values[1:] >= values[:-1]).all() else np.maximum.accumulate(values)


def reduce_ranges(ufunc: np.ufunc, values: Values, begins: Index, ends: Index) -> Values:
    """``ufunc`` over ``values[begin:end]`` for each range; none may be empty. Any order, any overlap.

    ``ufunc``: ``np.add``, ``np.minimum`` or ``np.maximum``. Integers wrap around where they overflow.
    """
    if not len(begins):
        return values[:0]
    low, high = int(begins.min()), int(ends.max())
    begins, ends, values = begins - low, ends - low, values[low:high]
    lengths = ends - begins
    longest = int(lengths.max())
    if longest == 1:
        return values[begins]
    # What reduceat does in vain: the stretches between one range and the next.
    between = np.maximum(begins[1:] - ends[:-1], 0)
    work = int(lengths.sum()) + int(between.sum())
    if work <= 8 * len(values) or work <= 1024 or values.dtype == object:
        return _each(ufunc, values, begins, ends)
    if ufunc is np.add and values.dtype.kind == "i":
        return _by_prefixes(values, begins, ends)
    if len(values) > _TABLE_AT_MOST:
        tree = RangeTree(ufunc, values.dtype)
        tree.write(0, values)
        return tree.ranges(begins, ends)
    return _by_table(ufunc, values, begins, ends, lengths, longest)


class RangeTree:
    """A tree over a growing column: range aggregates in O(log n), a change of m neighbours in O(m + log n).

    Leaves are written where the owner wants them. What lies beside a range never counts, whatever it is.
    """

    def __init__(self, ufunc: np.ufunc, dtype: npt.DTypeLike) -> None:
        self._ufunc = ufunc
        self._identity = identity(ufunc, dtype)
        self._levels = [np.full(2, self._identity, dtype)]

    def __len__(self) -> int:
        return len(self._levels[0]) - 1

    def write(self, begin: int, values: Values) -> None:
        """Sets the leaves from ``begin`` on, and all nodes above them."""
        end = begin + len(values)
        if end > len(self):
            self._grow(end)
        self._levels[0][begin:end] = values
        self._lift(begin, end)

    def ranges(self, begins: Index, ends: Index) -> Values:
        """The aggregate of the leaves ``[begin, end)`` of each range; none may be empty."""
        left, right = begins.copy(), ends.copy()
        result = np.full(len(begins), self._identity, self._levels[0].dtype)
        after = result.copy()
        for level in self._levels:
            nothing = len(level) - 1
            # A node that is a right child, or the last one a left child: its parent would reach beyond the range.
            open_ = left < right
            if not open_.any():
                break
            takes = open_ & ((left & 1) == 1)
            result = self._ufunc(result, level[np.where(takes, left, nothing)])
            left += takes
            takes = open_ & ((right & 1) == 1)
            right -= takes
            after = self._ufunc(level[np.where(takes, right, nothing)], after)
            left >>= 1
            right >>= 1
        return np.asarray(self._ufunc(result, after))

    def _grow(self, size: int) -> None:
        """To a power of two of leaves; each level has one more entry, which stays the identity."""
        leaves, capacity = self._levels[0][:-1], 1 << (size - 1).bit_length()
        self._levels = []
        while capacity:
            self._levels.append(np.full(capacity + 1, self._identity, leaves.dtype))
            capacity >>= 1
        self._levels[0][: len(leaves)] = leaves
        self._lift(0, len(leaves))

    def _lift(self, begin: int, end: int) -> None:
        for lower, upper in zip(self._levels, self._levels[1:], strict=False):
            begin, end = begin >> 1, (end + 1) >> 1
            self._ufunc(lower[2 * begin : 2 * end : 2], lower[2 * begin + 1 : 2 * end : 2], out=upper[begin:end])


def _each(ufunc: np.ufunc, values: Values, begins: Index, ends: Index) -> Values:
    bounds = np.empty(2 * len(begins), np.intp)
    bounds[0::2], bounds[1::2] = begins, ends
    # reduceat wants every bound to be a place; of the last one, only its being last matters.
    padded = np.append(values, values[:1])
    return np.asarray(ufunc.reduceat(padded, bounds)[0::2])


def _by_prefixes(values: Values, begins: Index, ends: Index) -> Values:
    sums = np.zeros(len(values) + 1, values.dtype)
    np.cumsum(values, out=sums[1:])
    return sums[ends] - sums[begins]


def _by_table(ufunc: np.ufunc, values: Values, begins: Index, ends: Index, lengths: Index, longest: int) -> Values:
    """Row k of the table holds the aggregates of the 2**k values from each place on."""
    levels = longest.bit_length()
    if ufunc is not np.add:
        table = np.empty((levels, len(values)), values.dtype)
        table[0] = values
        for k in range(1, levels):
            half = 1 << (k - 1)
            table[k, :-half] = ufunc(table[k - 1, :-half], table[k - 1, half:])
            table[k, -half:] = table[k - 1, -half:]
        k_of = np.frexp(lengths.astype(np.float64))[1] - 1
        return np.asarray(ufunc(table[k_of, begins], table[k_of, ends - (1 << k_of)]))
    result = np.zeros(len(begins), values.dtype)
    at, row = begins.copy(), values
    for k in range(levels):
        takers = np.flatnonzero(lengths & (1 << k))
        places = at[takers]
        result[takers] += row[places]
        at[takers] = places + (1 << k)
        half = 1 << k
        row = row[:-half] + row[half:] if len(row) > half else row[:0]
    return result
