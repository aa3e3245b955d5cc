"""Memory is reserved before a block is fetched, by whoever fetches it: many readers take no more than the budget."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from state_backends.store.io_thread import Priority
from tests.io_thread.rig import PATIENCE, Gate
from tests.simulated_disk import Disk, Job, at_rest
from tests.stores.rig import KIB, Rig

READERS = 8
BLOCKS = 40


def windows_on_disk(make: Callable[..., Rig]) -> Rig:
    """Eight windows, each twice as large as the budget, all of them on disk."""
    rig = make("tiered", budget=20 * KIB)
    for slice_us in range(READERS):
        rig.append(*((100 * slice_us + n, slice_us) for n in range(BLOCKS)), size=KIB)
    rig.to_disk(*range(READERS))
    return rig


def read_within_budget(rig: Rig, slice_us: int, *, blocking: bool) -> list[int]:
    """The seqs of a slice's blocks. The budget is never exceeded while they are read."""
    seqs = []
    for stored in rig.store.read([slice_us], blocking=blocking):
        assert rig.budget.left() >= 0
        seqs.append(rig.check(stored))
    return seqs


@pytest.mark.parametrize("blocking", [True, False])
def test_readers_fetch_no_more_than_the_budget_and_a_block_each(make: Callable[..., Rig], blocking: bool) -> None:
    rig = windows_on_disk(make)
    size = max(block.size_bytes for block in rig.blocks.values())
    with Gate(rig.io):
        jobs = [Job(lambda s=s: read_within_budget(rig, s, blocking=blocking)) for s in range(READERS)]
        for job in jobs:
            while not job.waits:
                job.join(0.001)
        fetched = rig.io.waiting()[Priority.READ.name.lower()]
        assert fetched * size <= rig.budget.limit_bytes + READERS * size
        assert fetched >= READERS, "each gets on"
    for number, job in enumerate(jobs):
        job.join(PATIENCE)
        assert job.value == [100 * number + n for n in range(BLOCKS)]
    assert rig.budget.reserved_bytes == 0


def test_readers_and_prestages_share_the_room(make: Callable[..., Rig]) -> None:
    rig = windows_on_disk(make)
    with Gate(rig.io):
        reader = Job(lambda: read_within_budget(rig, 0, blocking=True))
        while not reader.waits:
            reader.join(0.001)
        rig.store.prestage([1, 2])
        assert rig.budget.left() >= 0
    reader.join(PATIENCE)
    rig.settle()
    assert reader.value == list(range(BLOCKS))


def test_a_reader_that_stops_early_gives_back_what_it_reserved(make: Callable[..., Rig]) -> None:
    rig = windows_on_disk(make)
    reading = rig.store.read([0], blocking=True)
    rig.check(next(reading))
    assert rig.budget.reserved_bytes > 0
    reading.close()  # type: ignore[attr-defined]
    rig.settle()
    assert rig.budget.reserved_bytes == 0


def test_what_is_handed_on_is_reserved_until_more_is_asked_for(make: Callable[..., Rig]) -> None:
    rig = windows_on_disk(make)
    reading = rig.store.read([0], blocking=True)
    first = next(reading)
    held = rig.budget.reserved_bytes
    assert held >= first.block.size_bytes
    for _ in reading:
        pass
    assert rig.budget.reserved_bytes == 0


def test_a_staging_that_was_given_up_leaves_the_next_one_of_its_block_alone(make: Callable[..., Rig]) -> None:
    """It tidies up when the I/O thread gets to it, and by then the block is being staged again."""
    rig = make("tiered")
    rig.append((0, 0), (1, 10), size=KIB)
    files = rig.store.persist()
    rig.store.close()
    disk = Disk()
    rig.store = rig.open(disk)
    rig.store.restore(files)
    disk.hold()
    rig.store.prestage([0])
    at_rest(rig.io, disk, [])
    reader = Job(lambda: rig.read(10))
    at_rest(rig.io, disk, [reader])
    disk.step()  # one of the staging's; the read is more urgent than its next
    at_rest(rig.io, disk, [reader])
    rig.store.destage([0])
    rig.store.prestage([0])
    disk.go()
    reader.join(PATIENCE)
    rig.settle()
    rig.validate()
    assert rig.store.stats().m_bucket_bytes == rig.blocks[0].size_bytes
    assert rig.budget.reserved_bytes == 0
