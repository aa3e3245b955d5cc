"""Replays a late window under a trigger: its executions, and how stale the result becomes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aion.core.trigger.triggers import LateView, Trigger


@dataclass(frozen=True)
class Replay:
    """The late executions of one window, in order.

    ``executed_us``: the lateness of each in microseconds, (k,). ``first_us``: the lateness of its first new event,
    (k,). ``pending``: how many new events it saw, (k,). ``final``: whether the last one is the final execution.
    ``events``: late events within the bound. ``dropped``: events at the bound or later. ``looks``: how often the
    trigger was called.
    """

    executed_us: NDArray[np.int64]
    first_us: NDArray[np.int64]
    pending: NDArray[np.int64]
    final: bool
    events: int
    dropped: int
    looks: int
    bound_us: int

    @property
    def executions(self) -> int:
        return len(self.executed_us)

    @cached_property
    def staleness(self) -> NDArray[np.float64]:
        """The staleness before each execution, relative to the late events that really came, (k,)."""
        elapsed = np.diff(self.executed_us, prepend=0) / self.bound_us
        return np.asarray(elapsed * self.pending / max(self.events, 1), dtype=np.float64)

    @property
    def at_once(self) -> NDArray[np.bool_]:
        """Whether an execution ran as soon as its first new event came. No trigger could have been faster."""
        return np.asarray(self.executed_us == self.first_us)

    @cached_property
    def maximum(self) -> float:
        """The largest actual staleness; 0 without an execution."""
        return float(self.staleness.max(initial=0.0))


def replay(
    trigger: Trigger,
    lateness_us: ArrayLike,
    events: ArrayLike | None = None,
    *,
    bound_us: int,
    on_time_events: int = 0,
    step_us: int = 0,
) -> Replay:
    """Replays one late window under ``trigger``, from its on-time execution to its purge.

    ``lateness_us``: when ``events`` come, (n,), in any order, 0 or above. ``events``: how many, (n,); by default one
    each. The watermark moves in steps of ``step_us``, and the trigger is called after each step. 0: it moves
    continuously, and the trigger is called when events come and when it asked for it. All events of one call come
    together. The cost depends on the number of calls, not of events.
    """
    at, counts = np.asarray(lateness_us, dtype=np.int64), np.ones(np.shape(lateness_us), dtype=np.int64)
    if events is not None:
        counts = np.asarray(events, dtype=np.int64)
    if at.shape != counts.shape or at.ndim != 1 or (at < 0).any() or (counts < 0).any():
        raise ValueError("lateness and events must be two rows of numbers from 0, equally long")
    in_time = (at < bound_us) & (counts > 0)
    dropped = int(counts[at >= bound_us].sum())
    at, counts = at[in_time], counts[in_time]
    if step_us:
        # A batch sees the events since the previous one. The final execution sees those after the last batch.
        at = np.minimum(-(-at // step_us) * step_us, bound_us)
    instants, which = np.unique(at, return_inverse=True)
    arrived = np.bincount(which, weights=counts, minlength=len(instants)).astype(np.int64)
    run = _Run(trigger, bound_us, on_time_events, step_us)
    for instant_us, number in zip(instants.tolist(), arrived.tolist(), strict=True):
        run.go_to(instant_us)
        run.arrive(number)
        if instant_us < bound_us:
            run.look(instant_us)
    run.go_to(bound_us)
    final = run.pending > 0
    if final:
        run.execute(bound_us)
    executed, first, pending = (np.array(c, dtype=np.int64) for c in (run.executed_us, run.first_us, run.seen))
    return Replay(executed, first, pending, final, int(counts.sum()), dropped, run.looks, bound_us)


class _Run:
    """The state of the window during the replay."""

    def __init__(self, trigger: Trigger, bound_us: int, on_time_events: int, step_us: int) -> None:
        self.trigger, self.bound_us, self.on_time_events, self.step_us = trigger, bound_us, on_time_events, step_us
        self.now_us = self.late = self.pending = self.looks = 0
        self.pending_from_us = 0
        self.executed_us: list[int] = []
        self.first_us: list[int] = []
        self.seen: list[int] = []

    def view(self) -> LateView:
        last_us = self.executed_us[-1] if self.executed_us else 0
        return LateView(
            self.now_us,
            last_us,
            self.pending,
            self.late,
            self.bound_us,
            self.on_time_events,
            len(self.seen),
            self.step_us,
        )

    def go_to(self, at_us: int) -> None:
        """Calls the trigger as often as it is due before ``at_us``, without new events."""
        while self.pending and self.now_us < at_us:
            if self.step_us:
                due_us: int | None = (self.now_us // self.step_us + 1) * self.step_us
            else:
                due_us = self.trigger.next_due_us(self.view())
            if due_us is None or due_us >= at_us:
                break
            assert due_us > self.now_us, f"{self.trigger} wants to be called again at once: {self.view()}"
            self.look(due_us)
        self.now_us = at_us

    def arrive(self, events: int) -> None:
        if not self.pending:
            self.pending_from_us = self.now_us
        self.late += events
        self.pending += events

    def look(self, at_us: int) -> None:
        self.now_us = at_us
        self.looks += 1
        if self.trigger.due(self.view()):
            self.execute(at_us)

    def execute(self, at_us: int) -> None:
        self.executed_us.append(at_us)
        self.first_us.append(self.pending_from_us)
        self.seen.append(self.pending)
        self.pending = 0
