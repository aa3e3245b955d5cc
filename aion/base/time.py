"""Event time as Aion counts it: signed 64-bit microseconds since the Unix epoch, UTC. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import ROUND_DOWN, Decimal
from numbers import Number

import numpy as np

from aion.errors import ConfigError

_LONGEST_US = 2**63 - 1
_LONGEST_TEXT = 1_000
"""Texts may come from events. Reading a duration must not take long, and a sensible one is much shorter."""
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EACH_BATCH_US = 0
"""How far the watermark has to move between two early panes that come at the end of each batch: it need not move."""

_UNITS_US: dict[str, int] = {
    "us": 1, "microsecond": 1, "microseconds": 1,
    "ms": 1_000, "millisecond": 1_000, "milliseconds": 1_000,
    "s": 1_000_000, "sec": 1_000_000, "second": 1_000_000, "seconds": 1_000_000,
    "m": 60_000_000, "min": 60_000_000, "minute": 60_000_000, "minutes": 60_000_000,
    "h": 3_600_000_000, "hour": 3_600_000_000, "hours": 3_600_000_000,
    "d": 86_400_000_000, "day": 86_400_000_000, "days": 86_400_000_000,
    "w": 604_800_000_000, "week": 604_800_000_000, "weeks": 604_800_000_000,
}  # fmt: skip
_PART = re.compile(r"\s*([+-]?)\s*(\d+\.?\d*|\.\d+)\s*([A-Za-z]+)\s*", re.ASCII)
_SQL = re.compile(r"\s*interval(?=[\s'])(.*)", re.ASCII | re.IGNORECASE | re.DOTALL)
_SQL_FIELDS = re.compile(
    r"\s*([+-]?)\s*'\s*([+-]?)([\d :.]+?)\s*'\s*(day|hour|minute)\s+to\s+(hour|minute|second)\s*",
    re.ASCII | re.IGNORECASE,
)
_FIELDS = ("day", "hour", "minute", "second")


def duration_us(value: object, *, what: str = "duration") -> int:
    """Returns microseconds of ``"20 seconds"``, ``"5m"``, ``"1 hour 30 minutes"``, ``"interval 5 minutes"``, a
    timedelta, or 0.

    Every text is read that Spark reads as an interval, and it means the same; a part of a microsecond does not count.
    Raises ConfigError naming ``what`` for anything else: a number without a unit could be anything. Months and years
    are refused: they have no fixed length.
    """
    if isinstance(value, timedelta) and value == value:  # NaT of pandas does not equal itself
        return value // timedelta(microseconds=1)
    if _is_number(value):
        if isinstance(value, int) and value == 0:
            return 0
        raise ConfigError(f"{what} of {_shown(value)} has no unit; write e.g. '{_shown(value)} seconds'")
    if not isinstance(value, str) or len(value) > _LONGEST_TEXT:
        raise ConfigError(f"{what} of {_shown(value)} is not a duration; write e.g. '20 seconds' or '5m'")
    total, position, text = Decimal(0), 0, _without_sql(value)
    while position < len(text) or not text:
        part = _PART.match(text, position)
        if part is None:
            raise ConfigError(f"{what} of {_shown(value)} is not a duration; write e.g. '20 seconds' or '5m'")
        sign, number, unit = part.groups()
        scale = _UNITS_US.get(unit.lower())
        if scale is None:
            raise ConfigError(
                f"{what} of {_shown(value)} has the unknown unit {unit!r}; "
                "units are us, ms, s, m, h, d, w or their English names; windows of months, quarters and years are "
                "aion.Calendar('1 month', zone='UTC')"
            )
        total += (Decimal(sign + number) * scale).to_integral_value(ROUND_DOWN)
        position = part.end()
    if abs(total) > _LONGEST_US:
        raise ConfigError(f"{what} of {_shown(value)} does not fit into 64 bits of microseconds")
    return int(total)


def _without_sql(text: str) -> str:
    """Returns what an interval of SQL says, without its words: ``interval '1 2' day to hour`` -> ``1 day 2 hour``."""
    sql = _SQL.fullmatch(text)
    if sql is None:
        return text
    if (fields := _SQL_FIELDS.fullmatch(sql[1])) is not None:
        outer, inner, numbers, first, last = fields.groups()
        names = _FIELDS[_FIELDS.index(first.lower()) : _FIELDS.index(last.lower()) + 1]
        values = re.split("[ :]", numbers)
        if len(values) == len(names):
            sign = "-" if (outer == "-") != (inner == "-") else ""
            return " ".join(f"{sign}{value} {name}" for value, name in zip(values, names, strict=True))
    return re.sub(r"'([^']*)'", r" \1 ", sql[1])


def _is_number(value: object) -> bool:
    # numpy takes its timedelta64 for a number.
    return isinstance(value, Number) and not isinstance(value, bool | np.timedelta64)


def _shown(value: object) -> str:
    # A number of numpy says its type, too.
    return str(value) if _is_number(value) else repr(value[:80] if isinstance(value, str) else value)


def format_duration(us: int) -> str:
    """Returns the shortest exact spelling that :func:`duration_us` reads back: ``90_000_000`` -> ``"90 seconds"``."""
    for name, scale in (
        ("day", 86_400_000_000),
        ("hour", 3_600_000_000),
        ("minute", 60_000_000),
        ("second", 1_000_000),
        ("millisecond", 1_000),
    ):
        if us and us % scale == 0:
            count = us // scale
            return f"{count} {name}" if count == 1 else f"{count} {name}s"
    return f"{us} microseconds"


def format_early(us: int) -> str:
    """Returns how far the watermark moves between two early panes, as a user writes it."""
    return "batch" if us == EACH_BATCH_US else format_duration(us)


def instant_us(value: int | datetime) -> int:
    """Returns microseconds since the epoch of an int (already µs) or a datetime (naive ones are UTC)."""
    # NaT of pandas is a datetime that does not equal itself.
    if isinstance(value, bool) or not isinstance(value, int | datetime) or value != value:
        raise ConfigError(f"{value!r} is not an instant; give microseconds since the epoch or a datetime")
    if isinstance(value, int):
        return value
    aware = value if value.tzinfo else value.replace(tzinfo=UTC)
    return (aware - EPOCH) // timedelta(microseconds=1)


def format_instant(us: int) -> str:
    """ISO 8601 in UTC; plain microseconds for an instant that Python's calendar cannot show."""
    try:
        return (EPOCH + timedelta(microseconds=us)).isoformat().replace("+00:00", "Z")
    except OverflowError:
        return f"{us} us"
