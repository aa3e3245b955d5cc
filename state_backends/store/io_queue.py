"""Which request of I/O does the next step. Pure: the shell has the clock, runs the steps, and says what they moved.

:class:`state_backends.store.io_thread.IoThread` and the simulated disk of ``aion tune`` are the two shells, so a replay
has the order of the real thing.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection
from typing import Generic, Protocol, TypeVar

from state_backends.store.io import BACKGROUND, LIMITED, Priority
from state_backends.thresholds import threshold

MOST_ASIDE = threshold(4, 1)
"""The most prestages, or all background requests together, that wait for the network at a time."""
ON_THE_NETWORK = frozenset({Priority.PRESTAGE, Priority.PRESTAGE_LATER, Priority.MAINTENANCE})


class Queued(Protocol):
    """A request. ``number``: its place by arrival among those of its priority."""

    priority: Priority
    number: int

    def over(self) -> bool: ...


R = TypeVar("R", bound=Queued)


class IoQueue(Generic[R]):
    """Requests, the most urgent first, and the first that came among equals.

    The shell looks at the :meth:`head`, takes it with :meth:`take`, does one step, and then puts it back, sets it aside
    or lets it leave. ``rate_limit``: bytes per second. It delays background work, but never work that a task waits for.
    """

    def __init__(self, rate_limit: int | None = None) -> None:
        self.size = 0
        """How many requests have not left."""
        self.holds = True
        """Whether only a few requests may wait for the network at a time. False: the queue is to be emptied."""
        self._heap: list[tuple[Priority, int, R]] = []
        self._taken: set[R] = set()  # they have a step under way, or wait for the network
        self._aside: set[R] = set()  # those that wait for the network
        self._held: list[tuple[Priority, int, R]] = []  # until one of those goes on
        self._gone: list[R] = []
        self._rate = rate_limit
        self._background_from_s = -math.inf

    def add(self, request: R) -> None:
        self.size += 1
        self._push(request)

    def raise_to(self, request: R, priority: Priority) -> None:
        """Makes a request more urgent. Among others of that priority it keeps its place by arrival."""
        if priority < request.priority and not request.over():
            # The old entry stays in the heap. It is skipped because its priority is no longer the request's.
            request.priority = priority
            if request not in self._taken:
                self._push(request)

    def head(self) -> tuple[R, float] | None:
        """Returns the most urgent request, and the time before which a rate limit does not let it begin.

        Returns None if all requests that are left have a step under way, or wait for the network.
        """
        while self._heap:
            priority, _, request = self._heap[0]
            if request in self._taken or request.over() or priority != request.priority:
                heapq.heappop(self._heap)
                if priority == request.priority and request not in self._taken:
                    self.size -= 1
                    self._gone.append(request)
            elif self._is_held(priority):
                self._held.append(heapq.heappop(self._heap))
            else:
                return request, self._background_from_s if priority in BACKGROUND else -math.inf
        return None

    def take(self) -> R:
        """Takes the :meth:`head`: its next step begins."""
        _, _, request = heapq.heappop(self._heap)
        self._taken.add(request)
        return request

    def moved(self, request: R, size_bytes: int, begin_s: float) -> None:
        """Counts the bytes of a step towards the rate limit. ``begin_s``: when the step began."""
        if self._rate and request.priority in LIMITED:
            self._background_from_s = max(self._background_from_s, begin_s) + size_bytes / self._rate

    def put_back(self, request: R) -> None:
        """The request has another step to do."""
        self._taken.discard(request)
        self._push(request)

    def set_aside(self, request: R) -> None:
        """The request waits for the network."""
        self._aside.add(request)

    def resume(self, request: R) -> None:
        """A request that was set aside has its answer."""
        self._aside.discard(request)
        self.put_back(request)
        self.release()

    def leave(self, request: R) -> None:
        """A request that was taken has no further step."""
        self._taken.discard(request)
        self.size -= 1

    def release(self) -> None:
        """Requests that were held may be taken again."""
        for entry in self._held:
            heapq.heappush(self._heap, entry)
        self._held.clear()

    def gone(self) -> list[R]:
        """Returns the requests that were over before their turn came. They have left; each is returned once."""
        gone, self._gone = self._gone, []
        return gone

    @property
    def aside(self) -> Collection[R]:
        """The requests that wait for the network."""
        return self._aside

    def waiting(self) -> Counter[Priority]:
        """Returns how many requests wait for their next step, by priority."""
        return Counter(
            priority
            for priority, _, request in (*self._heap, *self._held)
            if priority == request.priority and request not in self._taken and not request.over()
        )

    def clear(self) -> list[R]:
        """Takes all requests out, also those with a step under way, and returns them."""
        left = {request.number: request for _, _, request in (*self._heap, *self._held)}
        left |= {request.number: request for request in self._taken}
        self._heap.clear()
        self._held.clear()
        self.size = 0
        return list(left.values())

    def _push(self, request: R) -> None:
        heapq.heappush(self._heap, (request.priority, request.number, request))

    def _is_held(self, priority: Priority) -> bool:
        """Whether enough requests of this priority, or a higher one, wait for the network already."""
        if priority not in ON_THE_NETWORK or not self.holds:
            return False
        return sum(Priority.PRESTAGE <= request.priority <= priority for request in self._aside) >= MOST_ASIDE
