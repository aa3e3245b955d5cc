"""Numbers rows by their group, for grouped reductions with numpy. Pure.

Groups are numbered densely from 0, so a grouped count, sum or extreme is one numpy pass into an array with a slot
for each group. Keys are hashed once for all aggregates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aion.aggregates.values import Ints, Mask, as_integers, from_integers
from state_backends.thresholds import threshold

_I64_MAX = 2**63 - 1
# A table of all possible codes is cheaper than hashing if it is not much longer than the number of rows.
_TABLE_PER_ROW = threshold(4, 1)
_TABLE_LEAST = threshold(1 << 12, 2)


class Groups:
    """Rows in ``count`` groups: ``ids[i]`` is the group of row i. A group may be empty."""

    def __init__(self, ids: Ints, count: int) -> None:
        self.ids = ids
        self.count = count

    @cached_property
    def counts(self) -> Ints:
        """The number of rows of each group."""
        return np.bincount(self.ids, minlength=self.count)

    @cached_property
    def most(self) -> int:
        """The number of rows of the largest group."""
        return int(self.counts.max()) if self.count else 0

    @cached_property
    def nonempty(self) -> Mask | None:
        """Which groups have a row; None if all have."""
        mask = self.counts > 0
        return None if bool(mask.all()) else mask

    @cached_property
    def are_sorted(self) -> bool:
        return bool((self.ids[1:] >= self.ids[:-1]).all())

    @cached_property
    def order(self) -> Ints:
        """The row numbers, sorted by group; rows of a group keep their order."""
        return np.arange(len(self.ids)) if self.are_sorted else stable_order(self.ids, self.count)

    @cached_property
    def offsets(self) -> Ints:
        """The positions in ``order`` at which the groups begin, and the end of the last group."""
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(self.counts)))

    def select(self, rows: Any) -> Groups:
        """Returns some of the rows, given as a mask or as row numbers, in the same groups."""
        return Groups(self.ids[rows], self.count)


class Numbered(Groups):
    """Groups of rows with equal keys. ``keys`` has a column for each key column, and a row for each group."""

    def __init__(self, ids: Ints, count: int, keys: list[pa.Array]) -> None:
        super().__init__(ids, count)
        self.keys = keys


class Digit(NamedTuple):
    """One column of a composite code: values from 0 to ``size``, exclusive. ``size`` is at least 1."""

    codes: npt.NDArray[Any]
    size: int


class Coded:
    """A column that is already encoded: row i has ``values[codes[i]]``. ``values`` may have entries without rows."""

    def __init__(self, codes: npt.NDArray[Any], values: pa.Array) -> None:
        self.codes, self.values = codes, values

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice) -> Coded:
        return Coded(self.codes[rows], self.values)


def number(columns: Sequence[pa.Array | Coded], rows: int) -> Numbered:
    """Numbers the rows by the values of all columns. All nulls are equal. Without columns, all rows are one group."""
    if not columns:
        return Numbered(np.zeros(rows, np.int64), min(rows, 1), [])
    encoded = [encode(column) for column in columns]
    groups, codes = pack([digit for digit, _ in encoded])
    numbered = Numbered(groups.ids, groups.count, [decode(c) for (_, decode), c in zip(encoded, codes, strict=True)])
    numbered.counts = groups.counts
    return numbered


def number_coded(column: Coded) -> Numbered:
    """Uses the codes of the rows as group numbers, so that groups may be empty. For columns with few codes."""
    count = len(column.values)
    return Numbered(column.codes, count, [column.values])


def encode(column: pa.Array | Coded) -> tuple[Digit, Callable[[Ints], pa.Array]]:
    """Returns a column's values as codes, and a function that turns codes back into values."""
    if isinstance(column, Coded):
        values = column.values
        return Digit(column.codes, max(len(values), 1)), lambda codes: values.take(pa.array(codes))
    integers = None if column.null_count or not len(column) else as_integers(column)
    if integers is not None and (found := _as_steps(integers)) is not None:
        digit, low, step = found
        return digit, lambda codes: from_integers(pa.array(codes * step + low), column.type)
    encoded = column.dictionary_encode(null_encoding="encode")
    digit = Digit(encoded.indices.to_numpy(zero_copy_only=False), max(len(encoded.dictionary), 1))
    return digit, lambda codes: encoded.dictionary.take(pa.array(codes))


def _as_steps(integers: Ints) -> tuple[Digit, int, int] | None:
    """Codes without hashing, for integers that are close together or are multiples of a step (as slices are).

    Returns the codes, the lowest value, and the step; None if the integers are too far apart.
    """
    low = int(integers.min())
    span, most, step = int(integers.max()) - low, max(len(integers), _TABLE_LEAST), 1
    if span > _I64_MAX:
        return None
    if span >= most:
        step = math.gcd(span, int(np.gcd.reduce(integers[:: len(integers) // 64 + 1] - low)))
        if span // step >= most:
            return None
    codes = integers - low
    if step > 1:
        codes //= step
        again = codes * step
        again += low
        if bool((again != integers).any()):
            return None
    return Digit(codes, span // step + 1), low, step


def pack(digits: Sequence[Digit]) -> tuple[Groups, list[Ints]]:
    """Returns groups of rows that are equal in all digits, and for each digit the code of each group.

    Groups are ordered by the first digit, then by the second, and so on. If there are too many codes for that, they are
    hashed, and groups come in no particular order.
    """
    codes, total = digits[0].codes.astype(np.int64, copy=False), digits[0].size
    # The codes of the digits so far that were compacted into the leading digit; None if none were.
    leading: list[Ints] | None = None
    sizes: list[int] = []
    for number_of_digit, digit in enumerate(digits[1:], 1):
        if total > _I64_MAX // digit.size:  # otherwise codes would overflow and collide
            groups, present = _compact(codes, total)
            leading = _unpacked(present, sizes, leading)
            assert len(leading) == number_of_digit
            codes, total, sizes = groups.ids, groups.count, []
        codes = codes * digit.size
        codes += digit.codes
        total *= digit.size
        sizes.append(digit.size)
    groups, present = _compact(codes, total)
    return groups, _unpacked(present, sizes, leading)


def _unpacked(present: Ints, sizes: list[int], leading: list[Ints] | None) -> list[Ints]:
    """Returns the codes of all digits. ``sizes``: the sizes of the trailing digits in ``present``."""
    trailing: list[Ints] = []
    for size in reversed(sizes):
        present, digit = np.divmod(present, size)
        trailing.append(digit)
    first = [present] if leading is None else [column[present] for column in leading]
    return first + trailing[::-1]


def _compact(codes: Ints, total: int) -> tuple[Groups, Ints]:
    """Returns groups of equal codes, and the code of each group. Codes are below ``total``."""
    if total <= max(_TABLE_PER_ROW * len(codes), _TABLE_LEAST):
        counts = np.bincount(codes, minlength=total)
        present = np.flatnonzero(counts)
        if len(present) == total:
            groups = Groups(codes, total)
        else:
            table = np.zeros(total, np.int64)
            table[present] = np.arange(len(present))
            groups = Groups(table[codes], len(present))
        groups.counts = counts[present]
        return groups, present
    encoded = pa.array(codes).dictionary_encode()
    present = encoded.dictionary.to_numpy()
    return Groups(encoded.indices.to_numpy().astype(np.int64), len(present)), present


def stable_order(ids: Ints, count: int) -> Ints:
    """Returns the row numbers sorted by id; equal ids keep their order. numpy's radix sort of 16 bits takes linear
    time.
    """
    order: Ints = np.argsort((ids & 0xFFFF).astype(np.uint16), kind="stable")
    shift = 16
    while count > 1 << shift:
        digit = (ids >> shift & 0xFFFF).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
        shift += 16
    return order


def total_by_group(groups: Groups, values: Ints) -> Ints:
    """Returns sums of integers that cannot overflow."""
    totals = np.zeros(groups.count, np.int64)
    np.add.at(totals, groups.ids, values)
    return totals
