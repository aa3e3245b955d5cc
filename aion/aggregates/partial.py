"""The base class of partials, whose states are lifted from rows, combined, and kept as Arrow columns. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aion.aggregates.doubled import magnitude
from aion.aggregates.groups import Groups
from aion.aggregates.values import Doubles, Mask, as_integers, combined, from_integers, orderable, spread, to_doubles
from aion.base.numbers import sums_by

T = TypeVar("T")
States: TypeAlias = list[pa.Array]
"""The columns of one partial, with a row for each group."""
Done: TypeAlias = "Mapping[Partial, States]"


class Present(NamedTuple):
    """The rows in which some columns are not null: their groups, their values, and the mask, or None for all."""

    groups: Groups
    values: list[pa.Array]
    mask: Mask | None


class Rows:
    """Columns of events in groups. Each column is converted once for all partials that read it."""

    def __init__(self, columns: Mapping[str, Any], groups: Groups) -> None:
        self.groups = groups
        self._columns = columns
        self._made: dict[Any, Any] = {}

    def array(self, name: str) -> pa.Array:
        return self._once(("array", name), lambda: combined(self._columns[name]))

    def present(self, *names: str) -> Present:
        return self._once(("present", names), lambda: self._present(names))

    def doubles(self, name: str) -> Doubles:
        """Returns the non-null values, as doubles."""
        return self._once(("doubles", name), lambda: to_doubles(self.present(name).values[0]))

    def magnitude(self, name: str) -> float:
        """Returns the largest absolute value; NaN if a value is NaN."""
        return self._once(("magnitude", name), lambda: magnitude(self.doubles(name)))

    def groups_of(self, *names: str) -> Groups:
        """Returns the groups of the rows in which the columns are not null."""
        mask = self._mask(names)
        return self.groups if mask is None else self._once(("groups", names), lambda: self.groups.select(mask))

    def _present(self, names: tuple[str, ...]) -> Present:
        arrays, mask = [self.array(name) for name in names], self._mask(names)
        values = arrays if mask is None else [a.filter(pa.array(mask)) for a in arrays]
        return Present(self.groups_of(*names), values, mask)

    def _mask(self, names: tuple[str, ...]) -> Mask | None:
        return self._once(("mask", names), lambda: self._made_mask(names))

    def _made_mask(self, names: tuple[str, ...]) -> Mask | None:
        arrays = [self.array(name) for name in names]
        masks = [a.is_valid().to_numpy(zero_copy_only=False) for a in arrays if a.null_count]
        mask: Mask | None = np.logical_and.reduce(masks) if masks else None
        return mask

    def _once(self, what: object, make: Callable[[], T]) -> T:
        if what not in self._made:
            self._made[what] = make()
        made: T = self._made[what]
        return made


@dataclass(frozen=True)
class Partial(ABC):
    """One part of an aggregate's state. Equal partials of several aggregates are kept once.

    ``needs``: the partials whose states must be computed before this one's. ``holistic``: its size has no bound,
    because it holds values of the events. ``commutative``: the order of arrival does not matter. ``invertible``: what
    was combined can be removed again. ``exact``: combining does not round, so the result has the same bits however
    neighbours are grouped.
    """

    holistic = False
    commutative = True
    invertible = False
    exact = True

    @property
    def columns(self) -> tuple[str, ...]:
        """The event columns from which it is lifted."""
        return ()

    @property
    @abstractmethod
    def types(self) -> tuple[pa.DataType, ...]:
        """The types of its state columns."""

    @property
    def needs(self) -> tuple[Partial, ...]:
        return ()

    @abstractmethod
    def lift(self, rows: Rows, done: Done) -> States:
        """Returns the state of each group of events."""

    @abstractmethod
    def combine(self, groups: Groups, old: Mapping[Partial, States], done: Done) -> States:
        """Returns the combined state of each group. ``old``: the states to combine, a row for each, in the order of
        arrival.
        """

    def is_exact_for(self, states: States, most: int) -> bool:
        """Returns whether combining up to ``most`` of these ``states`` to one is exact."""
        return self.exact

    def entered(self, states: Mapping[Partial, States]) -> pa.Array:
        """Returns how many events the state of each group was made from, int64. ``states``: all of the layout.

        A partial that is not exact has equal states for equal events only if they were combined in the same groupings.
        So this number, and not the state, says whether an event came.
        """
        return states[EVENTS][0]

    def spec(self) -> list[Any]:
        """Returns a description, as JSON values, of everything that its stored form depends on."""
        return [type(self).__name__, *self.columns, *map(str, self.types)]


# -- counts -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted(Partial):
    """The number of events, or with a column, the number of its non-null values."""

    column: str | None = None
    invertible = True

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.column is None else (self.column,)

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (pa.int64(),)

    def lift(self, rows: Rows, done: Done) -> States:
        groups = rows.groups if self.column is None else rows.groups_of(self.column)
        return [pa.array(groups.counts)]

    def combine(self, groups: Groups, old: Mapping[Partial, States], done: Done) -> States:
        return [pa.array(sums_by(groups.ids, old[self][0].to_numpy(), groups.count))]


EVENTS = Counted()

# -- smallest and largest ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Extreme(Partial):
    """The smallest or largest value of a column; NaN is the largest of all."""

    column: str
    type: pa.DataType
    largest: bool

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def types(self) -> tuple[pa.DataType, ...]:
        return (self.type,)

    def lift(self, rows: Rows, done: Done) -> States:
        kept = rows.present(self.column)
        if pa.types.is_floating(self.type):
            has_nan = bool(np.isnan(rows.magnitude(self.column)))
            values = rows.doubles(self.column)
            found = double_extremes(kept.groups, values, largest=self.largest, has_nan=has_nan)
            return [spread(found, kept.groups.nonempty).cast(self.type)]
        return [extremes(kept.groups, kept.values[0], largest=self.largest)]

    def combine(self, groups: Groups, old: Mapping[Partial, States], done: Done) -> States:
        groups, values, _ = present(groups, old[self][0])
        return [extremes(groups, values[0], largest=self.largest)]

    def spec(self) -> list[Any]:
        return [*super().spec(), self.largest]


def extremes(groups: Groups, values: pa.Array, *, largest: bool) -> pa.Array:
    """Returns the smallest or largest value of each group; null for an empty group. ``values`` has no nulls."""
    if pa.types.is_floating(values.type):
        doubles = to_doubles(values)
        has_nan = bool(np.isnan(magnitude(doubles)))
        return spread(double_extremes(groups, doubles, largest=largest, has_nan=has_nan), groups.nonempty).cast(
            values.type
        )
    if pa.types.is_struct(values.type):
        return _extreme_structs(groups, values, largest=largest)
    integers = as_integers(values)
    if integers is None:
        return _extremes_of_any_type(groups, values, largest=largest)
    info = np.iinfo(np.int64)
    extreme = np.full(groups.count, info.min if largest else info.max, np.int64)
    (np.maximum if largest else np.minimum).at(extreme, groups.ids, integers)
    return from_integers(spread(extreme, groups.nonempty), values.type)


def double_extremes(groups: Groups, values: Doubles, *, largest: bool, has_nan: bool) -> Doubles:
    """Returns the smallest or largest double of each group; an arbitrary value for an empty group."""
    if largest:  # maximum.at propagates NaN, which is the largest value
        found = np.full(groups.count, -np.inf)
        with np.errstate(invalid="ignore"):
            np.maximum.at(found, groups.ids, values)
        return found + 0.0  # turns -0.0 into 0.0
    found = np.full(groups.count, np.inf)
    if has_nan:
        nan = np.isnan(values)
        np.minimum.at(found, groups.ids, np.where(nan, np.inf, values))
        found[groups.select(~nan).counts == 0] = np.nan
    else:
        np.minimum.at(found, groups.ids, values)
    return found + 0.0


def _extremes_of_any_type(groups: Groups, values: pa.Array, *, largest: bool) -> pa.Array:
    """Does what :func:`extremes` does, with Arrow's grouped kernel, for strings and other types that are not
    numbers.
    """
    return by_kernel(groups, values, "max" if largest else "min")


def _extreme_structs(groups: Groups, values: pa.Array, *, largest: bool) -> pa.Array:
    """Does what :func:`extremes` does, for structs: by their ranks, which are from 0."""
    ranks = orderable(values)
    row_of = np.zeros(len(values) + 1, np.int64)
    row_of[ranks] = np.arange(len(values))
    best = np.full(groups.count, -1 if largest else len(values))
    (np.maximum if largest else np.minimum).at(best, groups.ids, ranks)
    empty = np.ones(groups.count, np.bool_)
    empty[groups.ids] = False
    return values.take(pa.array(row_of[best], mask=empty))


def by_kernel(groups: Groups, values: pa.Array, kernel: str) -> pa.Array:
    """Returns the result of one of Arrow's grouped kernels for each group; null for an empty group."""
    table = pa.table({"group": pa.array(groups.ids), "value": values})
    options = pc.ScalarAggregateOptions(skip_nulls=True, min_count=1)
    result = table.group_by("group", use_threads=False).aggregate([("value", kernel, options)])
    at = np.full(groups.count, -1, np.int64)
    at[result.column("group").to_numpy()] = np.arange(result.num_rows)
    return combined(result.column(f"value_{kernel}")).take(pa.array(at, mask=at < 0))


def present(groups: Groups, *columns: pa.Array) -> Present:
    """Returns the rows of states in which the first column is not null."""
    if not columns[0].null_count:
        return Present(groups, list(columns), None)
    mask = columns[0].is_valid().to_numpy(zero_copy_only=False)
    return Present(groups.select(mask), [c.filter(pa.array(mask)) for c in columns], mask)


def needs_all(partials: Sequence[Partial]) -> list[Partial]:
    """Returns the partials and all partials that they need. Each comes after those that it needs."""
    found: dict[Partial, None] = {}
    for partial in partials:
        for needed in needs_all(partial.needs):
            found.setdefault(needed)
        found.setdefault(partial)
    return list(found)
