"""For all tests: hypothesis profiles, a temporary folder of their own, and a guard that nothing is left behind.

Property tests look at a few examples, always the same ones. With ``HYPOTHESIS_PROFILE=thorough`` they look at many, and
at others each time.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from state_backends import thresholds
from state_backends.server import server_folder
from tests import jvm
from tests.leaks import nothing_is_left_behind, wait_for_the_end_of, wait_for_the_servers_in

settings.register_profile(
    "ci", derandomize=True, max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

SHARED = Path(tempfile.gettempdir())
MEMORY = Path("/dev/shm")
MARK = "AION_TESTS"
SPARK = "tests/spark/"
SLOW = ("tests/spark/", "tests/connect/", "tests/chaos/", "tests/experiments/")


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes long comes first, Spark before all: with several workers (``-n 2``) none waits for the last.

    With tiny thresholds, tests of what the usual ones lead to are left out. The first case of a test that is slow
    ``but_first`` is not slow, and one that is slow ``if_tiny`` is slow with tiny thresholds only.
    """
    met = set()
    for item in items:
        slow = item.get_closest_marker("slow")
        if slow is None:
            continue
        test = item.nodeid.partition("[")[0]
        is_first = slow.kwargs.get("but_first") and test not in met
        if is_first or (slow.kwargs.get("if_tiny") and not thresholds.TINY):
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "slow"]
        met.add(test)
    if thresholds.TINY:
        usual = [item for item in items if item.get_closest_marker("usual_sizes")]
        config.hook.pytest_deselected(items=usual)
        items[:] = [item for item in items if item not in usual]
    items.sort(key=lambda item: next((n for n, part in enumerate(SLOW) if item.nodeid.startswith(part)), len(SLOW)))


def pytest_collection_finish() -> None:
    """Nothing that is there before the first test is looked at again by a collection of garbage.

    Tests collect garbage often, and the tests themselves, their libraries and what they import are most of the heap.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each worker takes whole modules. One of them takes all that need Spark, so that one session serves them all."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SPARK if nodeid.startswith(SPARK) else str(super()._split_scope(nodeid))

    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def temporary() -> Iterator[Path]:
    """Where this session, and every process that it starts, has its temporary files; with pytest's own elsewhere.

    The system's folder is everybody's: what is left there is nobody's fault. In the end no process may be left.
    """
    folder = Path(tempfile.mkdtemp(prefix="aion-tests-", dir=SHARED))
    environment = dict(os.environ)
    os.environ |= {"TMPDIR": str(folder), MARK: uuid.uuid4().hex}
    os.environ["JAVA_TOOL_OPTIONS"] = f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} {jvm.OPTIONS}".strip()
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(SHARED))  # which keeps tmp_path for those who look for a bug
    tempfile.tempdir = None
    yield folder
    jvm.stop()
    left = wait_for_the_end_of(f"{MARK}={os.environ[MARK]}")
    left += wait_for_the_servers_in(folder / f"aion-{os.getuid()}")
    files = _swept(folder)
    shutil.rmtree(folder, ignore_errors=True)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    assert not left, f"outlives the tests: process {', '.join(left)}"
    assert not files, f"outlives the tests: {files}"


def _swept(folder: Path) -> list[Path]:
    """What is left when folders of servers that were killed are gone; they are swept as the next server would do it.

    Who holds their leases may be about to end.
    """
    deadline = time.monotonic() + 60
    while True:
        server_folder.sweep(folder / f"aion-{os.getuid()}")
        try:
            files = [path for path in folder.rglob("*") if not path.is_dir()]
        except FileNotFoundError:  # a server has just taken its folder away
            continue
        if not files or time.monotonic() > deadline:
            return files
        time.sleep(0.1)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(
    temporary: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    # The state servers' folder goes with them, and so with their executors: it is looked at in the end.
    servers = temporary / f"aion-{os.getuid()}"
    servers.mkdir(mode=0o700, exist_ok=True)
    with nothing_is_left_behind([temporary], [temporary, tmp_path_factory.getbasetemp(), MEMORY]):
        yield
        servers.mkdir(mode=0o700, exist_ok=True)
        # What was logged holds exceptions, which hold frames, and so whatever a fault was made with.
        caplog.get_records("call").clear()


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if the system has such: for tests with thousands of commits, which say nothing of devices."""
    usable = MEMORY.is_dir() and os.access(MEMORY, os.W_OK)
    with tempfile.TemporaryDirectory(prefix="aion-test-", dir=MEMORY if usable else tmp_path) as name:
        yield Path(name)
