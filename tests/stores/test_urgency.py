"""What a task waits for comes before what nobody waits for, whichever shard it is of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from state_backends.backends import STORES
from state_backends.store.io_thread import Steps
from state_backends.store.options import StoreOptions
from state_backends.store.p_bucket import PBucket
from tests.io_thread.rig import PATIENCE
from tests.simulated_disk import Job
from tests.stores.rig import KIB, Rig, make_block

BLOCKS = 30


class Noted:
    """A p-bucket that notes each step that the I/O thread takes for it, and stops at the one that it is asked to."""

    def __init__(self, bucket: PBucket, name: str, log: list[str]) -> None:
        self._bucket, self._name, self._log = bucket, name, log
        self.stop_at = 0
        self.stopped, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._bucket, name)
        return (lambda *given: self._through(name, found(*given))) if name in ("fetch", "write") else found

    def _through(self, what: str, steps: Steps[Any]) -> Steps[Any]:
        while True:
            try:
                moved = next(steps)
            except StopIteration as stop:
                self._log.append(f"{self._name} {what} done")
                return stop.value
            self._log.append(f"{self._name} {what}")
            if len(self._log) == self.stop_at:
                self.stopped.set()
                assert self.go_on.wait(PATIENCE)
            yield moved


@pytest.fixture
def shards(make: Callable[..., Rig], tmp_path: Path) -> Any:
    """Two shards of a host: ``a`` of many blocks, all on disk, and ``b`` of one block in memory."""
    log: list[str] = []
    rig = make("tiered")
    rig.append(*((seq, 0) for seq in range(BLOCKS)), size=KIB)
    files = rig.store.persist()
    rig.store.close()
    rig.p_bucket = PBucket(rig.folder / "files", rig.folder / "live", durable=True)
    noted = Noted(rig.p_bucket, "a", log)
    rig.store = STORES["tiered"](noted, rig.io, rig.budget, StoreOptions(**rig.options))
    rig.store.restore(files)
    other = PBucket(tmp_path / "b" / "files", tmp_path / "b" / "live", durable=True)
    b = STORES["tiered"](Noted(other, "b", log), rig.io, rig.budget, StoreOptions(**rig.options))
    b.append(0, make_block(0, 1000, KIB), late=False)
    yield rig, noted, b, log
    noted.go_on.set()
    b.close()


def test_a_commit_waits_for_one_step_of_another_shards_prestage(shards: Any) -> None:
    rig, noted, b, log = shards
    noted.stop_at = 3
    rig.store.prestage([0])
    assert noted.stopped.wait(PATIENCE)
    commit = Job(b.persist)
    while not commit.waits:
        commit.join(0.001)
    begun = len(log)
    noted.go_on.set()
    commit.join(PATIENCE)
    assert [file.blocks for file in commit.value] == [1]
    done = log.index("b write done")
    assert sum(step.startswith("a") for step in log[begun:done]) <= 1
    rig.settle()
    assert log.count("a fetch") == BLOCKS, "and then the prestage goes on"


def test_a_destage_that_a_commit_waits_for_is_one_that_it_waits_for(shards: Any) -> None:
    """What was on its way to the disk without haste has haste as soon as a commit needs it there."""
    rig, noted, b, log = shards
    noted.stop_at = 3
    rig.store.prestage([0])
    assert noted.stopped.wait(PATIENCE)
    b.destage([0])
    b.flush()
    commit = Job(b.persist)
    while not commit.waits:
        commit.join(0.001)
    begun = len(log)
    noted.go_on.set()
    commit.join(PATIENCE)
    assert sum(step.startswith("a") for step in log[begun : log.index("b write done")]) <= 1
