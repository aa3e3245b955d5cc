"""Requests of the I/O thread that wait for the network, while others go on. Held by events, never by sleeps."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from aion.errors import ServerUnreachable, StorageError
from state_backends.store.io_queue import MOST_ASIDE
from state_backends.store.io_thread import IoThread, Priority, Steps
from state_backends.store.waiting import waiting_for
from tests.io_thread.rig import PATIENCE, Gate, note, result


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


@pytest.mark.usual_sizes
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
