"""Where the hours, days, weeks, months and years of a time zone begin. Pure: the rules of a zone are an argument.

A day begins at the first instant at which the local date is that day or later. That is local midnight, and where the
clocks skip midnight, the instant at which they do. A day that the clocks skip as a whole (Apia left out the 30th of
December 2011) would begin with the next one: it has no instants. If the clocks go back over midnight, a day begins at
the first of the two midnights. Days may also begin at another local time, such as 5:00. Then all this is true of it.
Hours begin when the clocks show them, by the same rule.

Rules are known for the years 1 to 9999. Beyond them they repeat every 400 years, as the Gregorian calendar does.
"""

from __future__ import annotations

import hashlib
import io
import re
import zoneinfo
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.base.numbers import LONGEST_US
from aion.errors import WindowError

Ints = npt.NDArray[np.int64]

DAY_US = 86_400_000_000
HOUR_US = DAY_US // 24
_SLACK_US = 3 * DAY_US
"""No step is longer than its days, plus this: zones changed sides of the date line, and their rules change."""
_MONTHS = {"month": 1, "quarter": 3, "year": 12}
_DAYS = {"day": 1, "week": 7}
_HOUR = "hour"
_UNITS = (_HOUR, *_DAYS, *_MONTHS)
_CLOCK_UNITS = ("minute", "second", "millisecond", "microsecond")
_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_THURSDAY = 3
"""1970-01-01 was a Thursday."""
_START = re.compile(r"\s*(?:([A-Za-z]+)(?:\s+|\s*$))?(?:(\d{1,2}):(\d\d)(?::(\d\d))?)?\s*", re.ASCII)


@dataclass(frozen=True)
class Steps:
    """``count`` units of the calendar: ``unit`` is hour, day, week, month, quarter or year.

    Steps are numbered. Number 0 begins on 1970-01-01, or with weeks on the first ``weekday`` after that (0 is Monday).
    ``time_us``: the time of day at which a step begins. A step is made of *ticks*, which are hours or days.
    """

    count: int
    unit: str
    weekday: int = 0
    time_us: int = 0

    @classmethod
    def of(cls, text: str, start: str | None = None) -> Steps:
        """Reads e.g. ``"1 day"``, ``"2 months"`` or ``"quarter"``, and where they start, e.g. ``"05:00"`` or
        ``"sunday"``. Raises WindowError.
        """
        known = f"give a whole number of {', '.join(f'{unit}s' for unit in _UNITS[:-1])} or years, e.g. '1 day'"
        found = re.fullmatch(r"\s*(?:(\d+)\s+)?([A-Za-z]+)\s*", text) if isinstance(text, str) else None
        unit = found[2].lower().removesuffix("s") if found else ""
        if unit in _CLOCK_UNITS:
            raise WindowError(
                f"Calendar: {text!r} is a fixed length, which no calendar changes; use aion.Tumbling({text!r})"
            )
        if found is None or unit not in _UNITS:
            raise WindowError(f"Calendar: {text!r} is not a step of the calendar; {known}")
        count = int(found[1] or 1)
        if count == 0:
            raise WindowError(f"Calendar: {text!r} has no length; {known}")
        steps = cls(count, unit, *_start(start, unit))
        if steps.longest_us > LONGEST_US:
            raise WindowError(f"Calendar: {text!r} is longer than times reach, which is about 70,000 years")
        return steps

    def __str__(self) -> str:
        return self.every if self.start is None else f"{self.every} from {self.start}"

    @property
    def every(self) -> str:
        """The length, as :meth:`of` reads it."""
        return f"{self.count} {self.unit}" + ("" if self.count == 1 else "s")

    @property
    def start(self) -> str | None:
        """Says where they start, as :meth:`of` reads it. It is None for midnight, and for weeks on Mondays."""
        minutes, seconds = divmod(self.time_us // 1_000_000, 60)
        clock = f"{minutes // 60:02}:{minutes % 60:02}" + (f":{seconds:02}" if seconds else "")
        words = [*([_WEEKDAYS[self.weekday]] if self.weekday else []), *([clock] if self.time_us else [])]
        return " ".join(words) or None

    @property
    def hours(self) -> int:
        """The length in hours of steps of hours, otherwise 0."""
        return self.count if self.unit == _HOUR else 0

    @property
    def tick_us(self) -> int:
        return HOUR_US if self.hours else DAY_US

    @property
    def days(self) -> int:
        """The length in days, if it is always the same, otherwise 0."""
        return self.count * _DAYS.get(self.unit, 0)

    @property
    def months(self) -> int:
        """The length in months, or 0 for steps of hours, days and weeks."""
        return self.count * _MONTHS.get(self.unit, 0)

    @property
    def longest_us(self) -> int:
        """The length of the longest step on which the clocks go back by two hours, as in Antarctica/Troll each year."""
        return (self.hours or self.days or 31 * self.months) * self.tick_us + 2 * HOUR_US

    @property
    def shortest_us(self) -> int:
        """About the length of the shortest step, if the clocks stand still."""
        return (self.hours or self.days or 28 * self.months) * self.tick_us

    def refine(self, other: Steps) -> bool:
        """Returns whether each of the other steps begins with one of these."""
        if self.time_us != other.time_us:
            return False
        if self.hours:
            return all(part % self.hours == 0 for part in (other.hours or 24 * (other.days or 1), 24 * other._first))
        if other.hours:
            return False
        if not self.days:
            return bool(other.months) and other.months % self.months == 0
        if not other.days:
            return self.days == 1
        return other.days % self.days == 0 and (other._first - self._first) % self.days == 0

    def number(self, ticks: Ints) -> Ints:
        """Returns the number of the step of each tick. Ticks count from 1970-01-01."""
        if length := self.hours or self.days:
            return np.asarray((ticks - self._first) // length)
        months = ticks.astype("datetime64[D]").astype("datetime64[M]").astype(np.int64)
        return np.asarray(months // self.months)

    def first_tick(self, numbers: Ints) -> Ints:
        """Returns the tick with which each step begins."""
        if length := self.hours or self.days:
            return np.asarray(self._first + numbers * length)
        months = (numbers * self.months).astype("datetime64[M]")
        return np.asarray(months.astype("datetime64[D]").astype(np.int64))

    @property
    def _first(self) -> int:
        return (self.weekday - _THURSDAY) % 7 if self.unit == "week" else 0


def _start(text: str | None, unit: str) -> tuple[int, int]:
    """Returns the weekday and the time of day of e.g. ``"sunday 05:00"``. Raises WindowError."""
    if text is None:
        return 0, 0
    if unit == _HOUR:
        raise WindowError(f"Calendar: hours begin when the clocks show a full hour; leave start={text!r} out")
    found = _START.fullmatch(text) if isinstance(text, str) and text.strip() else None
    day, hours, minutes, seconds = found.groups() if found else (None, None, None, None)
    time = [int(number or 0) for number in (hours, minutes, seconds)]
    if found is None or time[0] > 23 or max(time[1:]) > 59 or (day is not None and day.lower() not in _WEEKDAYS):
        raise WindowError(
            f"Calendar: start of {text!r} is neither a time of day nor the first day of a week; give e.g. '05:00', "
            "'sunday' or 'sunday 05:00'"
        )
    if day is not None and unit != "week":
        raise WindowError(f"Calendar: start of {text!r} names a day, and only weeks begin on one; give a time: '05:00'")
    seconds_of_day = (time[0] * 60 + time[1]) * 60 + time[2]
    return (0 if day is None else _WEEKDAYS.index(day.lower())), seconds_of_day * 1_000_000


@dataclass(frozen=True)
class ZoneRules:
    """What the clocks of a zone do, as the bytes of a TZif file (RFC 9636). ``name``: of the zone."""

    name: str
    tzif: bytes

    @property
    def digest(self) -> str:
        """Identifies the rules."""
        return hashlib.sha256(self.tzif).hexdigest()[:16]

    def tick_starts(self, ticks: Ints, tick_us: int = DAY_US, time_us: int = 0) -> Ints:
        """Returns the first instant of each day or hour, in µs. They count from 1970-01-01, and begin at a local
        time.
        """
        return _ticks_of(self, tick_us, time_us).starts(ticks)

    def __repr__(self) -> str:
        return f"ZoneRules({self.name!r}, {self.digest})"


class _Ticks:
    """A table of the first instants of days or hours, made in parts when they are needed."""

    AT_ONCE = 1 << 12
    CYCLE = 146_097
    """The Gregorian calendar repeats after this many days, which are whole weeks."""
    FIRST, LAST = (datetime(year, 1, 1).toordinal() - datetime(1970, 1, 1).toordinal() for year in (400, 9600))
    """From the first of these days up to the second, zoneinfo knows the offsets. It knows a bit more."""

    def __init__(self, rules: ZoneRules, tick_us: int, time_us: int) -> None:
        self._tick = timedelta(microseconds=tick_us)
        a_day = DAY_US // tick_us
        self._cycle, self._first, self._last = a_day * self.CYCLE, a_day * self.FIRST, a_day * self.LAST
        self._time = timedelta(microseconds=time_us)
        self._zone = zoneinfo.ZoneInfo.from_file(io.BytesIO(rules.tzif), key=rules.name)
        self._starts: dict[int, Ints] = {}

    def starts(self, ticks: Ints) -> Ints:
        if not len(ticks):
            return np.empty(0, np.int64)
        cycles = None
        if ticks.min() < self._first or ticks.max() >= self._last:
            cycles = np.minimum((ticks - self._first) // self._cycle, 0)
            cycles += np.maximum((ticks - self._last) // self._cycle + 1, 0)
            ticks = ticks - cycles * self._cycle
        parts, places = np.divmod(ticks, self.AT_ONCE)
        if parts.min() == parts.max():
            found = self._part(int(parts[0])).take(places)
        else:
            found = np.empty(ticks.shape, np.int64)
            for part in np.unique(parts).tolist():
                own = parts == part
                found[own] = self._part(part)[places[own]]
        return found if cycles is None else found + cycles * (self.CYCLE * DAY_US)

    def _part(self, part: int) -> Ints:
        if (found := self._starts.get(part)) is None:
            first = part * self.AT_ONCE
            origin = datetime(1970, 1, 1) + self._time
            starts = [self._start(origin + tick * self._tick) for tick in range(first, first + self.AT_ONCE)]
            self._starts[part] = found = np.array(starts, np.int64)
        return found

    def _start(self, local: datetime) -> int:
        before, after = self._offset_us(local), self._offset_us(local.replace(fold=1))
        us = (local - datetime(1970, 1, 1)) // timedelta(microseconds=1)
        if before >= after:
            return us - before
        # The clocks skip this local time, at an instant from ``low`` on. Local times at or after it are at ``high``.
        low, high = us - after, us - before
        while low < high:
            middle = (low + high) // 2
            if middle + self._offset_at_us(middle) >= us:
                high = middle
            else:
                low = middle + 1
        return high

    def _offset_us(self, local: datetime) -> int:
        offset = self._zone.utcoffset(local)
        assert offset is not None, "a zone has an offset at any time"
        return offset // timedelta(microseconds=1)

    def _offset_at_us(self, us: int) -> int:
        utc = datetime(1970, 1, 1) + timedelta(microseconds=us)
        return (self._zone.fromutc(utc.replace(tzinfo=self._zone)).replace(tzinfo=None) - utc) // timedelta(
            microseconds=1
        )


@lru_cache(maxsize=64)
def _ticks_of(rules: ZoneRules, tick_us: int, time_us: int) -> _Ticks:
    return _Ticks(rules, tick_us, time_us)


class FixedStarts:
    """The starts of some steps, whatever the rules of the zone say now. Steps between them adapt.

    ``numbers``: of the steps, ascending. ``starts_us``: they do not descend. ``rules``: the digests of the rules that
    they came from.
    """

    def __init__(self, numbers: Ints, starts_us: Ints, rules: Iterable[str] = ()) -> None:
        self.numbers, self.starts_us, self.rules = numbers, starts_us, frozenset(rules)

    def __len__(self) -> int:
        return len(self.numbers)

    def applied(self, numbers: Ints, starts_us: Ints) -> Ints:
        """Returns the starts of these steps, where ``starts_us`` is what the rules say."""
        after = np.searchsorted(self.numbers, numbers)
        low = np.concatenate(([np.iinfo(np.int64).min], self.starts_us))[after]
        high = np.append(self.starts_us, np.iinfo(np.int64).max)[after]
        fixed = np.append(self.numbers, np.iinfo(np.int64).max)[after] == numbers
        return np.where(fixed, high, np.clip(starts_us, low, high))


NONE_FIXED = FixedStarts(np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True, eq=False)
class CalendarEdges:
    """The starts of the steps of a zone's calendar. Step k ends where step k + 1 begins; it may have no instants."""

    steps: Steps
    rules: ZoneRules
    fixed: FixedStarts = NONE_FIXED

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CalendarEdges) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @cached_property
    def _identity(self) -> tuple[Any, ...]:
        fixed = self.fixed.numbers.tobytes(), self.fixed.starts_us.tobytes(), self.fixed.rules
        return self.steps, self.rules, fixed

    @property
    def longest_us(self) -> int:
        """An upper bound on the length of a step."""
        return self.steps.longest_us + _SLACK_US

    def starts(self, numbers: Ints) -> Ints:
        """Returns the start of each step, in µs."""
        found = self.rules.tick_starts(self.steps.first_tick(numbers), self.steps.tick_us, self.steps.time_us)
        return self.fixed.applied(numbers, found) if len(self.fixed) else found

    def numbers(self, times_us: Ints) -> Ints:
        """Returns the number of the step that each instant is in: the last one that starts at or before it."""
        if not len(times_us):
            return np.empty(0, np.int64)
        found = self.steps.number(self._no_earlier_ticks(times_us))
        later = self.starts(found) > times_us
        while later.any():
            found[later] -= 1
            later[later] = self.starts(found[later]) > times_us[later]
        return found

    def _no_earlier_ticks(self, times_us: Ints) -> Ints:
        """Returns for each instant its tick, or one that is not much later."""
        if not self.steps.hours:
            return np.asarray(times_us // DAY_US + 1)  # no clock is a day or more ahead of UTC
        ticks = np.asarray(times_us // HOUR_US)
        # What the clocks said within a day of the instant says what they say then, but for a change between.
        ticks += (times_us - self.rules.tick_starts(ticks, HOUR_US)) // HOUR_US + 2
        while (early := self.rules.tick_starts(ticks + 1, HOUR_US) <= times_us).any():
            ticks[early] += 1
        return ticks

    def number(self, us: int) -> int:
        return int(self.numbers(np.array([us], np.int64))[0])

    def floors(self, times_us: Ints) -> Ints:
        """Returns the last edge at or before each instant."""
        return self.starts(self.numbers(times_us))

    def afters(self, times_us: Ints) -> Ints:
        """Returns the first edge after each instant."""
        return self.starts(self.numbers(times_us) + 1)

    def between(self, low_us: int, high_us: int) -> Ints:
        """Returns the last edge at or before ``low_us``, then all edges up to ``high_us``, in order and each once."""
        first, last = self.numbers(np.array([low_us, high_us], np.int64)).tolist()
        edges = self.starts(np.arange(first, last + 1))
        distinct = np.ones(len(edges), np.bool_)
        distinct[:-1] = edges[1:] > edges[:-1]
        return edges[distinct]

    @property
    def without_fixed(self) -> CalendarEdges:
        """The edges that the rules give."""
        return CalendarEdges(self.steps, self.rules)

    def makes_redundant(self, other: CalendarEdges) -> bool:
        """Returns whether all edges of the other are edges of this, whatever the rules are."""
        same = self.rules == other.rules and not len(self.fixed) and not len(other.fixed)
        return same and self.steps.refine(other.steps)

    def with_starts(self, numbers: Ints, starts_us: Ints, rules: Iterable[str]) -> CalendarEdges:
        """The same, but these steps have these starts: see :class:`FixedStarts`."""
        return CalendarEdges(self.steps, self.rules, FixedStarts(numbers, starts_us, rules))
