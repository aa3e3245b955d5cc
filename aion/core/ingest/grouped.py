"""Events that Spark's own aggregate functions have grouped by slice and key, before they reach Python. Pure.

It is an optimisation of the child: the blocks hold the same slices, keys and states as those that
:class:`aion.core.ingest.builder.BlockBuilder` makes of the events themselves. Only what is the same is grouped so
(:func:`why_not`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import islice
from math import gcd

import pyarrow as pa

from aion.aggregates.in_sql import Computed, InSql, in_sql
from aion.aggregates.partial import Partial
from aion.base.hashing import can_hash
from aion.base.numbers import EARLIEST_US, LATEST_US
from aion.core.ingest.builder import BlockBuilder, ShardBlock
from aion.core.query.plan import Plan
from aion.core.slicing.grid import BEYOND_SLICE, NO_SLICE
from state_backends.thresholds import threshold

GROUP, STATE = "group", "state"
"""The names of the columns of grouped rows begin so: what rows were grouped by, and what was computed of each group."""
_FAMILIES = threshold(16, 1)
"""With more families of edges, rows are grouped by the unit of all of them, and their slices are found later."""
_SECOND_US, _MINUTE_US = 1_000_000, 60_000_000
_WHOLE_MINUTES_US = 315_532_800 * _SECOND_US
"""From 1980 on, the clocks of all zones are whole minutes apart and change at whole minutes, and before that at whole
seconds. So a minute, or a second, is within one slice of calendar windows, whatever the rules of their zone are.
"""


def why_not(plan: Plan, *, drops_bad_texts: bool) -> str | None:
    """Says why Spark's functions cannot group the events of a plan as its children do, or returns None if they can."""
    if plan.layout is None:
        return "the events themselves are kept"
    if plan.by_event or plan.event_rows is not None:
        return "some of the windows begin or end with single events"
    others = [name for name in plan.key if not can_hash(plan.schema.field(name).type)]
    if others:
        return f"the key {others[0]!r} is of type {plan.schema.field(others[0]).type}"
    if drops_bad_texts and any(_is_text(field.type) for field in plan.schema if field.name not in plan.key):
        return "each text is looked at, because on_bad_text drops some"
    said = Grouped(plan).said
    rounded = [bound for bound in plan.layout.bound if not all(p in said for p in plan.layout.kept_for(bound))]
    if rounded:
        bound = rounded[0]
        return f"{bound.name!r} = {bound.aggregate} is none that Spark's functions compute exactly"
    return None


def _is_text(type_: pa.DataType) -> bool:
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_) or pa.types.is_nested(type_))


class Grouped:
    """What Spark computes of the events of a plan, as SQL, and how blocks are made of it."""

    def __init__(self, plan: Plan) -> None:
        assert plan.layout is not None
        self._plan, self._layout = plan, plan.layout

    @cached_property
    def _columns(self) -> dict[str, tuple[str, pa.DataType]]:
        return {field.name: (f"column{number}", field.type) for number, field in enumerate(self._plan.schema)}

    @cached_property
    def said(self) -> dict[Partial, InSql]:
        """What is computed for each partial; without those for which Spark has no function."""
        found = {p: in_sql(p, self._columns, f"partial{n}") for n, p in enumerate(self._layout.partials)}
        return {partial: said for partial, said in found.items() if said is not None}

    def steps(self, micros: str, flagged: Mapping[str, int | None]) -> list[dict[str, str]]:
        """Returns columns that are computed before rows are grouped, by name; each step has those of the steps before.

        The columns of the plan are ``column0``, ``column1``, ... ``micros``: the time in microseconds. ``flagged``: by
        conditions, the slices of events that no window takes, or None if the row is no event. The first one that is
        true holds.
        """
        cases = {
            **flagged,
            f"{micros} is null": NO_SLICE,
            f"{micros} < {EARLIEST_US} or {micros} > {LATEST_US}": BEYOND_SLICE,
        }
        # The lowest bigint cannot be written as a number.
        whens = (f"when {case} then {_null(at)}" for case, at in cases.items())
        slices = f"case {' '.join(whens)} else {self._start(micros)} end"
        steps: list[dict[str, str]] = [{_SLICE: slices}]
        for said in self.said.values():
            for number, step in enumerate(said.steps):
                if number == len(steps):
                    steps.append({})
                steps[number].update(step)
        return steps

    def _start(self, micros: str) -> str:
        edges = self._plan.cell_edges
        families = edges.families if len(edges.families) <= _FAMILIES else [(edges.unit_us, edges.origin_us)]
        starts = [f"{micros} - pmod({micros} - {phase}, {period})" for period, phase in families]
        if edges.calendars:
            unit = gcd(_MINUTE_US, *(calendar.steps.time_us for calendar in edges.calendars))
            starts.append(f"{micros} - pmod({micros}, if({micros} < {_WHOLE_MINUTES_US}, {_SECOND_US}, {unit}))")
        return starts[0] if len(starts) == 1 else f"greatest({', '.join(starts)})"

    @property
    def _are_starts(self) -> bool:
        """Whether rows are grouped by the starts of their slices, and not by less."""
        edges = self._plan.cell_edges
        return not edges.calendars and len(edges.families) <= _FAMILIES

    @property
    def groups(self) -> list[Computed]:
        """What rows are grouped by: the slice, the key, and what partials need."""
        keys = [Computed(*self._columns[name]) for name in self._plan.key]
        return [Computed(_SLICE, pa.int64()), *keys, *(group for said in self.said.values() for group in said.groups)]

    @property
    def aggregates(self) -> list[Computed]:
        """The aggregate functions."""
        return [each for said in self.said.values() for each in said.aggregates]

    def blocks(self, batch: pa.RecordBatch, builder: BlockBuilder) -> Iterator[ShardBlock]:
        """Yields the blocks of a builder that takes rows with the columns ``groups`` and ``aggregates``."""
        batch = batch.filter(batch.column(0).is_valid()) if batch.column(0).null_count else batch
        if not batch.num_rows:
            return
        slices, *keys = batch.columns[: 1 + len(self._plan.key)]
        others = iter(batch.columns[1 + len(keys) :])
        groups = [list(islice(others, len(said.groups))) for said in self.said.values()]
        states: list[pa.Array] = []
        for (partial, said), of in zip(self.said.items(), groups, strict=True):
            found = said.read(of, list(islice(others, len(said.aggregates))))
            states += [s if s.type == t else s.cast(t) for s, t in zip(found, partial.types, strict=True)]
        fields = [self._plan.schema.field(name) for name in self._plan.key]
        of_plan = [k if k.type == field.type else k.cast(field.type) for k, field in zip(keys, fields, strict=True)]
        if not self._are_starts:
            # By the plan of the task: the rules of time zones that it has known decide where calendar windows begin.
            slices = pa.array(builder.plan.grid.starts_of(slices.to_numpy()))
        yield from builder.add_grouped(slices, pa.RecordBatch.from_arrays(of_plan, schema=pa.schema(fields)), states)


_SLICE = "slice_start"


def _null(slice_us: int | None) -> str:
    return "cast(null as bigint)" if slice_us is None else f"cast('{slice_us}' as bigint)"
