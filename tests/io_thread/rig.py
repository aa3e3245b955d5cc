"""What tests of the I/O thread need: one that is closed, a gate that stops it, and steps."""

from __future__ import annotations

import threading
from typing import Any

from state_backends.store.io_thread import IoRequest, IoThread, Priority, Steps

PATIENCE = 10.0  # seconds after which a test that waits has failed


def result(request: IoRequest[Any]) -> Any:
    return request.future.result(PATIENCE)


class Gate:
    """Steps that stop the thread inside of one until they are let through."""

    def __init__(self, io: IoThread, priority: Priority = Priority.READ) -> None:
        self._entered, self._open = threading.Event(), threading.Event()
        io.submit(priority, self._steps())

    def _steps(self) -> Steps[Any]:
        self._entered.set()
        assert self._open.wait(PATIENCE)
        yield 0

    def __enter__(self) -> Gate:
        assert self._entered.wait(PATIENCE)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.set()


def note(log: list[str], name: str, steps: int = 1) -> Steps[str]:
    for number in range(steps):
        log.append(name if steps == 1 else f"{name}{number}")
        if number < steps - 1:
            yield 0
    return name


def fail(error: BaseException) -> Steps[Any]:
    raise error
    yield 0


# -- order ------------------------------------------------------------------------------------------------
