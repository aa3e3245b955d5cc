"""Predicts when the next batch of each shard comes, and keeps the prestages that wait for their time.

A query whose trigger has an interval says when its next batch starts. Of other queries it is learnt how often they have
batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from state_backends.server.attempts import ShardKey

_IDLE_S = 600.0
_IDLE_IN_USE_S = 86_400.0  # if its worker died, its attempt never ends
_GONE_S = 7 * 86_400.0
_IDLE_BATCHES = 20
_WEIGHT, _DEVIATION_WEIGHT = 0.3, 0.25  # of the newest interval
_DEVIATIONS = 4  # as many mean deviations earlier than the mean


class PlannedPrestage(NamedTuple):
    """``start_s``: when to start. ``token``: the version with these slices. ``later``: those that are less urgent."""

    start_s: float
    key: ShardKey
    token: str
    slices: Sequence[int]
    later: Sequence[int] = ()


@dataclass(slots=True)
class _Interval:
    """Moving means of the seconds between batches and of their absolute deviation, as in TCP (RFC 6298, section 2)."""

    mean_s: float
    deviation_s: float

    def learn(self, seconds: float) -> None:
        self.deviation_s += _DEVIATION_WEIGHT * (abs(seconds - self.mean_s) - self.deviation_s)
        self.mean_s += _WEIGHT * (seconds - self.mean_s)


class Schedule:
    """It owns the time when each shard was last opened, how often its batches come, and planned prestages.

    How often they come is kept when a shard is closed, until the operator is :meth:`gone`. It has no lock: hold the
    host's lock around every call.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now_s = clock
        self._opened_s: dict[ShardKey, float] = {}
        self._intervals: dict[ShardKey, _Interval] = {}
        self._triggers: dict[ShardKey, tuple[float, float]] = {}  # the interval, and when it next starts a batch
        self._planned: list[PlannedPrestage] = []

    def __len__(self) -> int:
        """Returns the number of prestages that wait."""
        return len(self._planned)

    def opened(self, key: ShardKey, *, reopened: bool, next_start: tuple[float, float] | None = None) -> None:
        """Records that an attempt opened a shard. ``reopened``: the same attempt had opened it before.

        ``next_start``: see :class:`state_backends.server.requests.OpenRequest`.
        """
        before = self._opened_s.get(key)
        if reopened and before is not None:
            return
        now = self._opened_s[key] = self.now_s()
        if next_start is None:
            self._triggers.pop(key, None)
        else:
            self._triggers[key] = next_start[0], now + next_start[1]
        if before is not None:
            if (known := self._intervals.get(key)) is None:
                self._intervals[key] = _Interval(now - before, (now - before) / 2)
            else:
                known.learn(now - before)

    def due_s(self, key: ShardKey) -> float:
        """Returns when the next batch may come: earlier than on average, because batches do not come evenly, but not
        before the query's trigger starts one.

        What is staged for a batch that comes earlier than this is not in memory yet. Not earlier than now.
        """
        known = self._intervals.get(key)
        after_s = 0.0 if known is None else known.mean_s - _DEVIATIONS * known.deviation_s
        _, starts_s = self._triggers.get(key, (0.0, 0.0))
        return max(self._opened_s[key] + after_s, starts_s, self.now_s())

    def next_s(self) -> float | None:
        """Returns when the next planned prestage starts, or None if none is planned."""
        return min((planned.start_s for planned in self._planned), default=None)

    def is_idle(self, key: ShardKey, *, in_use: bool) -> bool:
        """Returns whether no attempt has opened the shard for long, compared with how often its batches come.

        ``in_use``: an attempt works on it.
        """
        return self._is_over(key, _IDLE_IN_USE_S if in_use else _IDLE_S)

    def gone(self, there: Iterable[ShardKey]) -> set[tuple[str, str]]:
        """Forgets operators, as (query, name), to which no batch has come for a week, and returns them.

        ``there``: the shards that are open on this host. Their operators are not gone.
        """
        stay = {key[:2] for key in there}
        stay |= {key[:2] for key in self._opened_s if key[:2] not in stay and not self._is_over(key, _GONE_S)}
        over = [key for key in self._opened_s if key[:2] not in stay]
        for key in over:
            del self._opened_s[key]
            self._intervals.pop(key, None)
            self._triggers.pop(key, None)
        return {key[:2] for key in over}

    def _is_over(self, key: ShardKey, least_s: float) -> bool:
        now = self.now_s()
        return now - self._opened_s.get(key, now) > max(least_s, _IDLE_BATCHES * self._mean_s(key))

    def _mean_s(self, key: ShardKey) -> float:
        every_s, _ = self._triggers.get(key, (0.0, 0.0))
        return max(every_s, self._intervals[key].mean_s if key in self._intervals else 0.0)

    def plan(self, planned: PlannedPrestage) -> None:
        self._planned.append(planned)

    def take_due(self) -> list[PlannedPrestage]:
        """Returns and removes the prestages whose time has come."""
        now = self.now_s()
        due = [planned for planned in self._planned if planned.start_s <= now]
        self._planned = [planned for planned in self._planned if planned.start_s > now]
        return due
