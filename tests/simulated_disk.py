"""A disk that a test holds in its hand: each step of I/O waits until it may go on, and may fail.

It lies between a store and its real p-bucket, and so all that it does is done by the I/O thread, in the store's own
order. With :func:`at_rest` everything that happens is what the test let happen: no sleep, and no race.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from state_backends.store.io_thread import IoThread, Priority, Steps
from state_backends.store.p_bucket import PBucket
from tests.io_thread.rig import PATIENCE

KINDS = {"write": "write", "fetch": "read", "adopt": "read", "drop": "drop"}


class Disk:
    """``hold`` stops the I/O thread at its next step; ``step`` lets one that is stopped take one, ``go`` all that come.

    What is in ``failing`` ("write", "read", "drop") raises OSError after ``fails_after`` more steps of that kind.
    ``cut``: the power is off. Every step fails, and nothing tidies up what was half done.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._leave: int | None = None
        self._stopped = False
        self.failing: frozenset[str] = frozenset()
        self.fails_after = 0
        self.cut = False
        self._half_done: list[Steps[Any]] = []

    def hold(self) -> None:
        with self._changed:
            self._leave = 0

    def step(self) -> None:
        with self._changed:
            if self._stopped:
                self._leave, self._stopped = 1, False
                self._changed.notify_all()

    def go(self) -> None:
        with self._changed:
            self._leave, self._stopped = None, False
            self._changed.notify_all()

    def fail(self, what: Collection[str], after: int = 0) -> None:
        self.failing, self.fails_after = frozenset(what), after

    def wait_until_stopped_or(self, idle: threading.Event) -> None:
        """Until the I/O thread waits for leave, or ``idle`` is set, of which :meth:`tell` must be told."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._stopped or idle.is_set(), PATIENCE)

    def tell(self, idle: threading.Event) -> None:
        with self._changed:
            idle.set()
            self._changed.notify_all()

    def through(self, kind: str, steps: Steps[Any]) -> Steps[Any]:
        try:
            while True:
                try:
                    self._may(kind)
                except OSError as error:
                    if not self.cut:
                        steps.throw(error)  # so that it tidies up
                    raise
                try:
                    moved = next(steps)
                except StopIteration as stop:
                    return stop.value
                yield moved
        finally:
            if self.cut:
                self._half_done.append(steps)  # or it would tidy up when it is forgotten
            else:
                steps.close()

    def _may(self, kind: str) -> None:
        with self._changed:
            while self._leave == 0:
                self._stopped = True
                self._changed.notify_all()
                assert self._changed.wait(PATIENCE)
            self._stopped = False
            if self._leave is not None:
                self._leave -= 1
        if self.cut:
            raise OSError("simulated: the power is off")
        if kind in self.failing:
            self.fails_after -= 1
            if self.fails_after < 0:
                raise OSError(f"simulated: the disk cannot {kind}")


class OnDisk:
    """A p-bucket on such a disk."""

    def __init__(self, bucket: PBucket, disk: Disk) -> None:
        self._bucket, self._disk = bucket, disk

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._bucket, name)
        if name not in KINDS:
            return found
        return lambda *arguments: self._disk.through(KINDS[name], found(*arguments))


class Job(threading.Thread):
    """A call that may have to wait for the disk."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.value: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.value = self._call()
        except BaseException as error:
            self.error = error

    @property
    def waits(self) -> bool:
        """Whether it waits for something, and has not been told yet that it happened."""
        frame = sys._current_frames().get(self.ident or 0)
        if frame is None or frame.f_code is not threading.Condition.wait.__code__:
            return False
        # Nothing public tells: whoever notifies takes the waiter out.
        found = frame.f_locals
        return found.get("waiter") in found["self"]._waiters


def at_rest(io: IoThread, disk: Disk, jobs: Collection[Job]) -> None:
    """Waits until the I/O thread has nothing to do, or no leave to do it, and each job is done or waits for it."""
    deadline = time.monotonic() + PATIENCE
    while True:
        for job in jobs:
            while job.is_alive() and not job.waits:
                assert time.monotonic() < deadline, "it neither ends nor waits for I/O: is a lock held across I/O?"
                job.join(0.0001)
        known = requests(io)
        idle = threading.Event()
        io.submit(Priority.MAINTENANCE, _told(disk, idle))
        disk.wait_until_stopped_or(idle)
        # A job that was told something meanwhile goes on, and may ask for more.
        if all(job.waits or not job.is_alive() for job in jobs) and requests(io) == known + 1:
            return


def requests(io: IoThread) -> int:
    return sum(stats.requests for stats in io.stats.by_priority.values())


def _told(disk: Disk, idle: threading.Event) -> Steps[None]:
    disk.tell(idle)
    return
    yield 0
