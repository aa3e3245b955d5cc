"""Each store: appending and reading."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from aion.errors import StateError
from state_backends.store.io import MOST_TOGETHER_BYTES
from tests.io_thread.rig import PATIENCE, Gate
from tests.stores.rig import KIB, WHEREVER, Rig


@pytest.mark.parametrize("where", WHEREVER)
@pytest.mark.parametrize("late", [False, True])
def test_blocks_are_read_by_slice_and_in_the_order_of_arrival(rig: Rig, where: str, late: bool) -> None:
    rig.append((0, 10), (1, -5), (2, 10), (3, 0), (4, -5), late=late)
    WHEREVER[where](rig)
    rig.append((5, 10), (6, -5))
    rig.validate()
    assert rig.read(10, -5) == rig.read(10, -5, blocking=True) == [1, 4, 6, 0, 2, 5]
    assert rig.read(0, 0) == [3]
    assert rig.read(99) == rig.read() == []


def test_nothing_waits_for_the_disk_but_who_asks_for_it(rig: Rig) -> None:
    with Gate(rig.io):
        rig.append((0, 0), (1, 0), (2, 10))
        rig.append((3, 0), (4, 20), late=True)
        rig.store.destage([0])
        rig.store.flush()
        rig.store.destage([10])
        rig.store.purge([20])
        assert rig.read(0, 10, 20) == [0, 1, 3, 2], "what is being written is still in memory"
        rig.validate()
    rig.settle()
    assert rig.read(0, 10, 20) == [0, 1, 3, 2]


def test_a_reader_sees_what_was_there_when_it_began(rig: Rig) -> None:
    rig.append((0, 0), (1, 0))
    reader = rig.store.read([0])
    assert rig.check(next(reader)) == 0
    rig.append((2, 0))
    rig.to_disk(0)
    assert [rig.check(stored) for stored in reader] == [1]


def test_reading_is_lazy(make: Callable[..., Rig]) -> None:
    rig = make("rocksdb")
    rig.append(*((seq, 0) for seq in range(60)))
    rig.to_disk(0)
    fetched: list[tuple[int, int]] = []
    fetch = rig.p_bucket.fetch
    rig.p_bucket.fetch = lambda no, at, size=0: fetched.extend(at) or fetch(no, at, size)  # type: ignore[method-assign]
    reader = rig.store.read([0])
    assert fetched == []
    assert [rig.check(next(reader)) for _ in range(2)] == [0, 1]
    assert len(fetched) < 20, "a few blocks ahead, and not the whole window"
    assert [rig.check(stored) for stored in reader] == [*range(2, 60)]
    assert len(fetched) == 60, "each block once"


def test_neighbours_in_a_file_are_read_together(make: Callable[..., Rig]) -> None:
    """A seek of a slow disk takes as long as to read half a megabyte."""
    rig = make("tiered")
    for slice_us in (0, 10, 20):
        rig.append(*((seq, slice_us) for seq in range(10 * slice_us, 10 * slice_us + 20)))
    rig.to_disk(0, 10, 20)
    most = max(2, MOST_TOGETHER_BYTES // max(block.size_bytes for block in rig.blocks.values()))
    calls: list[int] = []
    fetch = rig.p_bucket.fetch
    rig.p_bucket.fetch = lambda no, at, size=0: calls.append(len(at)) or fetch(no, at, size)  # type: ignore[method-assign]
    assert rig.read(0, 10, 20, blocking=True) == [*range(20), *range(100, 120), *range(200, 220)]
    calls.clear()
    with Gate(rig.io):  # otherwise the first ones may run before the others are asked for
        rig.store.prestage([0, 10, 20])
    rig.settle()
    assert len(calls) <= 1 + -(-60 // most) and sum(calls) == 60
    assert rig.read(10) == [*range(100, 120)]
    assert rig.store.stats().staging.hits == 20
    rig.validate()


def test_a_reader_that_gives_up_leaves_nothing_to_do(rig: Rig) -> None:
    rig.append(*((seq, 0) for seq in range(20)))
    rig.to_disk(0)
    reader = rig.store.read([0])
    next(reader)
    rig.settle()
    with Gate(rig.io):
        for _ in range(3):
            reader = rig.store.read([0])
            waiting = threading.Thread(target=lambda reader=reader: next(reader))
            waiting.start()
    waiting.join(PATIENCE)
    reader.close()
    assert rig.read(0) == [*range(20)]


@pytest.mark.parametrize("where", ["as it is", "destaged", "partly destaged"])
def test_who_reads_from_a_store_that_is_closed_is_told_and_harms_nobody(rig: Rig, where: str) -> None:
    """A server streams to whoever asked, while another attempt may have the shard rebuilt in the same folder."""
    rig.append(*((seq, seq % 2 * 10) for seq in range(40)))
    files = rig.store.persist()
    WHEREVER[where](rig)
    readers = [rig.store.read([0, 10], blocking=blocking) for blocking in (False, True)]
    for reader in readers:
        assert rig.check(next(reader)) == 0
    rig.reopen(files)
    with pytest.raises(StateError, match=r"slice \d+: its store was closed"):
        for stored in readers[0]:
            rig.check(stored)
    # One that staged everything before it began has it.
    found = [0]
    try:
        found += [rig.check(stored) for stored in readers[1]]
    except StateError as error:
        assert "closed" in str(error)
    else:
        assert len(found) == 40
    assert rig.read(0, 10) == sorted(range(40), key=lambda seq: (seq % 2, seq))


def test_readers_beside_a_writer(make: Callable[..., Rig], kind: str) -> None:
    rig = make(kind, budget=16 * KIB)
    rig.append(*((seq, 0) for seq in range(20)))
    begun, done = threading.Event(), threading.Event()
    found: list[list[int]] = []
    failures: list[BaseException] = []

    def reading() -> None:
        try:
            while not done.is_set() or len(found) < 3:
                found.append(rig.read(0))
                begun.set()
        except BaseException as error:
            failures.append(error)
            begun.set()

    reader = threading.Thread(target=reading)
    reader.start()
    assert begun.wait(PATIENCE)
    for round_ in range(20):
        rig.append(*((100 + 10 * round_ + i, 10 + round_) for i in range(5)), size=KIB)
        rig.store.destage([0, 10 + round_])
        rig.store.flush()
        if round_ % 5 == 4:
            rig.store.persist()
        rig.store.purge([9 + round_])
    done.set()
    reader.join(PATIENCE)
    assert failures == []
    assert all(seqs == [*range(20)] for seqs in found)
