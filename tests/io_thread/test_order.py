"""The I/O thread: what runs before what, what a failure does, and how it ends. Held by events, never by sleeps."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from aion.errors import ServerUnreachable
from state_backends.store.io_thread import IoThread, Priority, Steps
from tests.io_thread.rig import PATIENCE, Gate, fail, note, result


def test_the_urgent_comes_first_and_equals_in_the_order_in_which_they_came(io: IoThread) -> None:
    log: list[str] = []
    mixed = [*reversed(Priority), *Priority, *reversed(Priority)]
    with Gate(io):
        requests = [io.submit(p, note(log, f"{p.name}-{i}")) for i, p in enumerate(mixed)]
    for request in requests:
        result(request)
    expected = sorted(enumerate(mixed), key=lambda ip: (ip[1], ip[0]))
    assert log == [f"{p.name}-{i}" for i, p in expected]


def test_the_priorities_are_those_of_the_design() -> None:
    assert [p.name for p in sorted(Priority)] == [
        "READ",
        "WRITE",
        "PRESTAGE",
        "PRESTAGE_LATER",
        "LATE_WRITE",
        "DESTAGE",
        "MAINTENANCE",
    ]


def test_an_urgent_request_waits_for_one_step_at_most(io: IoThread) -> None:
    log: list[str] = []
    inside, go_on = threading.Event(), threading.Event()

    def long() -> Steps[Any]:
        for number in range(5):
            log.append(f"destage{number}")
            if number == 2:
                inside.set()
                assert go_on.wait(PATIENCE)
            yield 0

    slow = io.submit(Priority.DESTAGE, long())
    assert inside.wait(PATIENCE)
    fast = io.submit(Priority.READ, note(log, "read", steps=2))
    go_on.set()
    result(slow), result(fast)
    assert log == ["destage0", "destage1", "destage2", "read0", "read1", "destage3", "destage4"]


def test_requests_of_one_priority_do_not_interleave(io: IoThread) -> None:
    log: list[str] = []
    with Gate(io):
        requests = [io.submit(Priority.DESTAGE, note(log, name, steps=3)) for name in "ab"]
    for request in requests:
        result(request)
    assert log == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_a_request_can_be_raised(io: IoThread) -> None:
    """Somebody waits for it now: it goes before what is less urgent than that, and is done once."""
    log: list[str] = []
    with Gate(io):
        first = io.submit(Priority.DESTAGE, note(log, "first", steps=2))
        second = io.submit(Priority.PRESTAGE, note(log, "second"))
        third = io.submit(Priority.DESTAGE, note(log, "third", steps=2))
        third.raise_to(Priority.READ)
        third.raise_to(Priority.MAINTENANCE)
    for request in (first, second, third):
        result(request)
    assert log == ["third0", "third1", "second", "first0", "first1"]


def test_a_request_under_way_can_be_raised(io: IoThread) -> None:
    log: list[str] = []
    inside, go_on = threading.Event(), threading.Event()

    def long() -> Steps[None]:
        inside.set()
        assert go_on.wait(PATIENCE)
        yield 0
        log.append("long")

    request = io.submit(Priority.MAINTENANCE, long())
    assert inside.wait(PATIENCE)
    other = io.submit(Priority.DESTAGE, note(log, "other"))
    request.raise_to(Priority.READ)
    request.raise_to(Priority.READ)
    go_on.set()
    result(request), result(other)
    assert log == ["long", "other"]


def test_raising_what_is_over_does_nothing(io: IoThread) -> None:
    done = io.submit(Priority.DESTAGE, note([], "done"))
    result(done)
    done.raise_to(Priority.READ)
    with Gate(io):
        cancelled = io.submit(Priority.DESTAGE, note([], "cancelled"))
        cancelled.cancel()
        cancelled.raise_to(Priority.READ)
    assert result(io.submit(Priority.MAINTENANCE, note([], "alive"))) == "alive"
    io.close()
    assert io.stats.queued == 0


# -- results and failures -----------------------------------------------------------------------------------


def test_a_future_holds_what_the_steps_return(io: IoThread) -> None:
    assert result(io.submit(Priority.DESTAGE, note([], "done", steps=3))) == "done"


@pytest.mark.parametrize("error", [OSError("disk full"), AssertionError("a bug"), SystemExit(3), KeyboardInterrupt()])
def test_a_failure_reaches_its_future_and_the_thread_goes_on(io: IoThread, error: BaseException) -> None:
    assert io.submit(Priority.READ, fail(error)).future.exception(PATIENCE) is error
    assert result(io.submit(Priority.READ, note([], "alive"))) == "alive"


def test_steps_may_ask_for_more(io: IoThread) -> None:
    log: list[str] = []

    def asking() -> Steps[Any]:
        return io.submit(Priority.MAINTENANCE, note(log, "asked for"))
        yield 0

    assert result(result(io.submit(Priority.READ, asking()))) == "asked for"


# -- cancelling -----------------------------------------------------------------------------------------------


def test_closing_finishes_what_is_queued() -> None:
    io, log = IoThread(), list[str]()
    with Gate(io):
        requests = [io.submit(p, note(log, p.name, steps=2)) for p in Priority]
        closing = threading.Thread(target=io.close)
        closing.start()
    closing.join(PATIENCE)
    assert all(request.future.done() for request in requests)
    assert len(log) == 2 * len(Priority)


def test_a_closed_thread_takes_nothing_more_and_may_be_closed_again() -> None:
    io = IoThread()
    io.close()
    io.close()
    with pytest.raises(RuntimeError, match="closed"):
        io.submit(Priority.READ, note([], "late"))


def test_the_thread_has_a_name_and_ends() -> None:
    io = IoThread("aion-io-test")
    assert "aion-io-test" in {t.name for t in threading.enumerate()}
    io.close()
    assert "aion-io-test" not in {t.name for t in threading.enumerate()}


def test_what_is_queued_is_counted() -> None:
    io = IoThread()
    with Gate(io):
        for priority in Priority:
            io.submit(priority, note([], "x", steps=2))
        io.submit(Priority.READ, fail(OSError()))
        io.submit(Priority.READ, note([], "x")).cancel()
        assert io.stats.queued == 3 + len(Priority), "and the gate"
    io.close()
    assert io.stats.queued == 0


def test_what_was_done_is_counted_by_priority() -> None:
    io = IoThread()

    def moving() -> Steps[None]:
        yield 100
        yield 20

    with Gate(io):
        io.submit(Priority.DESTAGE, moving())
        io.submit(Priority.DESTAGE, fail(OSError()))
    io.close()
    stats = io.stats.by_priority["destage"]
    assert (stats.requests, stats.steps, stats.bytes) == (2, 4, 120)
    assert io.stats.by_priority["read"].requests == 1, "the gate"
    assert stats.longest_wait_s <= stats.waited_s
    assert io.stats.to_json()["by_priority"]["destage"]["bytes"] == 120


# -- room, and rates ----------------------------------------------------------------------------------------------


def test_who_fills_the_queue_waits_for_room() -> None:
    io = IoThread(capacity=2)
    io.wait_for_room()
    with Gate(io):
        io.submit(Priority.DESTAGE, note([], "queued"))
        filling = threading.Thread(target=io.wait_for_room, daemon=True)
        filling.start()
        filling.join(0.05)
        assert filling.is_alive(), "the gate and one more are all that there is room for"
    filling.join(PATIENCE)
    assert not filling.is_alive()
    io.close()
    io.wait_for_room()


def test_a_rate_limit_slows_writes_down_and_never_reads() -> None:
    now = [0.0]
    io = IoThread(rate_limit=1000, clock=lambda: now[0])

    def moving(size: int) -> Steps[str]:
        yield size
        return "moved"

    writing = io.submit(Priority.DESTAGE, moving(10**9))
    assert result(io.submit(Priority.READ, moving(10**9))) == "moved"
    assert result(io.submit(Priority.PRESTAGE, moving(1))) == "moved"
    assert not writing.future.done(), "it has a million seconds to go"
    io.close()
    assert result(writing) == "moved", "but whoever closes does not wait for them"


# -- a thread that dies -------------------------------------------------------------------------------------------


class Lethal(int):
    """Bytes that cannot be added up: what fails then fails between the steps."""

    def __radd__(self, other: int) -> int:
        raise SystemExit("the end")


def test_nobody_waits_for_a_thread_that_died() -> None:
    io = IoThread(capacity=3)

    def deadly() -> Steps[None]:
        yield Lethal(1)

    with Gate(io):
        requests = [io.submit(Priority.READ, deadly()), io.submit(Priority.READ, note([], "next"))]
        cancelled = io.submit(Priority.READ, note([], "cancelled"))
        cancelled.cancel()
        assert io.died() is None
    for request in requests:
        with pytest.raises(ServerUnreachable, match=r"the I/O thread .* died \(SystemExit: the end\)"):
            result(request)
    assert io.died() is not None
    with pytest.raises(ServerUnreachable, match="died"):
        io.submit(Priority.READ, note([], "later"))
    io.wait_for_room()
    io.close()
