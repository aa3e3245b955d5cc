"""What windows mean, event by event, in plain Python: the oracle for everything in ``aion.slicing``.

Written from the definitions (Scotty and KIP-450), not from the code: no slices, no partials, no sharing. Times
are integers; a batch is a set that arrives under one watermark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aion.core.windows import Count, Definition, Periodic, PerRecord, Session

ON_TIME, LATE, RETRACTED = 0, 1, 2
NEVER = -(10**30)


class Event(NamedTuple):
    time: int
    value: int
    number: int
    """In the order of arrival."""


Row = tuple[Any, ...]
"""(definition, number, start, end, kind, events, values in the order of the aggregates ...)"""


def results(events: Sequence[Event]) -> Row:
    values = [event.value for event in events]
    return (len(values), sum(values), min(values), max(values))


class Oracle:
    """``process`` returns how many events were too late for every window, ``advance`` the panes, sorted."""

    def __init__(self, windows: Sequence[Definition], bound: int) -> None:
        self.watermark = NEVER
        self.lives = [_LIVES[type(w).__mro__[-2]](n, w, bound) for n, w in enumerate(windows)]
        self.arrived = 0

    def process(self, batch: Sequence[tuple[int, int]]) -> int:
        events = [Event(time, value, self.arrived + n) for n, (time, value) in enumerate(batch)]
        self.arrived += len(events)
        taken: set[int] = set()
        for life in self.lives:
            taken |= {event.number for event in life.process(events, self.watermark)}
        return len(events) - len(taken)

    def advance(self, watermark: int) -> list[Row]:
        before, self.watermark = self.watermark, max(self.watermark, watermark)
        return sorted(row for life in self.lives for row in life.advance(before, self.watermark))


@dataclass
class _Window:
    events: list[Event] = field(default_factory=list)
    changed: bool = False
    yielded: list[tuple[int, int, Row]] = field(default_factory=list)


@dataclass
class PeriodicLife:
    number: int
    window: Periodic
    bound: int
    live: dict[int, _Window] = field(default_factory=dict)

    def process(self, events: Sequence[Event], watermark: int) -> list[Event]:
        taken = []
        for event in events:
            for start in self.window.starts_covering(event.time):
                if self.window.end(start) + self.bound > watermark:
                    window = self.live.setdefault(start, _Window())
                    window.events.append(event)
                    window.changed = True
                    taken.append(event)
        return taken

    def advance(self, before: int, now: int) -> list[Row]:
        rows: list[Row] = []
        for start, window in list(self.live.items()):
            end = self.window.end(start)
            if end <= now and window.changed:
                rows.append((self.number, 0, start, end, ON_TIME if end > before else LATE, *results(window.events)))
                window.changed = False
            if end + self.bound <= now:
                del self.live[start]
        return rows


@dataclass
class SessionLife:
    number: int
    window: Session
    bound: int
    live: list[_Window] = field(default_factory=list)

    def process(self, events: Sequence[Event], watermark: int) -> list[Event]:
        pieces = [*self.live, *(_Window([event], changed=True) for event in events)]
        old = {id(window) for window in self.live}
        components: list[list[_Window]] = []
        for piece in sorted(pieces, key=lambda window: first(window)):
            reached = max((last(w) for w in components[-1]), default=NEVER) if components else NEVER
            if first(piece) - reached <= self.window.gap_us:
                components[-1].append(piece)
            else:
                components.append([piece])
        self.live, taken = [], []
        for component in components:
            new = [w for w in component if id(w) not in old]
            ends = max(last(w) for w in component) + self.window.gap_us
            if len(new) == len(component) and ends + self.bound <= watermark:
                continue  # nothing live, and too late to be one
            taken += [event for w in new for event in w.events]
            self.live.append(
                _Window(
                    [event for w in component for event in w.events],
                    any(w.changed for w in component),
                    [y for w in component for y in w.yielded],
                )
            )
        return taken

    def advance(self, before: int, now: int) -> list[Row]:
        rows: list[Row] = []
        for window in list(self.live):
            start, end = first(window), last(window) + self.window.gap_us
            rows += [
                (self.number, 0, s, e, RETRACTED, *result) for s, e, result in window.yielded if (s, e) != (start, end)
            ]
            window.yielded = [y for y in window.yielded if y[:2] == (start, end)]
            if end <= now and window.changed:
                result = results(window.events)
                rows.append((self.number, 0, start, end, ON_TIME if end > before else LATE, *result))
                window.yielded = [(start, end, result)]
                window.changed = False
            if end + self.bound <= now:
                self.live.remove(window)
        return rows


def first(window: _Window) -> int:
    return min(event.time for event in window.events)


def last(window: _Window) -> int:
    return max(event.time for event in window.events)


@dataclass
class CountLife:
    number: int
    window: Count
    bound: int
    events: list[Event] = field(default_factory=list)
    gone: int = 0
    yielded: dict[int, tuple[list[Event], int, int]] = field(default_factory=dict)

    def process(self, events: Sequence[Event], watermark: int) -> list[Event]:
        taken = [event for event in events if event.time + 1 + self.bound > watermark]
        self.events = sorted([*self.events, *taken], key=lambda event: (event.time, event.number))
        return taken

    def advance(self, before: int, now: int) -> list[Row]:
        rows: list[Row] = []
        k = self.gone
        while k * self.window.slide + self.window.n <= len(self.events):
            begin = k * self.window.slide
            events = self.events[begin : begin + self.window.n]
            start, end = events[0].time, events[-1].time + 1
            old, old_start, old_end = self.yielded.get(k, ([], start, end))
            if (old_start, old_end) != (start, end):
                rows.append((self.number, k, old_start, old_end, RETRACTED, *results(old)))
            if end <= now and events != old:
                rows.append((self.number, k, start, end, ON_TIME if end > before else LATE, *results(events)))
                self.yielded[k] = (events, start, end)
            k += 1
            if end + self.bound <= now:
                self.gone = k
        return rows


@dataclass
class RecordLife:
    number: int
    window: PerRecord
    bound: int
    events: list[Event] = field(default_factory=list)
    new: set[int] = field(default_factory=set)

    def process(self, events: Sequence[Event], watermark: int) -> list[Event]:
        taken = [event for event in events if event.time + self.window.size_us + 1 + self.bound > watermark]
        self.events += taken
        self.new |= {event.number for event in taken}
        return taken

    def advance(self, before: int, now: int) -> list[Row]:
        rows: list[Row] = []
        for time in {event.time for event in self.events}:
            inside = [event for event in self.events if time - self.window.size_us <= event.time <= time]
            on_time = time + 1 > before
            news = time + 1 + self.bound > before and any(event.number in self.new for event in inside)
            if time + 1 <= now and (on_time or news):
                row = (self.number, 0, time - self.window.size_us, time, ON_TIME if on_time else LATE)
                rows.append((*row, *results(inside)))
        self.new = set()
        return rows


_LIVES: dict[type, Any] = {
    Periodic: PeriodicLife,
    Session: SessionLife,
    Count: CountLife,
    PerRecord: RecordLife,
}
