"""Aligned windows in a trace's metadata, as JSON values. A calendar brings the rules of its zone. Pure."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from aion.core.calendars import CalendarEdges, Steps, ZoneRules
from aion.core.windows import Aligned, Calendar, Periodic


def to_json(window: Aligned) -> list[Any]:
    if isinstance(window, Periodic):
        return [window.size_us, window.slide_us, window.offset_us]
    rules = window.edges.rules
    return [str(window.edges.steps), rules.name, base64.b64encode(rules.tzif).decode("ascii")]


def from_json(values: Sequence[Any]) -> Aligned:
    if isinstance(values[0], int):
        return Periodic(*values)
    every, zone, tzif = values
    return Calendar(CalendarEdges(Steps.of(every), ZoneRules(zone, base64.b64decode(tzif))))
