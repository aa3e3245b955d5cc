"""Going back to before an attempt."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from aion.errors import StateError
from tests.io_thread.rig import PATIENCE, Gate
from tests.simulated_disk import Disk, Job, at_rest
from tests.stores.rig import WHEREVER, Rig


@pytest.mark.parametrize("where", ["as it is", "flushed", "destaged", "persisted"])
def test_a_rollback_forgets_what_came_since(rig: Rig, where: str) -> None:
    rig.append((0, 0), (1, 10))
    files = rig.store.persist()
    kept = rig.durable()
    rig.append((2, 0), (3, 20), late=True)
    rig.append((4, 10))
    rig.store.destage([0])
    if where != "persisted":
        WHEREVER[where](rig)
    rig.store.rollback(2)
    rig.validate()
    assert rig.read(0, 10, 20) == [0, 1]
    # The same numbers come again, for other blocks.
    rig.append((2, 0), (3, 0))
    assert rig.read(0, 10, 20) == [0, 2, 3, 1]
    files += rig.store.persist()
    assert set(rig.durable()) == {*kept, *(Path(f.path).name for f in files)}, "files of the attempt are gone"
    rig.reopen(files)
    assert rig.read(0, 10, 20) == [0, 2, 3, 1]


@pytest.mark.parametrize("where", ["as it is", "flushed", "destaged", "persisted"])
def test_a_reader_from_before_a_rollback_never_gets_the_blocks_of_after_it(rig: Rig, where: str) -> None:
    """The next attempt gives the same numbers to other blocks."""
    rig.append((0, 0))
    rig.store.persist()
    rig.append(*((seq, 0) for seq in range(1, 20)))
    reader = rig.store.read([0])
    assert rig.check(next(reader)) == 0
    before = dict(rig.blocks)
    rig.store.rollback(1)
    rig.append(*((seq, 0) for seq in range(1, 20)))
    WHEREVER[where](rig)
    with pytest.raises(StateError, match="purged while it was read"):
        for seq, block in reader:
            assert bytes(block.stored) == bytes(before[seq].stored)


def test_a_rollback_waits_for_what_is_being_written(rig: Rig) -> None:
    rig.append((0, 0))
    files = rig.store.persist()
    with Gate(rig.io):
        rig.append((1, 0), late=True)
        rig.store.destage([0])
        rig.store.flush()
        rolling = threading.Thread(target=rig.store.rollback, args=(1,))
        rolling.start()
    rolling.join(PATIENCE)
    rig.settle()
    rig.validate()
    assert rig.read(0) == [0]
    assert set(rig.durable()) == {Path(f.path).name for f in files}


def test_a_rollback_waits_for_what_memory_pressure_writes_meanwhile(make: Callable[..., Rig]) -> None:
    """Or the file, when it is written, is taken for that of the blocks that have those numbers by then."""
    rig, disk = make("tiered"), Disk()
    rig.store.close()
    rig.store = rig.open(disk)
    disk.hold()
    rig.append((0, 0), late=True)
    rig.store.flush()
    rig.append((1, 10))
    rolling = Job(lambda: rig.store.rollback(0))
    at_rest(rig.io, disk, [rolling])
    assert rolling.is_alive(), "it waits for the first file"
    assert rig.store.shrink(10, 0) is None, "which writes a second one"
    while rolling.is_alive():
        disk.step()
        at_rest(rig.io, disk, [rolling])
    rig.append((0, 0), (1, 10))
    rig.store.destage([10])
    rig.store.flush()
    disk.go()
    rig.settle()
    rig.validate()
    assert rig.read(0, 10) == [0, 1]


def test_a_rollback_keeps_files_that_hold_something_older(rig: Rig) -> None:
    """Its contract: it forgets the blocks, and the files that hold nothing else."""
    rig.append((0, 0), late=True)
    rig.to_disk(0)
    rig.append((1, 0))
    rig.store.rollback(1)
    assert rig.read(0) == [0]
    rig.reopen(rig.store.persist())
    assert rig.read(0) == [0]
