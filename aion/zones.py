"""Calendar windows, and the rules of time zones as this machine knows them."""

from __future__ import annotations

import difflib
import importlib.resources
import zoneinfo
from pathlib import Path
from typing import Unpack

from aion.core.calendars import CalendarEdges, Steps, ZoneRules
from aion.core.filling import Fill, Value
from aion.core.timing import Duration, Timing, When
from aion.core.windows import Calendar as _Calendar
from aion.errors import WindowError


class Calendar(_Calendar):
    """Windows from local midnight to local midnight: days, weeks, months, quarters or years of a time zone; or hours.

    ``Calendar("1 day", zone="Europe/Berlin")``. A day has 23 or 25 hours where the clocks change. Where they skip
    midnight, the day begins at its first instant. Several units are counted from 1970: ``"2 months"`` from January
    1970, ``"2 weeks"`` from Monday, 1970-01-05, ``"3 days"`` from 1970-01-01. Hours begin when the clocks show a full
    hour, also where these are half an hour or less from UTC's. The hour that the clocks skip has no window, and the one
    that they show twice has one window for both. ``zone``: a name of the IANA time zone
    database, as Python's zoneinfo finds it when the definition is made.

    ``start``: the local time at which windows begin, in place of midnight, e.g. ``"05:00"``, and the day on which weeks
    begin, in place of Monday: ``Calendar("1 week", zone="America/New_York", start="sunday")``, or ``"sunday 05:00"``.
    Where the clocks skip that time, the window begins when they do; where they show it twice, it begins the first time.

    Raises WindowError for a step that is not a whole number of these units, for an unknown zone, and for a ``start``
    that is none.
    """

    def __init__(
        self,
        every: str,
        zone: str,
        start: str | None = None,
        *,
        fill: Value | None = None,
        fill_for: Duration | None = None,
        **when: Unpack[When],
    ) -> None:
        edges = CalendarEdges(Steps.of(every, start), zone_rules(zone))
        filled = Fill.of("Calendar", fill, fill_for)
        _Calendar.__init__(self, edges, timing=Timing.of("Calendar", when), fill=filled)


def zone_rules(name: str) -> ZoneRules:
    """Returns the rules of a zone, from the first folder of ``zoneinfo.TZPATH`` that has it, or from the package
    tzdata.

    Raises WindowError if there is no such zone.
    """
    parts = name.split("/") if isinstance(name, str) else []
    data = _tzif(parts) if parts and all(part and not part.startswith(".") for part in parts) else None
    if data is None or not data.startswith(b"TZif"):
        near = difflib.get_close_matches(str(name), zoneinfo.available_timezones(), 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise WindowError(f"Calendar: there is no time zone {name!r}; give a name such as 'Europe/Berlin'{hint}")
    return ZoneRules(name, data)


def _tzif(parts: list[str]) -> bytes | None:
    packaged = importlib.resources.files("tzdata").joinpath("zoneinfo")
    for folder in [*map(Path, zoneinfo.TZPATH), packaged]:
        try:
            return folder.joinpath(*parts).read_bytes()
        except (OSError, ValueError):  # no such file, a folder, or a name that no file can have
            continue
    return None
