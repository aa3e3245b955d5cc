"""The calendar window of an instant, in plain Python: datetime and zoneinfo, one event at a time. Slow and obvious.

A day begins at the first instant at which clocks show a certain time of that day or later. A window of several days,
weeks, months, quarters or years begins with its first day, and ends with the first day of the next window.
"""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MIDNIGHT = timedelta(0)
MONTHS = {"month": 1, "quarter": 3, "year": 12}


def window_of(
    us: int, count: int, unit: str, zone: ZoneInfo, time: timedelta = MIDNIGHT, weekday: int = 0
) -> tuple[int, int]:
    """The start and end of the window that the instant is in, in µs. ``weekday``: the first of a week, 0 for Monday."""
    # A local date may come back when clocks go back over midnight. The later date counts.
    first = _first_day(_instant(us).astimezone(zone).date() + timedelta(days=1), count, unit, weekday)
    while _day_start(first, zone, time) > us:
        first = _first_day(first - timedelta(days=1), count, unit, weekday)
    return _day_start(first, zone, time), _day_start(_next(first, count, unit), zone, time)


def hours_of(us: int, count: int, zone: ZoneInfo) -> tuple[int, int]:
    """The start and end of the window of hours that the instant is in, in µs. Hours are counted from 1970-01-01."""
    local = _instant(us).astimezone(zone).replace(tzinfo=None)
    number = ((local - datetime(1970, 1, 1)) // timedelta(hours=1) + 48) // count
    while _hour_start(number * count, zone) > us:
        number -= 1
    return _hour_start(number * count, zone), _hour_start((number + 1) * count, zone)


def _hour_start(hour: int, zone: ZoneInfo) -> int:
    days, hours = divmod(hour, 24)
    return _day_start(date(1970, 1, 1) + timedelta(days=days), zone, timedelta(hours=hours))


def _first_day(day: date, count: int, unit: str, weekday: int) -> date:
    """The first day of the window that a day is in."""
    if unit in MONTHS:
        step = count * MONTHS[unit]
        months = (day.year - 1970) * 12 + day.month - 1
        year, month = divmod(months - months % step, 12)
        return date(1970 + year, 1 + month, 1)
    origin, step = date(1970, 1, 1), count
    if unit == "week":
        step = 7 * count
        while origin.weekday() != weekday:
            origin += timedelta(days=1)
    return day - timedelta(days=(day - origin).days % step)


def _next(first: date, count: int, unit: str) -> date:
    if unit in MONTHS:
        year, month = divmod(first.month - 1 + count * MONTHS[unit], 12)
        return date(first.year + year, 1 + month, 1)
    return first + timedelta(days=count * (7 if unit == "week" else 1))


@lru_cache(maxsize=100_000)
def _day_start(day: date, zone: ZoneInfo, time: timedelta) -> int:
    """The first instant whose local time is that or later. No offset is a day, but a zone may leave out a day."""
    local = datetime(day.year, day.month, day.day) + time
    as_utc = (local.replace(tzinfo=UTC) - EPOCH) // timedelta(seconds=1)
    day_s, minute = 24 * 3600, 60
    # The first minute in which the date is reached, then the second. Clocks never show a date for less than a minute.
    for start in range(as_utc - day_s, as_utc + 2 * day_s + minute, minute):
        if _reached(start + minute - 1, local, zone):
            return next(s for s in range(start, start + minute) if _reached(s, local, zone)) * 1_000_000
    raise AssertionError(f"{day} does not begin in {zone}")


def _reached(second: int, local: datetime, zone: ZoneInfo) -> bool:
    return _instant(second * 1_000_000).astimezone(zone).replace(tzinfo=None) >= local


def _instant(us: int) -> datetime:
    return EPOCH + timedelta(microseconds=us)
