"""When a heartbeat moves the watermark: the decisions, without Spark."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from aion.core.heartbeat import Beat, Heartbeat, HeartbeatSettings, Position
from aion.errors import ConfigError

SECOND = 1_000_000
NOW = 1_000 * SECOND
IDLE = HeartbeatSettings(idle_us=5 * SECOND, close_us=5 * SECOND)


@dataclass
class Query:
    """A query as Spark drives it: a batch takes what the source has, at most one thing, and the last heartbeat."""

    settings: HeartbeatSettings
    beat: Beat = field(default_factory=Beat)
    waiting: list[int] = field(default_factory=list)
    latest_us: int | None = None
    read: int = 0
    now_us: int = NOW
    runs: int = 0
    takes_us: int = 0

    def start(self, *, bounded: bool) -> Query:
        self.runs += 1
        self.heartbeat = Heartbeat(f"run {self.runs}", self.settings)
        if bounded:
            self.heartbeat.end_at(self.now_us)
        return self

    def batch(self) -> bool:
        """Runs a batch, if there is one."""
        beat = self.heartbeat.next(self.beat, self.now_us, lambda: Position(self.latest_us, (str(self.read),)))
        times = [self.waiting.pop(0)] if self.waiting else []
        self.read += len(times)
        if not times and beat == self.beat:
            return False
        if beat != self.beat and beat.time_us is not None:
            times.append(beat.time_us)
        self.beat = beat
        self.now_us += self.takes_us
        self.latest_us = max([t for t in (self.latest_us, *times) if t is not None], default=None)
        return True

    def all_batches(self) -> int:
        for number in range(50):
            if not self.batch():
                return number
        raise AssertionError("it does not end")

    def seconds(self, n: int) -> Query:
        """Polls for some seconds, ten times a second."""
        for _ in range(n * 10):
            self.now_us += SECOND // 10
            self.batch()
        return self


def test_the_clock_counts_for_a_silent_source() -> None:
    query = Query(IDLE, waiting=[NOW - 2 * SECOND]).start(bounded=False).seconds(3)
    assert query.latest_us == NOW - 2 * SECOND
    query.seconds(56)
    assert query.latest_us is not None
    assert 5 <= (query.now_us - query.latest_us) / SECOND <= 6.2


def test_a_silent_query_rests_between_slow_batches() -> None:
    query = Query(IDLE, waiting=[NOW], takes_us=3 * SECOND).start(bounded=False).seconds(20)
    assert query.beat.caught_up
    for _ in range(5):
        while not query.batch():
            query.now_us += SECOND // 100
        assert query.batch() and query.beat.time_us is None, "the windows that are due need another batch"
        assert not query.batch(), "the query rests"


def test_a_silent_source_starts_few_batches() -> None:
    query = Query(HeartbeatSettings(idle_us=300 * SECOND, close_us=300 * SECOND), waiting=[NOW]).start(bounded=False)
    number = query.seconds(3600).beat.number
    assert 200 < number < 260, "about two each thirty seconds"


def test_a_backfill_is_not_made_late() -> None:
    """Nor what follows it before the source has been close to the clock."""
    query = Query(IDLE, waiting=[NOW - 1000 * SECOND, NOW - 999 * SECOND]).start(bounded=False).seconds(60)
    assert query.latest_us == NOW - 999 * SECOND
    query.waiting = [query.now_us - SECOND]
    query.seconds(20)
    assert query.latest_us >= query.now_us - 8 * SECOND


def test_what_waits_after_a_restart_is_not_made_late() -> None:
    query = Query(IDLE, waiting=[NOW]).start(bounded=False).seconds(10)
    assert query.beat.caught_up
    query.now_us += 3600 * SECOND
    backlog = [query.now_us - (3600 - n) * SECOND for n in range(300)]
    query.waiting = list(backlog)
    query.start(bounded=False)
    while query.waiting:
        first = query.waiting[0]
        query.seconds(1)
        assert query.latest_us < first + 20 * SECOND
    query.seconds(10)
    assert query.latest_us >= query.now_us - 8 * SECOND, "though it is silent since the restart"


def test_a_bounded_run_ends_and_uses_the_time_at_which_it_began() -> None:
    query = Query(IDLE, waiting=[NOW - 2 * SECOND]).start(bounded=True)
    assert query.all_batches() == 2
    query.now_us += 3600 * SECOND
    began_us = query.now_us
    query.start(bounded=True)
    query.batch()
    query.now_us += 60 * SECOND
    query.all_batches()
    assert query.latest_us == began_us - 5 * SECOND


@pytest.mark.parametrize("events", [0, 1, 5])
def test_a_promise_comes_after_all_events_of_the_run(events: int) -> None:
    until = NOW - 100 * SECOND
    query = Query(HeartbeatSettings(until_us=until), waiting=[NOW - (1000 - n) * SECOND for n in range(events)])
    query.start(bounded=True)
    while query.waiting:
        assert query.batch() and query.latest_us < until
    assert query.all_batches() <= 4
    assert query.latest_us == until
    again = query.start(bounded=True).beat
    assert query.all_batches() <= 3 and query.beat.time_us is None, "a promise that says nothing new moves nothing"
    assert again != query.beat


def test_events_that_came_after_a_crash_are_read_before_a_promise() -> None:
    """The batch that was planned last is run again, and what it found empty is not empty any more."""
    until = NOW - 100 * SECOND
    query = Query(HeartbeatSettings(until_us=until)).start(bounded=True)
    assert query.batch() and query.batch() and query.beat.time_us is None
    query.waiting = [NOW - 900 * SECOND, NOW - 800 * SECOND]
    query.start(bounded=True)
    while query.waiting:
        assert query.batch() and (query.latest_us is None or query.latest_us < until)
    query.all_batches()
    assert query.latest_us == until


def test_a_promise_needs_an_end() -> None:
    with pytest.raises(ConfigError, match="complete_until: this run has no end"):
        Query(HeartbeatSettings(until_us=NOW)).start(bounded=False).batch()
