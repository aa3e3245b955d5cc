"""The states of a window, the watermark that moves it on, and the counters of an operator. Pure
(docs/start/concepts.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from aion.base.numbers import plus, within


class Status(StrEnum):
    ACTIVE = "active"
    LATE = "late"
    FINAL = "final"
    PURGED = "purged"


# (status, what happens) -> the next status. Anything else is a bug.
TRANSITIONS: dict[tuple[Status, str], Status] = {
    (Status.ACTIVE, "end_passed"): Status.LATE,
    (Status.LATE, "bound_passed"): Status.FINAL,
    (Status.FINAL, "purge"): Status.PURGED,
}


@dataclass(slots=True)
class StalenessKept:
    """How stale windows became: the largest staleness between two executions (paper 3.4).

    It counts windows that got late events and are gone. ``windows``: their number. ``total``: the sum of their largest
    staleness. ``largest``: the largest of all. ``kept``: windows that stayed within the trigger's bound. The others
    exceeded it. ``missed_between_looks``: within one step of the watermark, because of the step or of the events that
    came with it. Batches are too far apart. ``missed_otherwise``: fewer late events came than expected, so each weighs
    more.
    """

    windows: int = 0
    kept: int = 0
    missed_between_looks: int = 0
    missed_otherwise: int = 0
    total: float = 0.0
    largest: float = 0.0

    def note(self, stalest: float, stalest_before: float, all_staleness: float, bound: float | None) -> None:
        """Counts a window with late events that is gone. See :class:`aion.core.life.window_table.WindowTable`.

        ``bound``: of the trigger, or None if it has none, and no window is kept within it or misses it.
        """
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


EXECUTED = ("early", "on_time", "late", "final")
"""The kinds of executions, in the order of a window's life."""


@dataclass(slots=True)
class Counters:
    """What an operator has done so far. Windows and executions are counted per shard, not per key."""

    events: int = 0
    late_events: int = 0
    dropped: int = 0
    untimed: int = 0
    """Those of the dropped events that have no time that windows could use."""
    windows: int = 0
    purged_windows: int = 0
    retracted: int = 0
    executions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(EXECUTED, 0))
    staleness: StalenessKept = field(default_factory=StalenessKept)

    def came(self, events: int) -> None:
        self.events = plus(self.events, events)

    def came_late(self, events: int) -> None:
        self.late_events = plus(self.late_events, events)

    def drop(self, events: int) -> None:
        self.dropped = plus(self.dropped, events)

    def drop_untimed(self, events: int) -> None:
        self.drop(events)
        self.untimed = plus(self.untimed, events)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Counters:
        return cls(**{**value, "staleness": StalenessKept(**value["staleness"])})


class Watermark:
    """The instant up to which events are assumed to be complete. It never goes back.

    ``at_us``: None until the first advance. Until then no event is late, whatever its time. ``step_us``: how far the
    last advance went, which is its speed per batch.
    """

    __slots__ = ("at_us", "step_us")

    def __init__(self, at_us: int | None = None, step_us: int = 0) -> None:
        self.at_us = at_us
        self.step_us = step_us

    def advance(self, to_us: int) -> bool:
        """Moves the watermark. Returns whether it moved: an older instant is ignored, as Spark does.

        An instant out of range counts as the end of the range.
        """
        to_us = within(to_us)
        if self.at_us is not None and to_us <= self.at_us:
            return False
        if self.at_us is not None:
            self.step_us = to_us - self.at_us
        self.at_us = to_us
        return True

    def expected_next(self) -> int | None:
        """Where it will be after another step like the last one. None before the first step."""
        return self.at_us + self.step_us if self.at_us is not None and self.step_us else None

    def passed(self, t_us: int) -> bool:
        return self.at_us is not None and self.at_us >= t_us
