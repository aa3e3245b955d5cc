"""What windowed aggregation means, in plain Python: lists, dicts and loops, slow and obvious.

Written from the definitions and Spark's documentation, and from nothing else of Aion: it
knows no blocks, no slices of events kept, no stores, no Arrow. What it says is what LocalOperator must say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any

I64 = range(-(2**63), 2**63)


# -- windows ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Definition:
    """Windows ``[offset + k * slide, offset + k * slide + size)`` for every integer k.

    With ``grows`` each stretch ``[offset + k * size, offset + (k + 1) * size)`` has windows instead that begin where it
    begins and end after one slide, two slides, and so on.

    ``early``: how far the watermark moves between early panes. ``bound``: its own. None: that of the operator.
    """

    size: int
    slide: int
    offset: int = 0
    early: int | None = None
    bound: int | None = None
    grows: bool = False

    def containing(self, t: int) -> list[tuple[int, int]]:
        """(start, end) of every window that contains the instant ``t``."""
        if self.grows:
            first = t - (t - self.offset) % self.size
            return [(first, end) for end in range(first + self.slide, first + self.size + 1, self.slide) if t < end]
        around = range((t - self.size - self.offset) // self.slide - 1, (t - self.offset) // self.slide + 2)
        starts = [self.offset + k * self.slide for k in around]
        return [(s, s + self.size) for s in starts if s <= t < s + self.size]

    def is_edge(self, t: int) -> bool:
        """Whether a window starts or ends at ``t``."""
        return (t - self.offset) % self.slide == 0 or (t - self.offset - self.size) % self.slide == 0


def slice_of(definitions: Sequence[Definition], t: int) -> int:
    """The last instant, up to ``t``, at which a window of any definition starts or ends."""
    while not any(d.is_edge(t) for d in definitions):
        t -= 1
    return t


# -- aggregates, as Spark's functions -----------------------------------------------------------------------


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def rank(value: Any) -> tuple[bool, Any]:
    """NaN is larger than every other number. Structs are ordered by their fields, here by name; null is first."""
    if isinstance(value, dict):
        return False, [(v is not None, (False, 0) if v is None else rank(v)) for _, v in sorted(value.items())]
    return (True, 0.0) if is_nan(value) else (False, value)


def spark_count(values: list[Any]) -> int:
    return sum(1 for v in values if v is not None)


def spark_min(values: list[Any]) -> Any:
    return min((v for v in values if v is not None), key=rank, default=None)


def spark_max(values: list[Any]) -> Any:
    return max((v for v in values if v is not None), key=rank, default=None)


def spark_sum(values: list[Any]) -> Any:
    """Integers stay integers (the caller minds 64 bits), floats are added as doubles, decimals exactly."""
    there = [v for v in values if v is not None]
    if not there:
        return None
    if isinstance(there[0], float) and all(map(math.isfinite, there)):
        return math.fsum(there)
    with localcontext() as context:
        context.prec = 100
        return sum(there)


def spark_mean(values: list[Any]) -> Any:
    """A double; for decimals use :func:`spark_decimal_mean`."""
    there = [v for v in values if v is not None]
    return None if not there else float(spark_sum([float(v) for v in there])) / len(there)


def spark_decimal_mean(values: list[Decimal | None], scale: int) -> Decimal | None:
    """A decimal of ``scale`` digits after the point, rounded half up."""
    there = [v for v in values if v is not None]
    if not there:
        return None
    with localcontext() as context:
        context.prec = 100
        return (sum(there, Decimal(0)) / len(there)).quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP)


# -- the operator -------------------------------------------------------------------------------------------

Event = dict[str, Any]
Key = tuple[Any, ...]


@dataclass
class _Window:
    definition: int
    start: int
    end: int
    executed: int = 0
    executed_on_time: bool = False
    events: list[tuple[Event, bool]] = field(default_factory=list)  # with: did it come late
    changed: set[Key] = field(default_factory=set)


@dataclass(frozen=True)
class Pane:
    definition: int
    start: int
    end: int
    key: Key
    pane: int
    kind: str
    events: int
    late_events: int
    closes: int
    result: Any


@dataclass(frozen=True)
class Dropped:
    """One event that was too late for one window, or (definition None) had no time at all."""

    definition: int | None
    start: int | None
    end: int | None
    key: Key
    lateness: int | None
    event: Event


class OracleOperator:
    """The life of all windows, event by event. ``result(events)`` computes a pane's columns."""

    def __init__(
        self,
        definitions: Sequence[Definition],
        *,
        bound: int,
        key: Sequence[str],
        result: Callable[[list[Event]], Any],
        final_only: bool = False,
    ) -> None:
        self.definitions = list(definitions)
        self.bounds = [bound if d.bound is None else d.bound for d in definitions]
        self.final_only = final_only
        self.early: dict[int, int] = {}
        self.key = tuple(key)
        self.result = result
        self.watermark: int | None = None
        self.windows: dict[tuple[int, int, int], _Window] = {}
        self.arrivals = 0

    def process(self, events: Sequence[Event]) -> tuple[list[Pane], list[Dropped]]:
        """These events arrive; late panes of the windows that they changed."""
        dropped: list[Dropped] = []
        for event in events:
            dropped += self._arrive(event)
        return list(self._late()), dropped

    def advance(self, watermark: int) -> list[Pane]:
        """What this watermark makes due."""
        panes: list[Pane] = []
        moved = self.watermark is None or watermark > self.watermark
        if moved:
            self.watermark = watermark
        for window in list(self.windows.values()):
            if not window.executed_on_time and self._reached(window.end):
                window.executed_on_time = True
                if not self.final_only:
                    window.changed = {self._key(event) for event, _ in window.events}
                    panes += self._execute(window, "on_time")
        for place, window in list(self.windows.items()):
            if self._reached(window.end + self.bounds[window.definition]):
                if window.changed:
                    panes += self._execute(window, "final")
                del self.windows[place]
        return [*panes, *self._early(watermark)] if moved else panes

    def close(self) -> list[Pane]:
        return list(self._late())

    def _early(self, watermark: int) -> Iterator[Pane]:
        """All open windows of a definition together, at most once for each progress of the watermark."""
        for number, definition in enumerate(self.definitions):
            last = self.early.get(number)
            if definition.early is None or (last is not None and watermark < last + definition.early):
                continue
            self.early[number] = watermark
            for window in self.windows.values():
                if window.definition == number and window.changed and not self._reached(window.end):
                    yield from self._execute(window, "early")

    def _reached(self, t: int) -> bool:
        return self.watermark is not None and self.watermark >= t

    def _key(self, event: Event) -> Key:
        return tuple(event[name] for name in self.key)

    def _arrive(self, event: Event) -> Iterator[Dropped]:
        self.arrivals += 1
        if event["ts"] is None:
            yield Dropped(None, None, None, self._key(event), None, event)
            return
        for number, definition in enumerate(self.definitions):
            for start, end in definition.containing(event["ts"]):
                if self._reached(end + self.bounds[number]):
                    assert self.watermark is not None
                    yield Dropped(number, start, end, self._key(event), self.watermark - end, event)
                    continue
                late = self._reached(end)
                window = self.windows.setdefault((number, start, end), _Window(number, start, end))
                if late:
                    # Its end has passed, so whatever it yields from now on is no on-time pane.
                    window.executed_on_time = True
                window.events.append((event, late))
                window.changed.add(self._key(event))

    def _late(self) -> Iterator[Pane]:
        for window in self.windows.values():
            if window.executed_on_time and window.changed and not self.final_only:
                yield from self._execute(window, "late")

    def _execute(self, window: _Window, kind: str) -> Iterator[Pane]:
        """One pane for each key that changed since the execution before."""
        for key in window.changed:
            mine = [(event, late) for event, late in window.events if self._key(event) == key]
            yield Pane(
                window.definition, window.start, window.end, key, window.executed, kind,
                len(mine), sum(late for _, late in mine), window.end + self.bounds[window.definition],
                self.result([event for event, _ in mine]),
            )  # fmt: skip
        window.changed = set()
        window.executed += 1
