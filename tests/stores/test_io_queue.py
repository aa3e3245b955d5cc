"""The queue of I/O requests, against a plain list of those that wait."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from state_backends.store.io import BACKGROUND, LIMITED, Priority
from state_backends.store.io_queue import MOST_ASIDE, ON_THE_NETWORK, IoQueue

PRIORITIES = st.sampled_from(Priority)


@dataclass(eq=False)
class Request:
    number: int
    priority: Priority
    ended: bool = False

    def over(self) -> bool:
        return self.ended


@dataclass
class Model:
    """What waits, what has a step under way, and what waits for the network."""

    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    aside: list[Request] = field(default_factory=list)

    def next(self) -> Request | None:
        free = [request for request in self.waiting if not request.ended and not self._is_held(request)]
        return min(free, key=lambda request: (request.priority, request.number), default=None)

    def _is_held(self, request: Request) -> bool:
        before = [each for each in self.aside if Priority.PRESTAGE <= each.priority <= request.priority]
        return request.priority in ON_THE_NETWORK and len(before) >= MOST_ASIDE


OTHERS = ["take", "step", "aside", "resume", "leave", "cancel"]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), PRIORITIES, st.just(0)),
        st.tuples(st.just("raise"), PRIORITIES, st.integers(0, 30)),
        st.tuples(st.sampled_from(OTHERS), PRIORITIES, st.integers(0, 30)),
    ),
    max_size=60,
)


@given(actions=ACTIONS)
def test_the_most_urgent_request_is_next_and_none_is_lost(actions: list[tuple[str, Priority, int]]) -> None:
    queue: IoQueue[Request] = IoQueue()
    model, all_of_them, gone = Model(), [], []
    for what, priority, which in actions:
        if what == "add":
            all_of_them.append(Request(len(all_of_them), priority))
            queue.add(all_of_them[-1])
            model.waiting.append(all_of_them[-1])
        elif what == "take":
            if queue.head() is not None:
                request = queue.take()
                assert request is model.next()
                model.waiting.remove(request)
                model.running.append(request)
        elif what == "resume":
            if model.aside:
                request = model.aside.pop(which % len(model.aside))
                queue.resume(request)
                model.waiting.append(request)
        elif what in ("step", "leave", "aside"):
            if model.running:
                request = model.running.pop(which % len(model.running))
                end: Any = {"step": queue.put_back, "leave": queue.leave, "aside": queue.set_aside}[what]
                end(request)
                {"step": model.waiting, "leave": gone, "aside": model.aside}[what].append(request)
        elif all_of_them:
            request = all_of_them[which % len(all_of_them)]
            if what == "raise":
                queue.raise_to(request, priority)
            elif request in model.waiting:
                request.ended = True
        head = queue.head()
        assert (None if head is None else head[0]) is model.next()
        for request in queue.gone():
            assert request.ended
            model.waiting.remove(request)
        assert queue.size == len(model.waiting) + len(model.running) + len(model.aside)
        assert sum(queue.waiting().values()) == sum(not request.ended for request in model.waiting)
    left = [*model.waiting, *model.running, *model.aside]
    assert {request.number for request in queue.clear()} >= {request.number for request in left if not request.ended}
    assert queue.size == 0 and queue.head() is None


@given(steps=st.lists(st.tuples(PRIORITIES, st.integers(0, 1000)), max_size=30), rate=st.integers(1, 500))
def test_a_rate_limit_delays_what_nobody_waits_for(steps: list[tuple[Priority, int]], rate: int) -> None:
    queue: IoQueue[Request] = IoQueue(rate)
    now_s, free_s = 0.0, float("-inf")
    for number, (priority, moved) in enumerate(steps):
        queue.add(Request(number, priority))
        head = queue.head()
        assert head is not None
        _, not_before_s = head
        assert not_before_s == (free_s if priority in BACKGROUND else float("-inf"))
        now_s = max(now_s, not_before_s)
        request = queue.take()
        queue.moved(request, moved, now_s)
        if priority in LIMITED:
            free_s = max(free_s, now_s) + moved / rate
        queue.leave(request)
