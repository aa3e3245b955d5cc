"""Partials that pick the value of one row of each group: first, last, min_by, max_by. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aion.aggregates.groups import Groups
from aion.aggregates.partial import Done, Partial, Rows, States, extremes, present
from aion.aggregates.values import Ints, as_integers, orderable, ordered_doubles, to_doubles

# The time of events without a time. It is before all others, so such events come first.
_NO_TIME = -(2**63)


@dataclass(frozen=True)
class Picked(Partial):
    """The ``value`` of the row with the smallest or largest ``order``. Of several, the first or last to arrive.

    Rows whose order is null do not count. With ``skip_nulls``, rows whose value is null do not count either. The state
    is the order (null if no row counts) and the value. ``is_time``: the order is the event time.
    """

    value: str
    value_type: pa.DataType
    order: str
    order_type: pa.DataType
    largest: bool
    last: bool
    is_time: bool = False
    skip_nulls: bool = False
    commutative = False

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.value, self.order)

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (_kept_type(self.order_type), self.value_type)

    def lift(self, rows: Rows, done: Done) -> States:
        groups, order, value = rows.groups, rows.array(self.order), rows.array(self.value)
        if self.is_time:
            order = order.cast(pa.int64()).fill_null(_NO_TIME)
        if self.skip_nulls:
            groups, (value, order), _ = present(groups, value, order)
        groups, (order, value), _ = present(groups, order, value)
        return self._pick(groups, _kept(order), value)

    def combine(self, groups: Groups, old: Mapping[Partial, States], done: Done) -> States:
        groups, (order, value), _ = present(groups, *old[self])
        return self._pick(groups, order, value)

    def _pick(self, groups: Groups, order: pa.Array, value: pa.Array) -> States:
        best = extremes(groups, order, largest=self.largest)
        at = pa.array(_rows_of(groups, order, best, last=self.last))
        at = pc.if_else(pc.less(at, 0), None, at)
        return [best, value.take(at)]

    def spec(self) -> list[Any]:
        return [*super().spec(), self.largest, self.last, self.skip_nulls]


def _rows_of(groups: Groups, order: pa.Array, best: pa.Array, *, last: bool) -> Ints:
    """Returns the first or last row of each group whose order equals the group's best; -1 for an empty group."""
    integers = as_integers(order)
    if pa.types.is_struct(order.type):
        codes = orderable(pa.concat_arrays([order, best.drop_null()]))
        of_group = np.full(groups.count, -1, np.int64)
        of_group[best.is_valid().to_numpy(zero_copy_only=False)] = codes[len(order) :]
        hits = codes[: len(order)] == of_group[groups.ids]
    elif integers is None:
        # As codes: a group's best string, which may be long, must not be copied for each of its rows.
        both = pa.concat_arrays([order, best]).dictionary_encode(null_encoding="encode").indices.to_numpy()
        hits = both[: len(order)] == both[len(order) :][groups.ids]
    else:
        bests = as_integers(best.fill_null(pa.scalar(0).cast(best.type)) if best.null_count else best)
        assert bests is not None
        hits = integers == bests[groups.ids]
    rows = np.flatnonzero(hits)
    found = np.full(groups.count, -1, np.int64)
    # If several values are assigned to one place, numpy keeps the last.
    rows = rows if last else rows[::-1]
    found[groups.ids[rows]] = rows
    return found


def _kept_type(type_: pa.DataType) -> pa.DataType:
    t = pa.types
    inside = t.is_floating(type_) or (t.is_temporal(type_) and not t.is_interval(type_))
    return pa.int64() if inside else type_


def _kept(order: pa.Array) -> pa.Array:
    """Returns the order in its stored form: doubles and times become integers with the same order."""
    if pa.types.is_floating(order.type):
        return pa.array(ordered_doubles(to_doubles(order)))
    if _kept_type(order.type) == order.type:
        return order
    integers = as_integers(order)
    return pa.array(integers)
