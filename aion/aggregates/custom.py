"""The user's own aggregate: three functions over Arrow arrays (Scotty section IV.B). Pure.

``lift`` maps each event to a partial. ``combine`` merges two arrays of partials, element by element. ``lower`` maps
partials to results. None of them sees groups. The rows of each group are merged as a balanced tree: one call for all
pairs of all groups on a level. So the number of calls is the logarithm of the size of the largest group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from aion.aggregates.groups import Groups
from aion.aggregates.partial import Done, Partial, Rows, States
from aion.aggregates.values import Ints, combined
from aion.errors import ApplyError

Function = Callable[..., Any]


@dataclass(frozen=True)
class Custom(Partial):
    """Partials made and merged by the user's functions."""

    name: str
    names: tuple[str, ...]
    schema: tuple[tuple[str, pa.DataType], ...]
    lift_function: Function
    combine_function: Function
    commutative: bool = False
    invertible: bool = False
    exact = False  # the function may round

    @property
    def columns(self) -> tuple[str, ...]:
        return self.names

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return tuple(type_ for _, type_ in self.schema)

    def lift(self, rows: Rows, done: Done) -> States:
        arrays = [rows.array(name) for name in self.names]
        lifted = call(f"{self.name}: lift", self.lift_function, arrays, self.types, len(rows.groups.ids))
        return self._merged(rows.groups, lifted)

    def combine(self, groups: Groups, old: Mapping[Partial, States], done: Done) -> States:
        return self._merged(groups, old[self])

    def _merged(self, groups: Groups, states: States) -> States:
        if not groups.are_sorted:
            states = _take(states, groups.order)
        sizes, numbers = groups.counts, np.arange(groups.count)
        finished: list[tuple[Ints, States]] = []
        if groups.nonempty is not None:
            empty = np.flatnonzero(~groups.nonempty)  # nobody asks for their states
            finished.append((empty, [pa.nulls(len(empty), column.type) for column in states]))
        while True:
            done, waiting = sizes == 1, sizes > 1
            rows = np.repeat(done, sizes)
            finished.append((numbers[done], states if done.all() else _take(states, np.flatnonzero(rows))))
            if not waiting.any():
                break
            states = _take(states, np.flatnonzero(~rows)) if done.any() else states
            states, sizes, numbers = self._level(states, sizes[waiting]), (sizes[waiting] + 1) // 2, numbers[waiting]
        order = np.argsort(np.concatenate([numbers for numbers, _ in finished]))
        columns = [pa.concat_arrays(column) for column in zip(*(s for _, s in finished), strict=True)]
        return columns if len(finished) == 1 else _take(columns, order)

    def _level(self, states: States, sizes: Ints) -> States:
        """Merges pairs of neighbours in a group, the earlier on the left. A last odd one is kept for the next level."""
        place = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        even = place % 2 == 0
        paired = even & (place + 1 < np.repeat(sizes, sizes))
        left, single = np.flatnonzero(paired), np.flatnonzero(even & ~paired)
        pairs = [_take(states, left), _take(states, left + 1)]
        merged = call(f"{self.name}: combine", self.combine_function, pairs, self.types, len(left))
        if not len(single):
            return merged
        both = [pa.concat_arrays(pair) for pair in zip(merged, _take(states, single), strict=True)]
        return _take(both, np.argsort(np.concatenate((left, single)), kind="stable"))

    def spec(self) -> list[Any]:
        return [*super().spec(), self.name, [[name, str(type_)] for name, type_ in self.schema]]


def _take(states: States, rows: Ints) -> States:
    return [column.take(pa.array(rows)) for column in states]


def call(what: str, function: Function, arguments: Sequence[Any], types: Sequence[pa.DataType], rows: int) -> States:
    """Calls a user's function and checks its result: an array for each type, with ``rows`` rows each.

    Raises ApplyError, which begins with ``what``.
    """
    try:
        result = function(*arguments)
        arrays = list(result) if isinstance(result, tuple | list) else [result]
        if len(arrays) != len(types):
            raise ValueError(f"returned {len(arrays)} arrays, but {len(types)} are needed")
        states = [
            combined(a).cast(t) if isinstance(a, pa.Array | pa.ChunkedArray) else pa.array(a, t)
            for a, t in zip(arrays, types, strict=True)
        ]
        lengths = [len(a) for a in states]
        if lengths != [rows] * len(types):
            raise ValueError(f"returned arrays of {lengths} rows, but {rows} are needed")
    except Exception as error:
        raise ApplyError(f"{what}: {type(error).__name__}: {error}") from error
    return states
