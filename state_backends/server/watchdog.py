"""Kills a server that hangs, so that no client waits for ever. Effect: a thread, signals.

A request may take long: a disk is slow, memory is full. A server that works answers a ping meanwhile; a server that
hangs does not. The first client that notices kills it. Then the kernel ends the calls of all its clients at once.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from aion.errors import ServerError
from state_backends.server import processes
from state_backends.server.server_folder import occupant

log = logging.getLogger(__name__)

LIMIT = 10
"""A call is given up after this many timeouts, if the server answers pings and the call does not end."""


@dataclass(slots=True)
class _Wait:
    what: str
    since: float
    heard: float
    give_up: Callable[[], None] | None


class Watchdog:
    """Watches the calls of one client. ``ping``: whether the server answers within some seconds. Close it."""

    def __init__(self, folder: Path, timeout_s: float, ping: Callable[[float], bool]) -> None:
        self._folder = folder
        self.timeout_s = timeout_s
        self.limit_s = LIMIT * timeout_s
        self._ping = ping
        self._waits: dict[int, _Wait] = {}
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def waiting(self, what: str, give_up: Callable[[], None] | None = None) -> Iterator[None]:
        """Around a call to the server. ``give_up``: ends the call from another thread, if it has no limit itself."""
        number, now = next(self._numbers), time.monotonic()
        with self._lock:
            self._waits[number] = _Wait(what, now, now, give_up)
            if self._thread is None and not self._stop.is_set():
                # Only now, in the process that waits: a thread does not survive a fork.
                self._thread = threading.Thread(target=self._run, name="aion-watchdog", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                del self._waits[number]

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self.timeout_s / 4):
            try:
                self._look()
            except Exception:
                log.exception("a look at the state server failed; the next one follows")

    def _look(self) -> None:
        now = time.monotonic()
        with self._lock:
            waits = [w for w in self._waits.values() if now - w.heard >= self.timeout_s]
        if not waits:
            return
        # Another server may have taken the place of the one that hung. Only the one that was pinged is killed.
        with contextlib.suppress(ServerError):
            pinged = occupant(self._folder)
            if self._ping(self.timeout_s):
                self._heard(waits)
            elif pinged is not None and not self._stop.is_set() and occupant(self._folder) == pinged:
                log.error(
                    "the state server %d has not got on with %r for %.0f s nor answered a ping: it is killed",
                    pinged.pid, waits[0].what, now - waits[0].heard,
                )  # fmt: skip
                processes.kill(pinged, self.timeout_s)

    def _heard(self, waits: list[_Wait]) -> None:
        now = time.monotonic()
        for wait in waits:
            wait.heard = now
            if wait.give_up is not None and now - wait.since >= self.limit_s:
                wait.give_up()
