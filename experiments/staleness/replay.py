"""Replays a late window under a trigger: its executions, and how stale the result becomes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aion.base.numbers import NEVER
from aion.core.trigger.triggers import LateWindows, Trigger


@dataclass(frozen=True)
class Replay:
    """The late executions of one window, in order.

    ``executed_us``: the lateness of each in microseconds, (k,). ``first_us``: the lateness of its first new event,
    (k,). ``pending``: how many new events it saw, (k,). ``final``: whether the last one is the final execution.
    ``events``: late events within the bound. ``dropped``: events at the bound or later.
    """

    executed_us: NDArray[np.int64]
    first_us: NDArray[np.int64]
    pending: NDArray[np.int64]
    final: bool
    events: int
    dropped: int
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
    together. The cost depends on the number of executions and of instants with events.
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
    upto = np.concatenate(([0], np.cumsum(arrived)))
    window = _Window(trigger, instants, upto, bound_us, on_time_events, step_us)
    executed: list[int] = []
    first: list[int] = []
    pending: list[int] = []
    seen = 0
    while seen < len(instants):
        executed_us = window.next_execution(seen, executed)
        until = int(np.searchsorted(instants, executed_us, side="right"))
        executed.append(executed_us)
        first.append(int(instants[seen]))
        pending.append(int(upto[until] - upto[seen]))
        seen = until
    seen_us, first_us, events_seen = (np.array(c, dtype=np.int64) for c in (executed, first, pending))
    final = executed[-1:] == [bound_us]
    return Replay(seen_us, first_us, events_seen, final, int(counts.sum()), dropped, bound_us)


@dataclass(frozen=True)
class _Window:
    """The window that is replayed.

    ``instants``: the latenesses at which events come, (k,), ascending. ``upto``: how many events come before each, and
    in all, (k + 1,).
    """

    trigger: Trigger
    instants: NDArray[np.int64]
    upto: NDArray[np.int64]
    bound_us: int
    on_time_events: int
    step_us: int

    def next_execution(self, seen: int, executed_us: list[int]) -> int:
        """The lateness of the next execution: the bound if only the final one is left.

        ``seen``: how many of the instants the last execution has seen. ``executed_us``: the executions so far.
        """
        if self.step_us:
            looks = np.arange(self.instants[seen], self.bound_us, self.step_us)
        else:
            looks = self.instants[seen:]
        # The trigger decides about many instants in one call, as if no execution came before. Only the first of its
        # answers counts, so the calls begin small.
        begin, length = 0, 8
        while begin < len(looks):
            some = looks[begin : begin + length]
            windows = self._at(some, seen, executed_us)
            due = self.trigger.due(windows)
            again = np.full(len(some), NEVER)
            if not self.step_us:
                until = np.append(looks, self.bound_us)[begin + 1 : begin + 1 + len(some)]
                asked = self.trigger.next_due_us(windows)
                again = np.where(asked < until, asked, NEVER)
            for place in np.flatnonzero(due | (again < NEVER)).tolist():
                if due[place]:
                    return int(some[place])
                at_us = int(again[place])
                while at_us < until[place]:
                    look = self._at(np.array([at_us]), seen, executed_us)
                    if self.trigger.due(look)[0]:
                        return at_us
                    asked_us = int(self.trigger.next_due_us(look)[0])
                    assert asked_us > at_us, f"{self.trigger} wants to be called again at once: {look}"
                    at_us = asked_us
            begin, length = begin + length, 2 * length
        return self.bound_us

    def _at(self, lateness_us: NDArray[np.int64], seen: int, executed_us: list[int]) -> LateWindows:
        """The window at each of these latenesses."""
        late = self.upto[np.searchsorted(self.instants, lateness_us, side="right")]
        return LateWindows(
            lateness_us=lateness_us,
            executed_us=np.full(len(late), executed_us[-1] if executed_us else 0),
            pending=late - self.upto[seen],
            late_events=late,
            bound_us=np.full(len(late), self.bound_us),
            on_time_events=np.full(len(late), self.on_time_events),
            executions=np.full(len(late), len(executed_us)),
            step_us=self.step_us,
        )
