"""Partials that hold values of a column: all of them, the distinct ones, or the k best. Pure.

A holistic function needs all values, so its partial is a list of the column's values for each key and slice. All
windows and functions share this list. It is smaller than events as rows, because key, time and other columns are not
repeated for each value. A block may have such columns besides partials of a fixed size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aion.aggregates.groups import Digit, Groups, encode, pack
from aion.aggregates.partial import Done, Partial, Rows, States
from aion.aggregates.values import Ints, combined, one_zero, orderable


def lists_of(groups: Groups, values: pa.Array) -> pa.ListArray:
    """Returns the values of each group as a list, in the order of the rows."""
    values = values if groups.are_sorted else values.take(pa.array(groups.order))
    return pa.ListArray.from_arrays(pa.array(groups.offsets, pa.int32()), values)


def joined(groups: Groups, lists: pa.ListArray) -> pa.ListArray:
    """Returns, for each group, its lists joined to one."""
    lengths = lengths_of(lists)
    if not groups.are_sorted:
        lists = lists.take(pa.array(groups.order))
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths[groups.order])))
    return pa.ListArray.from_arrays(pa.array(ends[groups.offsets], pa.int32()), combined(lists.flatten()))


def lengths_of(lists: pa.ListArray) -> Ints:
    lengths: Ints = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def offsets_of(lists: pa.ListArray) -> Ints:
    """Returns the positions among all values at which the lists begin, and the end of the last list."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths_of(lists))))


def flat_groups(groups: Groups, lists: pa.ListArray) -> Groups:
    """Returns the groups of the single values. ``groups``: those of the lists."""
    return Groups(np.repeat(groups.ids, lengths_of(lists)), groups.count)


def each_list(lists: pa.ListArray) -> Groups:
    """Returns groups of the single values, with each list as a group."""
    return Groups(np.repeat(np.arange(len(lists)), lengths_of(lists)), len(lists))


# -- all values -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Values(Partial):
    """All non-null values of a column, in the order of arrival."""

    column: str
    type: pa.DataType
    holistic = True
    commutative = False

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (pa.list_(self.type),)

    def lift(self, rows: Rows, done: Done) -> States:
        kept = rows.present(self.column)
        return [lists_of(kept.groups, kept.values[0])]

    def combine(self, groups: Groups, old: Mapping[Partial, States], done: Done) -> States:
        return [joined(groups, old[self][0])]


# -- distinct values --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distinct(Partial):
    """The distinct values of a column, or of combinations of columns. Rows with a null in any of them do not count.

    Values are compared as in Spark: all NaNs are equal, and 0.0 equals -0.0. Several columns are lists of equal length.
    """

    names: tuple[str, ...]
    value_types: tuple[pa.DataType, ...]
    holistic = True

    @property
    def columns(self) -> tuple[str, ...]:
        return self.names

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return tuple(pa.list_(type_) for type_ in self.value_types)

    def lift(self, rows: Rows, done: Done) -> States:
        kept = rows.present(*self.names)
        return distinct(kept.groups, kept.values)

    def combine(self, groups: Groups, old: Mapping[Partial, States], done: Done) -> States:
        lists = old[self]
        return distinct(flat_groups(groups, lists[0]), [combined(column.flatten()) for column in lists])

    def from_values(self, values: States) -> States:
        """Returns the distinct values in a state of :class:`Values`."""
        return distinct(each_list(values[0]), [combined(values[0].flatten())])


def distinct(groups: Groups, columns: list[pa.Array]) -> States:
    """Returns, for each column, the values of each group's distinct rows. The columns have no nulls."""
    encoded = [encode(one_zero(column)) for column in columns]
    _, (ids, *codes) = pack([Digit(groups.ids, max(groups.count, 1)), *(part for part, _ in encoded)])
    found = Groups(ids, groups.count)
    return [lists_of(found, decode(c)) for (_, decode), c in zip(encoded, codes, strict=True)]


# -- the k best -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Best(Partial):
    """The ``value`` of the ``k`` rows with the largest (or smallest) ``order``, the best first.

    Of rows with equal order, the first to arrive is better. Rows whose order is null do not count. ``value`` and
    ``order`` may be the same column.
    """

    value: str
    value_type: pa.DataType
    order: str
    order_type: pa.DataType
    k: int
    largest: bool
    commutative = False

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.order, self.value)))

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        types = (pa.list_(self.order_type), pa.list_(self.value_type))
        return types if self.order != self.value else types[:1]

    def lift(self, rows: Rows, done: Done) -> States:
        kept = rows.present(self.order)
        columns = kept.values
        if self.value != self.order:
            value = rows.array(self.value)
            columns = [*columns, value if kept.mask is None else value.filter(pa.array(kept.mask))]
        return self._best(kept.groups, columns)

    def combine(self, groups: Groups, old: Mapping[Partial, States], done: Done) -> States:
        lists = old[self]
        return self._best(flat_groups(groups, lists[0]), [combined(column.flatten()) for column in lists])

    def _best(self, groups: Groups, columns: list[pa.Array]) -> States:
        order = orderable(columns[0])
        order = np.argsort(~order if self.largest else order, kind="stable")  # ~ reverses the order of integers
        by_group = order[groups.select(order).order]
        kept = by_group[np.arange(len(by_group)) - groups.offsets[groups.ids[by_group]] < self.k]
        found = groups.select(kept)
        return [lists_of(found, column.take(pa.array(kept))) for column in columns]

    def spec(self) -> list[Any]:
        return [*super().spec(), self.k, self.largest]
