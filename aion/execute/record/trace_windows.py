"""Aligned windows in a trace's metadata, as JSON values. A calendar brings the rules of its zone. Pure."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from aion.base.time import duration_us, format_duration
from aion.core.calendars import CalendarEdges, Steps, ZoneRules
from aion.core.periodic import Cumulative, Periodic, periodic_of
from aion.core.timing import NO_TIMING, Timing
from aion.core.windows import Aligned, Calendar


def to_json(window: Aligned) -> list[Any]:
    # A trace has no keys, so nobody can tell which rows a definition with ``fill`` has for windows without events.
    if isinstance(window, Cumulative):
        return [{name: value for name, value in window.spec().items() if not name.startswith("fill")}]
    if isinstance(window, Periodic):
        return [window.size_us, window.slide_us, window.offset_us]
    steps, rules = window.edges.steps, window.edges.rules
    start = [] if steps.start is None else [steps.start]
    return [steps.every, rules.name, base64.b64encode(rules.tzif).decode("ascii"), *start]


def from_json(values: Sequence[Any], timing: Timing = NO_TIMING) -> Aligned:
    if isinstance(values[0], Mapping):
        return periodic_of(values[0], timing)
    if isinstance(values[0], int):
        size_us, slide_us, offset_us = values
        return Periodic(size_us, slide_us, offset_us, timing)
    every, zone, tzif, *start = values
    rules = ZoneRules(zone, base64.b64decode(tzif))
    return Calendar(CalendarEdges(Steps.of(every, *start), rules), timing=timing)


def timing_to_json(timing: Timing) -> dict[str, Any]:
    """What the definition says about its own executions, and nothing that it leaves to the policy."""
    trigger = None if timing.trigger is None else {key: _plain(value) for key, value in timing.trigger}
    values = {"early_us": timing.early_us, "bound_us": timing.bound_us, "trigger": trigger}
    return {name: value for name, value in values.items() if value is not None}


def timing_from_json(values: Mapping[str, Any]) -> Timing:
    trigger = values.get("trigger")
    items = None if trigger is None else tuple(trigger.items())
    return Timing(values.get("early_us"), values.get("bound_us"), items)


def _plain(value: Any) -> Any:
    """A setting of a trigger as the same setting in JSON."""
    return format_duration(duration_us(value)) if isinstance(value, timedelta) else value
