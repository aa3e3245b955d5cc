"""When the batches of each shard come, and which prestages wait for their time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from state_backends.server.attempts import ShardKey

_IDLE_S = 600.0
_IDLE_AT_WORK_S = 86_400.0  # an attempt whose worker died never ends
_IDLE_BATCHES = 20


class PlannedPrestage(NamedTuple):
    """``token``: the version whose slices these are."""

    start_s: float
    key: ShardKey
    token: str
    slices: Sequence[int]


class Schedule:
    """It owns when each shard was opened last, the average time between its batches, and the planned prestages.

    How often a shard's batches come is remembered when the shard is closed. Not locked: the host's lock is held around
    every call.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now_s = clock
        self._opened_s: dict[ShardKey, float] = {}
        self._interval_s: dict[ShardKey, float] = {}
        self._planned: list[PlannedPrestage] = []

    def __len__(self) -> int:
        """Of the prestages that wait."""
        return len(self._planned)

    def opened(self, key: ShardKey, *, reopened: bool) -> None:
        """An attempt of a new batch begins; with ``reopened`` one that was here before."""
        before = self._opened_s.get(key)
        if reopened and before is not None:
            return
        now = self._opened_s[key] = self.now_s()
        if before is not None:
            known = self._interval_s.get(key)
            self._interval_s[key] = now - before if known is None else 0.7 * known + 0.3 * (now - before)

    def due_s(self, key: ShardKey) -> float:
        """When the next batch is expected; not earlier than now."""
        return max(self._opened_s[key] + self._interval_s.get(key, 0.0), self.now_s())

    def is_idle(self, key: ShardKey, *, at_work: bool) -> bool:
        """Whether no attempt has come for long. The query may have a slow trigger, so its own pace counts."""
        now = self.now_s()
        longest = max(_IDLE_AT_WORK_S if at_work else _IDLE_S, _IDLE_BATCHES * self._interval_s.get(key, 0.0))
        return now - self._opened_s.get(key, now) > longest

    def plan(self, planned: PlannedPrestage) -> None:
        self._planned.append(planned)

    def take_due(self) -> list[PlannedPrestage]:
        """The prestages whose time has come."""
        now = self.now_s()
        due = [planned for planned in self._planned if planned.start_s <= now]
        self._planned = [planned for planned in self._planned if planned.start_s > now]
        return due
