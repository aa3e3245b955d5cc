"""Kills a server that hangs, so that no client waits for ever. Effect: a thread, signals.

A request may take long, because a disk is slow or memory is full. A server that works answers pings meanwhile; a server
that hangs does not. The first client that notices kills it. Then the kernel ends the calls of all its clients at once.
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

from state_backends.format.errors import ServerError
from state_backends.server import processes
from state_backends.server.server_folder import occupant

log = logging.getLogger(__name__)

LIMIT = 10
"""If the server answers pings but a call does not end, the client gives up the call after this many timeouts."""


@dataclass(slots=True)
class _Wait:
    what: str
    began_s: float
    last_sign_s: float  # when the server last gave a sign of life
    give_up: Callable[[], None] | None


class Watchdog:
    """Watches the calls of one client. Close it. ``ping(seconds)``: whether the server answers within that time."""

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
        """Returns a context for a call to the server. ``give_up``: ends the call from another thread, if it has no
        timeout.
        """
        number, now = next(self._numbers), time.monotonic()
        with self._lock:
            self._waits[number] = _Wait(what, now, now, give_up)
            if self._thread is None and not self._stop.is_set():
                # The thread starts now, in the process that waits, because a thread does not survive a fork.
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
                self._check()
            except Exception:
                log.exception("cannot check the state server; it is tried again")

    def _check(self) -> None:
        """Pings the server if a call has waited for long. Kills the server if it does not answer."""
        now = time.monotonic()
        with self._lock:
            waits = [w for w in self._waits.values() if now - w.last_sign_s >= self.timeout_s]
        if not waits:
            return
        # Another server may have taken the place of the one that hangs. Only the server that was pinged is killed.
        with contextlib.suppress(ServerError):
            pinged = occupant(self._folder)
            if self._ping(self.timeout_s):
                self._answered(waits)
            elif pinged is not None and not self._stop.is_set() and occupant(self._folder) == pinged:
                log.error(
                    "killing the state server %d: %r has made no progress for %.0f s, and it does not answer a ping",
                    pinged.pid, waits[0].what, now - waits[0].last_sign_s,
                )  # fmt: skip
                processes.kill(pinged, self.timeout_s)

    def _answered(self, waits: list[_Wait]) -> None:
        now = time.monotonic()
        for wait in waits:
            wait.last_sign_s = now
            if wait.give_up is not None and now - wait.began_s >= self.limit_s:
                wait.give_up()
