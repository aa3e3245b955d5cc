"""When a heartbeat moves the watermark of a query whose sources are silent or complete (:func:`aion.watermark`). Pure.

A heartbeat is a source of its own, and a decision is an offset of it. Spark logs the offsets of a batch before it runs
the batch. So a batch that is run again has the same decision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from aion.errors import ConfigError

RUN = "aion_heartbeat"
"""The name, in an offset, of the run that decided it. No offset of another source has it."""
_SHORTEST_PERIOD_US = 1_000_000
_PERIODS = 10


class Beat(NamedTuple):
    """An offset. ``run`` names the reader that decided it. ``caught_up``: events were once close to the clock.

    ``time_us`` is the event time that the batch up to this offset gives to the watermark, or None if it gives none.
    """

    run: str = ""
    number: int = 0
    caught_up: bool = False
    time_us: int | None = None

    @classmethod
    def of(cls, offset: dict[str, Any]) -> Beat:
        return cls(offset[RUN], offset["number"], offset["caught_up"], offset["time_us"])

    def offset(self) -> dict[str, Any]:
        return {RUN: self.run, "number": self.number, "caught_up": self.caught_up, "time_us": self.time_us}


class Position(NamedTuple):
    """How far a query is before a batch. ``others``: up to where the batches so far have read the other sources.

    ``latest_us``: the watermark plus its delay. None before the first event.
    """

    latest_us: int | None
    others: tuple[str, ...]


@dataclass(frozen=True)
class HeartbeatSettings:
    """``idle_us``: how far behind the clock the watermark may be, besides its delay, or None if it does not follow the
    clock.

    ``close_us``: how close to the clock events must have been once. ``until_us``: up to where the events of this run
    are complete, plus the delay, or None if it is not known.
    """

    idle_us: int | None = None
    close_us: int = 0
    until_us: int | None = None

    @property
    def period_us(self) -> int:
        """How long the heartbeat waits after a batch. A silent query rests between batches, however long they take."""
        return max(_SHORTEST_PERIOD_US, (self.idle_us or 0) // _PERIODS)


class Heartbeat:
    """The decisions in one run of a query. ``run``: a name that no other run has."""

    def __init__(self, run: str, settings: HeartbeatSettings) -> None:
        self._run = run
        self._settings = settings
        self._ends_us: int | None = None
        self._is_over = False
        self._others: tuple[str, ...] | None = None
        self._rests_until_us: int | None = 0
        self._asked_us: int | None = None

    def end_at(self, now_us: int) -> None:
        """Says that the run ends when it has read what the sources have now."""
        self._ends_us = now_us

    def next(self, last: Beat, now_us: int, look: Callable[[], Position]) -> Beat:
        """Returns the offset up to which the next batch goes, after ``last``. The same one does not make a batch.

        Spark asks all sources at the same time, after a batch or when there was none.
        """
        asked_us, self._asked_us = self._asked_us, now_us
        if self._ends_us is None and self._settings.until_us is not None:
            raise ConfigError(
                "complete_until: this run has no end, so its data are never complete; start the query with "
                ".trigger(availableNow=True) and sources that support it, or give the name of a column"
            )
        if last.run != self._run:
            # From now on the query can be found by this run.
            return last._replace(run=self._run, number=last.number + 1, time_us=None)
        if last.time_us is not None:
            # The next batch has the new watermark, and closes windows. Spark can be set to run none without a source.
            return self._after(last, last.caught_up, None)
        if self._is_over:
            return last
        if self._ends_us is None:
            if self._rests_until_us is None:
                self._rests_until_us = now_us + self._settings.period_us
            if now_us < self._rests_until_us:
                return last
            self._rests_until_us = now_us + self._settings.period_us
        position = look()
        others, self._others = self._others, position.others
        caught_up = last.caught_up or self._is_close(position.latest_us, now_us)
        # If no other source was read since the look before, none had more when they were asked before this.
        if asked_us is None or others != position.others:
            wanted = self._ends_us is not None or caught_up != last.caught_up
            return self._after(last, caught_up, None) if wanted else last
        time_us = self._time_us(asked_us if self._ends_us is None else self._ends_us, caught_up=caught_up)
        self._is_over = self._ends_us is not None
        if time_us is not None and (position.latest_us is None or time_us > position.latest_us):
            return self._after(last, caught_up, time_us)
        return last if caught_up == last.caught_up else self._after(last, caught_up, None)

    def _is_close(self, latest_us: int | None, now_us: int) -> bool:
        if self._settings.idle_us is None or latest_us is None:
            return False
        return latest_us >= (now_us if self._ends_us is None else self._ends_us) - self._settings.close_us

    def _time_us(self, silent_us: int, *, caught_up: bool) -> int | None:
        """Returns where a query is whose sources had nothing more at ``silent_us``."""
        times = [] if self._settings.until_us is None else [self._settings.until_us]
        if self._settings.idle_us is not None and caught_up:
            times.append(silent_us - self._settings.idle_us)
        return max(times, default=None)

    def _after(self, last: Beat, caught_up: bool, time_us: int | None) -> Beat:
        if time_us is not None:
            self._rests_until_us = None
        return Beat(self._run, last.number + 1, caught_up, time_us)
