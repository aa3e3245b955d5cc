"""The state columns of several aggregates, and the three steps lift, combine and lower on them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from aion.aggregates.binding import BoundAggregate
from aion.aggregates.groups import Coded, Groups, number, number_coded
from aion.aggregates.lists import Distinct, Values
from aion.aggregates.partial import EVENTS, Partial, Rows, States, needs_all
from aion.aggregates.values import combined
from aion.errors import IntegerOverflow, TooLarge
from state_backends.thresholds import threshold

_ROWS_PER_CODE = threshold(16, 1)
"""With this many rows per code, it is cheaper to make states also for codes without rows than to look for these."""


class Layout:
    """The columns ``p0, p1, ...`` of the partials of some aggregates. Each partial is kept once; ``p0`` counts events.

    If all values of a column are kept, its distinct values are computed from them. ``also``: additional partials that
    no aggregate needs.
    """

    def __init__(self, bound: Sequence[BoundAggregate], also: Sequence[Partial] = ()) -> None:
        self.bound = tuple(bound)
        wanted = needs_all([EVENTS, *(p for b in bound for p in b.partials), *also])
        self._from_values = {
            p: values
            for p in wanted
            if isinstance(p, Distinct)
            and len(p.names) == 1
            and (values := Values(p.names[0], p.value_types[0])) in wanted
        }
        self.partials: dict[Partial, tuple[str, ...]] = {}
        self.fields: list[pa.Field] = []
        for partial in wanted:
            if partial not in self._from_values:
                fields = [pa.field(f"p{len(self.fields) + i}", type_) for i, type_ in enumerate(partial.types)]
                self.partials[partial] = tuple(field.name for field in fields)
                self.fields += fields

    @property
    def columns(self) -> list[str]:
        """The event columns that the partials are made from."""
        return list(dict.fromkeys(column for p in self.partials for column in p.columns))

    @property
    def holistic(self) -> bool:
        """Whether some of the columns hold values of the events, so that a state may grow without bound."""
        return any(p.holistic for p in self.partials)

    @property
    def commutative(self) -> bool:
        """Whether all states are the same for every order of arrival."""
        return all(p.commutative for p in self.partials)

    def regroupable(self, column: Callable[[str], pa.Array], most: int) -> frozenset[Partial]:
        """Returns the partials whose states give the same bits however neighbours are grouped when they are combined.

        Such states have a bounded size. ``column``: gives the states by column name. ``most``: the largest number of
        states that are combined to one.
        """
        exact = {
            partial: partial.exact
            and not partial.holistic
            and partial.is_exact_for([column(name) for name in names], most)
            for partial, names in self.partials.items()
        }
        return frozenset(p for p in exact if all(exact.get(needed, False) for needed in needs_all([p])))

    def kept_for(self, bound: BoundAggregate) -> list[Partial]:
        """Returns the partials that are kept for an aggregate."""
        values = self._from_values
        kept = [values[p] if isinstance(p, Distinct) and p in values else p for p in needs_all(bound.partials)]
        return list(dict.fromkeys(kept))

    def spec(self) -> list[Any]:
        """Returns a description, as JSON values, of everything that the stored form of states depends on."""
        return [partial.spec() for partial in self.partials]

    def lift(self, keys: Mapping[str, Any], events: Mapping[str, Any]) -> pa.Table:
        """Turns events into states, one row per distinct key: the key columns, then the state columns.

        Raises IntegerOverflow, and ApplyError if a function of the user fails.
        """
        columns = [column if isinstance(column, Coded) else combined(column) for column in keys.values()]
        first, size = columns[0], len(columns[0])
        if len(columns) == 1 and isinstance(first, Coded) and len(first.values) * _ROWS_PER_CODE < size:
            groups = number_coded(first)
        else:
            groups = number(columns, size)
        rows = Rows(events, groups)
        done: dict[Partial, States] = {}
        for partial in self.partials:
            with self._named(partial):
                done[partial] = partial.lift(rows, done)
        table = self._table(dict(zip(keys, groups.keys, strict=True)), done)
        return table if groups.nonempty is None else table.filter(pa.array(groups.nonempty))

    def combine(self, keys: Sequence[str], states: pa.Table) -> pa.Table:
        """Combines states of many blocks, given in the order of arrival, to one row per distinct key."""
        groups = number([combined(states.column(name)) for name in keys], states.num_rows)
        done = self.merge(groups, lambda name: combined(states.column(name)))
        return self._table(dict(zip(keys, groups.keys, strict=True)), done)

    def merge(
        self,
        groups: Groups,
        column: Callable[[str], pa.Array],
        among: Collection[Partial] | None = None,
        done: Mapping[Partial, States] | None = None,
    ) -> dict[Partial, States]:
        """Returns the merged states of each group. ``column`` gives the states to merge, by the names of ``fields``.

        ``among``: merge only these partials. ``done``: states of the same groups that are already merged.
        """
        wanted = [partial for partial in self.partials if among is None or partial in among]
        old = {p: [column(name) for name in self.partials[p]] for p in needs_all(wanted) if p in self.partials}
        found = dict(done or {})
        for partial in wanted:
            with self._named(partial):
                found[partial] = partial.combine(groups, old, found)
        return found

    def states(self, table: Any) -> dict[Partial, States]:
        """Returns the columns of a table or batch as states."""
        return {p: [combined(table.column(name)) for name in names] for p, names in self.partials.items()}

    def lower(self, states: Mapping[Partial, States]) -> dict[str, pa.Array]:
        """Returns the result columns, by the user's names."""
        found: dict[str, pa.Array] = {}
        derived: dict[Partial, States] = {}
        for partial, values in self._from_values.items():
            assert isinstance(partial, Distinct)
            derived[partial] = partial.from_values(states[values])
        for bound in self.bound:
            try:
                parts = (derived[p] if p in derived else states[p] for p in bound.partials)
                found[bound.name] = bound.lower(*parts)
            except IntegerOverflow as error:
                raise IntegerOverflow(f"aggregates: {bound.name!r} = {bound.aggregate}: {error}") from None
        return found

    def entered(self, states: Mapping[Partial, States]) -> dict[str, pa.Array]:
        """Returns how many events each result is made from whose partials round, by the user's names."""
        found = {}
        for bound in self.bound:
            for partial in bound.partials:
                if not partial.exact and partial in states:
                    found[bound.name] = partial.entered(states)
        return found

    def _table(self, keys: Mapping[str, pa.Array], states: Mapping[Partial, States]) -> pa.Table:
        columns = [*keys.values(), *(column for p in self.partials for column in states[p])]
        return pa.table(columns, names=[*keys, *(field.name for field in self.fields)])

    @contextmanager
    def _named(self, partial: Partial) -> Iterator[None]:
        """Adds the names of the aggregates to the message of an IntegerOverflow or TooLarge."""
        try:
            with self.fits(partial):
                yield
        except IntegerOverflow as error:
            raise IntegerOverflow(f"aggregates: {self._users([partial])}: {error}") from None

    @contextmanager
    def fits(self, *partials: Partial) -> Iterator[None]:
        """Returns a context for putting states together, those of some partials or of all. Raises TooLarge."""
        try:
            yield
        except pa.ArrowInvalid as error:
            # Arrow has no class of its own for it.
            if "overflow" not in str(error):
                raise
            users = self._users(partials or [p for p in self.partials if p.holistic])
            raise TooLarge(
                f"aggregates: {users}: the values of one window take more than 2 GiB, and an array of Arrow or a value "
                "in Spark holds no more. Use smaller windows, an aggregate that keeps less, or apply=, which reads "
                "the events of a window some at a time"
            ) from error

    def _users(self, partials: Collection[Partial]) -> str:
        used = [b for b in self.bound if not set(needs_all(b.partials)).isdisjoint(partials)]
        return ", ".join(f"{b.name!r} = {b.aggregate}" for b in used)
