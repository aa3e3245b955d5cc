"""An I/O thread that is closed after the test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from state_backends.store.io_thread import IoThread


@pytest.fixture
def io() -> Iterator[IoThread]:
    thread = IoThread()
    yield thread
    thread.close()
