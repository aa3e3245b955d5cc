"""The plan of one ``windowed`` call, checked against a schema. Child, root and LocalOperator share it. Pure.

All times here are int64 microseconds. All timestamp columns are ``timestamp[us]`` with zone UTC or none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aion.aggregates import Aggregate
from aion.aggregates.binding import bind, check_aggregate
from aion.aggregates.layout import Layout
from aion.aggregates.partial import Extreme, Partial
from aion.aggregates.values import combined
from aion.base.numbers import NEVER
from aion.base.schema import parse_schema
from aion.core.gaps import gaps_us
from aion.core.periodic import Family, Tumbling
from aion.core.query.columns import (
    asked_columns,
    check_columns,
    check_names,
    check_zone,
    identity,
    key_names,
    result_schema,
)
from aion.core.query.deciding import deciding, says
from aion.core.query.functions import ApplyFunction
from aion.core.query.history import History
from aion.core.query.words import computed, words
from aion.core.slicing.edges import EdgeSet
from aion.core.slicing.grid import EVENT_ROWS_US, SliceGrid, has_event_rows
from aion.core.windows import (
    Aligned,
    Calendar,
    Count,
    Definition,
    Definitions,
    PerRecord,
    Punctuated,
    Session,
    named,
)
from aion.errors import ConfigError
from state_backends.format.definitions import COMPUTED, WORDS

FINAL = "final"
ALL, CHANGES = "all", "changes"
EMITS = (ALL, FINAL, CHANGES)
"""What comes out of a window: all its panes; one pane when its bound has passed; or what each batch changed."""


FINISH, DROP = "finish", "drop"
ON_REMOVED = (FINISH, DROP)
"""What becomes of the windows of a definition that a query does not have any more, when it starts again."""

SENT = "sent"
"""The definition of the plan for events that children send."""
_SENT = timedelta(hours=1)  # how long the slices are of the events that children send


class Updates(NamedTuple):
    """How events replace earlier ones (:mod:`aion.core.query.updates`).

    ``identity``: the columns whose values they share. ``layout``: of the aggregates, which are computed from the newest
    events. None for an ``apply`` function.
    """

    identity: tuple[str, ...]
    layout: Layout | None


@dataclass(frozen=True)
class Plan:
    """A resolved operator definition.

    ``layout``: the partials of the aggregates. None for an ``apply`` function, whose events are kept.

    Some windows distinguish single events (:func:`is_event_wise`), so they need a row for each event. For the others,
    partials are enough. If an operator has both, this plan is for the other windows, and ``event_rows`` is the plan for
    those that need event rows. It has its own definitions and its own blocks. ``own``: the definitions that this plan's
    blocks are for, by number, or None for all. ``name_offset_us``: a segment's name minus its start
    (:data:`aion.core.slicing.grid.EVENT_ROWS_US`). ``final_only``: each window runs once, when its bound has passed.
    ``completeness``: whether rows say how complete they are. ``unique``: the columns that identify an event, so that it
    counts once (:mod:`aion.core.operator.unique`); empty: all events count. ``updates``: how events replace earlier
    ones, or None if they do not. ``changes``: a batch yields what it changed, with the values before
    (:mod:`aion.execute.panes.changing`). ``history``: what the plan knows of definitions before it
    (:mod:`aion.core.query.evolution`), or None if the definition has never changed. ``of_panes``: the events are panes
    of other windows.
    """

    key: tuple[str, ...]
    time: str
    windows: Mapping[str, Definition]
    schema: pa.Schema
    layout: Layout | None
    apply: ApplyFunction | None
    outputs: pa.Schema
    blocking: bool = True
    own: Mapping[int, Definition] | None = None
    event_rows: Plan | None = None
    name_offset_us: int = 0
    final_only: bool = False
    completeness: bool = False
    unique: tuple[str, ...] = ()
    updates: Updates | None = None
    changes: bool = False
    history: History | None = None
    of_panes: bool = False

    def with_windows(self, changed: Mapping[int, Definition]) -> Plan:
        """Returns the same plan, but these definitions, by number, are others of the same kind."""
        windows = {name: changed.get(n, w) for n, (name, w) in enumerate(self.windows.items())}
        own = None if self.own is None else {n: changed.get(n, w) for n, w in self.own.items()}
        event_rows = None if self.event_rows is None else self.event_rows.with_windows(changed)
        return replace(self, windows=windows, own=own, event_rows=event_rows)

    @cached_property
    def sent(self) -> Plan:
        """The plan for the blocks that children send. It is another one if each event counts once.

        Then they send events, because what they have put together cannot be taken apart again.
        """
        if not self.unique:
            return self
        return Plan(self.key, self.time, {SENT: Tumbling(_SENT)}, self.schema, None, self.apply, self.outputs)

    @cached_property
    def calendars(self) -> dict[int, Calendar]:
        """The calendar windows, by their numbers."""
        return {n: w for n, w in enumerate(self.windows.values()) if isinstance(w, Calendar)}

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """This plan, and the plan for event rows if there is one."""
        return (self,) if self.event_rows is None else (self, self.event_rows)

    def holds(self, slice_us: int) -> bool:
        """Returns whether blocks of this segment belong to this plan, and not to the other plan."""
        return has_event_rows(slice_us) == (self.name_offset_us > 0)

    @cached_property
    def _own(self) -> Mapping[int, Definition]:
        return dict(enumerate(self.windows.values())) if self.own is None else self.own

    @cached_property
    def grid(self) -> SliceGrid:
        """The slices and segments. For kept events, each slice is a segment, so they need no column for their slice."""
        past, segmented = self.history, self.layout is not None
        if past is None:
            return SliceGrid(self._own, segmented=segmented)
        always = past.is_cut_anew
        return SliceGrid(self._own, segmented=segmented, ends=past.ends, always=always, limits=past.limits)

    def slices_of(self, rows: Any) -> Any:
        """Returns the slice of each row of a block or table, int64. None if each block holds a single slice."""
        return combined(rows.column(SLICE)).to_numpy() if self.grid.has_segments else None

    @cached_property
    def keyed(self) -> dict[int, Definition]:
        """The definitions of windows of single keys, by their numbers."""
        return {n: w for n, w in self._own.items() if not isinstance(w, Aligned)}

    @cached_property
    def fills(self) -> frozenset[int]:
        """The numbers of the definitions whose keys have rows in windows without events."""
        return frozenset(number for number, window in self.grid.aligned.items() if window.fill is not None)

    @cached_property
    def by_event(self) -> bool:
        """Whether some windows distinguish single events. Then each event is a row of its own."""
        return any(is_event_wise(w) for w in self.keyed.values())

    @cached_property
    def cell_us(self) -> int | None:
        """The width of a cell. Events of a key in the same cell share a row, because they are always in one session.

        It is None if there are no cells.
        """
        gaps = [w.gap_us for w in self.keyed.values() if isinstance(w, Session)]
        return min(gaps, default=None) if not self.by_event else None

    @cached_property
    def cell_edges(self) -> EdgeSet:
        """The edges of slices and of cells."""
        edges = self.grid.edges
        return edges if self.cell_us is None else EdgeSet([*edges.families, Family(self.cell_us, 0)], edges.calendars)

    @cached_property
    def block_keys(self) -> list[str]:
        """The key columns of a block."""
        return list(self.key) if self.layout is None else [field.name for field in self.key_fields]

    def instants(self, rows: Any) -> tuple[Any, Any]:
        """Returns the times of the first and last event of each row of a block or table, int64 microseconds."""
        if self.layout is None:
            times = _micros(rows.column(self.time))
            return times, times
        first, last = (self.layout.partials[p][0] for p in instants(self.time, self.timestamp))
        return _micros(rows.column(first)), _micros(rows.column(last))

    def marks(self, rows: Any) -> Any:
        """Returns, for each row of a block, int64: bit n is set if the row is a punctuation of definition n."""
        if self.layout is not None:
            if MARK not in self.layout.partials:
                return np.zeros(rows.num_rows, np.int64)
            return combined(rows.column(self.layout.partials[MARK][0])).to_numpy()
        return self.marks_of(rows)

    def marks_of(self, events: pa.RecordBatch) -> Any:
        """Returns the same for events with the user's columns. Raises ApplyError if a predicate fails."""
        marks = np.zeros(events.num_rows, np.int64)
        for number, window in self.keyed.items():
            if isinstance(window, Punctuated):
                marks |= says(window, events).astype(np.int64) << number
        return marks

    def gaps(self, rows: Any) -> dict[int, Any]:
        """Returns the gap of each row of a block or table, for each session whose events bring their gaps (int64, µs).

        By the number of the definition. At most 0 for a gap that cannot be used (:mod:`aion.core.gaps`).
        """
        columns = {n: w.gap_column for n, w in self.keyed.items() if isinstance(w, Session) and w.gap_column}
        if self.layout is None:
            return {n: gaps_us(combined(rows.column(name))) for n, name in columns.items()}
        partials = self.layout.partials
        return {n: combined(rows.column(partials[gap_of(name)][0])).to_numpy() for n, name in columns.items()}

    def computed(self, events: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the events with all columns that partials need. Raises ApplyError if a predicate fails.

        They are computed where events become partials, because the user's columns are gone after that.
        """
        if self.layout is None:
            return events
        added = {}
        if MARK in self.layout.partials:
            added[MARK.column] = pa.array(self.marks_of(events))
        for window in self.keyed.values():
            if isinstance(window, Session) and window.gap_column is not None:
                added[gap_of(window.gap_column).column] = pa.array(gaps_us(events.column(window.gap_column)))
        for name, column in added.items():
            events = events.append_column(name, column)
        return events

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the definitions, by number. One that finishes may have the name of another."""
        return tuple(name.partition("\0")[0] for name in self.windows)

    def numbers_of(self, names: Any, starts_us: Any) -> Any:
        """Returns the number of the definition of each window, int64. ``names``: an array with the definitions' names.

        One that finishes may have the name of another, which begins where it ends.
        """
        numbers = pc.index_in(names, pa.array(self.names, pa.string())).to_numpy(zero_copy_only=False).astype(np.int64)
        for number, name in enumerate(self.names):
            first = self.names.index(name)
            if number > first:
                low, high = (
                    (-NEVER, NEVER) if self.history is None else self.history.limits.get(number, (-NEVER, NEVER))
                )
                numbers[(self._same_name(numbers, first)) & (starts_us >= low) & (starts_us < high)] = number
        return numbers

    def _same_name(self, numbers: Any, first: int) -> Any:
        return np.isin(numbers, [n for n, name in enumerate(self.names) if name == self.names[first]])

    @cached_property
    def key_fields(self) -> list[pa.Field]:
        """The key columns in blocks of partials. They are named by position, so that no user's name can clash."""
        return [pa.field(f"k{i}", self.schema.field(name).type) for i, name in enumerate(self.key)]

    @cached_property
    def block_schema(self) -> pa.Schema:
        """The columns of a block: those of the user's events, or keys and partials."""
        if self.layout is None:
            return self.schema
        slices = [pa.field(SLICE, pa.int64())] if self.grid.has_segments else []
        return pa.schema([*slices, *self.key_fields, *self.layout.fields])

    @cached_property
    def timestamp(self) -> pa.DataType:
        return self.schema.field(self.time).type

    @cached_property
    def result_schema(self) -> pa.Schema:
        return result_schema(
            [self.schema.field(name) for name in self.key],
            self.timestamp,
            self.outputs,
            completeness=self.completeness,
            changes=self.changes,
        )

    @cached_property
    def definition(self) -> dict[str, Any]:
        """Everything that stored state depends on, as JSON values. A restart with another definition is refused.

        ``words`` and ``computed`` are not compared: what the user wrote, for the message about the difference, and what
        :mod:`aion.core.query.stored` reads.
        """
        said = words(
            self.schema,
            key=self.key,
            time=self.time,
            windows={name: window for name, window in self.windows.items() if "\0" not in name},
            bound=self.layout.bound if self.layout is not None else (),
            columns=self.schema.names if self.layout is None else (),
            emit=self.emit,
            unique=self.unique,
            updates=self.updates.identity if self.updates is not None else (),
        )
        past = {} if self.history is None else self.history.definition
        return {**self._stored, WORDS: said, **self._computed, **past}

    @property
    def _computed(self) -> dict[str, Any]:
        layout = self.layout if self.updates is None else self.updates.layout
        return {} if layout is None else {COMPUTED: computed(layout.bound, self.schema)}

    @property
    def emit(self) -> str:
        """What comes out of a window."""
        return FINAL if self.final_only else CHANGES if self.changes else ALL

    @cached_property
    def _stored(self) -> dict[str, Any]:
        return {
            "key": [[name, str(self.schema.field(name).type)] for name in self.key],
            "time": self.time,
            "windows": [[name, window.spec()] for name, window in zip(self.names, self.windows.values(), strict=True)],
            "block": [[f.name, str(f.type)] for f in self.block_schema],
            "partials": self.layout.spec() if self.layout else [],
            **({} if self.emit == ALL else {"emit": self.emit}),
            **({"unique": list(self.unique)} if self.unique else {}),
            **({"updates": list(self.updates.identity)} if self.updates is not None else {}),
            **({"event_rows": self.event_rows._stored} if self.event_rows is not None else {}),
        }


def make_plan(
    schema: pa.Schema,
    *,
    key: str | Sequence[str] | None,
    time: str,
    windows: Definitions,
    aggregates: Mapping[str, Aggregate] | None,
    apply: ApplyFunction | None,
    outputs: str | pa.Schema | None,
    blocking: bool = True,
    emit: str = ALL,
    completeness: bool = False,
    unique: str | Sequence[str] | None = None,
    columns: str | Sequence[str] | None = None,
) -> Plan:
    """Checks a definition against the input's schema.

    ``blocking``: whether ``apply`` needs all events before it can begin (paper 3.3). Aggregates never block: partials
    are decoded while others are still read. ``completeness``: whether the result has the columns
    :data:`aion.core.query.columns.COMPLETENESS_COLUMNS`. ``unique``: see :class:`Plan`. ``columns``: those that
    ``apply`` gets besides what is needed anyway, or None for all. ``schema`` must have the time as ``timestamp[us]``.
    Raises SchemaError, WindowError or ConfigError.
    """
    keys = key_names(key)
    check_columns(schema, keys, time)
    definitions = named(windows)
    check_zone(schema.field(time), definitions)
    recognised = identity(unique, keys, schema)
    names = output_fields(aggregates, apply, outputs)
    if aggregates is None:
        result = pa.schema(names)
        check_names(keys, result.names, completeness=completeness, changes=emit == CHANGES)
        needed = (*keys, time, *deciding(definitions, schema), *recognised)
        return Plan(
            keys, time, definitions, asked_columns(columns, needed, schema), None, apply, result, blocking,
            final_only=emit == FINAL, completeness=completeness, unique=recognised, changes=emit == CHANGES,
        )  # fmt: skip
    bound = [bind(name, a, schema, time) for name, a in aggregates.items()]
    result = pa.schema([pa.field(b.name, b.type) for b in bound])
    check_names(keys, result.names, completeness=completeness, changes=emit == CHANGES)
    numbered = dict(enumerate(definitions.values()))
    event_wise = {number: w for number, w in numbered.items() if is_event_wise(w)}
    others = {number: w for number, w in numbered.items() if number not in event_wise}
    columns_of_windows = deciding(definitions, schema)

    def part(own: Mapping[int, Definition], event_rows: Plan | None = None, name_offset_us: int = 0) -> Plan:
        layout = Layout(bound, besides(own.values(), time, schema.field(time).type))
        columns = (*keys, time, *(c for c in layout.columns if c in schema.names), *columns_of_windows, *recognised)
        kept = pa.schema([schema.field(n) for n in dict.fromkeys(columns)])
        return Plan(
            keys,
            time,
            definitions,
            kept,
            layout,
            None,
            result,
            False,
            own,
            event_rows,
            name_offset_us,
            emit == FINAL,
            completeness,
            () if name_offset_us else recognised,
            changes=emit == CHANGES,
        )

    if event_wise and others:
        return part(others, part(event_wise, name_offset_us=EVENT_ROWS_US))
    return part(numbered)


def output_fields(
    aggregates: Mapping[str, Aggregate] | None, apply: ApplyFunction | None, outputs: str | pa.Schema | None
) -> list[pa.Field]:
    """Returns the columns that the user's aggregates or function compute. Raises ConfigError.

    The columns of aggregates have type null, because their types depend on the input's columns.
    """
    if (aggregates is None) == (apply is None):
        raise ConfigError("give either aggregates={...} or apply=aion.Apply(function, schema), and not both")
    if aggregates is None:
        assert outputs is not None
        return list(parse_schema(outputs))
    if not aggregates:
        raise ConfigError("aggregates: none given; e.g. aggregates={'n': aion.aggregates.count()}")
    if not isinstance(aggregates, Mapping):
        raise ConfigError(
            f"aggregates: {aggregates!r} is not a mapping of result columns to aggregates; "
            "give e.g. {'n': aion.aggregates.count()}"
        )
    for name, aggregate in aggregates.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"aggregates: {name!r} is not the name of a column; give a text such as 'n'")
        check_aggregate(name, aggregate)
    return [pa.field(name, pa.null()) for name in aggregates]


def is_event_wise(window: Definition) -> bool:
    """Returns whether its windows begin or end with single events, so that each event needs a row of its own."""
    return isinstance(window, Count | PerRecord | Punctuated) or (isinstance(window, Session) and window.by_event)


SLICE = "slice"
"""The column with the slice of each row. Blocks have it if they may hold several slices."""

MARK = Extreme("\0mark", pa.int64(), largest=True)
"""The partial that says which definitions an event is a punctuation of, one bit for each."""


def gap_of(column: str) -> Extreme:
    """Returns the partial with the gaps that events bring in a column. A row is a single event."""
    return Extreme(f"\0gap {column}", pa.int64(), largest=True)


def instants(time: str, type_: pa.DataType) -> tuple[Partial, Partial]:
    """Returns the partials with the times of the first and the last event of a row."""
    return Extreme(time, type_, largest=False), Extreme(time, type_, largest=True)


def besides(windows: Collection[Definition], time: str, type_: pa.DataType) -> list[Partial]:
    """Returns the partials that windows of single keys need besides the aggregates."""
    if all(isinstance(w, Aligned) for w in windows):
        return []
    gaps = dict.fromkeys(w.gap_column for w in windows if isinstance(w, Session) and w.gap_column is not None)
    marks = [MARK] if any(isinstance(w, Punctuated) for w in windows) else []
    return [*instants(time, type_), *marks, *map(gap_of, gaps)]


def _micros(column: Any) -> Any:
    return combined(column).cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
