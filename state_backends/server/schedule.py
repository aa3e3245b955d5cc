"""Predicts when the next batch of each shard comes, and keeps the prestages that wait for their time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from state_backends.server.attempts import ShardKey

_IDLE_S = 600.0
_IDLE_IN_USE_S = 86_400.0  # if its worker died, its attempt never ends
_IDLE_BATCHES = 20


class PlannedPrestage(NamedTuple):
    """``start_s``: when to start. ``token``: the version that has these slices."""

    start_s: float
    key: ShardKey
    token: str
    slices: Sequence[int]


class Schedule:
    """It owns the time when each shard was last opened, the average time between its batches, and planned prestages.

    The average is kept when a shard is closed. It has no lock: hold the host's lock around every call.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now_s = clock
        self._opened_s: dict[ShardKey, float] = {}
        self._interval_s: dict[ShardKey, float] = {}
        self._planned: list[PlannedPrestage] = []

    def __len__(self) -> int:
        """Returns the number of prestages that wait."""
        return len(self._planned)

    def opened(self, key: ShardKey, *, reopened: bool) -> None:
        """Records that an attempt opened a shard. ``reopened``: the same attempt had opened it before."""
        before = self._opened_s.get(key)
        if reopened and before is not None:
            return
        now = self._opened_s[key] = self.now_s()
        if before is not None:
            known = self._interval_s.get(key)
            self._interval_s[key] = now - before if known is None else 0.7 * known + 0.3 * (now - before)

    def due_s(self, key: ShardKey) -> float:
        """Returns when the next batch is expected. Not earlier than now."""
        return max(self._opened_s[key] + self._interval_s.get(key, 0.0), self.now_s())

    def is_idle(self, key: ShardKey, *, in_use: bool) -> bool:
        """Returns whether no attempt has opened the shard for long, compared with how often its batches come.

        ``in_use``: an attempt works on it.
        """
        now = self.now_s()
        longest = max(_IDLE_IN_USE_S if in_use else _IDLE_S, _IDLE_BATCHES * self._interval_s.get(key, 0.0))
        return now - self._opened_s.get(key, now) > longest

    def plan(self, planned: PlannedPrestage) -> None:
        self._planned.append(planned)

    def take_due(self) -> list[PlannedPrestage]:
        """Returns and removes the prestages whose time has come."""
        now = self.now_s()
        due = [planned for planned in self._planned if planned.start_s <= now]
        self._planned = [planned for planned in self._planned if planned.start_s > now]
        return due
