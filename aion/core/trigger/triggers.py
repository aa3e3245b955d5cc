"""Triggers decide which late windows run again now (paper 3.4). Pure; independent of how windows are laid out.

A trigger decides about many late windows at once, from columns of their states. It does not decide the on-time
execution, nor the final one: a window that is purged runs once more if and only if events came since its last
execution.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from aion.base.numbers import NEVER

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

MOST_PLANNED = 20
"""The most executions that :meth:`Trigger.planned` returns for a window."""


@dataclass(frozen=True, slots=True)
class LateWindows:
    """Late windows as their trigger sees them: columns with one row for each window.

    Lateness is the watermark minus the window's end, in microseconds. ``lateness_us``: the lateness now.
    ``executed_us``: the lateness of the last execution, 0 for the on-time one. ``pending``: events since then.
    ``late_events``: all late events so far, including the pending ones. ``bound_us``: the lateness at which the window
    is purged, the horizon T. ``on_time_events``: events that the on-time execution saw. ``executions``: late executions
    so far. ``step_us``: one number for all: how far the watermark typically moves from one check to the next; 0 if
    unknown, or if it moves so often that it does not matter.
    """

    lateness_us: Ints
    executed_us: Ints
    pending: Ints
    late_events: Ints
    bound_us: Ints
    on_time_events: Ints
    executions: Ints
    step_us: int = 0

    def __len__(self) -> int:
        return len(self.lateness_us)

    def some(self, rows: Ints) -> LateWindows:
        """Returns the windows with these numbers."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _COLUMNS})


_COLUMNS = [field.name for field in fields(LateWindows) if field.name != "step_us"]


class Trigger(Protocol):
    def due(self, windows: LateWindows) -> Flags:
        """Returns a mask of the windows that run now. Called at the end of a batch, and when ``next_due_us`` said."""

    def next_due_us(self, windows: LateWindows) -> Ints:
        """Returns the lateness at which to check each again even if no event comes. NEVER: only events can make it due.

        For windows that are not due now. Always later than now and before the bound.
        """

    def planned(self, windows: LateWindows) -> list[list[int]]:
        """Returns, for each window, the next latenesses at which it will run if events come as expected.

        At most ``MOST_PLANNED``. Empty if only events decide. Always later than now and before the bound.
        """

    def to_json(self) -> dict[str, Any]:
        """JSON values from which :func:`aion.core.operator.overview.trigger_from_json` makes the same trigger."""


class EveryBatchTrigger:
    """A late window runs once in each batch that brought it late events."""

    def due(self, windows: LateWindows) -> Flags:
        return windows.pending > 0

    def next_due_us(self, windows: LateWindows) -> Ints:
        return never(windows)

    def planned(self, windows: LateWindows) -> list[list[int]]:
        return [[] for _ in range(len(windows))]

    def to_json(self) -> dict[str, Any]:
        return {"kind": "every_batch"}


class IntervalTrigger:
    """A late window runs once in each interval of ``every_us`` after its end (the paper's deltat).

    It runs at the start of the interval if events are pending, otherwise as soon as one comes.
    """

    def __init__(self, every_us: int) -> None:
        if every_us < 1:
            raise ValueError(f"an interval of {every_us} µs is not above 0")
        self.every_us = every_us

    def due(self, windows: LateWindows) -> Flags:
        new = windows.lateness_us // self.every_us > windows.executed_us // self.every_us
        return np.asarray((windows.pending > 0) & new)

    def next_due_us(self, windows: LateWindows) -> Ints:
        next_us = self._next_us(windows)
        return np.where((windows.pending > 0) & (next_us < windows.bound_us), next_us, NEVER)

    def planned(self, windows: LateWindows) -> list[list[int]]:
        both = zip(self._next_us(windows).tolist(), windows.bound_us.tolist(), strict=True)
        return [[*range(start_us, bound_us, self.every_us)[:MOST_PLANNED]] for start_us, bound_us in both]

    def to_json(self) -> dict[str, Any]:
        return {"kind": "interval", "every_us": self.every_us}

    def _next_us(self, windows: LateWindows) -> Ints:
        """Returns the start of the next interval."""
        done_us = np.maximum(windows.executed_us, windows.lateness_us)
        return np.asarray((done_us // self.every_us + 1) * self.every_us)


class CountTrigger:
    """A late window runs as soon as ``every`` events have come since its last execution (the paper's deltaev)."""

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"a count of {every} events is less than 1")
        self.every = every

    def due(self, windows: LateWindows) -> Flags:
        return windows.pending >= self.every

    def next_due_us(self, windows: LateWindows) -> Ints:
        return never(windows)

    def planned(self, windows: LateWindows) -> list[list[int]]:
        return [[] for _ in range(len(windows))]

    def to_json(self) -> dict[str, Any]:
        return {"kind": "count", "every": self.every}


def never(windows: LateWindows) -> Ints:
    """For :meth:`Trigger.next_due_us`: nothing but events makes these windows due."""
    return np.full(len(windows), NEVER)
