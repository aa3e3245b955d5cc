"""The single prioritised I/O thread (paper section 4, "I/O Scheduling and Priorities").

A request is a generator: each step does one block's worth of I/O. After every step the thread looks for a
more urgent request, so nothing urgent waits for longer than one block. Requests of one priority run in the
order in which they came.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeVar

T = TypeVar("T")


class Priority(IntEnum):
    """What comes first. The paper puts prestaging first; a read that someone waits for is more urgent still."""

    READ = 0
    PRESTAGE = 1
    LATE_WRITE = 2
    DESTAGE = 3
    MAINTENANCE = 4


@dataclass(order=True)
class _Request:
    priority: Priority
    number: int
    steps: Generator[None, None, Any] = field(compare=False)
    future: Future[Any] = field(compare=False)


@dataclass
class IoStats:
    requests: dict[str, int] = field(default_factory=lambda: {p.name.lower(): 0 for p in Priority})
    steps: dict[str, int] = field(default_factory=lambda: {p.name.lower(): 0 for p in Priority})
    busy_seconds: float = 0.0
    queued: int = 0


class IoThread:
    """Runs requests until closed; ``clock`` only measures how busy it is."""

    def __init__(self, name: str = "aion-io", clock: Callable[[], float] = time.perf_counter) -> None:
        self._queue: list[_Request] = []
        self._numbers = itertools.count()
        self._wake = threading.Condition()
        self._closed = False
        self._clock = clock
        self.stats = IoStats()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, priority: Priority, steps: Generator[None, None, T]) -> Future[T]:
        """Queues a request; its future holds what the generator returns, or the exception it raised."""
        future: Future[T] = Future()
        with self._wake:
            if self._closed:
                raise RuntimeError("the I/O thread is closed")
            heapq.heappush(self._queue, _Request(priority, next(self._numbers), steps, future))
            self.stats.requests[priority.name.lower()] += 1
            self.stats.queued += 1
            self._wake.notify()
        return future

    def close(self) -> None:
        """Finishes what is queued, then ends the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._closed:
                    self._wake.wait()
                if not self._queue:
                    return
                request = heapq.heappop(self._queue)
            self._step(request)

    def _step(self, request: _Request) -> None:
        begin = self._clock()
        done = True
        if request.future.cancelled():
            request.steps.close()
        else:
            try:
                next(request.steps)
                done = False
            except StopIteration as stop:
                request.future.set_result(stop.value)
            except BaseException as error:
                request.future.set_exception(error)
        with self._wake:
            self.stats.steps[request.priority.name.lower()] += 1
            self.stats.busy_seconds += self._clock() - begin
            if done:
                self.stats.queued -= 1
            else:
                heapq.heappush(self._queue, request)
