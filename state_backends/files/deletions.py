"""Deletes remote files behind those who say which ones: one list for all shards of a host.

A request takes as long for a thousand names as for one. While one is under way, the names of all shards wait in the
list, and the next request takes them together. So however many shards a host has, deleting does not fall behind.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

from state_backends.files.s3 import AT_ONCE


class _Waiting(NamedTuple):
    delete: Callable[[Sequence[str]], None]
    paths: Sequence[str]
    failed: Callable[[Exception], None]
    over: Future[None]


class Deletions:
    """The list. ``pool`` has the thread that deletes. Any thread may call a method."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._waiting: deque[_Waiting] = deque()
        self._runs = False
        self._closed = False

    def add(
        self, delete: Callable[[Sequence[str]], None], paths: Sequence[str], failed: Callable[[Exception], None]
    ) -> Future[None]:
        """Adds paths to the list. Does not wait; the future that it returns is over when they were tried.

        ``delete`` deletes these and others. ``failed`` is called with its error if it raises one: some may be left.
        """
        over: Future[None] = Future()
        with self._lock:
            if self._closed:
                over.cancel()
                return over
            self._waiting.append(_Waiting(delete, paths, failed, over))
            if not self._runs:
                self._pool.submit(self._run)
                self._runs = True
        return over

    def close(self) -> None:
        """Nothing more is deleted after what is under way."""
        with self._lock:
            self._closed = True
            dropped, self._waiting = list(self._waiting), deque()
        for waiting in dropped:
            waiting.over.cancel()

    def _run(self) -> None:
        while taken := self._take():
            try:
                taken[0].delete([path for waiting in taken for path in waiting.paths])
            except Exception as error:
                for waiting in taken:
                    waiting.failed(error)
            finally:
                for waiting in taken:
                    waiting.over.set_result(None)

    def _take(self) -> list[_Waiting]:
        """Returns what one request is for. Empty: nothing waits."""
        taken: list[_Waiting] = []
        names = 0
        with self._lock:
            while self._waiting and (not taken or names + len(self._waiting[0].paths) <= AT_ONCE):
                taken.append(self._waiting.popleft())
                names += len(taken[-1].paths)
            self._runs = bool(taken)
        return taken
