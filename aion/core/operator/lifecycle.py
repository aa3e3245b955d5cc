"""The life of one window as a table, and what is remembered of it; what an operator counts. Pure (docs/concepts.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from aion.core.numbers import coarse, plus
from aion.core.operator.actions import WindowRef
from aion.core.packing import table, untable
from aion.core.trigger.triggers import LateView

NEVER = 2**63 - 1


class Status(StrEnum):
    ACTIVE = "active"
    LATE = "late"
    FINAL = "final"
    PURGED = "purged"


# The life of a window as a table: (status, what happens) -> status. Anything else is a bug.
TRANSITIONS: dict[tuple[Status, str], Status] = {
    (Status.ACTIVE, "end_passed"): Status.LATE,
    (Status.LATE, "bound_passed"): Status.FINAL,
    (Status.FINAL, "purge"): Status.PURGED,
}


def diagram() -> str:
    """The table as a Mermaid state diagram, for the documentation."""
    moves = [f"    {status} --> {after}: {happening}" for (status, happening), after in TRANSITIONS.items()]
    first, last = Status.ACTIVE, Status.PURGED
    return "\n".join(["stateDiagram-v2", f"    [*] --> {first}", *moves, f"    {last} --> [*]"])


@dataclass(slots=True)
class WindowState:
    bound_us: int
    status: Status = Status.ACTIVE
    panes: int = 0
    executed_seq: int = -1
    executed_us: int = 0  # the lateness of the last execution
    last_seq: int = -1
    late_from_seq: int = NEVER
    events: int = 0
    late_events: int = 0
    news: int = 0
    # Time and events, multiplied, of the stalest interval between two executions; and what they were for that interval,
    # or are for the one that runs, when it was looked at before.
    stalest: float = 0.0
    stalest_before: float = 0.0
    looked: float = 0.0
    reason: int = 0
    """What decided the bound: the code of a :class:`policies.cleanup.Reason`."""

    def due_us(self, ref: WindowRef) -> int:
        """The watermark at which something happens to the window by itself: its end, then its bound."""
        return ref.end_us if self.status is Status.ACTIVE else ref.end_us + self.bound_us

    def came(self, events: int, *, late: bool = False) -> None:
        """Takes note of events that the window got."""
        self.events = plus(self.events, events)
        self.news = plus(self.news, events)
        if late:
            self.late_events = plus(self.late_events, events)

    def stale(self, lateness_us: int) -> float:
        """Microseconds since the last execution, up to the bound, times events since then: t * n (paper 3.4)."""
        return float((min(lateness_us, self.bound_us) - self.executed_us) * self.news)

    def look(self, lateness_us: int) -> None:
        """Notes how stale the window is, and is left."""
        self.looked = coarse(self.stale(lateness_us))

    def executed(self, lateness_us: int, *, on_time: bool = False) -> None:
        """Notes an execution over all that came. What came before an execution on time did not wait for it."""
        if not on_time and (stale := coarse(self.stale(lateness_us))) > self.stalest:
            self.stalest, self.stalest_before = stale, self.looked
        self.panes += 1
        self.executed_seq, self.executed_us = self.last_seq, lateness_us
        self.news, self.looked = 0, 0.0

    @property
    def all_staleness(self) -> float:
        """T * N, as of now: what ``stale`` is measured against."""
        return float(self.bound_us * self.late_events)

    def view(self, lateness_us: int, step_us: int) -> LateView:
        """The window, which has ended, as its trigger sees it."""
        return LateView(
            lateness_us=lateness_us,
            executed_us=self.executed_us,
            news=self.news,
            late_events=self.late_events,
            bound_us=self.bound_us,
            on_time_events=self.events - self.late_events,
            # A window that was made late has had no execution on time.
            executions=self.panes - (self.late_from_seq > 0),
            step_us=step_us,
        )

    def move(self, happening: str) -> None:
        self.status = TRANSITIONS[self.status, happening]


_COLUMNS = tuple(f.name for f in fields(WindowState))
_DOUBLES = ("stalest", "stalest_before", "looked")
_STATUSES = list(Status)


def windows_to_json(names: Mapping[str, Sequence[int]], states: Sequence[WindowState]) -> dict[str, Any]:
    """What a snapshot holds of windows: the columns that say which they are, and one of each thing that is known."""
    columns = {name: [getattr(state, name) for state in states] for name in _COLUMNS}
    columns["status"] = [_STATUSES.index(status) for status in columns["status"]]
    # Of most windows all blocks were executed.
    columns["executed_seq"] = [state.last_seq - state.executed_seq for state in states]
    return table({**names, **columns}, _DOUBLES)


def windows_from_json(value: Mapping[str, Any], *names: str) -> Iterator[tuple[list[int], WindowState]]:
    """Which window each is, and what is known of it."""
    columns = untable(value)
    for which, known in zip(
        zip(*(columns[name] for name in names), strict=True),
        zip(*(columns[name] for name in _COLUMNS), strict=True),
        strict=True,
    ):
        state = WindowState(**dict(zip(_COLUMNS, known, strict=True)))
        state.status, state.executed_seq = _STATUSES[int(state.status)], state.last_seq - state.executed_seq
        yield list(which), state


@dataclass(slots=True)
class StalenessKept:
    """Of windows that got late events and are gone: the largest staleness between two executions (paper 3.4).

    ``windows``: how many; ``total``: the sum of their maxima; ``largest``: of all. ``kept``: those that stayed within
    the trigger's bound. Of the others, ``missed_between_looks``: a single step of the watermark, or the events that
    came with it, took them past it: batches are too far apart. ``missed_otherwise``: fewer late events came than were
    expected, so that each weighs more.
    """

    windows: int = 0
    kept: int = 0
    missed_between_looks: int = 0
    missed_otherwise: int = 0
    total: float = 0.0
    largest: float = 0.0

    def observe(self, state: WindowState, bound: float | None) -> None:
        if state.all_staleness:
            self.note(state.stalest, state.stalest_before, state.all_staleness, bound)

    def note(self, stalest: float, stalest_before: float, all_staleness: float, bound: float | None) -> None:
        """A window with late events is gone; for the first three see :class:`WindowState`."""
        staleness = stalest / all_staleness
        self.windows += 1
        self.total += staleness
        self.largest = max(self.largest, staleness)
        if bound is None or staleness <= bound * (1 + 1e-9):
            self.kept += bound is not None
        elif stalest_before <= bound * all_staleness:
            self.missed_between_looks += 1
        else:
            self.missed_otherwise += 1


@dataclass(slots=True)
class Counters:
    """What an operator did so far; windows and executions count windows of the shard, not of keys."""

    events: int = 0
    late_events: int = 0
    dropped: int = 0
    windows: int = 0
    purged_windows: int = 0
    retracted: int = 0
    executions: dict[str, int] = field(default_factory=lambda: {"on_time": 0, "late": 0, "final": 0})
    staleness: StalenessKept = field(default_factory=StalenessKept)

    def came(self, events: int) -> None:
        self.events = plus(self.events, events)

    def came_late(self, events: int) -> None:
        self.late_events = plus(self.late_events, events)

    def drop(self, events: int) -> None:
        self.dropped = plus(self.dropped, events)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Counters:
        return cls(**{**value, "staleness": StalenessKept(**value["staleness"])})
