"""Rows numbered by their group, and grouped reductions over such numbers. Pure.

Groups are numbered densely from 0, so a grouped count, sum or extreme is one numpy pass into an array with a slot
for each group. Keys are hashed once, however many aggregates there are.
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

_I64_MAX = 2**63 - 1
# A table of all codes that could occur is cheaper than hashing, as long as it is not much longer than the rows.
_TABLE_PER_ROW = 4
_TABLE_LEAST = 1 << 12


class Groups:
    """Rows in ``count`` groups: ``ids[i]`` is the group of row i. A group may be empty."""

    def __init__(self, ids: Ints, count: int) -> None:
        self.ids = ids
        self.count = count

    @cached_property
    def counts(self) -> Ints:
        """Rows of each group."""
        return np.bincount(self.ids, minlength=self.count)

    @cached_property
    def most(self) -> int:
        """Rows of the largest group."""
        return int(self.counts.max()) if self.count else 0

    @cached_property
    def there(self) -> Mask | None:
        """Which groups have any row; None: all of them."""
        found = self.counts > 0
        return None if bool(found.all()) else found

    @cached_property
    def are_sorted(self) -> bool:
        return bool((self.ids[1:] >= self.ids[:-1]).all())

    @cached_property
    def order(self) -> Ints:
        """The rows by group; those of a group in their own order."""
        return np.arange(len(self.ids)) if self.are_sorted else stable_order(self.ids, self.count)

    @cached_property
    def offsets(self) -> Ints:
        """Where each group begins in ``order``, and where the last one ends."""
        return np.concatenate((np.zeros(1, np.int64), np.cumsum(self.counts)))

    def of(self, rows: Any) -> Groups:
        """Some of the rows, chosen by a mask or by their numbers, in the same groups."""
        return Groups(self.ids[rows], self.count)


class Numbered(Groups):
    """Groups of rows with equal keys; ``keys`` has a column for each key column and a row for each group."""

    def __init__(self, ids: Ints, count: int, keys: list[pa.Array]) -> None:
        super().__init__(ids, count)
        self.keys = keys


class Part(NamedTuple):
    """One column of a composite code: values from 0 to ``size``, exclusive, which is at least 1."""

    codes: npt.NDArray[Any]
    size: int


class Coded:
    """A column that is coded already: row i holds ``values[codes[i]]``; there may be values that no row holds."""

    def __init__(self, codes: npt.NDArray[Any], values: pa.Array) -> None:
        self.codes, self.values = codes, values

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice) -> Coded:
        return Coded(self.codes[rows], self.values)


def number(columns: Sequence[pa.Array | Coded], rows: int) -> Numbered:
    """Numbers the rows by the values of all columns, nulls being one; without any column they are one group."""
    if not columns:
        return Numbered(np.zeros(rows, np.int64), min(rows, 1), [])
    encoded = [encode(column) for column in columns]
    groups, codes = pack([part for part, _ in encoded])
    numbered = Numbered(groups.ids, groups.count, [decode(c) for (_, decode), c in zip(encoded, codes, strict=True)])
    numbered.counts = groups.counts
    return numbered


def number_coded(column: Coded) -> Numbered:
    """Numbers the rows by the codes that they have, so that groups may be empty: for codes that are few."""
    count = len(column.values)
    return Numbered(column.codes, count, [column.values])


def encode(column: pa.Array | Coded) -> tuple[Part, Callable[[Ints], pa.Array]]:
    """A column's values as codes, and the way back."""
    if isinstance(column, Coded):
        values = column.values
        return Part(column.codes, max(len(values), 1)), lambda codes: values.take(pa.array(codes))
    integers = None if column.null_count or not len(column) else as_integers(column)
    if integers is not None and (found := _as_steps(integers)) is not None:
        part, low, step = found
        return part, lambda codes: from_integers(pa.array(codes * step + low), column.type)
    encoded = column.dictionary_encode(null_encoding="encode")
    part = Part(encoded.indices.to_numpy(zero_copy_only=False), max(len(encoded.dictionary), 1))
    return part, lambda codes: encoded.dictionary.take(pa.array(codes))


def _as_steps(integers: Ints) -> tuple[Part, int, int] | None:
    """Integers that lie close together, or as multiples of a step (as slices do), need not be hashed.

    Returns the codes, the lowest value, and the step; None for integers that are too far apart.
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
    return Part(codes, span // step + 1), low, step


def pack(parts: Sequence[Part]) -> tuple[Groups, list[Ints]]:
    """Groups of rows that agree in all parts, and for each part the code of each group.

    Groups come in the order of the first part, then of the second, ... unless there are so many codes that they have
    to be hashed.
    """
    codes, total = parts[0].codes.astype(np.int64, copy=False), parts[0].size
    # What the leading digit of a code stands for, once several parts have been made into one.
    known: list[Ints] | None = None
    digits: list[int] = []
    for number_of_part, part in enumerate(parts[1:], 1):
        if total > _I64_MAX // part.size:  # or codes would wrap around and meet
            groups, present = _compact(codes, total)
            known = _unpacked(present, digits, known)
            assert len(known) == number_of_part
            codes, total, digits = groups.ids, groups.count, []
        codes = codes * part.size
        codes += part.codes
        total *= part.size
        digits.append(part.size)
    groups, present = _compact(codes, total)
    return groups, _unpacked(present, digits, known)


def _unpacked(present: Ints, digits: list[int], known: list[Ints] | None) -> list[Ints]:
    trailing: list[Ints] = []
    for size in reversed(digits):
        present, digit = np.divmod(present, size)
        trailing.append(digit)
    leading = [present] if known is None else [column[present] for column in known]
    return leading + trailing[::-1]


def _compact(codes: Ints, total: int) -> tuple[Groups, Ints]:
    """Groups of equal codes, which are below ``total``; and the code of each."""
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
    """The rows by id, equal ones in their own order: numpy sorts 16 bits at a time by radix, in linear time."""
    order: Ints = np.argsort((ids & 0xFFFF).astype(np.uint16), kind="stable")
    shift = 16
    while count > 1 << shift:
        digit = (ids >> shift & 0xFFFF).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
        shift += 16
    return order


def total_by_group(groups: Groups, values: Ints) -> Ints:
    """Sums of integers that cannot overflow."""
    totals = np.zeros(groups.count, np.int64)
    np.add.at(totals, groups.ids, values)
    return totals
