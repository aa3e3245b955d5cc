"""The single prioritised I/O thread (paper section 4, "I/O Scheduling and Priorities").

A request is a generator. Each step does the I/O of one block and yields the number of bytes that it moved. After every
step the thread looks for a more urgent request, so an urgent request waits for one block at most. Requests of one
priority run in the order in which they came. A request can be given a higher priority, or be cancelled. A request that
waits for the network is set aside until the answer is there. Of those that no task waits for, only a few are set aside
at a time: otherwise an urgent one would wait for all of their answers.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, InvalidStateError, wait
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar, cast

from state_backends.format.errors import ServerUnreachable
from state_backends.store.io import Pending, Priority, Steps
from state_backends.store.io_queue import IoQueue
from state_backends.store.waiting import Waits

T = TypeVar("T")
log = logging.getLogger(__name__)


class IoRequest(Generic[T]):
    """A queued piece of I/O; see :class:`state_backends.store.io.Pending`.

    Its result, or the exception that it raised, is in ``future``.
    """

    __slots__ = ("_io", "future", "number", "priority", "queued_at", "steps")

    def __init__(self, io: IoThread, priority: Priority, number: int, steps: Steps[T], queued_at: float) -> None:
        self._io = io
        self.priority = priority
        self.number = number
        self.steps = steps
        self.queued_at: float | None = queued_at
        self.future: Future[T] = Future()

    def raise_to(self, priority: Priority) -> None:
        self._io._raise(self, priority)

    def cancel(self) -> None:
        if not self.future.done() and self.future.cancel():
            # Wakes waiting threads now, not when the I/O thread gets to this request.
            with contextlib.suppress(RuntimeError):  # another thread has cancelled it at the same time
                self.future.set_running_or_notify_cancel()

    def over(self) -> bool:
        return self.future.done()

    def error(self) -> BaseException | None:
        return _error(self.future)

    def result(self) -> T:
        return self.future.result()

    def when_over(self, callback: Callable[[BaseException | None], None]) -> None:
        self.future.add_done_callback(lambda future: callback(_error(future)))


@dataclass
class PriorityStats:
    """Requests and steps so far, bytes moved, and how many seconds requests waited for their first step."""

    requests: int = 0
    steps: int = 0
    bytes: int = 0
    waited_s: float = 0.0
    longest_wait_s: float = 0.0


@dataclass
class IoStats:
    by_priority: dict[str, PriorityStats] = field(
        default_factory=lambda: {p.name.lower(): PriorityStats() for p in Priority}
    )
    busy_s: float = 0.0
    queued: int = 0
    longest_step_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class IoThread:
    """Runs requests until it is closed; see :class:`state_backends.store.io.Io`.

    ``capacity``: callers of :meth:`wait_for_room` wait while this many requests are queued. ``rate_limit``: bytes per
    second. It slows down background work, but never work that a task waits for.
    """

    def __init__(
        self,
        name: str = "aion-io",
        *,
        capacity: int = 4096,
        rate_limit: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._queue: IoQueue[IoRequest[Any]] = IoQueue(rate_limit)
        self._numbers = itertools.count()
        lock = threading.RLock()
        self._wake, self._room = threading.Condition(lock), threading.Condition(lock)
        self._closed = False
        self._death: str | None = None
        self._clock = clock
        self._capacity = capacity
        self._cancelled: list[Steps[Any]] = []  # to be closed
        self.stats = IoStats()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def died(self) -> str | None:
        """Why it no longer works: its thread ended although nobody closed it, or None if it works."""
        return self._death

    def submit(self, priority: Priority, steps: Steps[T]) -> IoRequest[T]:
        """Queues a request. Raises RuntimeError after :meth:`close`, and ServerUnreachable if the thread has died."""
        with self._wake:
            if self._death is not None:
                raise ServerUnreachable(self._death)
            if self._closed and threading.current_thread() is not self._thread:
                raise RuntimeError("the I/O thread is closed")
            request = IoRequest(self, priority, next(self._numbers), steps, self._clock())
            self._queue.add(request)
            self.stats.by_priority[priority.name.lower()].requests += 1
            self.stats.queued = self._queue.size
            self._wake.notify()
        return request

    def waiting(self) -> dict[str, int]:
        """Returns how many requests wait for their next step, by priority."""
        with self._wake:
            waiting = self._queue.waiting()
        return {priority.name.lower(): waiting[priority] for priority in Priority}

    now = staticmethod(time.monotonic)

    def busy(self) -> bool:
        return self.stats.queued > 0

    def wait(self, requests: Iterable[Pending[Any]]) -> None:
        wait([cast("IoRequest[Any]", request).future for request in requests])

    def wait_for_room(self) -> None:
        with self._wake:
            while self.stats.queued >= self._capacity and not self._closed and self._death is None:
                self._room.wait()

    def close(self) -> None:
        """Finishes all queued requests, then ends the thread."""
        with self._wake:
            self._closed = True
            self._queue.holds = False
            self._queue.release()
            self._wake.notify_all()
        self._thread.join()

    def _raise(self, request: IoRequest[Any], priority: Priority) -> None:
        with self._wake:
            self._queue.raise_to(request, priority)
            self._wake.notify()

    def _run(self) -> None:
        """Runs the loop. If it ends for any reason, its requests fail, so that nobody waits for ever."""
        try:
            self._work()
        except BaseException as error:
            self._die(error)

    def _die(self, error: BaseException) -> None:
        """Fails all requests after an error between two steps. An error in a step fails only its own request."""
        log.critical("the I/O thread died; every request fails from now on", exc_info=error)
        with self._wake:
            self._death = self._death or f"the I/O thread of the state server died ({type(error).__name__}: {error})"
            waiting = self._queue.clear()
            self.stats.queued = 0
            self._wake.notify_all()
            self._room.notify_all()
        for request in waiting:
            with contextlib.suppress(BaseException):  # a callback failed, or the request is over already
                request.future.set_exception(ServerUnreachable(self._death))

    def _work(self) -> None:
        while True:
            with self._wake:
                request = self._next()
                cancelled, self._cancelled = self._cancelled, []
                if request is not None:
                    self._begin(request)
                elif not cancelled:
                    return
            # Not under the lock: cleaning up may need another lock, whose holder may be waiting for this one.
            for steps in cancelled:
                _close(steps)
            if request is not None:
                self._step(request)

    def _begin(self, request: IoRequest[Any]) -> None:
        if request.queued_at is not None:
            waited = self._clock() - request.queued_at
            request.queued_at = None
            stats = self.stats.by_priority[request.priority.name.lower()]
            stats.waited_s += waited
            stats.longest_wait_s = max(stats.longest_wait_s, waited)

    def _next(self) -> IoRequest[Any] | None:
        """Waits for the most urgent request that may run now. Hold the lock.

        Returns None if there are cancelled requests to clean up, or if the thread is closed and nothing is queued.
        """
        while True:
            head = self._queue.head()
            for request in self._queue.gone():
                self._left(request)
            if head is not None:
                _, not_before_s = head
                delay_s = not_before_s - self._clock()
                if delay_s <= 0 or self._closed:
                    return self._queue.take()
                if self._cancelled:
                    return None
                self._wake.wait(delay_s)
                continue
            over = self._closed and all(request.future.done() for request in self._queue.aside)
            if over or self._cancelled or self._death is not None:
                return None
            self._wake.wait()

    def _step(self, request: IoRequest[Any]) -> None:
        begin = self._clock()
        moved, done = 0, True
        outcome: Callable[[], None] | None = None
        try:
            moved = next(request.steps)
            done = request.future.cancelled()
        except StopIteration as stop:
            outcome = partial(request.future.set_result, stop.value)
        except BaseException as error:
            outcome = partial(request.future.set_exception, error)
        took = self._clock() - begin
        with self._wake:
            stats = self.stats.by_priority[request.priority.name.lower()]
            stats.steps += 1
            stats.bytes += moved
            self.stats.busy_s += took
            self.stats.longest_step_s = max(self.stats.longest_step_s, took)
            self._queue.moved(request, moved, begin)
            aside = isinstance(moved, Waits) and not done
            if done:
                self._queue.leave(request)
                self._left(request)
            elif aside:
                self._queue.set_aside(request)
            else:
                self._queue.put_back(request)
                self._wake.notify()
        if aside:
            cast(Waits, moved).until.add_done_callback(lambda _: self._resume(request))
        if outcome is not None:
            # Do not ask first whether it was cancelled: it may be cancelled between the question and this.
            with contextlib.suppress(InvalidStateError):
                outcome()

    def _resume(self, request: IoRequest[Any]) -> None:
        """Queues a request again that was set aside. Any thread may call it."""
        with self._wake:
            self._queue.resume(request)
            self._wake.notify_all()

    def _left(self, request: IoRequest[Any]) -> None:
        """A request has left the queue. Hold the lock."""
        if request.future.cancelled():
            self._cancelled.append(request.steps)
        self.stats.queued = self._queue.size
        self._room.notify_all()


def _error(future: Future[Any]) -> BaseException | None:
    return CancelledError() if future.cancelled() else future.exception()


def _close(steps: Steps[Any]) -> None:
    try:
        steps.close()
    except Exception:
        log.exception("cannot clean up after a cancelled request")


__all__ = ["IoRequest", "IoStats", "IoThread", "Priority", "PriorityStats", "Steps"]
