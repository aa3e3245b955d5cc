"""Steps of I/O that wait for another thread, such as one that asks the network. Meanwhile other requests go on."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from typing import Any, Self

from state_backends.format.errors import StorageError
from state_backends.store.io import Steps


class Waits(int):
    """What a step yields that has to wait for another thread: the next one begins when ``until`` is done.

    Meanwhile other requests go on. It counts as no bytes.
    """

    until: Future[Any]

    def __new__(cls, until: Future[Any]) -> Self:
        made = super().__new__(cls, 0)
        made.until = until
        return made


def waiting_for(futures: Iterable[Future[Any]]) -> Steps[None]:
    """Steps that wait for other threads. Raises what a future raised, and StorageError if it was cancelled."""
    for future in futures:
        if not future.done():
            yield Waits(future)
        try:
            future.result()
        except CancelledError:
            raise StorageError("the connection was closed") from None
