"""A simulated disk: one step of one request at a time, the most urgent first, as the I/O thread does it.

Pure: the clock is a number that goes on when somebody waits, works, or time is said to pass.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from state_backends.store.io import BACKGROUND, LIMITED, Pending, Priority, Steps

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Machine:
    """How fast a machine is, as measured: bytes per second, and seconds that each block or file costs besides.

    ``processing_bytes_per_s``: of blocks that a function is given, and ``execution_s`` for each time besides.
    ``staging_s``: until a prestage begins to bring blocks.
    """

    read_bytes_per_s: float
    read_block_s: float
    write_bytes_per_s: float
    write_file_s: float
    processing_bytes_per_s: float
    execution_s: float = 0.0
    staging_s: float = 0.0


class Moved(int):
    """Bytes that a step moved, as steps yield them, and the seconds that it takes from its beginning on.

    ``goes_on``: the next step belongs to it, so that nothing comes between, however urgent.
    """

    seconds: float
    goes_on: bool

    def __new__(cls, size_bytes: int, seconds: float, *, goes_on: bool = False) -> Moved:
        made = super().__new__(cls, size_bytes)
        made.seconds, made.goes_on = seconds, goes_on
        return made


class GivenUp(Exception):
    """What became of a request that was cancelled."""


class Request(Generic[T]):
    """As :class:`state_backends.store.io.Pending` says."""

    __slots__ = ("_disk", "_error", "_over", "_told", "_value", "number", "priority", "steps", "submitted_s")

    def __init__(
        self, disk: SimulatedDisk, priority: Priority, number: int, steps: Steps[T], submitted_s: float
    ) -> None:
        self._disk = disk
        self.priority, self.number, self.steps, self.submitted_s = priority, number, steps, submitted_s
        self._over = False
        self._error: BaseException | None = None
        self._value: T | None = None
        self._told: list[Callable[[BaseException | None], None]] = []

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

    def when_over(self, told: Callable[[BaseException | None], None]) -> None:
        if self._over:
            told(self._error)
        else:
            self._told.append(told)

    def end(self, value: T | None, error: BaseException | None = None) -> None:
        """By the disk: it is over."""
        self._over, self._value, self._error = True, value, error
        told, self._told = self._told, []
        for tell in told:
            tell(error)


class SimulatedDisk:
    """As :class:`state_backends.store.io.Io` says, in the place of an I/O thread. Steps run when time goes by.

    Only :meth:`pass_to` and those who wait let it go by. What a step takes, it says by what it
    yields, :class:`Moved`, or by :meth:`spend`.
    ``rate_limit``: bytes per second of writes and maintenance; what is waited for is never slowed down.
    """

    def __init__(self, rate_limit: int | None = None, *, capacity: int = 4096) -> None:
        self.now_s = 0.0
        self.waited_s = 0.0
        """That whoever called waited for requests, or for room in the queue."""
        self.bytes = dict.fromkeys(Priority, 0)
        self._rate, self._capacity = rate_limit, capacity
        self._background_from_s = 0.0
        self._free_s = 0.0
        self._heap: list[tuple[Priority, int, Request[Any]]] = []
        self._chosen: Request[Any] | None = None  # has the step under way, or the next one
        self._begin_s = 0.0  # of its step
        self._moved: int | None = None  # in it; None: it did not run yet
        self._spent_s = 0.0
        self._numbers = 0
        self._queued = 0

    def submit(self, priority: Priority, steps: Steps[T]) -> Request[T]:
        request = Request(self, priority, self._numbers, steps, self.now_s)
        self._numbers += 1
        self._queued += 1
        heapq.heappush(self._heap, (priority, request.number, request))
        # Who has nothing to do begins at once, and does not know what comes next. What the step does, it does when
        # time goes by: whoever submits is in the middle of something.
        if self._chosen is None:
            self._choose(self.now_s)
        return request

    def raise_to(self, request: Request[Any], priority: Priority) -> None:
        if priority < request.priority and not request.over():
            # The old entry stays in the heap, and is passed over because it has the old priority.
            request.priority = priority
            if self._chosen is not request:
                heapq.heappush(self._heap, (priority, request.number, request))

    def pass_to(self, to_s: float) -> None:
        """Time goes by, and what is queued is worked on."""
        while self._step(to_s):
            pass
        self.now_s = max(self.now_s, to_s)

    def finish(self) -> None:
        """Time goes by until all that is queued is done."""
        while self._step(math.inf):
            pass

    def wait(self, requests: Iterable[Pending[Any]]) -> None:
        begin_s = self.now_s
        for request in list(requests):
            while not request.over():
                self._must_step()
        self.waited_s += self.now_s - begin_s

    def wait_for_room(self) -> None:
        if self._queued >= self._capacity:
            begin_s = self.now_s
            while self._queued >= self._capacity:
                self._must_step()
            self.waited_s += self.now_s - begin_s

    def spend(self, seconds: float) -> None:
        """By the step that runs: it takes so much longer than what it yields says."""
        self._spent_s += seconds

    def busy(self) -> bool:
        return self._queued > 0

    def now(self) -> float:
        return self.now_s

    def _must_step(self) -> None:
        if not self._step(math.inf):
            raise AssertionError("a request that is not queued was waited for")

    def _step(self, until_s: float) -> bool:
        """What happens next, if that is by then: a step is chosen, runs, or ends."""
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
        while self._heap:
            priority, _, request = self._heap[0]
            if request.over() or priority != request.priority:
                heapq.heappop(self._heap)
                if priority == request.priority:
                    self._leave(request)
                continue
            begin_s = max(self._free_s, request.submitted_s)
            if self._rate is not None and priority in BACKGROUND:
                begin_s = max(begin_s, self._background_from_s)
            if begin_s > until_s:
                return False
            heapq.heappop(self._heap)
            self._chosen, self._begin_s, self._moved = request, begin_s, None
            return True
        return False

    def _run(self, request: Request[Any]) -> None:
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
        self._free_s = self._begin_s + self._spent_s + (moved.seconds if isinstance(moved, Moved) else 0.0)
        if self._rate is not None and request.priority in LIMITED:
            self._background_from_s = max(self._background_from_s, self._begin_s) + moved / self._rate

    def _end(self, request: Request[Any], moved: int) -> None:
        self.now_s = max(self.now_s, self._free_s)
        if request.over():
            self._leave(request)
        elif isinstance(moved, Moved) and moved.goes_on:
            self._begin_s, self._moved = self._free_s, None
        else:
            self._chosen = None
            heapq.heappush(self._heap, (request.priority, request.number, request))

    def _leave(self, request: Request[Any]) -> None:
        """It has no further step; what was given up tidies up."""
        if self._chosen is request:
            self._chosen = None
        self._queued -= 1
        request.steps.close()
