"""When a shard's next batch may come, and so when to begin to stage for it."""

from __future__ import annotations

import random

import pytest

from state_backends.server.schedule import PlannedPrestage, Schedule
from state_backends.store.pressure import Sampler
from tests.io_thread.rig import PATIENCE

KEY = ("query", "operator", 0)


@pytest.mark.parametrize("jitter", [0.01, 0.1, 0.3])
def test_batches_that_do_not_come_evenly_find_their_prestage_begun(jitter: float) -> None:
    now = [0.0]
    schedule, numbers = Schedule(lambda: now[0]), random.Random(1)
    early, waits = 0, []
    schedule.opened(KEY, reopened=False)
    for batch in range(300):
        opened, after = now[0], numbers.uniform(1 - jitter, 1 + jitter)
        due = schedule.due_s(KEY)
        if batch >= 20:
            early += due <= opened + after
            waits.append(due - opened)
        now[0] = opened + after
        schedule.opened(KEY, reopened=False)
    assert early >= 0.95 * len(waits)
    assert sum(waits) / len(waits) >= 1 - 3.5 * jitter, "and no earlier than is needed: memory is held meanwhile"


def test_nothing_is_known_before_the_second_batch_so_it_may_come_at_once() -> None:
    now = [5.0]
    schedule = Schedule(lambda: now[0])
    schedule.opened(KEY, reopened=False)
    assert schedule.due_s(KEY) == 5.0
    now[0] = 6.0
    schedule.opened(KEY, reopened=False)
    assert schedule.due_s(KEY) == 6.0, "one interval says nothing of how much they differ"


def test_a_prestage_that_is_planned_wakes_the_thread_in_time() -> None:
    """It neither waits for the thread's next look, nor does the thread look all the time."""
    import threading

    schedule = Schedule(lambda: 0.0)
    started, looks = threading.Event(), []

    def tick() -> None:
        looks.append(1)
        if schedule.take_due():
            started.set()

    sampler = Sampler(tick, lambda: None if (at := schedule.next_s()) is None else at, every_s=10 * PATIENCE)
    try:
        schedule.plan(PlannedPrestage(0.0, KEY, "token", [1]))
        sampler.wake()
        assert started.wait(PATIENCE)
        assert len(looks) <= 3
    finally:
        sampler.stop()


def test_a_trigger_says_when_the_next_batch_starts() -> None:
    now = [5.0]
    schedule = Schedule(lambda: now[0])
    schedule.opened(KEY, reopened=False, next_start=(10.0, 4.0))
    assert schedule.due_s(KEY) == 9.0
    now[0] = 12.0
    assert schedule.due_s(KEY) == 12.0, "a batch that takes longer than the interval is followed at once"
    schedule.opened(KEY, reopened=False, next_start=(10.0, 7.0))
    assert schedule.due_s(KEY) == 19.0
    schedule.opened(KEY, reopened=False)
    assert schedule.due_s(KEY) == 12.0, "the query has another trigger now"


def test_a_shard_is_not_idle_between_two_batches_of_its_trigger() -> None:
    now = [0.0]
    schedule = Schedule(lambda: now[0])
    schedule.opened(KEY, reopened=False, next_start=(3600.0, 3600.0))
    now[0] = 3 * 3600.0
    assert not schedule.is_idle(KEY, in_use=False)
    now[0] = 30 * 3600.0
    assert schedule.is_idle(KEY, in_use=False)
