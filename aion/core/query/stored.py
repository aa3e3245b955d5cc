"""The plan of an operator, from what is stored of its definition: to look into state without the user's program. Pure.

Functions of the user are not stored. Those of an aggregate have to be given again; an ``apply`` function is not needed,
because its events are kept as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import pyarrow as pa

from aion.aggregates.binding import BoundAggregate, bind
from aion.aggregates.functions import Aggregate
from aion.aggregates.layout import Layout
from aion.base.arrow_types import arrow_type
from aion.core.calendars import CalendarEdges, Steps, ZoneRules
from aion.core.filling import Fill
from aion.core.periodic import periodic_of
from aion.core.query.evolved import evolved
from aion.core.query.history import EVOLUTION, Evolution
from aion.core.query.plan import FINAL, Plan, Updates, besides, is_event_wise
from aion.core.slicing.grid import EVENT_ROWS_US
from aion.core.windows import Calendar, Count, Definition, PerRecord, Punctuated, Session
from aion.errors import ConfigError
from state_backends.format.definitions import COMPUTED


def stored_plan(
    definition: Mapping[str, Any],
    rules: Callable[[str], ZoneRules],
    aggregates: Mapping[str, Aggregate] | None = None,
) -> Plan:
    """Returns the plan of a stored definition of windows, with the definitions that it had before.

    ``rules``: finds the rules of a time zone. ``aggregates``: in place of those that are stored, for example if they
    have functions. Raises ConfigError if the results cannot be computed from what is stored.
    """
    windows = {w.name: w.spec for w in Evolution.of(definition).windows if w.is_current}
    found = {name: _window(spec, rules) for name, spec in windows.items()}
    plan = _plan(definition, found, aggregates)
    if EVOLUTION in definition:
        plan = evolved(plan, Evolution.of(definition))
    specs = [each.layout.spec() for each in plan.plans if each.layout is not None]
    if specs and specs != _own(definition):
        raise ConfigError("aggregates: these are not the aggregates whose partial results are stored")
    return plan


def _own(definition: Mapping[str, Any]) -> list[Any]:
    return [part["partials"] for part in (definition, definition.get("event_rows")) if part is not None]


def _plan(
    definition: Mapping[str, Any], windows: Mapping[str, Definition], aggregates: Mapping[str, Aggregate] | None
) -> Plan:
    key = tuple(name for name, _ in definition["key"])
    time, final_only = definition["time"], definition.get("emit") == FINAL
    identity = definition.get("updates")
    if not definition["partials"]:  # whole events are kept
        kept = pa.schema([pa.field(name, arrow_type(type_)) for name, type_ in definition["block"]])
        if identity is None:
            return Plan(key, time, windows, kept, None, None, pa.schema([]), final_only=final_only)
    bound, schema = _bound(definition, aggregates)
    result = pa.schema([pa.field(b.name, b.type) for b in bound])
    if identity is not None:
        updates = Updates(tuple(identity), Layout(bound) if bound else None)
        return Plan(key, time, windows, kept, None, None, result, final_only=final_only, updates=updates)

    def part(own: Mapping[int, Definition], event_rows: Plan | None = None, name_offset_us: int = 0) -> Plan:
        layout = Layout(bound, besides(own.values(), time, schema.field(time).type))
        return Plan(
            key, time, windows, schema, layout, None, result, False, own, event_rows, name_offset_us, final_only
        )

    numbered = dict(enumerate(windows.values()))
    by_event = {number: window for number, window in numbered.items() if is_event_wise(window)}
    others = {number: window for number, window in numbered.items() if number not in by_event}
    return part(others, part(by_event, None, EVENT_ROWS_US)) if by_event and others else part(numbered)


def _bound(
    definition: Mapping[str, Any], given: Mapping[str, Aggregate] | None
) -> tuple[list[BoundAggregate], pa.Schema]:
    """Returns the aggregates, and the columns that they need, with those of the key and the time."""
    stored = definition.get(COMPUTED)
    if stored is None:
        if "updates" in definition:  # a function is applied, or an earlier version wrote it
            stored = {"aggregates": [], "columns": definition["block"]}
        else:
            raise ConfigError(
                "an earlier Aion wrote this state, and did not note how the results are computed from it; run a batch "
                "of the query with this one"
            )
    if given is None:
        lacking = [name for name, _, _, options in stored["aggregates"] if options is None]
        if lacking:
            raise ConfigError(
                f"the functions of {', '.join(map(repr, lacking))} are not stored; give aggregates=, as the query "
                "has them"
            )
        given = {
            name: Aggregate(function, tuple(columns), tuple((option, _tuples(value)) for option, value in options))
            for name, function, columns, options in stored["aggregates"]
        }
    needed = {
        *(name for name, _ in definition["key"]),
        definition["time"],
        *(c for a in given.values() for c in a.columns),
    }
    schema = pa.schema([pa.field(name, arrow_type(type_)) for name, type_ in stored["columns"] if name in needed])
    return [bind(name, aggregate, schema, definition["time"]) for name, aggregate in given.items()], schema


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _lasting(us: int) -> timedelta:
    return timedelta(microseconds=us)


def _window(spec: Mapping[str, Any], rules: Callable[[str], ZoneRules]) -> Definition:
    match spec["type"]:
        case "periodic" | "cumulative":
            return periodic_of(spec)
        case "calendar":
            edges = CalendarEdges(Steps.of(spec["every"], spec.get("start")), rules(spec["zone"]))
            return Calendar(edges, fill=Fill.of_spec(spec))
        case "session":
            column, most = spec.get("gap_column"), spec.get("max_duration_us")
            gap = None if column is not None else _lasting(spec["gap_us"])
            return Session(gap, gap_column=column, max_duration=None if most is None else _lasting(most))
        case "count":
            return Count(spec["n"], spec["slide"])
        case "per_record":
            return PerRecord(_lasting(spec["size_us"]))
        case "punctuated":
            # Which events are punctuations is stored with them.
            return Punctuated(spec["predicate"])
    raise ConfigError(f"windows of type {spec['type']!r} are not known; use the newer Aion that wrote this state")
