"""For all tests: hypothesis profiles, and a guard that no test leaves a thread or a folder behind.

``HYPOTHESIS_PROFILE=thorough pytest`` looks longer and elsewhere than ``ci``, which always tries the same.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", derandomize=True, max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def _folders() -> Iterator[list[Path]]:
    """Every temporary folder that this process makes: /tmp is shared with others, so looking there won't do."""
    made: list[Path] = []
    original = tempfile.mkdtemp

    def mkdtemp(*args: object, **kwargs: object) -> str:
        folder = original(*args, **kwargs)  # type: ignore[call-overload]
        made.append(Path(folder))
        return folder

    tempfile.mkdtemp = mkdtemp  # type: ignore[assignment]
    yield made
    tempfile.mkdtemp = original


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("aion-")}


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(_folders: list[Path]) -> Iterator[None]:
    threads, known = _threads(), len(_folders)
    yield
    assert _threads() <= threads, "a thread of Aion's outlives the test"
    left = [f for f in _folders[known:] if f.name.startswith("aion-local-") and f.exists()]
    assert not left, "a folder of a LocalOperator outlives the test"


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if the system has such: for tests with thousands of commits, which say nothing of devices."""
    shared = Path("/dev/shm")
    usable = shared.is_dir() and os.access(shared, os.W_OK)
    with tempfile.TemporaryDirectory(prefix="aion-test-", dir=shared if usable else tmp_path) as name:
        yield Path(name)
