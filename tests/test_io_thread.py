"""The I/O thread: what runs before what, what a failure does, and how it ends. Held by events, never by sleeps."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from state_backends.io_thread import IoThread, Priority

PATIENCE = 10.0  # seconds after which a test that waits has failed

Steps = Generator[int, None, Any]


def future(request: Any) -> Future[Any]:
    """What a submitted request comes to; a request may be its own future."""
    return getattr(request, "future", request)  # type: ignore[no-any-return]


def result(request: Any) -> Any:
    return future(request).result(PATIENCE)


@pytest.fixture
def io() -> Iterator[IoThread]:
    thread = IoThread()
    yield thread
    thread.close()


class Gate:
    """Steps that stop the thread inside of one until they are let through."""

    def __init__(self, io: IoThread, priority: Priority = Priority.READ) -> None:
        self._entered, self._open = threading.Event(), threading.Event()
        io.submit(priority, self._steps())

    def _steps(self) -> Steps:
        self._entered.set()
        assert self._open.wait(PATIENCE)
        yield 0

    def __enter__(self) -> Gate:
        assert self._entered.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.set()


def note(log: list[str], name: str, steps: int = 1) -> Steps:
    for number in range(steps):
        log.append(name if steps == 1 else f"{name}{number}")
        if number < steps - 1:
            yield 0
    return name


def fail(error: BaseException) -> Steps:
    raise error
    yield 0


# -- order ------------------------------------------------------------------------------------------------


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
    assert [p.name for p in sorted(Priority)] == ["READ", "PRESTAGE", "LATE_WRITE", "DESTAGE", "MAINTENANCE"]


def test_an_urgent_request_waits_for_one_step_at_most(io: IoThread) -> None:
    log: list[str] = []
    inside, go_on = threading.Event(), threading.Event()

    def long() -> Steps:
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


# -- results and failures -----------------------------------------------------------------------------------


def test_a_future_holds_what_the_steps_return(io: IoThread) -> None:
    assert result(io.submit(Priority.DESTAGE, note([], "done", steps=3))) == "done"


@pytest.mark.parametrize("error", [OSError("disk full"), AssertionError("a bug"), SystemExit(3), KeyboardInterrupt()])
def test_a_failure_reaches_its_future_and_the_thread_goes_on(io: IoThread, error: BaseException) -> None:
    assert future(io.submit(Priority.READ, fail(error))).exception(PATIENCE) is error
    assert result(io.submit(Priority.READ, note([], "alive"))) == "alive"


def test_steps_may_ask_for_more(io: IoThread) -> None:
    log: list[str] = []

    def asking() -> Steps:
        return io.submit(Priority.MAINTENANCE, note(log, "asked for"))
        yield 0

    assert result(result(io.submit(Priority.READ, asking()))) == "asked for"


# -- cancelling -----------------------------------------------------------------------------------------------


def test_what_is_cancelled_while_it_waits_never_runs(io: IoThread) -> None:
    log: list[str] = []
    with Gate(io):
        cancelled, other = (io.submit(Priority.READ, note(log, name)) for name in ("cancelled", "other"))
        cancelled.cancel()
    assert result(other) == "other"
    assert log == ["other"]
    with pytest.raises(CancelledError):
        result(cancelled)


def test_what_is_cancelled_between_two_steps_takes_no_further_one(io: IoThread) -> None:
    log: list[str] = []
    inside, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def long() -> Steps:
        try:
            log.append("first")
            inside.set()
            assert go_on.wait(PATIENCE)
            yield 0
            log.append("second")
        finally:
            closed.set()

    request = io.submit(Priority.DESTAGE, long())
    assert inside.wait(PATIENCE)
    urgent = io.submit(Priority.READ, cancelling(request))
    go_on.set()
    result(urgent)
    assert closed.wait(PATIENCE), "its clean-up runs"
    assert log == ["first"]
    assert result(io.submit(Priority.READ, note([], "alive"))) == "alive"


def cancelling(request: Any) -> Steps:
    request.cancel()
    yield 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_that_is_cancelled_while_it_runs_does_not_end_the_thread(io: IoThread, fails: bool) -> None:
    """A reader that gives up cancels what it asked for, and cannot know whether it is being read."""
    inside, go_on = threading.Event(), threading.Event()

    def reading() -> Steps:
        inside.set()
        assert go_on.wait(PATIENCE)
        if fails:
            raise OSError("unreadable")
        return "read"
        yield 0

    request = io.submit(Priority.READ, reading())
    assert inside.wait(PATIENCE)
    request.cancel()
    go_on.set()
    assert result(io.submit(Priority.READ, note([], "alive"))) == "alive"


# -- the end --------------------------------------------------------------------------------------------------


def test_closing_finishes_what_is_queued() -> None:
    io, log = IoThread(), list[str]()
    with Gate(io):
        requests = [io.submit(p, note(log, p.name, steps=2)) for p in Priority]
        closing = threading.Thread(target=io.close)
        closing.start()
    closing.join(PATIENCE)
    assert all(future(r).done() for r in requests)
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
