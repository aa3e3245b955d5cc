"""A simulated disk: one step of one request at a time, the most urgent first, as the I/O thread does it.

Pure: the clock is a number that goes on when somebody waits, works, or time is said to pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Priority(IntEnum):
    """As :class:`state_backends.io_thread.Priority`."""

    READ = 0
    PRESTAGE = 1
    LATE_WRITE = 2
    DESTAGE = 3


class Cost(NamedTuple):
    """What something takes: seconds, whatever its bytes are, and as many bytes in each further second.

    ``times``: how many times as long each took of those that this was learnt from, in their order.
    """

    fixed_s: float
    bytes_per_s: float
    times: tuple[float, ...] = (1.0,)


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


class Request:
    """``steps``: seconds and bytes of each. ``done`` is called when the last is over, unless it was cancelled."""

    __slots__ = ("at_step", "cancelled", "done", "finished_at_s", "number", "priority", "steps", "submitted_s")

    def __init__(
        self,
        priority: Priority,
        number: int,
        steps: Sequence[tuple[float, int]],
        done: Callable[[], None],
        submitted_s: float,
    ) -> None:
        self.priority, self.number, self.steps, self.done = priority, number, steps, done
        self.submitted_s = submitted_s
        self.at_step = 0
        self.cancelled = False
        self.finished_at_s: float | None = None


class SimulatedDisk:
    """``rate_limit``: bytes per second of writes; reads are never slowed down."""

    def __init__(self, rate_limit: int | None = None) -> None:
        self.now_s = 0.0
        self.bytes = dict.fromkeys(Priority, 0)
        self._rate = rate_limit
        self._background_from_s = 0.0
        self._free_s = 0.0
        self._heap: list[tuple[Priority, int, Request]] = []
        self._running: Request | None = None
        self._numbers = 0

    def submit(self, priority: Priority, steps: Sequence[tuple[float, int]], done: Callable[[], None]) -> Request:
        self._numbers += 1
        request = Request(priority, self._numbers, steps, done, self.now_s)
        heapq.heappush(self._heap, (priority, request.number, request))
        # Who has nothing to do begins at once, and does not know what comes next.
        self._step(self.now_s)
        return request

    def raise_to(self, request: Request, priority: Priority) -> None:
        if priority < request.priority and request.finished_at_s is None:
            request.priority = priority
            if self._running is not request:
                heapq.heappush(self._heap, (priority, request.number, request))

    def pass_to(self, to_s: float) -> None:
        """Time goes by, and what is queued is worked on."""
        while self._step(to_s):
            pass
        self.now_s = max(self.now_s, to_s)

    def wait(self, request: Request) -> None:
        """Time goes by until a request is over."""
        while request.finished_at_s is None and not request.cancelled:
            if not self._step(float("inf")):
                raise AssertionError("a request that is not queued was waited for")
        if request.finished_at_s is not None:
            self.now_s = max(self.now_s, request.finished_at_s)

    def _step(self, until_s: float) -> bool:
        """Begins a step, or ends the one under way, if that is by then."""
        if self._running is not None:
            if self._free_s > until_s:
                return False
            self._end(self._running)
            return True
        while self._heap:
            priority, _, request = self._heap[0]
            if request.cancelled or request.finished_at_s is not None or priority != request.priority:
                heapq.heappop(self._heap)
                continue
            begin_s = max(self._free_s, request.submitted_s)
            background = self._rate is not None and priority >= Priority.LATE_WRITE
            if background:
                begin_s = max(begin_s, self._background_from_s)
            if begin_s > until_s:
                return False
            heapq.heappop(self._heap)
            seconds, size = request.steps[request.at_step]
            self.bytes[priority] += size
            if background and self._rate:
                self._background_from_s = begin_s + size / self._rate
            self._running, self._free_s = request, begin_s + seconds
            return True
        return False

    def _end(self, request: Request) -> None:
        self._running = None
        request.at_step += 1
        if request.cancelled:
            return
        if request.at_step == len(request.steps):
            request.finished_at_s = self._free_s
            request.done()
        else:
            heapq.heappush(self._heap, (request.priority, request.number, request))
