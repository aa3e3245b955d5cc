"""The plan of a query whose definition has changed, and blocks that were made before that. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from aion.aggregates.values import combined
from aion.base.arrow_types import arrow_type
from aion.base.numbers import NEVER
from aion.core.calendars import CalendarEdges, Steps, ZoneRules
from aion.core.filling import Fill
from aion.core.periodic import Periodic, is_periodic, periodic_of
from aion.core.query.evolution import nothing, rules_of, segment_us
from aion.core.query.history import EVOLUTION, Evolution, History, Layout, StoredColumns, layouts_of
from aion.core.query.plan import SENT, SLICE, Plan, is_event_wise
from aion.core.slicing.grid import slices_from_json, start_of
from aion.core.windows import Aligned, Calendar, Definition


def evolved(plan: Plan, evolution: Evolution) -> Plan:
    """Returns the plan with all definitions that have windows, each with its number."""
    if SENT in plan.windows:
        return plan  # events are sent as they come
    windows: dict[str, Definition] = {}
    limits = {}
    for number, kept in enumerate(evolution.windows):
        if kept.is_current:
            windows[kept.name] = plan.windows[kept.name]
        else:
            windows[f"{kept.name}\0{number}"] = definition_of(kept.spec, rules_of(plan))
        low = -NEVER if kept.since_us is None else kept.since_us
        high = NEVER if kept.until_us is None else kept.until_us
        if (low, high) != (-NEVER, NEVER):
            limits[number] = low, high
    alive = {n: w for n, w in enumerate(windows.values()) if not evolution.windows[n].over}
    columns = {}
    if plan.layout is not None:
        for bound in plan.layout.bound:
            since_us = evolution.since_us(partial.spec() for partial in plan.layout.kept_for(bound))
            if since_us is not None:
                columns[bound.name] = since_us
    keys = tuple(arrow_type(name) for name in evolution.keys)
    is_wider = any(type_ != plan.schema.field(name).type for name, type_ in zip(plan.key, keys, strict=True))
    history = History(evolution, 0, limits, columns, keys if is_wider else ())
    inner = plan.event_rows
    if inner is None:
        return replace(plan, windows=windows, own=alive, history=history)
    by_event = {n: w for n, w in alive.items() if is_event_wise(w)}
    inner = replace(inner, windows=windows, own=by_event, history=replace(history, plan=1))
    others = {n: w for n, w in alive.items() if n not in by_event}
    return replace(plan, windows=windows, own=others, event_rows=inner, history=history)


def definition_of(spec: Mapping[str, Any], rules: Mapping[str, ZoneRules]) -> Aligned:
    """Returns a definition that finishes, from what is stored of it."""
    if is_periodic(spec):
        return periodic_of(spec)
    if not spec or spec["zone"] not in rules:  # it has no windows any more
        return Periodic(1_000_000, 1_000_000, 0)
    edges = CalendarEdges(Steps.of(spec["every"], spec.get("start")), rules[spec["zone"]])
    return Calendar(edges, fill=Fill.of_spec(spec))


def of_shard(plan: Plan, snapshot: Mapping[str, Any] | None) -> Plan:
    """Returns the plan for a shard with this snapshot, which may have been made before the last changes."""
    if plan.history is None or snapshot is None:
        return plan
    evolution = plan.history.evolution
    kept = snapshot.get(EVOLUTION, {"steps": 0, "layouts": [], "ends": []})
    layouts, ends = layouts_of(kept), dict(kept["ends"])
    starts = slices_from_json(snapshot["slices"])
    if kept["steps"] < evolution.changes and starts:
        # The shard had no batch between these steps, so its blocks are as they were before the first of them.
        step = evolution.step(kept["steps"])
        layouts.append(Layout(snapshot["next_seq"], kept["steps"], max(map(start_of, starts))))
        if plan.history.is_cut_anew and step.windows and plan.layout is not None:
            longest_us = min(segment_us(spec) for _, spec in step.windows)
            own = [start_us for start_us in starts if plan.holds(start_us)]
            ends |= {start_us: max(ends.get(start_us, 0), start_us + longest_us) for start_us in own}
    history = replace(plan.history, layouts=tuple(layouts), ends=ends)
    inner = plan.event_rows
    if inner is not None and inner.history is not None:
        inner = replace(inner, history=replace(inner.history, layouts=history.layouts))
    return replace(plan, history=history, event_rows=inner)


def converted(plan: Plan, batch: pa.RecordBatch, step: int, slice_us: int) -> pa.RecordBatch:
    """Returns the rows of a block that was made before a step, with the columns that blocks have now.

    ``slice_us``: the segment of the block. Columns that it lacks are null, and partials that it lacks stand for events
    whose columns are null.
    """
    assert plan.history is not None
    names = _names_then(plan, step)
    columns: dict[str, Any] = {}
    for now in plan.block_schema:
        if (then := names.get(now.name)) is not None:
            column = batch.column(then)
            columns[now.name] = column if column.type == now.type else column.cast(now.type)
        elif plan.layout is not None and now.name == SLICE:
            columns[SLICE] = pa.array(np.full(batch.num_rows, slice_us - plan.name_offset_us))
    if SLICE in columns:
        # Rows of equal time stay in the order of arrival only if no later row has an earlier slice.
        columns[SLICE] = pa.array(plan.grid.starts(combined(columns[SLICE]).to_numpy()))
    if plan.layout is not None:
        columns |= nothing(plan, batch.num_rows, columns)
    arrays = [columns[f.name] if f.name in columns else pa.nulls(batch.num_rows, f.type) for f in plan.block_schema]
    return pa.RecordBatch.from_arrays(arrays, schema=plan.block_schema)


def schema_before(plan: Plan, step: int) -> pa.Schema:
    """Returns the columns of the blocks of one of the plans, as they were before a step."""
    return pa.schema([pa.field(name, arrow_type(type_)) for name, type_ in _stored_columns(plan, step).block])


def _stored_columns(plan: Plan, step: int) -> StoredColumns:
    assert plan.history is not None
    return plan.history.evolution.step(step).columns[plan.history.plan]


def _names_then(plan: Plan, step: int) -> dict[str, str]:
    """Returns what columns of blocks were called before a step, by their names now, if blocks had them."""
    stored = _stored_columns(plan, step)
    had = [name for name, _ in stored.block]
    if plan.layout is None:
        return {name: name for name in had}
    first = len(had) - sum(name.startswith("p") for name in had)
    names = {name: name for name in had[:first]}
    columns = had[first:]
    at = 0
    before = {}
    for spec, width in zip(stored.partials, stored.widths(), strict=True):
        before[orjson.dumps(spec)] = columns[at : at + width]
        at += width
    for partial, own in plan.layout.partials.items():
        names |= dict(zip(own, before.get(orjson.dumps(partial.spec()), ()), strict=False))
    return names
