"""A simulated disk: like the I/O thread, it does one step of one request at a time, the most urgent first.

Pure: the clock is a number. It goes on when somebody waits or works, or when the caller lets time pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar, cast

from state_backends.store.io import SWITCH_SECONDS, Pending, Priority, Steps
from state_backends.store.io_queue import IoQueue

T = TypeVar("T")
_FETCHES = frozenset({Priority.READ, Priority.PRESTAGE, Priority.PRESTAGE_LATER})


@dataclass(frozen=True, slots=True)
class Machine:
    """How fast a machine is: bytes per second, and the fixed cost of each block or file in seconds.

    ``processing_bytes_per_s``: how fast a function gets through blocks; each execution takes ``execution_s`` more.
    ``staging_s``: how long a prestage takes before its first block. Raises ValueError for a speed that is not above 0,
    and for a time that is negative.
    """

    read_bytes_per_s: float
    read_block_s: float
    write_bytes_per_s: float
    write_file_s: float
    processing_bytes_per_s: float
    execution_s: float = 0.0
    staging_s: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            speed = name.endswith("bytes_per_s")
            if type(value) not in (int, float) or not 0 <= value < math.inf or (speed and value == 0):
                raise ValueError(f"{name}: {value!r} is not a number {'above 0' if speed else 'of 0 or more'}")


class Transfer(int):
    """The bytes that a step moved, and the seconds that the step takes. Steps yield it.

    ``goes_on``: the next step belongs to this one. Not even an urgent request comes in between.
    """

    seconds: float
    goes_on: bool

    def __new__(cls, size_bytes: int, seconds: float, *, goes_on: bool = False) -> Transfer:
        made = super().__new__(cls, size_bytes)
        made.seconds, made.goes_on = seconds, goes_on
        return made


class GivenUp(Exception):
    """The error of a request that was cancelled."""


class SimulatedIo(Generic[T]):
    """A :class:`state_backends.store.io.Pending`."""

    __slots__ = ("_callbacks", "_disk", "_error", "_over", "_value", "number", "priority", "steps", "submitted_s")

    def __init__(
        self, disk: SimulatedDisk, priority: Priority, number: int, steps: Steps[T], submitted_s: float
    ) -> None:
        self._disk = disk
        self.priority, self.number, self.steps, self.submitted_s = priority, number, steps, submitted_s
        self._over = False
        self._error: BaseException | None = None
        self._value: T | None = None
        self._callbacks: list[Callable[[BaseException | None], None]] = []

    def raise_to(self, priority: Priority) -> None:
        self._disk.raise_to(self, priority)

    def cancel(self) -> None:
        if not self._over:
            self.end(None, GivenUp())

    def over(self) -> bool:
        return self._over

    def error(self) -> BaseException | None:
        return self._error

    def result(self) -> T:
        self._disk.wait([self])
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    def when_over(self, callback: Callable[[BaseException | None], None]) -> None:
        if self._over:
            callback(self._error)
        else:
            self._callbacks.append(callback)

    def end(self, value: T | None, error: BaseException | None = None) -> None:
        """The disk calls this when the request is over."""
        self._over, self._value, self._error = True, value, error
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(error)


class SimulatedDisk:
    """A :class:`state_backends.store.io.Io` in the place of an I/O thread. Steps run when time goes by.

    Time goes by in :meth:`pass_to` and while somebody waits. A step says how long it takes: it yields :class:`Transfer`
    or calls :meth:`spend`. ``rate_limit``: bytes per second of writes and maintenance. Urgent requests are never
    slowed.
    """

    def __init__(self, rate_limit: int | None = None, *, capacity: int = 4096) -> None:
        self.now_s = 0.0
        self.waited_s = 0.0
        """How long callers have waited for requests, or for room in the queue."""
        self.bytes = dict.fromkeys(Priority, 0)
        self._capacity = capacity
        self._free_s = 0.0
        self._queue: IoQueue[SimulatedIo[Any]] = IoQueue(rate_limit)
        self._chosen: SimulatedIo[Any] | None = None  # has the step under way, or the next one
        self._begin_s = 0.0  # of its step
        self._moved: int | None = None  # in it, if it has run
        self._spent_s = 0.0
        self._numbers = 0

    def submit(self, priority: Priority, steps: Steps[T]) -> SimulatedIo[T]:
        request = SimulatedIo(self, priority, self._numbers, steps, self.now_s)
        self._numbers += 1
        self._queue.add(request)
        # An idle disk takes the request at once, without knowing what comes next. But the step runs only when time goes
        # by, because the caller may be in the middle of something.
        if self._chosen is None:
            self._choose(self.now_s)
        return request

    def raise_to(self, request: SimulatedIo[Any], priority: Priority) -> None:
        self._queue.raise_to(request, priority)

    def pass_to(self, to_s: float) -> None:
        """Lets time go by. The disk works on its queue meanwhile."""
        while self._step(to_s):
            pass
        self.now_s = max(self.now_s, to_s)

    def finish(self) -> None:
        """Lets time go by until the queue is empty."""
        while self._step(math.inf):
            pass

    def wait(self, requests: Iterable[Pending[Any]]) -> None:
        begin_s = self.now_s
        for request in list(requests):
            while not request.over():
                self._must_step()
        if self.now_s > begin_s:
            self._keep_on(self.now_s + SWITCH_SECONDS)
        self.waited_s += self.now_s - begin_s

    def wait_for_room(self) -> None:
        if self._queue.size >= self._capacity:
            begin_s = self.now_s
            while self._queue.size >= self._capacity:
                self._must_step()
            self.waited_s += self.now_s - begin_s

    def spend(self, seconds: float) -> None:
        """A running step calls this: it takes this much longer than its :class:`Transfer` says."""
        self._spent_s += seconds

    def busy(self) -> bool:
        return self._queue.size > 0

    def now(self) -> float:
        return self.now_s

    def _keep_on(self, until_s: float) -> None:
        """Fetches blocks on until then: the thread that fetches has the interpreter. Writing lets others have it."""
        while self._fetches():
            if not self._step(until_s):
                self.now_s = until_s
                break

    def _fetches(self) -> bool:
        """Whether the step under way, or the next one, fetches a block."""
        if self._chosen is not None:
            return self._chosen.priority in _FETCHES
        head = self._head()
        return head is not None and head[0].priority in _FETCHES

    def _must_step(self) -> None:
        if not self._step(math.inf):
            raise AssertionError("somebody waits for a request that is not queued")

    def _step(self, until_s: float) -> bool:
        """Does the next thing that happens by then: chooses, runs or ends a step. False if nothing does."""
        request = self._chosen
        if request is None:
            return self._choose(until_s)
        if self._moved is None:
            self._run(request)
        elif self._free_s <= until_s:
            self._end(request, self._moved)
        else:
            return False
        return True

    def _choose(self, until_s: float) -> bool:
        head = self._head()
        if head is None:
            return False
        begin_s = max(self._free_s, head[0].submitted_s, head[1])
        if begin_s > until_s:
            return False
        self._chosen, self._begin_s, self._moved = self._queue.take(), begin_s, None
        return True

    def _head(self) -> tuple[SimulatedIo[Any], float] | None:
        head = self._queue.head()
        for request in self._queue.gone():
            request.steps.close()
        return head

    def _run(self, request: SimulatedIo[Any]) -> None:
        self.now_s = max(self.now_s, self._begin_s)
        if request.over():
            self._leave(request)
            return
        self._spent_s = 0.0
        try:
            moved = self._moved = next(request.steps)
        except Exception as error:
            self._free_s = self._begin_s + self._spent_s
            self._leave(request)
            if isinstance(error, StopIteration):
                request.end(error.value)
            else:
                request.end(None, error)
            return
        self.bytes[request.priority] += moved
        self._free_s = self._begin_s + self._spent_s + (moved.seconds if isinstance(moved, Transfer) else 0.0)
        self._queue.moved(request, moved, self._begin_s)

    def _end(self, request: SimulatedIo[Any], moved: int) -> None:
        self.now_s = max(self.now_s, self._free_s)
        if request.over():
            self._leave(request)
        elif isinstance(moved, Transfer) and moved.goes_on:
            self._begin_s, self._moved = self._free_s, None
        else:
            self._chosen = None
            self._queue.put_back(request)

    def _leave(self, request: SimulatedIo[Any]) -> None:
        """The request has no further step. A cancelled one cleans up."""
        self._chosen = None
        self._queue.leave(request)
        request.steps.close()
