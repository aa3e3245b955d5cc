"""Requests of the I/O thread that are cancelled while they wait, run, or end. Held by events, never by sleeps."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import CancelledError, wait
from typing import Any

import pytest

from state_backends.store.io_thread import IoRequest, IoThread, Priority, Steps
from tests.io_thread.rig import PATIENCE, Gate, note, result


def test_what_is_cancelled_while_it_waits_never_runs(io: IoThread) -> None:
    log: list[str] = []
    with Gate(io):
        cancelled, other = (io.submit(Priority.READ, note(log, name)) for name in ("cancelled", "other"))
        cancelled.cancel()
    assert result(other) == "other"
    assert log == ["other"]
    with pytest.raises(CancelledError):
        result(cancelled)


def test_who_waits_for_what_is_cancelled_is_woken(io: IoThread) -> None:
    with Gate(io):
        request = io.submit(Priority.PRESTAGE, note([], "cancelled"))
        waiting = threading.Thread(target=wait, args=([request.future],), daemon=True)
        waiting.start()
        request.cancel()
    waiting.join(PATIENCE / 4)
    assert not waiting.is_alive()


def test_what_is_cancelled_between_two_steps_takes_no_further_one(io: IoThread) -> None:
    log: list[str] = []
    inside, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def long() -> Steps[Any]:
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


def test_what_is_cancelled_may_clean_up_under_a_lock_of_who_submits(io: IoThread) -> None:
    """A store submits under its lock, and takes back under it what is not wanted any more."""
    lock, inside, go_on, cleaning = threading.Lock(), threading.Event(), threading.Event(), threading.Event()

    def long() -> Steps[Any]:
        try:
            inside.set()
            assert go_on.wait(PATIENCE)
            yield 0
        finally:
            cleaning.set()
            if lock.acquire(timeout=PATIENCE):
                lock.release()

    submitted: list[IoRequest[Any]] = []

    def submitting() -> None:
        assert cleaning.wait(PATIENCE)
        submitted.append(io.submit(Priority.READ, note([], "another")))
        lock.release()

    request = io.submit(Priority.DESTAGE, long())
    assert inside.wait(PATIENCE)
    io.submit(Priority.READ, cancelling(request))
    lock.acquire()
    submitter = threading.Thread(target=submitting, daemon=True)
    submitter.start()
    go_on.set()
    submitter.join(PATIENCE / 2)
    assert not submitter.is_alive(), "each waits for the other"
    assert result(submitted[0]) == "another"


def test_a_clean_up_that_fails_does_not_end_the_thread(io: IoThread) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def clumsy() -> Steps[Any]:
        try:
            inside.set()
            assert go_on.wait(PATIENCE)
            yield 0
        finally:
            raise ValueError("while cleaning up")

    request = io.submit(Priority.DESTAGE, clumsy())
    assert inside.wait(PATIENCE)
    io.submit(Priority.READ, cancelling(request))
    go_on.set()
    assert result(io.submit(Priority.MAINTENANCE, note([], "next"))) == "next"


def cancelling(request: IoRequest[Any]) -> Steps[None]:
    request.cancel()
    yield 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_request_that_is_cancelled_while_it_runs_does_not_end_the_thread(io: IoThread, fails: bool) -> None:
    """A reader that gives up cancels what it asked for, and cannot know whether it is being read."""
    inside, go_on = threading.Event(), threading.Event()

    def reading() -> Steps[Any]:
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


def test_a_request_may_be_cancelled_while_its_result_is_set(io: IoThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread goes on, whatever comes first."""
    with Gate(io):
        request = io.submit(Priority.READ, note([], "a"))
        _cancel_when_it_is_asked(request, monkeypatch)
    wait([request.future], PATIENCE)
    monkeypatch.undo()
    assert result(io.submit(Priority.READ, note([], "b"))) == "b"
    assert io.died() is None


def _cancel_when_it_is_asked(request: IoRequest[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked, asks = type(request.future).cancelled, itertools.count()

    def cancelled(future: Any) -> bool:
        """Another thread cancels the request just after the I/O thread has seen that it was not cancelled."""
        found = asked(future)
        of_io = future is request.future and threading.current_thread() is not threading.main_thread()
        if of_io and not found and next(asks) == 1:  # the first is for the statistics
            other = threading.Thread(target=request.cancel)
            other.start()
            other.join()
        return found

    monkeypatch.setattr(type(request.future), "cancelled", cancelled)


def test_a_request_may_be_cancelled_twice(io: IoThread) -> None:
    with Gate(io):
        request = io.submit(Priority.READ, note([], "a"))
        for _ in range(2):
            request.cancel()
    assert isinstance(request.error(), CancelledError)
    assert result(io.submit(Priority.READ, note([], "b"))) == "b"


# -- waiting for another thread ---------------------------------------------------------------------------
