"""The I/O thread: what runs before what, what a failure does, and how it ends. Held by events, never by sleeps."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, wait
from typing import Any

import pytest

from aion.errors import ServerUnreachable, StorageError
from state_backends.store.io_thread import MOST_ASIDE, IoRequest, IoThread, Priority, Steps
from state_backends.store.waiting import waiting_for

PATIENCE = 10.0  # seconds after which a test that waits has failed


def result(request: IoRequest[Any]) -> Any:
    return request.future.result(PATIENCE)


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

    def _steps(self) -> Steps[Any]:
        self._entered.set()
        assert self._open.wait(PATIENCE)
        yield 0

    def __enter__(self) -> Gate:
        assert self._entered.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.set()


def note(log: list[str], name: str, steps: int = 1) -> Steps[str]:
    for number in range(steps):
        log.append(name if steps == 1 else f"{name}{number}")
        if number < steps - 1:
            yield 0
    return name


def fail(error: BaseException) -> Steps[Any]:
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
    assert [p.name for p in sorted(Priority)] == ["READ", "WRITE", "PRESTAGE", "LATE_WRITE", "DESTAGE", "MAINTENANCE"]


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


def test_several_threads_are_possible() -> None:
    io = IoThread(threads=2)
    with Gate(io), Gate(io):
        waiting = io.submit(Priority.READ, note([], "third"))
        assert not waiting.future.done()
    assert result(waiting) == "third"
    io.close()


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


def after(log: list[str], name: str, *answers: Future[Any]) -> Steps[str]:
    log.append(f"{name} asks")
    yield from waiting_for(answers)
    log.append(f"{name} has it")
    return name


def test_others_go_on_while_a_request_waits_for_the_network(io: IoThread) -> None:
    log: list[str] = []
    answer: Future[None] = Future()
    waiting = io.submit(Priority.READ, after(log, "read", answer))
    assert result(io.submit(Priority.MAINTENANCE, note(log, "merge"))) == "merge"
    assert log == ["read asks", "merge"] and io.busy() and not waiting.over()
    answer.set_result(None)
    assert result(waiting) == "read" and log[-1] == "read has it"


def test_an_answer_that_is_there_takes_no_turn(io: IoThread) -> None:
    log: list[str] = []
    answer: Future[None] = Future()
    answer.set_result(None)
    with Gate(io):
        io.submit(Priority.READ, after(log, "read", answer))
        other = io.submit(Priority.READ, note(log, "other"))
    result(other)
    assert log == ["read asks", "read has it", "other"]


def test_a_request_that_waits_may_be_raised_and_goes_on_at_its_new_priority(io: IoThread) -> None:
    log: list[str] = []
    answer: Future[None] = Future()
    waiting = io.submit(Priority.DESTAGE, after(log, "staged", answer))
    result(io.submit(Priority.MAINTENANCE, note(log, "first")))
    waiting.raise_to(Priority.READ)
    with Gate(io):
        other = io.submit(Priority.WRITE, note(log, "other"))
        answer.set_result(None)
    result(other)
    assert log == ["staged asks", "first", "staged has it", "other"]


def test_what_the_network_says_reaches_who_asked(io: IoThread) -> None:
    refused, cut_off = Future[None](), Future[None]()
    requests = [io.submit(Priority.READ, after([], "read", answer)) for answer in (refused, cut_off)]
    refused.set_exception(StorageError("no"))
    cut_off.cancel()
    cut_off.set_running_or_notify_cancel()
    with pytest.raises(StorageError, match="no"):
        result(requests[0])
    with pytest.raises(StorageError, match="closed"):
        result(requests[1])


def test_what_is_cancelled_while_it_waits_for_the_network_goes_no_further(io: IoThread) -> None:
    log: list[str] = []
    answer: Future[None] = Future()
    waiting = io.submit(Priority.READ, after(log, "read", answer))
    result(io.submit(Priority.READ, note(log, "other")))
    waiting.cancel()
    with pytest.raises(CancelledError):
        result(waiting)
    answer.set_result(None)
    result(io.submit(Priority.MAINTENANCE, note(log, "last")))
    assert log == ["read asks", "other", "last"] and not io.busy()


def test_closing_waits_for_the_network_unless_nobody_else_does() -> None:
    log: list[str] = []
    answers = [Future[None]() for _ in range(2)]
    thread = IoThread()
    wanted, unwanted = (thread.submit(Priority.READ, after(log, str(n), a)) for n, a in enumerate(answers))
    result(thread.submit(Priority.MAINTENANCE, note(log, "merge")))
    unwanted.cancel()
    closing = threading.Thread(target=thread.close)
    closing.start()
    answers[0].set_result(None)
    closing.join(PATIENCE)
    assert not closing.is_alive() and result(wanted) == "0" and log == ["0 asks", "1 asks", "merge", "0 has it"]


def test_a_thread_that_dies_fails_what_waits_for_the_network() -> None:
    thread, answer = IoThread(), Future[None]()
    waiting = thread.submit(Priority.READ, after([], "read", answer))
    result(thread.submit(Priority.MAINTENANCE, note([], "merge")))
    thread._die(RuntimeError("for the test"))
    with pytest.raises(ServerUnreachable):
        result(waiting)
    thread.close()
    answer.set_result(None)


def test_few_prestages_wait_for_the_network_at_a_time_and_reads_pass_them(io: IoThread) -> None:
    log: list[str] = []
    answers = [Future[None]() for _ in range(2 * MOST_ASIDE)]
    staged = [io.submit(Priority.PRESTAGE, after(log, str(n), answer)) for n, answer in enumerate(answers)]
    answer: Future[None] = Future()
    read = io.submit(Priority.READ, after(log, "read", answer))
    for name, priority in (("destage", Priority.DESTAGE), ("late", Priority.LATE_WRITE)):
        result(io.submit(priority, note(log, name)))
    first = [f"{n} asks" for n in range(MOST_ASIDE)]
    assert sorted(log) == sorted([*first, "read asks", "destage", "late"]), "the last two need no network"
    answer.set_result(None)
    result(read)
    assert not any(request.over() for request in staged)
    staged[-1].raise_to(Priority.READ)
    result(io.submit(Priority.WRITE, note(log, "write")))
    assert f"{len(answers) - 1} asks" in log, "a task waits for it now"
    for future in answers:
        future.set_result(None)
    assert [result(request) for request in staged] == [str(n) for n in range(len(answers))]
    assert not io.busy()


def test_closing_finishes_what_was_held() -> None:
    thread, log, answer = IoThread(), list[str](), Future[None]()
    requests = [thread.submit(Priority.MAINTENANCE, after(log, str(n), answer)) for n in range(3 * MOST_ASIDE)]
    result(thread.submit(Priority.DESTAGE, note(log, "other")))
    closing = threading.Thread(target=thread.close)
    closing.start()
    answer.set_result(None)
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert [result(request) for request in requests] == [str(n) for n in range(len(requests))]
