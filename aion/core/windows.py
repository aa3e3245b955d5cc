"""Window definitions over event time: where windows begin and end, not when they run. Pure.

Ends are exclusive unless stated otherwise. Tumbling, sliding and cumulative windows (:mod:`aion.core.periodic`) are
aligned to the Unix epoch plus ``offset``, as in Spark and Flink, and calendar windows to the clocks of a zone. They
are the same for all keys, and context-free: their edges do not depend on events. The others are context-aware: events
decide where their windows begin and end (Disco section 2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, Unpack, get_args

import numpy as np

from aion.base.time import format_duration
from aion.core.calendars import CalendarEdges, ZoneRules
from aion.core.filling import Fill
from aion.core.periodic import Ints, Periodic
from aion.core.timing import NO_TIMING, Duration, Timing, When, positive_us
from aion.errors import WindowError

OnArrival: TypeAlias = Literal["wait", "emit"]
EMIT = "emit"


@dataclass(frozen=True, repr=False)
class Calendar:
    """Windows from one local midnight, or another time of day, to the next: days, weeks, months, quarters or years.

    ``edges``: where they begin. ``earlier``: the edges by the rules that a query knew before. Slices end there, too,
    because windows that live keep their edges when the rules of a zone change.
    """

    edges: CalendarEdges
    earlier: tuple[CalendarEdges, ...] = ()
    timing: Timing = NO_TIMING
    fill: Fill | None = None

    @property
    def zone(self) -> str:
        return self.edges.rules.name

    @property
    def all_edges(self) -> tuple[CalendarEdges, ...]:
        return (self.edges, *self.earlier)

    def covering(self, t_us: int) -> Iterator[tuple[int, int]]:
        """Yields the start and the end of the window that contains the instant ``t_us``."""
        start = self.edges.floors(np.array([t_us], np.int64))
        yield int(start[0]), int(self.edges.afters(start)[0])

    @property
    def reach_us(self) -> int:
        """The length of the longest window, apart from rare changes of a zone."""
        return self.edges.steps.longest_us

    def stretches(self) -> tuple[int, int, int]:
        """Size, slide and offset of evenly spaced stretches; each window lies in one of them."""
        slide_us = self.reach_us // 4
        return self.reach_us + slide_us, slide_us, 0

    # A window is known by its number, which stays the same when the rules of the zone change.

    run_step: ClassVar[int] = 1

    def run_values(self, starts_us: Ints, ends_us: Ints) -> Ints:
        """Returns what stands for each window in a run."""
        return self.edges.numbers(starts_us)

    def ended_run_value(self, us: int) -> int:
        """Runs up to this value hold windows that end at ``us`` or before."""
        return self.edges.number(us) - 1

    def with_rules(self, *rules: ZoneRules) -> Calendar:
        """Returns the same windows for a query that knew these rules before."""
        others = dict.fromkeys(r for r in rules if r != self.edges.rules)
        return self._changed(earlier=tuple(CalendarEdges(self.edges.steps, r) for r in others))

    def with_edges(self, edges: CalendarEdges) -> Calendar:
        """Returns the same windows, but with edges that other rules of the zone gave them."""
        return self._changed(edges=edges)

    def _changed(self, **fields: Any) -> Calendar:
        # Not dataclasses.replace: a subclass has arguments of its own.
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__, **fields)
        return found

    def spec(self) -> dict[str, int | str]:
        """Returns what identifies this definition after a restart. The rules of the zone may be others then."""
        steps = self.edges.steps
        start = {} if steps.start is None else {"start": steps.start}
        fill = {} if self.fill is None else self.fill.spec()
        return {"type": "calendar", "every": steps.every, "zone": self.zone, **start, **fill}

    def __str__(self) -> str:
        return f"calendar {self.edges.steps} {self.zone}"

    __repr__ = __str__


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Session:
    """Windows of activity: events of a key with at most ``gap`` between one and the next.

    ``Session("30 minutes")``. A session starts at its first event and ends ``gap`` after its last. An event exactly
    ``gap`` after the last one still belongs to it, as in Spark and Flink.

    ``Session(gap_column="timeout")``: each event brings its own gap, in a column of intervals or of strings like
    ``"30 minutes"``. A session lasts as long as any of its events reaches, as in Spark's ``session_window``. Events
    with a null, zero or negative gap come out as ``dropped``.

    ``max_duration``: no session is longer. An event at ``max_duration`` after the first event of the session or later
    begins a new session. Raises WindowError for a gap that is not positive, and for a ``max_duration`` that is not
    longer than ``gap``.
    """

    gap_us: int
    gap_column: str | None
    max_duration_us: int | None
    timing: Timing

    def __init__(
        self,
        gap: Duration | None = None,
        *,
        gap_column: str | None = None,
        max_duration: Duration | None = None,
        **when: Unpack[When],
    ) -> None:
        if (gap is None) == (gap_column is None):
            raise WindowError(
                f"Session: gap={gap!r} and gap_column={gap_column!r}; give one of the two: a gap like '30 minutes', or "
                "the name of a column with the gap of each event"
            )
        if gap_column is not None and not (isinstance(gap_column, str) and gap_column):
            raise WindowError(f"Session: gap_column of {gap_column!r} is not the name of a column; give e.g. 'timeout'")
        gap_us = 0 if gap is None else _gap(gap)
        max_us = None if max_duration is None else positive_us(max_duration, "Session: max_duration")
        if max_us is not None and max_us <= gap_us:
            raise WindowError(
                f"Session: a max_duration of {format_duration(max_us)} is not longer than the gap of "
                f"{format_duration(gap_us)}, so no session would ever end because of its gap; use a longer max_duration"
            )
        object.__setattr__(self, "gap_us", gap_us)
        object.__setattr__(self, "gap_column", gap_column)
        object.__setattr__(self, "max_duration_us", max_us)
        object.__setattr__(self, "timing", Timing.of("Session", when))

    @property
    def by_event(self) -> bool:
        """Whether single events decide where it ends. Otherwise the first and the last event of a stretch are enough.

        A late event moves all later cuts of a session with a ``max_duration``, so any event may be the first of one.
        """
        return self.gap_column is not None or self.max_duration_us is not None

    @property
    def reach_us(self) -> int:
        """The length of a window that holds a single event. 0 if the event brings its gap."""
        return self.gap_us

    def end(self, last_us: int) -> int:
        """Returns the end of a session whose last event is at ``last_us``, unless it is cut before."""
        return last_us + self.gap_us

    def spec(self) -> dict[str, int | str]:
        return {
            "type": "session",
            "gap_us": self.gap_us,
            **({} if self.gap_column is None else {"gap_column": self.gap_column}),
            **({} if self.max_duration_us is None else {"max_duration_us": self.max_duration_us}),
        }

    def __str__(self) -> str:
        most = "" if self.max_duration_us is None else f" up to {format_duration(self.max_duration_us)}"
        gap = format_duration(self.gap_us) if self.gap_column is None else f"by {self.gap_column}"
        return f"session {gap}{most}"

    __repr__ = __str__


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Count:
    """Windows of ``n`` events of a key in event-time order; events of equal time in the order of arrival.

    ``Count(100)``, or ``Count(100, 10)`` for a new window every 10 events. Window k holds the events number
    ``k * slide`` to ``k * slide + n - 1``. It starts at the time of its first event and ends one microsecond after its
    last. So a late event moves all later windows. Raises WindowError for numbers that are not positive integers, and
    for a slide above ``n`` (events between windows would belong to none).
    """

    n: int
    slide: int
    timing: Timing
    reach_us: ClassVar[int] = 0

    def __init__(self, n: int, slide: int | None = None, **when: Unpack[When]) -> None:
        object.__setattr__(self, "timing", Timing.of("Count", when))
        object.__setattr__(self, "n", _positive_number(n, "Count: n"))
        object.__setattr__(self, "slide", self.n if slide is None else _positive_number(slide, "Count: slide"))
        if self.slide > self.n:
            raise WindowError(
                f"Count: a slide of {self.slide} is more than the {self.n} events of a window, so events between "
                "windows would be lost; use a slide of at most n"
            )

    def spec(self) -> dict[str, int | str]:
        return {"type": "count", "n": self.n, "slide": self.slide}

    def __str__(self) -> str:
        return f"count {self.n}" if self.slide == self.n else f"count {self.n} by {self.slide}"

    __repr__ = __str__


@dataclass(frozen=True, slots=True, init=False, repr=False)
class PerRecord:
    """One window for each event of a key: all events from ``size`` before it up to its own time, both inclusive.

    ``PerRecord("5 minutes")``. Kafka Streams calls these sliding windows (KIP-450). Events of the same time share a
    window. ``on_arrival="emit"``: the windows of an event come out in the batch in which it arrives. They do not
    ``"wait"`` until the watermark has passed them.

    Raises WindowError if the size is not positive, for any other ``on_arrival``, and for ``early``: a window ends with
    its own event.
    """

    size_us: int
    on_arrival: OnArrival
    timing: Timing

    def __init__(self, size: Duration, *, on_arrival: OnArrival = "wait", **when: Unpack[When]) -> None:
        object.__setattr__(self, "size_us", positive_us(size, "PerRecord: size"))
        if on_arrival not in get_args(OnArrival):
            raise WindowError(
                f"PerRecord: on_arrival of {on_arrival!r} is not known; give 'wait' (windows come out when they are "
                "complete) or 'emit' (in the batch in which an event arrives)"
            )
        object.__setattr__(self, "on_arrival", on_arrival)
        object.__setattr__(self, "timing", Timing.of("PerRecord", when))
        if self.timing.early_us is not None:
            raise WindowError(
                f"PerRecord: early of {when['early']!r}: a window that ends with its own event has nothing to show "
                "before; leave early out"
            )

    @property
    def reach_us(self) -> int:
        return self.size_us

    def spec(self) -> dict[str, int | str]:
        # Stored state does not depend on when panes come out.
        return {"type": "per_record", "size_us": self.size_us}

    def __str__(self) -> str:
        return f"per record {format_duration(self.size_us)}"

    __repr__ = __str__


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Punctuated:
    """Windows between punctuation events of a key. Each starts with one, its first event, and ends at the next.

    ``predicate`` says which events are punctuation: the name of a boolean column, or a function of an Arrow record
    batch that returns one boolean per row. Events before the first punctuation have a window of their own, which starts
    at its first event. Raises WindowError for any other predicate.
    """

    predicate: str | Callable[[Any], Any]
    timing: Timing
    reach_us: ClassVar[int] = 0

    def __init__(self, predicate: str | Callable[[Any], Any], **when: Unpack[When]) -> None:
        object.__setattr__(self, "predicate", predicate)
        object.__setattr__(self, "timing", Timing.of("Punctuated", when))
        if not (callable(predicate) or (isinstance(predicate, str) and predicate)):
            raise WindowError(
                f"Punctuated: {predicate!r} is not a predicate; give the name of a boolean column, or a function "
                "of a record batch"
            )

    def spec(self) -> dict[str, int | str]:
        # A function cannot be compared with that of an earlier run. Its name is the best substitute.
        return {"type": "punctuated", "predicate": self._name}

    @property
    def _name(self) -> str:
        if isinstance(self.predicate, str):
            return self.predicate
        return str(getattr(self.predicate, "__qualname__", type(self.predicate).__qualname__))

    def __str__(self) -> str:
        return f"punctuated by {self._name}"

    __repr__ = __str__


Aligned: TypeAlias = Periodic | Calendar
"""Definitions whose windows are the same for all keys."""
Definition: TypeAlias = Periodic | Calendar | Session | Count | PerRecord | Punctuated
ALIGNED = ("periodic", "cumulative", "calendar")
"""The types of aligned definitions in their specs."""
Definitions: TypeAlias = Definition | Sequence[Definition] | Mapping[str, Definition]


def named(windows: Definitions) -> dict[str, Definition]:
    """Definitions by name, in order. An unnamed one is named after itself (``tumbling 1 minute``).

    Raises WindowError if there is none, if one is not a window definition, and if two have the same name.
    """
    if isinstance(windows, Mapping):
        result = dict(windows)
    else:
        several = [windows] if isinstance(windows, Definition) else windows
        if not isinstance(several, Sequence) or isinstance(several, str):
            raise WindowError(
                f"windows: {windows!r} is not a window definition; give e.g. aion.Tumbling('1 minute'), a list of "
                "definitions, or a mapping of names to them"
            )
        result = {}
        for window in several:
            if str(window) in result:
                raise WindowError(f"windows: {window} is given twice; give each definition once")
            result[str(window)] = window
    if not result:
        raise WindowError("windows: none given; e.g. windows=[aion.Tumbling('1 minute')]")
    for name, window in result.items():
        if not isinstance(window, Definition):
            what = f"{name!r} is {window!r}, which" if isinstance(windows, Mapping) else repr(window)
            raise WindowError(f"windows: {what} is not a window definition; give e.g. aion.Tumbling('1 minute')")
        if not isinstance(name, str) or not name:
            raise WindowError(f"windows: {name!r} is not a name; give a text, e.g. {{'minute': {window!r}}}")
    return result


def _gap(value: Duration) -> int:
    try:
        return positive_us(value, "Session: gap")
    except WindowError as error:
        hint = (
            f"; for a gap in a column, give gap_column={value!r}"
            if isinstance(value, str) and value.isidentifier()
            else ""
        )
        raise WindowError(f"{error}{hint}") from None


def _positive_number(value: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**63:
        raise WindowError(f"{what} of {value!r} is not a positive number of events below 2**63; give e.g. 100")
    return value
