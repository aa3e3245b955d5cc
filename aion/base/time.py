"""Event time as Aion counts it: signed 64-bit microseconds since the Unix epoch, UTC. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from aion.errors import ConfigError

MICROS_PER_SECOND = 1_000_000
_LONGEST_US = 2**63 - 1
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_UNITS_US: dict[str, int] = {
    "us": 1, "microsecond": 1, "microseconds": 1,
    "ms": 1_000, "millisecond": 1_000, "milliseconds": 1_000,
    "s": 1_000_000, "sec": 1_000_000, "second": 1_000_000, "seconds": 1_000_000,
    "m": 60_000_000, "min": 60_000_000, "minute": 60_000_000, "minutes": 60_000_000,
    "h": 3_600_000_000, "hour": 3_600_000_000, "hours": 3_600_000_000,
    "d": 86_400_000_000, "day": 86_400_000_000, "days": 86_400_000_000,
    "w": 604_800_000_000, "week": 604_800_000_000, "weeks": 604_800_000_000,
}  # fmt: skip
_PART = re.compile(r"\s*([+-]?\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def duration_us(value: str | int | timedelta, *, what: str = "duration") -> int:
    """Returns microseconds of ``"20 seconds"``, ``"5m"``, ``"1 hour 30 minutes"``, a timedelta, or an int (µs).

    Raises ConfigError naming ``what`` for anything else. Months and years are refused: they have no
    fixed length.
    """
    if isinstance(value, bool):
        raise ConfigError(f"{what}: {value!r} is not a duration; write e.g. '20 seconds' or '5m'")
    if isinstance(value, int):
        return value
    if isinstance(value, timedelta):
        return value // timedelta(microseconds=1)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{what}: {value!r} is not a duration; write e.g. '20 seconds' or '5m'")
    total, position = Decimal(0), 0
    while position < len(value):
        part = _PART.match(value, position)
        if part is None:
            raise ConfigError(f"{what}: {value!r} is not a duration; write e.g. '20 seconds' or '5m'")
        number, unit = part.groups()
        scale = _UNITS_US.get(unit.lower())
        if scale is None:
            raise ConfigError(
                f"{what}: {value!r} has the unknown unit {unit!r}; "
                "units are us, ms, s, m, h, d, w or their English names; windows of months, quarters and years are "
                "aion.Calendar('1 month', zone='UTC')"
            )
        total += Decimal(number) * scale
        position = part.end()
    if abs(total) > _LONGEST_US:
        raise ConfigError(f"{what}: {value[:60]!r} does not fit into 64 bits of microseconds")
    return int(total.to_integral_value())


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
