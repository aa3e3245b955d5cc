"""The simulated disk against the I/O thread: the same requests have the same steps in the same order, and end alike."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion.tools.tune.disk import SimulatedDisk, Transfer
from state_backends.store.io import SWITCH_SECONDS, Io, Pending, Priority, Steps
from state_backends.store.io_thread import IoThread
from tests.io_thread.rig import Gate


class Asked(NamedTuple):
    """A request; ``then``: what becomes of it before the first one runs."""

    priority: Priority
    steps: int
    fails: bool
    then: Priority | str


requests = st.builds(
    Asked,
    st.sampled_from(Priority),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(["nothing", "nothing", "cancelled", *Priority]),
)


class Log:
    """What requests did, and what was told of their ends."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []
        self.told: list[tuple[int, bool]] = []

    def request(self, number: int, asked: Asked) -> Steps[int]:
        for step in range(asked.steps):
            self.steps.append((number, step))
            yield 1
        self.steps.append((number, asked.steps))
        if asked.fails:
            raise ValueError(number)
        return number

    def ask(self, io: Io, asked: list[Asked]) -> list[Pending[int]]:
        made = [io.submit(one.priority, self.request(number, one)) for number, one in enumerate(asked)]
        for number, (request, one) in enumerate(zip(made, asked, strict=True)):
            request.when_over(lambda error, number=number: self.told.append((number, error is None)))  # type: ignore[misc]
            if one.then == "cancelled":
                request.cancel()
            elif isinstance(one.then, Priority):
                request.raise_to(one.then)
        return made


def nothing() -> Steps[None]:
    return
    yield 0


def settle(io: Io) -> None:
    io.submit(Priority.MAINTENANCE, nothing()).result()


def check(io: Io, made: list[Pending[int]], asked: list[Asked]) -> None:
    io.wait(made)
    for number, (request, one) in enumerate(zip(made, asked, strict=True)):
        assert request.over()
        error = request.error()
        assert (error is None) == (one.then != "cancelled" and not one.fails)
        if error is None:
            assert request.result() == number
        else:
            with pytest.raises(type(error)):
                request.result()
    settle(io)
    assert not io.busy()


@given(st.lists(requests, max_size=12))
def test_steps_come_in_the_order_of_the_io_thread(asked: list[Asked]) -> None:
    real, simulated = Log(), Log()
    thread = IoThread()
    try:
        with Gate(thread):
            made = real.ask(thread, asked)
        check(thread, made, asked)
        disk = SimulatedDisk()
        disk.submit(Priority.READ, nothing())  # the gate
        made = simulated.ask(disk, asked)
        assert not simulated.steps, "who submits is in the middle of something"
        check(disk, made, asked)
        counted = thread.stats.by_priority
        assert disk.bytes == {p: counted[p.name.lower()].bytes for p in Priority}
    finally:
        thread.close()
    assert (simulated.steps, simulated.told) == (real.steps, real.told)


def test_time_goes_by_as_steps_say_and_nobody_waits_for_what_is_not_his() -> None:
    disk = SimulatedDisk()
    seen: list[float] = []

    def long() -> Steps[str]:
        disk.spend(0.5)
        yield Transfer(10, 1.0)
        seen.append(disk.now())
        yield Transfer(0, 2.0, goes_on=True)
        seen.append(disk.now())
        return "done"

    write = disk.submit(Priority.DESTAGE, long())
    disk.pass_to(2.0)
    read = disk.submit(Priority.READ, nothing())
    disk.wait([read])
    assert (disk.now(), seen, write.over()) == (3.5, [1.5, 3.5], True), (
        "the last step is one, however urgent others are"
    )
    assert disk.waited_s == 1.5
    assert write.result() == "done"


def test_who_fills_the_queue_waits_for_room() -> None:
    disk = SimulatedDisk(capacity=2)

    def step() -> Steps[None]:
        yield Transfer(1, 1.0)

    for _ in range(2):
        disk.wait_for_room()
        disk.submit(Priority.DESTAGE, step())
    disk.wait_for_room()
    assert (disk.now(), disk.waited_s) == (1.0, 1.0)
    disk.finish()
    assert (disk.now(), disk.waited_s, disk.busy()) == (2.0, 1.0, False), "nobody waited for that"


def test_a_rate_limit_slows_writes_down_and_never_reads() -> None:
    disk = SimulatedDisk(10)

    def step() -> Steps[None]:
        yield Transfer(20, 0.5)

    first, second = (disk.submit(Priority.DESTAGE, step()) for _ in range(2))
    disk.wait([first])
    assert disk.now() == 2.0, "what follows the step waits for it, too"
    disk.wait([disk.submit(Priority.READ, step())])
    assert disk.now() == 2.5
    disk.wait([second])
    assert disk.now() == 4.5


def fetches(number: int, took_s: float) -> Steps[None]:
    for _ in range(number):
        yield Transfer(1, took_s)


@pytest.mark.parametrize(("priority", "fetched"), [(Priority.PRESTAGE, True), (Priority.DESTAGE, False)])
def test_who_waits_goes_on_when_the_interpreter_is_free(priority: Priority, fetched: bool) -> None:
    """A thread that fetches block after block keeps Python's interpreter for a while. One that writes does not."""
    disk = SimulatedDisk()
    later = disk.submit(priority, fetches(3, 1e-5))
    disk.submit(Priority.READ, fetches(1, 1e-5)).result()
    assert later.over() is fetched
    disk.submit(priority, fetches(1000, 1e-5))
    begin_s = disk.now()
    disk.submit(Priority.READ, fetches(1, 1e-5)).result()
    assert disk.now() - begin_s == pytest.approx(SWITCH_SECONDS if fetched else 0.0, abs=5e-5)
