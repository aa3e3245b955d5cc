"""What windows that each key has its own of mean, one event at a time, in plain Python. Slow and obvious.

Written from the definitions: sessions end where no event of theirs reaches, by its gap, or after a maximal duration,
and an event there or behind begins the next; count windows hold n events in event-time
order; a window per record holds what came up to ``size`` before it, both ends inclusive; punctuated windows begin at a
punctuation and end at the next. What ended a bound before the watermark is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import aion

NEVER = 2**63 - 1


class Event(NamedTuple):
    key: int
    t: int
    value: int
    mark: bool = False
    gap: int | None = 5


class Window(NamedTuple):
    """``over``: the watermark at which it is complete; NEVER while it is not."""

    start: int
    end: int
    over: int
    events: tuple[Event, ...]


def windows_of(definition: object, events: Sequence[Event]) -> list[Window]:
    """Of the events of one key, in the order of arrival."""
    events = sorted(events, key=lambda e: e.t)
    found: list[Window] = []
    match definition:
        case aion.Session():
            groups: list[list[Event]] = []
            for e in events:
                if groups and e.t <= reach_of(definition, groups[-1]) and not is_too_long(definition, groups[-1], e):
                    groups[-1].append(e)
                else:
                    groups.append([e])
            for g in groups:
                end = reach_of(definition, g)
                if definition.max_duration_us is not None:
                    end = min(end, g[0].t + definition.max_duration_us)
                found.append(Window(g[0].t, end, end, tuple(g)))
        case aion.Count(n=n, slide=slide):
            for i in range(0, len(events) - n + 1, slide):
                g = events[i : i + n]
                found.append(Window(g[0].t, g[-1].t + 1, g[-1].t + 1, tuple(g)))
        case aion.PerRecord(size_us=size):
            times = sorted({e.t for e in events})
            found = [Window(t - size, t, t + 1, tuple(e for e in events if t - size <= e.t <= t)) for t in times]
        case aion.Punctuated():
            begins = [i for i, e in enumerate(events) if i == 0 or e.mark]
            for i, begin in enumerate(begins):
                end = begins[i + 1] if i + 1 < len(begins) else None
                over = NEVER if end is None else events[end].t
                found.append(Window(events[begin].t, over, over, tuple(events[begin:end])))
    return found


def gap_of(session: aion.Session, e: Event) -> int:
    return session.gap_us if session.gap_column is None else e.gap or 0


def reach_of(session: aion.Session, events: Sequence[Event]) -> int:
    return max(e.t + gap_of(session, e) for e in events)


def is_too_long(session: aion.Session, events: Sequence[Event], e: Event) -> bool:
    return session.max_duration_us is not None and e.t >= events[0].t + session.max_duration_us


class Oracle:
    """The events that are kept, those that were dropped, and the windows that have ended."""

    def __init__(self, definition: object, bound: int, *, by_event: bool) -> None:
        self.definition = definition
        self.by_event = by_event
        self.bound = bound
        self.live: dict[int, list[Event]] = {}
        self.dropped: list[Event] = []
        self.done: list[tuple[int, Window]] = []
        self.watermark: int | None = None
        self.closed = self.settled = -NEVER
        self.longest_gap = 0
        # Where sessions were that were cut and are gone: what belongs there is too late.
        self.cut: dict[int, list[Window]] = {}

    def process(self, batch: Sequence[Event]) -> None:
        """All events of a batch are judged by what was there before it."""
        before = {key: list(events) for key, events in self.live.items()}
        self.dropped += [e for e in batch if self._only_for_later(e)]
        for row in self._rows(batch):
            if all(self._in_time(e, before.get(e.key, [])) for e in row):
                for e in row:
                    self.live.setdefault(e.key, []).append(e)
                    self.longest_gap = max(self.longest_gap, e.gap or 0)
            else:
                self.dropped += row
        self._remove_closed(self.closed)

    def _rows(self, batch: Sequence[Event]) -> list[list[Event]]:
        """Where partials are kept, events of a key within a cell of the gap share their fate in sessions."""
        if self.by_event or not isinstance(self.definition, aion.Session) or self.definition.by_event:
            return [[e] for e in batch]
        rows: dict[tuple[int, int], list[Event]] = {}
        for e in batch:
            rows.setdefault((e.key, e.t // self.definition.gap_us), []).append(e)
        return list(rows.values())

    def _in_time(self, e: Event, live: list[Event]) -> bool:
        match self.definition:
            case aion.Session() if self.definition.by_event:
                gap, most = gap_of(self.definition, e), self.definition.max_duration_us
                if gap <= 0 or any(w.start <= e.t < w.end for w in self.cut.get(e.key, [])):
                    return False
                if any(w.start <= e.t < w.end for w in windows_of(self.definition, live)):
                    return True
                alone = e.t + (gap if most is None else min(gap, most))
                return alone > self.closed and (e.t >= self.settled or most is not None)
            case aion.Session(gap_us=gap):
                inside = any(w.start <= e.t <= w.end - gap for w in windows_of(self.definition, live))
                return e.t + gap > self.closed or inside
            case aion.PerRecord(size_us=size):
                return e.t + size + 1 > self.closed
        return e.t + 1 > self.closed or (bool(live) and e.t >= min(o.t for o in live))

    def _only_for_later(self, e: Event) -> bool:
        """Kept for windows per record that are still there, but its own is gone, and comes out as dropped."""
        if not isinstance(self.definition, aion.PerRecord):
            return False
        return e.t + 1 <= self.closed < e.t + self.definition.size_us + 1

    def advance(self, watermark: int) -> None:
        if self.watermark is not None and watermark <= self.watermark:
            return
        self.watermark = watermark
        was_closed = self.closed
        self.closed = max(self.closed, watermark - self.bound)
        # Only with a gap from a column: events in the same time may have been forgotten by then.
        if isinstance(self.definition, aion.Session) and self.definition.gap_column is not None:
            self.settled = max(self.settled, self.closed - self.longest_gap)
        self._remove_closed(was_closed)

    def _remove_closed(self, was_closed: int) -> None:
        """``was_closed``: a window that ended by then has been counted before."""
        for key, events in self.live.items():
            self.live[key] = self._still_needed(key, events, was_closed)

    def _still_needed(self, key: int, events: list[Event], was_closed: int) -> list[Event]:
        windows = windows_of(self.definition, events)
        gone = [w for w in windows if w.over <= self.closed]
        self.done += [(key, w) for w in gone if self._was_there(w, was_closed)]
        match self.definition:
            case aion.PerRecord(size_us=size):
                return [e for e in events if e.t + size + 1 > self.closed]
            case aion.Count(slide=slide):
                return sorted(events, key=lambda e: e.t)[len(gone) * slide :]
        if isinstance(self.definition, aion.Session):
            self.cut.setdefault(key, []).extend(w for w in gone if w.end - w.start == self.definition.max_duration_us)
        held = [e for w in gone for e in w.events]
        return [e for e in events if not any(e is h for h in held)]

    def _was_there(self, window: Window, closed: int) -> bool:
        """Windows per record are found again as long as their events are needed by later ones, but are gone."""
        return not isinstance(self.definition, aion.PerRecord) or window.over > closed

    def ended(self) -> dict[tuple[int, int, int], list[tuple[int, ...]]]:
        """(key, start, end) of every window that the watermark has passed, with the values of each that has those."""
        found: dict[tuple[int, int, int], list[tuple[int, ...]]] = {}
        live = [(k, w) for k, events in self.live.items() for w in windows_of(self.definition, events)]
        live = [(k, w) for k, w in live if self._was_there(w, self.closed)]
        for key, w in [*self.done, *live]:
            if self._comes_at_once() or (self.watermark is not None and w.over <= self.watermark):
                values = tuple(sorted(e.value for e in w.events))
                found.setdefault((key, w.start, w.end), []).append(values)
        return found

    def goes_on(self, key: int, start: int, end: int) -> bool:
        """Whether a session that came out is part of one that has not ended."""
        if not isinstance(self.definition, aion.Session) or self.watermark is None:
            return False
        windows = windows_of(self.definition, self.live.get(key, []))
        if self.definition.max_duration_us is not None:
            return any(w.start <= start < w.end and w.over > self.watermark for w in windows)
        return any(w.start <= start and end <= w.end and w.over > self.watermark for w in windows)

    def _comes_at_once(self) -> bool:
        return isinstance(self.definition, aion.PerRecord) and self.definition.on_arrival == "emit"
