"""What windows mean, pane by pane, in plain Python: any definitions together, as docs/reference/windows.md tells it.

No slices, no partials, no sharing. The bound is fixed, and late events trigger at the end of their batch. What windows
a key has at some moment, :func:`tests.keyed_oracle.windows_of` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from aion.core.periodic import Periodic
from aion.core.windows import Count, Definition, PerRecord, Session
from tests.keyed_oracle import Event, Window, windows_of

NEVER = -(10**30)


class Pane(NamedTuple):
    """``definition``: its number. Of one that is retracted there are no events and no values."""

    definition: int
    key: int
    start: int
    end: int
    kind: str
    events: int = 0
    total: int | None = None
    low: int | None = None
    high: int | None = None


class Numbered(NamedTuple):
    """An event, and its number in the order of arrival."""

    event: Event
    number: int


Dropped = Counter[tuple[int, int]]
"""Events by definition and key."""


class Oracle:
    """``process`` returns what was too late, by definition; ``advance`` the panes, sorted.

    To advance to where the watermark is shows what a batch has triggered.
    """

    def __init__(self, windows: Sequence[Definition], bound: int) -> None:
        self.watermark: int | None = None
        self._windows = windows
        self._lives: list[_Life] = [
            _PeriodicLife(n, w, bound) if isinstance(w, Periodic) else _KeyedLife(n, w, bound)
            for n, w in enumerate(windows)
        ]
        self._arrived = 0
        self._edges = [w for w in windows if isinstance(w, Periodic)]
        gaps = [w.gap_us for w in windows if isinstance(w, Session)]
        self._cell = min(gaps, default=None)

    def process(self, batch: Sequence[Event]) -> Dropped:
        events = [Numbered(event, self._arrived + n) for n, event in enumerate(batch)]
        self._arrived += len(events)
        rows: dict[Any, list[Numbered]] = {}
        for one in events:
            rows.setdefault(self._row_of(one), []).append(one)
        single = [[one] for one in events]
        dropped: Dropped = Counter()
        for window, life in zip(self._windows, self._lives, strict=True):
            of_events = isinstance(window, Count | PerRecord)  # they keep events, not partials
            dropped += life.process(single if of_events else list(rows.values()), self.watermark)
        return dropped

    def advance(self, watermark: int) -> list[Pane]:
        panes = [pane for life in self._lives for pane in life.batch_ended(self.watermark)]
        before = self.watermark
        if before is None or watermark > before:
            self.watermark = watermark
            panes += [pane for life in self._lives for pane in life.advance(before, watermark)]
        return sorted(panes, key=str)

    def _row_of(self, one: Numbered) -> Any:
        """Partials of a key that arrive together are one row for each slice, and each cell of the smallest gap."""
        if self._cell is None:
            return one.number
        t = one.event.t
        edges = [(t - w.offset_us) // w.slide_us for w in self._edges]
        edges += [(t - w.offset_us - w.size_us) // w.slide_us for w in self._edges]
        return one.event.key, t // self._cell, *edges


class _Life(Protocol):
    def process(self, rows: Sequence[list[Numbered]], watermark: int | None) -> Dropped: ...
    def batch_ended(self, watermark: int | None) -> list[Pane]: ...
    def advance(self, before: int | None, now: int) -> list[Pane]: ...


@dataclass
class _Bucket:
    events: list[Event] = field(default_factory=list)
    changed: bool = True


class _PeriodicLife:
    def __init__(self, number: int, window: Periodic, bound: int) -> None:
        self._number, self._window, self._bound = number, window, bound
        self._live: dict[tuple[int, int, int], _Bucket] = {}  # by key, start and end

    def process(self, rows: Sequence[list[Numbered]], watermark: int | None) -> Dropped:
        dropped: Dropped = Counter()
        for event in (one.event for row in rows for one in row):
            for start, end in self._window.covering(event.t):
                if watermark is None or end + self._bound > watermark:
                    bucket = self._live.setdefault((event.key, start, end), _Bucket())
                    bucket.events.append(event)
                    bucket.changed = True
                else:
                    dropped[self._number, event.key] += 1
        return dropped

    def batch_ended(self, watermark: int | None) -> list[Pane]:
        return [] if watermark is None else self._executed("late", watermark)

    def advance(self, before: int | None, now: int) -> list[Pane]:
        panes = self._executed("on_time", now)
        self._live = {at: b for at, b in self._live.items() if at[2] + self._bound > now}
        return panes

    def _executed(self, kind: str, now: int) -> list[Pane]:
        panes = []
        for (key, start, end), bucket in self._live.items():
            if end <= now and bucket.changed:
                panes.append(_pane(self._number, key, start, end, kind, bucket.events))
                bucket.changed = False
        return panes


@dataclass
class _Key:
    """The events of a key that are needed, and of each window that was executed the newest event it had seen."""

    events: list[Numbered] = field(default_factory=list)
    yielded: dict[tuple[int, int, int], int] = field(default_factory=dict)


class _KeyedLife:
    """Windows that each key has its own of."""

    def __init__(self, number: int, window: Definition, bound: int) -> None:
        self._number, self._window, self._bound = number, window, bound
        self._keys: dict[int, _Key] = {}
        self._closed = NEVER

    def process(self, rows: Sequence[list[Numbered]], watermark: int | None) -> Dropped:
        """All events of a batch are judged by what was there before it."""
        dropped: Dropped = Counter()
        taken = []
        for row in rows:
            first = min(row, key=lambda one: one.event.t).event
            is_taken = self._is_taken(first)
            if is_taken:
                taken += row
            if not is_taken or (isinstance(self._window, PerRecord) and first.t < self._closed):
                dropped[self._number, first.key] += len(row)
        for one in sorted(taken, key=lambda one: one.number):
            self._keys.setdefault(one.event.key, _Key()).events.append(one)
        return dropped

    def _is_taken(self, event: Event) -> bool:
        there = self._keys.get(event.key, _Key())
        match self._window:
            case Session(gap_us=gap):
                spans = ((w.start, w.end - gap) for w in self._windows(there))
                return event.t + gap > self._closed or any(start <= event.t <= last for start, last in spans)
            case PerRecord(size_us=size):
                return event.t + size + 1 > self._closed
        return event.t + 1 > self._closed or any(event.t >= one.event.t for one in there.events)

    def batch_ended(self, watermark: int | None) -> list[Pane]:
        if watermark is None:
            return []
        panes = self._executed("final", self._due(self._closed)) if isinstance(self._window, Count) else []
        for of in self._keys.values():
            self._let_go(of)
        return panes + self._executed("late", self._due(watermark))

    def _due(self, by: int) -> dict[int, list[Window]]:
        return {
            key: [w for w in self._windows(of) if self._is_there(w) and w.over <= by and self._is_new(w, of)]
            for key, of in self._keys.items()
        }

    def advance(self, before: int | None, now: int) -> list[Pane]:
        due = {
            key: [
                w
                for w in self._windows(of)
                if self._is_there(w) and w.over <= now and (before is None or w.over > before) and self._is_new(w, of)
            ]
            for key, of in self._keys.items()
        }
        panes = self._executed("on_time", due)
        self._closed = max(self._closed, now - self._bound)
        for key, of in self._keys.items():
            places = {self._place(w, of) for w in self._windows(of)}
            for start, end, nth in [at for at in of.yielded if at not in places and at[1] <= self._closed]:
                panes.append(Pane(self._number, key, start, end, "retracted"))
                del of.yielded[start, end, nth]
            self._let_go(of)
        return panes

    def _let_go(self, of: _Key) -> None:
        gone = [w for w in self._windows(of) if w.over <= self._closed]
        for window in gone:
            of.yielded.pop(self._place(window, of), None)
        match self._window:
            case PerRecord(size_us=size):
                of.events = [one for one in of.events if one.event.t + size + 1 > self._closed]
            case Count(slide=slide):
                in_order = sorted(of.events, key=lambda one: (one.event.t, one.number))
                of.events = sorted(in_order[len(gone) * slide :], key=lambda one: one.number)
            case _:
                held = {id(event) for window in gone for event in window.events}
                of.events = [one for one in of.events if id(one.event) not in held]

    def _executed(self, kind: str, due: dict[int, list[Window]]) -> list[Pane]:
        """With a window comes the retraction of what was executed, is there no longer, and lies where the window is."""
        panes = []
        for key, windows in due.items():
            of = self._keys[key]
            places = {self._place(w, of) for w in self._windows(of)}
            for start, end, nth in [place for place in of.yielded if place not in places]:
                if any(w.start <= end and w.over >= start for w in windows):
                    panes.append(Pane(self._number, key, start, end, "retracted"))
                    del of.yielded[start, end, nth]
            for window in windows:
                panes.append(_pane(self._number, key, window.start, window.end, kind, window.events))
                of.yielded[self._place(window, of)] = self._newest(window, of)
        return panes

    def _windows(self, of: _Key) -> list[Window]:
        return windows_of(self._window, [one.event for one in of.events])

    def _is_there(self, window: Window) -> bool:
        """Of windows per record events stay for later ones; they must not be executed again."""
        return not isinstance(self._window, PerRecord) or window.over > self._closed

    def _is_new(self, window: Window, of: _Key) -> bool:
        seen = of.yielded.get(self._place(window, of))
        return seen is None or self._newest(window, of) > seen

    def _newest(self, window: Window, of: _Key) -> int:
        held = {id(event) for event in window.events}
        return max(one.number for one in of.events if id(one.event) in held)

    def _place(self, window: Window, of: _Key) -> tuple[int, int, int]:
        """What a window is known by. Two count windows may have the same bounds."""
        if not isinstance(self._window, Count):
            return window.start, window.end, 0
        first = next((one.number for one in of.events if window.events and one.event is window.events[0]), -1)
        return window.start, window.end, first


def _pane(number: int, key: int, start: int, end: int, kind: str, events: Sequence[Event]) -> Pane:
    values = [event.value for event in events]
    return Pane(number, key, start, end, kind, len(values), sum(values), min(values), max(values))
