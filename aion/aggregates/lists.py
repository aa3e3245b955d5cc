"""Partials that hold values: all of a column's, its distinct ones, or the k best. Pure.

A holistic function needs its events, so those are its partial: a list of the column's values for each key and slice,
kept once however many windows and functions read it. That is smaller than events as rows (no key, time or other column
is repeated for each of them), and a call may mix such columns with partials of a fixed size: a block then has both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aion.aggregates.groups import Groups, Part, encode, pack
from aion.aggregates.partial import Done, Partial, Rows, States
from aion.aggregates.values import Ints, canonical, combined, orderable, to_doubles


def lists_of(groups: Groups, values: pa.Array) -> pa.ListArray:
    """The values of each group, in their order."""
    values = values if groups.are_sorted else values.take(pa.array(groups.order))
    return pa.ListArray.from_arrays(pa.array(groups.offsets, pa.int32()), values)


def joined(groups: Groups, lists: pa.ListArray) -> pa.ListArray:
    """The lists of each group, one after the other."""
    lengths = lengths_of(lists)
    if not groups.are_sorted:
        lists = lists.take(pa.array(groups.order))
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths[groups.order])))
    return pa.ListArray.from_arrays(pa.array(ends[groups.offsets], pa.int32()), combined(lists.flatten()))


def lengths_of(lists: pa.ListArray) -> Ints:
    lengths: Ints = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths


def offsets_of(lists: pa.ListArray) -> Ints:
    """Where each list begins among the values of all, and where the last one ends."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths_of(lists))))


def flat_groups(groups: Groups, lists: pa.ListArray) -> Groups:
    """The groups of the single values, in lists that are in groups themselves."""
    return Groups(np.repeat(groups.ids, lengths_of(lists)), groups.count)


def each_list(lists: pa.ListArray) -> Groups:
    """The single values, each list being a group."""
    return Groups(np.repeat(np.arange(len(lists)), lengths_of(lists)), len(lists))


# -- all values -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Values(Partial):
    """All values of a column that are not null, in the order of arrival."""

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
        there = rows.present(self.column)
        return [lists_of(there.groups, there.values[0])]

    def combine(self, groups: Groups, old: Mapping[Partial, States], done: Done) -> States:
        return [joined(groups, old[self][0])]


# -- distinct values --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Distinct(Partial):
    """The distinct values of a column, or of several together; rows with a null in any of them do not count.

    Values are told apart as in Spark: one NaN, one zero. Several columns are lists of equal length.
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
        there = rows.present(*self.names)
        return distinct(there.groups, there.values)

    def combine(self, groups: Groups, old: Mapping[Partial, States], done: Done) -> States:
        lists = old[self]
        return distinct(flat_groups(groups, lists[0]), [combined(column.flatten()) for column in lists])

    def of_all(self, values: States) -> States:
        """The same of the :class:`Values` of the column."""
        return distinct(each_list(values[0]), [combined(values[0].flatten())])


def distinct(groups: Groups, columns: list[pa.Array]) -> States:
    """For each column the values of each group's distinct rows, none of them null."""
    encoded = [encode(one_zero(column)) for column in columns]
    _, (ids, *codes) = pack([Part(groups.ids, max(groups.count, 1)), *(part for part, _ in encoded)])
    found = Groups(ids, groups.count)
    return [lists_of(found, decode(c)) for (_, decode), c in zip(encoded, codes, strict=True)]


def one_zero(values: pa.Array) -> pa.Array:
    """Doubles with one zero and one NaN; anything else as it is."""
    if not pa.types.is_floating(values.type):
        return values
    return pa.array(canonical(to_doubles(values)), from_pandas=False).cast(values.type)


# -- the k best -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Best(Partial):
    """The ``value`` of the ``k`` rows with the largest (or smallest) ``order``, the best first.

    Of equal ones the first to arrive is better. Rows whose order is null do not count. ``value`` may be the order.
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
        there = rows.present(self.order)
        columns = there.values
        if self.value != self.order:
            value = rows.array(self.value)
            columns = [*columns, value if there.mask is None else value.filter(pa.array(there.mask))]
        return self._best(there.groups, columns)

    def combine(self, groups: Groups, old: Mapping[Partial, States], done: Done) -> States:
        lists = old[self]
        return self._best(flat_groups(groups, lists[0]), [combined(column.flatten()) for column in lists])

    def _best(self, groups: Groups, columns: list[pa.Array]) -> States:
        order = orderable(columns[0])
        order = np.argsort(~order if self.largest else order, kind="stable")  # ~ turns the order of integers round
        by_group = order[groups.of(order).order]
        kept = by_group[np.arange(len(by_group)) - groups.offsets[groups.ids[by_group]] < self.k]
        found = groups.of(kept)
        return [lists_of(found, column.take(pa.array(kept))) for column in columns]

    def spec(self) -> list[Any]:
        return [*super().spec(), self.k, self.largest]
