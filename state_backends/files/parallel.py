"""Calls that wait for the network, several at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def in_parallel(pool: ThreadPoolExecutor, function: Callable[[Any], T], arguments: Sequence[Any]) -> list[T]:
    """Returns what the function returns for each argument. Raises the first error when all calls are over."""
    futures = [pool.submit(function, argument) for argument in arguments]
    wait_for(futures)
    return [future.result() for future in futures]


def wait_for(futures: Iterable[Future[Any]]) -> None:
    """Waits until all are over. ``wait`` would not return if the pool is closed, which cancels what has not begun."""
    for future in futures:
        with contextlib.suppress(CancelledError):
            future.exception()
