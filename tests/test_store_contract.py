"""One suite for the three stores: what is appended is read, in order, until it is purged, whatever the disk does."""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
import resource
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from aion.errors import CorruptState, DiskError, StateError
from policies.destage import StandardDestage
from state_backends.block import Block, Folded, Kind, encode
from state_backends.compaction import DEFAULTS, Limits
from state_backends.io_thread import IoThread, Priority, Request, Steps
from state_backends.m_bucket import MemoryBudget
from state_backends.p_bucket import PBucket
from state_backends.pressure import PressureManager
from state_backends.store import BlockStore, Only, SstFile
from state_backends.stores import STORES
from tests.simulated_disk import Disk, Job, OnDisk, at_rest
from tests.test_io_thread import PATIENCE, Gate, result

KIB = 1 << 10


def make_block(slice_us: int, number: int, size: int = 0, folded: Folded | None = None) -> Block:
    """A block of about ``size`` bytes, each of its own contents, which do not compress."""
    payload = hashlib.shake_128(str(number).encode()).digest(max(size - 400, 8))
    batch = pa.record_batch({"payload": [payload]})
    return encode(batch, kind=Kind.EVENTS, slice_us=slice_us, events=1, min_us=slice_us, max_us=slice_us, folded=folded)


def nothing() -> Steps[None]:
    return
    yield 0


class Rig:
    """A store with everything that it stands on. Blocks are (seq, slice)."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        *,
        budget: int = 1 << 30,
        bucket_limit: int = 1 << 30,
        keep: float = 0.0,
        limits: Limits = DEFAULTS,
    ) -> None:
        self.kind, self.folder = kind, folder
        self.options: dict[str, Any] = {
            "bucket_limit_bytes": min(bucket_limit, budget),
            "keep_fraction": keep,
            "limits": limits,
        }
        self.io = IoThread()
        self.budget = MemoryBudget(budget)
        self.blocks: dict[int, Block] = {}
        self.numbers = 0
        self.store = self.open()

    def open(self, disk: Disk | None = None) -> BlockStore:
        self.p_bucket = PBucket(self.folder / "files", self.folder / "live", durable=True)
        p_bucket: Any = OnDisk(self.p_bucket, disk) if disk else self.p_bucket
        return STORES[self.kind](p_bucket, self.io, self.budget, **self.options)

    def reopen(
        self,
        files: Sequence[SstFile],
        purged: frozenset[int] = frozenset(),
        superseded: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.store.close()
        self.store = self.open()
        self.store.restore(files, purged, superseded)

    def append(self, *blocks: tuple[int, int], late: bool = False, size: int = 0, folded: Folded | None = None) -> None:
        for seq, slice_us in blocks:
            self.numbers += 1
            self.blocks[seq] = make_block(slice_us, self.numbers, size, folded)
            self.store.append(seq, self.blocks[seq], late=late)

    def read(self, *slices: int, blocking: bool = False) -> list[int]:
        """The seqs of the blocks of these slices; their bytes are those that were appended."""
        return [self.check(stored) for stored in self.store.read(slices, blocking=blocking)]

    def check(self, stored: Any) -> int:
        seq, block = stored
        assert block.header == self.blocks[seq].header
        assert bytes(block.data) == bytes(self.blocks[seq].data), f"block {seq} is another one"
        return int(seq)

    def settle(self) -> None:
        """Waits until the I/O thread has nothing more to do."""
        result(self.io.submit(Priority.MAINTENANCE, nothing()))

    def to_disk(self, *slices: int) -> None:
        self.store.destage(slices)
        self.store.flush()
        self.settle()

    def validate(self) -> None:
        self.store.validate()  # type: ignore[attr-defined]
        assert self.budget.used_bytes == self.store.stats().m_bucket_bytes

    def close(self) -> None:
        self.store.close()
        self.io.close()
        assert self.budget.used_bytes == 0, "what is closed holds no memory"
        assert not (self.folder / "live").exists(), "RocksDB's folder goes with the store"

    def break_disk(self) -> None:
        """Nothing can be written from now on: where the files' folder was, there is a file."""
        (self.folder / "files").mkdir(exist_ok=True)
        (self.folder / "files").rename(self.folder / "away")
        (self.folder / "files").write_text("in the way")

    def heal_disk(self) -> None:
        (self.folder / "files").unlink()
        (self.folder / "away").rename(self.folder / "files")

    def durable(self) -> dict[str, bytes]:
        """The files that are kept for good, by name, and what is in them."""
        return {p.name: p.read_bytes() for p in (self.folder / "files").glob("*")}


@pytest.fixture(params=STORES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Makes rigs that are closed, and looked over, after the test."""
    rigs: list[Rig] = []

    def make(kind: str, **options: Any) -> Rig:
        folder = tmp_path / str(len(rigs))
        folder.mkdir()
        rigs.append(Rig(kind, folder, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.settle()
        rig.validate()
        rig.close()


@pytest.fixture
def rig(make: Callable[..., Rig], kind: str) -> Rig:
    return make(kind)


# -- appending and reading ----------------------------------------------------------------------------------

WHEREVER: dict[str, Callable[[Rig], object]] = {
    "as it is": lambda rig: None,
    "flushed": lambda rig: (rig.store.flush(), rig.settle()),
    "destaged": lambda rig: rig.to_disk(0, 10),
    "partly destaged": lambda rig: rig.to_disk(10),
    "persisted": lambda rig: rig.store.persist(),
    "restored": lambda rig: rig.reopen(rig.store.persist()),
}


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
    fetched = []
    fetch = rig.p_bucket.fetch
    rig.p_bucket.fetch = lambda *where: fetched.append(where) or fetch(*where)  # type: ignore[method-assign]
    reader = rig.store.read([0])
    assert fetched == []
    assert [rig.check(next(reader)) for _ in range(2)] == [0, 1]
    assert len(fetched) < 20, "a few blocks ahead, and not the whole window"
    assert [rig.check(stored) for stored in reader] == [*range(2, 60)]
    assert len(fetched) == 60, "each block once"


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


# -- memory and disk ----------------------------------------------------------------------------------------


def test_what_is_destaged_leaves_memory(rig: Rig) -> None:
    rig.append((0, 0), (1, 10))
    rig.append((2, 0), late=True)
    sizes = {seq: block.size_bytes for seq, block in rig.blocks.items()}
    rig.to_disk(0)
    stats = rig.store.stats()
    in_memory = {"memory": {0, 1, 2}, "tiered": {1}, "rocksdb": set[int]()}[rig.kind]
    assert stats.m_bucket_bytes == sum(sizes[s] for s in in_memory)
    assert stats.disk_only_bytes == sum(sizes[s] for s in sizes.keys() - in_memory)
    assert stats.blocks == 3


def test_late_blocks_go_straight_to_the_disk(make: Callable[..., Rig]) -> None:
    rig = make("tiered")
    rig.append((0, 0))
    rig.append((1, 0), late=True)
    rig.store.flush()
    rig.settle()
    stats = rig.store.stats()
    assert (stats.m_bucket_bytes, stats.disk_only_bytes) == (rig.blocks[0].size_bytes, rig.blocks[1].size_bytes)


def test_what_is_persisted_is_in_both_tiers_and_destaging_it_writes_nothing(make: Callable[..., Rig]) -> None:
    rig = make("tiered")
    rig.append((0, 0))
    rig.store.persist()
    size = rig.blocks[0].size_bytes
    stats = rig.store.stats()
    assert (stats.m_bucket_bytes, stats.p_bucket_bytes, stats.disk_only_bytes) == (size, size, 0)
    before = rig.durable()
    rig.to_disk(0)
    assert rig.store.stats().disk_only_bytes == size
    assert rig.durable() == before


@pytest.mark.parametrize("seed", range(3))
def test_memory_exceeds_the_budget_by_one_block_at_most(make: Callable[..., Rig], seed: int) -> None:
    rig = make("tiered", budget=64 * KIB)
    sizes = random.Random(seed)
    for seq in range(300):
        rig.append((seq, seq % 7), late=sizes.random() < 0.2, size=sizes.randrange(500, 5000))
        rig.validate()
    largest = max(block.size_bytes for block in rig.blocks.values())
    assert rig.budget.peak_bytes <= 64 * KIB + largest
    assert rig.store.stats().blocks == 300
    assert rig.read(*range(7)) == sorted(range(300), key=lambda seq: (seq % 7, seq))
    assert rig.budget.peak_bytes <= 64 * KIB + largest, "reading a window does not need it in memory"


def test_stores_of_one_host_share_a_budget(make: Callable[..., Rig]) -> None:
    first, second = make("tiered", budget=32 * KIB), make("tiered", budget=32 * KIB)
    second.store.close()
    second.budget = first.budget
    second.store = second.open()
    for seq in range(40):
        first.append((seq, 0), size=2 * KIB)
        second.append((seq, 0), size=2 * KIB)
    assert first.budget.peak_bytes <= 34 * KIB + 100
    assert first.read(0) == second.read(0) == [*range(40)]
    second.store.close()  # so that what is left is the first one's
    assert first.budget.used_bytes == first.store.stats().m_bucket_bytes
    second.budget = MemoryBudget(1 << 30)
    second.store = second.open()


def test_an_m_bucket_has_its_own_limit(make: Callable[..., Rig]) -> None:
    rig = make("tiered", budget=1 << 20, bucket_limit=10 * KIB)
    rig.append(*((seq, 0) for seq in range(20)), size=2 * KIB)
    rig.append((20, 10), size=2 * KIB)
    rig.store.flush()
    rig.settle()
    assert rig.store.stats().m_bucket_bytes <= 10 * KIB + 2 * rig.blocks[0].size_bytes
    assert rig.store.stats().m_bucket_bytes >= 8 * KIB, "and it is used"
    assert rig.read(0, 10) == [*range(21)]


def test_the_memory_store_keeps_all_whatever_the_budget(make: Callable[..., Rig]) -> None:
    rig = make("memory", budget=4 * KIB)
    rig.append(*((seq, 0) for seq in range(20)), size=KIB)
    rig.to_disk(0)
    assert rig.store.stats().disk_only_bytes == 0
    assert rig.durable() == {} if (rig.folder / "files").exists() else True


def test_the_memory_store_keeps_all_whatever_the_pressure(make: Callable[..., Rig]) -> None:
    rig = make("memory", budget=4 * KIB)
    rig.append(*((seq, 0) for seq in range(20)), size=KIB)
    manager = PressureManager(rig.budget, StandardDestage(), lambda: 1.0)
    manager.tick([("local", rig.store)])
    rig.settle()
    assert rig.store.stats().m_bucket_bytes == sum(b.size_bytes for b in rig.blocks.values())
    assert (manager.destaged, manager.refused) == (0, 1)


# -- prestaging ---------------------------------------------------------------------------------------------


def staged(make: Callable[..., Rig], *slices: int, **options: Any) -> Rig:
    """A tiered store of six blocks on disk, with these slices prestaged."""
    rig = make("tiered", **options)
    rig.append((0, 0), (1, 0), (2, 0), (3, 10), (4, 10), (5, 20), size=KIB)
    rig.to_disk(0, 10, 20)
    assert rig.store.stats().m_bucket_bytes == 0
    rig.store.prestage(slices)
    return rig


def test_what_is_prestaged_is_in_both_tiers_and_read_without_waiting(make: Callable[..., Rig]) -> None:
    rig = staged(make, 0, 20)
    rig.settle()
    rig.validate()
    size = sum(rig.blocks[seq].size_bytes for seq in (0, 1, 2, 5))
    stats = rig.store.stats()
    assert stats.m_bucket_bytes == stats.staging.staged_bytes == size
    assert stats.p_bucket_bytes == sum(b.size_bytes for b in rig.blocks.values())
    with Gate(rig.io):
        assert rig.read(0, 20) == [0, 1, 2, 5], "the I/O thread is not asked"
    stats = rig.store.stats()
    assert (stats.staging.hits, stats.staging.misses, stats.staging.late) == (4, 0, 0)
    assert rig.read(10) == [3, 4]
    assert rig.store.stats().staging.misses == 2


def test_what_is_prestaged_and_let_go_unread_was_staged_in_vain(make: Callable[..., Rig]) -> None:
    rig = staged(make, 0)
    rig.settle()
    assert rig.check(next(rig.store.read([0]))) == 0
    before = rig.durable()
    rig.to_disk(0)
    assert rig.store.stats().m_bucket_bytes == 0
    assert rig.durable() == before, "it is on disk already"
    assert rig.store.stats().staging.vain_bytes == sum(rig.blocks[seq].size_bytes for seq in (1, 2))
    assert rig.read(0) == [0, 1, 2]


def test_prestaging_again_does_nothing(make: Callable[..., Rig]) -> None:
    rig = staged(make, 0)
    with Gate(rig.io):
        rig.store.prestage([0])
        rig.validate()
    rig.settle()
    rig.store.prestage([0, 99])
    rig.settle()
    assert rig.store.stats().staging.staged_bytes == sum(rig.blocks[seq].size_bytes for seq in (0, 1, 2))


def test_prestaging_takes_no_more_than_the_budget_has(make: Callable[..., Rig]) -> None:
    rig = staged(make, 0, 10, 20, budget=4 * KIB)
    rig.settle()
    assert 0 < rig.store.stats().m_bucket_bytes <= 4 * KIB
    assert rig.read(0, 10, 20) == [*range(6)]


def test_prestaging_and_appending_do_not_both_take_the_same_room(make: Callable[..., Rig]) -> None:
    """What is under way counts: or together they come to twice the budget."""
    rig = make("tiered", budget=12 * KIB)
    rig.append(*((seq, 0) for seq in range(9)), size=KIB)
    rig.to_disk(0)
    appending = threading.Thread(target=lambda: rig.append(*((seq, 10) for seq in range(20, 30)), size=KIB))
    with Gate(rig.io):
        rig.store.prestage([0])
        appending.start()
        appending.join(0.2)  # it is done, or waits for room that only the I/O thread can make
    appending.join(PATIENCE)
    rig.settle()
    assert rig.budget.peak_bytes <= 12 * KIB + KIB
    assert rig.read(0, 10) == [*range(9), *range(20, 30)]


def test_what_is_not_wanted_any_more_is_not_staged(make: Callable[..., Rig]) -> None:
    rig = make("tiered")
    rig.append((0, 0), (1, 10), (2, 20))
    rig.to_disk(0, 10, 20)
    with Gate(rig.io):
        rig.store.prestage([0, 10, 20])
        rig.store.destage([0])
        rig.store.purge([10])
        rig.validate()
    rig.settle()
    rig.validate()
    assert rig.store.stats().m_bucket_bytes == rig.blocks[2].size_bytes
    assert rig.read(0, 10, 20) == [0, 2]


@pytest.mark.parametrize("how", ["destage", "purge"])
def test_a_reader_that_waits_for_a_staging_is_told_when_there_will_be_none(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    rig = make("tiered")
    rig.append((0, 0))
    rig.to_disk(0)
    waits = threading.Event()
    raise_to = Request.raise_to
    monkeypatch.setattr(Request, "raise_to", lambda *to: (raise_to(*to), waits.set()))
    found: list[Any] = []

    def reading() -> None:
        try:
            found.append(rig.read(0))
        except StateError as error:
            found.append(error)

    with Gate(rig.io):
        rig.store.prestage([0])
        reader = threading.Thread(target=reading, daemon=True)
        reader.start()
        assert waits.wait(PATIENCE), "it makes the staging urgent, and waits for it"
        getattr(rig.store, how)([0])
    reader.join(PATIENCE / 4)
    assert not reader.is_alive(), "it waits for ever"
    if how == "destage":
        assert found == [[0]]
    else:
        assert "block 0 of slice 0 was purged" in str(found[0])


def test_a_staging_that_fails_loses_nothing(make: Callable[..., Rig]) -> None:
    rig = make("tiered")
    rig.append((0, 0))
    rig.to_disk(0)
    fetch = rig.p_bucket.fetch

    def failing(*where: int) -> Steps[Block]:
        raise OSError("unreadable")
        yield 0

    rig.p_bucket.fetch = failing  # type: ignore[method-assign]
    rig.store.prestage([0])
    rig.settle()
    rig.validate()
    with pytest.raises(OSError, match="unreadable"):
        rig.read(0)
    rig.p_bucket.fetch = fetch  # type: ignore[method-assign]
    assert rig.read(0) == [0]


def test_a_part_of_each_slice_stays_if_it_is_told_to(make: Callable[..., Rig]) -> None:
    """The bootstrap part: the first blocks, by which an execution can begin while the rest is staged."""
    rig = make("tiered", keep=0.5)
    rig.append(*((seq, 0) for seq in range(4)), size=KIB)
    rig.to_disk(0)
    assert rig.store.stats().m_bucket_bytes == rig.blocks[0].size_bytes * 2
    with Gate(rig.io):
        reader = rig.store.read([0])
        assert [rig.check(next(reader)) for _ in range(2)] == [0, 1]
    assert [rig.check(stored) for stored in reader] == [2, 3]


def test_what_is_restored_can_be_prestaged(make: Callable[..., Rig]) -> None:
    rig = staged(make)
    rig.reopen(rig.store.persist())
    rig.store.prestage([10])
    assert rig.read(10) == [3, 4]
    rig.settle()
    rig.store.rollback(4)
    rig.validate()
    assert rig.read(10) == [3]


# -- purging ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", WHEREVER)
def test_what_is_purged_is_gone_from_every_tier(rig: Rig, where: str) -> None:
    rig.append((0, 0), (1, 10), (2, 0))
    WHEREVER[where](rig)
    rig.store.purge([0])
    rig.validate()
    assert rig.read(0, 10) == [1]
    assert rig.store.stats().blocks == 1
    rig.store.purge([0, 10])
    rig.settle()
    stats = rig.store.stats()
    assert (stats.blocks, stats.m_bucket_bytes, stats.p_bucket_bytes) == (0, 0, 0)
    assert rig.store.files() == {}
    assert rig.p_bucket.disk_bytes() == 0, "RocksDB gives back the space"


def test_what_is_purged_while_it_is_written_does_not_come_back(rig: Rig) -> None:
    with Gate(rig.io):
        rig.append((0, 0), (1, 10), late=True)
        rig.store.destage([0, 10])
        rig.store.flush()
        rig.store.purge([0])
        rig.validate()
    rig.settle()
    rig.validate()
    assert rig.read(0, 10) == [1]
    assert rig.store.stats().blocks == 1
    rig.store.purge([10])
    rig.settle()
    assert rig.store.files() == {}


def test_a_p_bucket_may_be_closed_while_a_file_is_dropped(tmp_path: Path) -> None:
    bucket = PBucket(tmp_path / "files", tmp_path / "live", durable=False)
    for _ in bucket.write([(0, make_block(0, 0))]):
        pass
    dropping = bucket.drop(0)
    next(dropping)
    bucket.close()
    assert list(dropping) == []
    assert list((tmp_path / "files").iterdir()) == []
    with pytest.raises(StateError, match="closed"):
        list(bucket.write([(1, make_block(0, 1))]))
    assert not (tmp_path / "live").exists()


# -- persisting and restoring -------------------------------------------------------------------------------


def test_persist_returns_the_files_that_are_new(rig: Rig) -> None:
    rig.append((0, 0), (1, 10))
    first = rig.store.persist()
    assert rig.store.persist() == []
    rig.append((2, 0))
    rig.append((3, 0), late=True)
    rig.store.flush()
    second = rig.store.persist()
    assert {f.file_no for f in first}.isdisjoint(f.file_no for f in second)
    assert sum(f.blocks for f in first) == sum(f.blocks for f in second) == 2
    for file in (*first, *second):
        assert Path(file.path).stat().st_size == file.size_bytes
    assert rig.store.files() == {
        f.file_no: counts
        for f in (*first, *second)
        for counts in [rig.store.files()[f.file_no]]
        if sum(counts.values()) == f.blocks
    }


def test_slices_that_are_about_to_be_purged_need_not_be_written(make: Callable[..., Rig]) -> None:
    for kind in ("memory", "tiered"):
        rig = make(kind)
        rig.append((0, 0), (1, 10))
        files = rig.store.persist(skip=[0])
        assert sum(f.blocks for f in files) == 1
        assert rig.read(0, 10) == [0, 1], "they are still there"
        rig.store.purge([0])
        assert rig.store.persist() == []


def test_a_store_is_restored_from_its_files(rig: Rig) -> None:
    rig.append((0, 0), (1, 10))
    files = rig.store.persist()
    rig.append((2, 0), late=True)
    files += rig.store.persist()
    rig.reopen(files)
    rig.validate()
    assert rig.read(0, 10) == [0, 2, 1]
    assert rig.store.stats().blocks == 3
    assert (rig.store.stats().m_bucket_bytes > 0) == (rig.kind == "memory")
    rig.append((3, 10))
    new = rig.store.persist()
    assert {f.path for f in new}.isdisjoint(f.path for f in files), "files are never overwritten"
    rig.reopen([*files, *new])
    assert rig.read(0, 10) == [0, 2, 1, 3]


def test_purged_slices_of_a_file_are_not_restored(rig: Rig) -> None:
    rig.append((0, 0), (1, 10), (2, 20))
    (file,) = rig.store.persist()
    rig.reopen([file], frozenset([0, 20]))
    assert rig.read(0, 10, 20) == [1]
    assert rig.store.files() == {file.file_no: {0: 0, 10: 1, 20: 0}}
    rig.store.purge([10])
    assert rig.store.files() == {}


def test_files_do_not_change_once_they_are_written(rig: Rig) -> None:
    rig.append((0, 0), (1, 10))
    files = rig.store.persist()
    before = rig.durable()
    assert set(before) == {Path(f.path).name for f in files}
    rig.store.purge([0])
    rig.reopen(files, frozenset([0]))
    rig.append((2, 30))
    new = {Path(f.path).name for f in rig.store.persist()}
    rig.store.purge([10])
    rig.settle()
    assert {name: data for name, data in rig.durable().items() if name not in new} == before


def test_a_closed_store_leaves_its_files(make: Callable[..., Rig]) -> None:
    rig = make("rocksdb")
    rig.append((0, 0), (1, 0))
    with Gate(rig.io):
        rig.store.flush()
        closing = threading.Thread(target=rig.store.close)
        closing.start()
    closing.join(PATIENCE)
    (name,) = rig.durable()
    assert name.endswith(".sst"), "what was being written is whole"
    rig.store = rig.open()


# -- rolling back -------------------------------------------------------------------------------------------


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
            assert bytes(block.data) == bytes(before[seq].data)


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


# -- disks that fail ----------------------------------------------------------------------------------------


def test_a_disk_that_fails_loses_nothing_and_is_reported(rig: Rig) -> None:
    rig.append((0, 0), (1, 10))
    files = rig.store.persist()
    rig.break_disk()
    rig.append((2, 0))
    rig.append((3, 10), late=True)
    for _ in range(2):
        with pytest.raises(OSError, match="files"):
            rig.store.persist()
        rig.validate()
        assert rig.read(0, 10) == [0, 2, 1, 3]
    rig.heal_disk()
    files += rig.store.persist()
    rig.reopen(files)
    assert rig.read(0, 10) == [0, 2, 1, 3]


def test_a_destage_that_fails_is_made_up_for(make: Callable[..., Rig]) -> None:
    for kind in ("tiered", "rocksdb"):
        rig = make(kind)
        rig.break_disk()
        rig.append((0, 0), (1, 0))
        rig.append((2, 0), late=True)
        rig.to_disk(0)
        rig.validate()
        assert rig.read(0) == [0, 1, 2]
        assert rig.store.stats().disk_only_bytes == 0
        rig.heal_disk()
        rig.store.flush()
        rig.settle()
        assert rig.store.stats().m_bucket_bytes == 0, "they were still to be let go"
        assert rig.read(0) == [0, 1, 2]


def test_blocks_may_be_purged_and_rolled_back_after_a_failure(rig: Rig) -> None:
    rig.append((0, 0))
    files = rig.store.persist()
    rig.break_disk()
    rig.append((1, 10), (2, 20), late=True)
    rig.to_disk(10, 20)
    rig.store.purge([10])
    rig.validate()
    assert rig.read(0, 10, 20) == [0, 2]
    rig.store.rollback(1)
    rig.validate()
    assert rig.read(0, 10, 20) == [0]
    rig.heal_disk()
    assert rig.store.persist() == []
    rig.reopen(files)
    assert rig.read(0, 10, 20) == [0]


@pytest.mark.timeout(60)
def test_when_memory_is_full_and_the_disk_takes_nothing_no_more_is_kept(make: Callable[..., Rig]) -> None:
    """Neither does an append wait for ever, nor does memory grow; what was kept is there."""
    for kind in ("tiered", "rocksdb"):
        rig = make(kind, budget=8 * KIB)
        rig.break_disk()
        kept = []
        for seq in range(20):
            try:
                rig.append((seq, 0), size=KIB)
            except DiskError as error:
                assert "memory is full" in str(error) and str(rig.folder / "files") in str(error)
            else:
                kept.append(seq)
            rig.validate()
        assert kept == [*range(len(kept))] and 5 < len(kept) < 12
        assert rig.budget.used_bytes <= 8 * KIB
        assert rig.read(0) == kept
        assert 1 < rig.store.stats().failed_writes < 30
        rig.heal_disk()
        rig.append((19, 0), size=KIB)  # it goes on as soon as it can
        rig.reopen(rig.store.persist())
        assert rig.read(0) == [*kept, 19]


def test_a_disk_that_fails_is_not_asked_with_every_block(make: Callable[..., Rig]) -> None:
    rig = make("rocksdb", budget=64 * KIB)
    rig.break_disk()
    for seq in range(60):
        rig.append((seq, 0), size=KIB)
        rig.settle()
    assert 1 < rig.store.stats().failed_writes <= 9, "once for each eighth of the budget"
    rig.heal_disk()
    rig.store.flush()
    rig.settle()
    assert rig.store.stats().m_bucket_bytes == 0
    assert rig.read(0) == [*range(60)]


@contextlib.contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    """The kernel's own way of failing a write half way, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_half_way_loses_nothing(rig: Rig) -> None:
    rig.append((0, 0))
    files = rig.store.persist()
    before = rig.durable()
    with no_file_larger_than(256 * KIB):
        rig.append(*((seq, 0) for seq in range(1, 5)), size=200 * KIB)
        with pytest.raises(Exception, match=r"(?i)file too large|io error"):
            rig.store.persist()
        rig.validate()
    assert rig.durable() == before, "half a file is no file"
    assert rig.read(0) == [*range(5)]
    files += rig.store.persist()
    rig.reopen(files)
    assert rig.read(0) == [*range(5)]


def test_a_file_that_rocksdb_refuses_loses_nothing_and_leaves_nothing(rig: Rig) -> None:
    rig.append((0, 0))
    files = rig.store.persist()
    in_the_way = rig.folder / "live" / f"{files[0].file_no + 1}.ingest"
    in_the_way.mkdir()
    rig.append((1, 0))
    with pytest.raises(Exception, match="ingest"):
        rig.store.persist()
    rig.validate()
    assert rig.read(0) == [0, 1]
    files += rig.store.persist()
    assert set(rig.durable()) == {Path(f.path).name for f in files}, "nobody would ever delete it"
    rig.reopen(files)
    assert rig.read(0) == [0, 1]


# -- files that are damaged ---------------------------------------------------------------------------------


def test_a_missing_or_truncated_file_is_named(rig: Rig) -> None:
    rig.append((0, 0), (1, 10))
    (file,) = rig.store.persist()
    path, data = Path(file.path), Path(file.path).read_bytes()
    for damaged in (None, b"", data[:-1], data[: len(data) // 2], data + b"\0"):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        with pytest.raises(CorruptState, match=path.name):
            rig.reopen([file])
        path.write_bytes(data)
    rig.reopen([file])
    assert rig.read(0, 10) == [0, 1]


def test_another_file_under_the_name_is_noticed(make: Callable[..., Rig]) -> None:
    rig, other = make("tiered"), make("tiered")
    rig.append((0, 0))
    (first,) = rig.store.persist()
    rig.append((1, 0))
    (second,) = rig.store.persist()
    other.append((0, 5))
    (elsewhere,) = other.store.persist()
    assert {first.size_bytes, second.size_bytes, elsewhere.size_bytes} == {first.size_bytes}
    for wrong in (second, elsewhere):
        Path(first.path).unlink()
        shutil.copyfile(wrong.path, first.path)
        with pytest.raises(CorruptState, match=Path(first.path).name):
            rig.reopen([first])
    rig.reopen([second])
    assert rig.read(0) == [1]


def test_a_damaged_file_never_gives_a_wrong_block(make: Callable[..., Rig]) -> None:
    rig = make("rocksdb")
    rig.append(*((seq, 0) for seq in range(12)), size=5 * KIB)
    (file,) = rig.store.persist()
    path, data = Path(file.path), Path(file.path).read_bytes()
    noticed: Counter[str] = Counter()
    for position in range(0, len(data), 1009):
        rig.store.close()
        path.unlink()
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x55]) + data[position + 1 :])
        try:
            rig.reopen([file])
            found = rig.read(0)
        except Exception as error:
            noticed[type(error).__name__] += 1
            assert path.name in str(error) or re.search(r"block \d+ of slice 0", str(error)), f"names neither: {error}"
        else:
            assert found == [*range(12)], "a byte that nobody reads"
    assert noticed.keys() <= {"CorruptBlock", "CorruptState"}
    assert noticed["CorruptBlock"] > 40
    rig.store.close()
    path.write_bytes(data)
    rig.reopen([file])


# -- superseding --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", WHEREVER)
def test_what_is_superseded_is_not_read_and_is_there_again_after_a_rollback(rig: Rig, where: str) -> None:
    rig.append((0, 0), (1, 10), (2, 0), (3, 0))
    WHEREVER[where](rig)
    rig.append((4, 0), folded=Folded(2, 0, 9))
    rig.store.supersede({0: (-1, 2)}, 4)
    rig.validate()
    assert rig.read(0, 10) == [4, 3, 1], "what stands for the first two has their place"
    assert rig.store.stats().blocks == 5
    rig.store.prestage([0, 10])
    rig.settle()
    rig.store.rollback(4)
    rig.validate()
    assert rig.read(0, 10) == [0, 2, 3, 1]


@pytest.mark.parametrize("where", WHEREVER)
def test_a_version_does_not_need_what_is_superseded(rig: Rig, where: str) -> None:
    rig.append((0, 0), (1, 10), (2, 0), (3, 0))
    files = rig.store.persist()
    rig.reopen(files) if where == "restored" else WHEREVER[where](rig)
    rig.append((4, 0), (5, 0), late=True)
    rig.append((6, 0), folded=Folded(5, 0, 9))
    rig.store.supersede({0: (0, 5)}, 6)
    files += rig.store.persist()
    holds = rig.store.files()
    assert sum(n for slices in holds.values() for n in slices.values()) == 3
    superseded = rig.store.superseded()
    rig.store.drop_superseded()
    rig.validate()
    assert rig.read(0, 10) == [0, 6, 1] and rig.store.stats().blocks == 3
    assert {seq for seq in range(7) for first, last in superseded if first <= seq <= last} <= {2, 3, 4, 5}
    rig.reopen([f for f in files if f.file_no in holds], superseded=superseded)
    rig.validate()
    assert rig.read(0, 10) == [0, 6, 1]
    assert rig.store.superseded() == superseded, "the files hold them still"
    assert rig.store.superseded(skip=[0]) == []


def test_what_nobody_will_read_is_not_written(make: Callable[..., Rig]) -> None:
    for kind in ("memory", "tiered"):
        rig = make(kind)
        rig.append(*((seq, 0) for seq in range(5)))
        rig.append((5, 0), folded=Folded(4, 0, 9))
        rig.store.supersede({0: (-1, 4)}, 5)
        (file,) = rig.store.persist()
        assert file.blocks == 1 and rig.store.superseded() == []


# -- everything in any order --------------------------------------------------------------------------------


EAGER = Limits(fan_in=2, worth_bytes=1, file_share=1.0, disk=100.0)
"""Merges whatever there is."""


class StoreMachine(RuleBasedStateMachine):
    """A store against a dict, with a disk that may break and versions to go back to."""

    def __init__(self, kind: str, keep: float) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory(prefix="aion-test-")
        folder = Path(self.temporary.name)
        self.rig = Rig(kind, folder, budget=12 * KIB, bucket_limit=4 * KIB, keep=keep, limits=EAGER)
        self.live: dict[int, int] = {}  # seq -> slice
        self.hidden: dict[int, int] = {}  # superseded, until the next commit
        self.next_seq = 0
        self.known: dict[int, SstFile] = {}
        # The last version: its files, its purged slices, what is superseded, its blocks, its next seq, their contents.
        self.version: Any = ([], frozenset(), [], {}, 0, {})
        self.generation = 0
        self.broken = self.was_broken = False

    slices = st.integers(0, 4)

    def slice_us(self, number: int) -> int:
        """Purged slices never come back: the numbers that were purged have new names."""
        return number * 1000 + self.generation

    def live_slices(self) -> list[int]:
        return sorted(set(self.live.values()))

    def arrival(self, seq: int) -> int:
        folded = self.rig.blocks[seq].header.folded
        return seq if folded is None else folded.last_seq

    def in_order(self, slices: Sequence[int]) -> list[int]:
        """Live blocks of these slices, by slice and in the order of arrival."""
        return [seq for _, _, seq in sorted((s, self.arrival(seq), seq) for seq, s in self.live.items() if s in slices)]

    @precondition(lambda self: self.live and not self.broken)
    @rule(data=st.data(), late=st.booleans(), count=st.integers(1, 2))
    def fold(self, data: st.DataObject, late: bool, count: int) -> None:
        """Some neighbours of a slice are superseded by a run of one block or two."""
        slice_us = data.draw(st.sampled_from(self.live_slices()))
        arrivals = sorted({self.arrival(seq) for seq in self.in_order([slice_us])})
        until = data.draw(st.sampled_from(arrivals))
        after = data.draw(st.sampled_from([-1, *(a for a in arrivals if a < until)]))
        old = [seq for seq in self.in_order([slice_us]) if after < self.arrival(seq) <= until]
        below = self.next_seq
        for part in range(count):
            self.rig.append((self.next_seq, slice_us), late=late, folded=Folded(until, part * 100, part * 100 + 99))
            self.next_seq += 1
        self.rig.store.supersede({slice_us: (after, until)}, below)
        self.live |= dict.fromkeys(range(below, self.next_seq), slice_us)
        self.hidden |= {seq: self.live.pop(seq) for seq in old}

    @rule(data=st.data(), low=st.integers(0, 250), below=st.none() | st.integers(0, 60))
    def read_some(self, data: st.DataObject, low: int, below: int | None) -> None:
        slices = self.live_slices()
        after = data.draw(st.integers(-1, max(self.next_seq, 0)))
        only = Only(dict.fromkeys(slices[:1], (after, after + 5)), [(low, low + 10)], below)
        wanted = []
        for seq in self.in_order(slices):
            folded = self.rig.blocks[seq].header.folded
            in_span = self.live[seq] not in slices[:1] or after < self.arrival(seq) <= after + 5
            meets = folded is None or (folded.low <= low + 10 and low <= folded.high)
            wanted += [seq] * (in_span and meets and (below is None or seq < below))
        assert [self.rig.check(stored) for stored in self.rig.store.read(slices, only=only)] == wanted

    @rule(number=slices, late=st.booleans(), size=st.sampled_from([0, 900, 3000]), count=st.integers(1, 4))
    def append(self, number: int, late: bool, size: int, count: int) -> None:
        total = sum(self.rig.blocks[seq].size_bytes for seq in self.live | self.hidden)
        if self.broken and total + count * max(size, KIB) > 12 * KIB:
            return  # it might be refused, or not: that depends on how far the I/O thread is
        for _ in range(count):
            self.rig.append((self.next_seq, self.slice_us(number)), late=late, size=size)
            self.live[self.next_seq] = self.slice_us(number)
            self.next_seq += 1

    @rule(data=st.data(), blocking=st.booleans())
    def read(self, data: st.DataObject, blocking: bool) -> None:
        chosen = data.draw(st.lists(st.sampled_from([*self.live_slices(), -1])))
        assert self.rig.read(*chosen, blocking=blocking) == self.in_order(chosen)

    @rule(data=st.data())
    def prestage(self, data: st.DataObject) -> None:
        self.rig.store.prestage(data.draw(st.lists(st.sampled_from([*self.live_slices(), -1]), unique=True)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), until=st.integers(0, 3))
    def read_half_way(self, data: st.DataObject, until: int) -> None:
        reader = self.rig.store.read(data.draw(st.lists(st.sampled_from(self.live_slices()), min_size=1)))
        for stored, _ in zip(reader, range(until), strict=False):
            self.rig.check(stored)
        reader.close()  # type: ignore[attr-defined]

    @rule(data=st.data())
    def destage(self, data: st.DataObject) -> None:
        self.rig.store.destage(data.draw(st.lists(st.sampled_from([*self.live_slices(), -1]), unique=True)))

    @rule(keep=st.sampled_from([0, 1500]), some=st.booleans())
    def press(self, keep: int, some: bool) -> None:
        """Memory pressure: windows leave memory, one or all of them, but for their first bytes."""
        views = sorted(self.rig.store.views(), key=lambda view: -view["m_bytes"])
        for view in views[:1] if some else views:
            self.rig.store.shrink(view["name"], keep)

    @rule()
    def flush(self) -> None:
        self.rig.store.flush()

    @rule()
    def settle(self) -> None:
        self.rig.settle()

    @rule(data=st.data())
    def purge(self, data: st.DataObject) -> None:
        self.forget(data.draw(st.lists(st.sampled_from([*self.live_slices(), -1]), max_size=2, unique=True)))

    def forget(self, slices: list[int]) -> None:
        self.rig.store.purge(slices)
        self.live = {seq: s for seq, s in self.live.items() if s not in slices}
        self.hidden = {seq: s for seq, s in self.hidden.items() if s not in slices}
        self.generation += 1

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        """As a shard commits: what is dead need not be written, and is purged when the rest is."""
        dead = data.draw(st.lists(st.sampled_from([*self.live_slices(), -1]), max_size=2, unique=True))
        try:
            files = self.rig.store.persist(skip=dead)
        except OSError:
            assert self.broken
            return
        self.known |= {f.file_no: f for f in files}
        self.forget(dead)
        holds = {no: slices for no, slices in self.rig.store.files().items() if any(slices.values())}
        alive = {s for slices in holds.values() for s, n in slices.items() if n}
        purged = frozenset(s for slices in holds.values() for s in slices) - alive
        superseded = self.rig.store.superseded(purged)
        self.rig.store.drop_superseded()
        self.hidden = {}
        contents = dict(self.rig.blocks)
        files = [self.known[no] for no in sorted(holds)]
        self.version = (files, purged, superseded, dict(self.live), self.next_seq, contents)

    @rule()
    def compact(self) -> None:
        """Only what is in the last version: nothing else is there for good."""
        self.rig.store.compact([f.file_no for f in self.version[0]])

    @precondition(lambda self: not self.broken)
    @rule()
    def rollback(self) -> None:
        self.next_seq = self.version[4]
        self.rig.store.rollback(self.next_seq)
        self.live = {seq: s for seq, s in (self.live | self.hidden).items() if seq < self.next_seq}
        self.hidden = {}

    @precondition(lambda self: not self.broken)
    @rule()
    def crash(self) -> None:
        files, purged, superseded, live, self.next_seq, contents = self.version
        self.rig.reopen(files, purged, superseded)
        self.live, self.hidden, self.rig.blocks = dict(live), {}, dict(contents)
        self.generation += 1

    @rule()
    def break_or_heal(self) -> None:
        self.rig.settle()
        (self.rig.heal_disk if self.broken else self.rig.break_disk)()
        self.broken, self.was_broken = not self.broken, True

    @invariant()
    def agrees(self) -> None:
        store = self.rig.store
        store.validate()  # type: ignore[attr-defined]
        stats = store.stats()
        total = sum(self.rig.blocks[seq].size_bytes for seq in self.live | self.hidden)
        assert stats.blocks == len(self.live) + len(self.hidden)
        assert max(stats.m_bucket_bytes, stats.p_bucket_bytes) <= total <= stats.m_bucket_bytes + stats.disk_only_bytes
        if self.rig.kind == "tiered" and not self.was_broken:
            assert self.rig.budget.peak_bytes <= 12 * KIB + 3 * KIB + 100

    def teardown(self) -> None:
        assert self.rig.read(*self.live_slices()) == self.in_order(self.live_slices())
        self.rig.close()
        self.temporary.cleanup()


@pytest.mark.parametrize(("kind", "keep"), [*((kind, 0.0) for kind in STORES), ("tiered", 0.3)])
def test_any_order_of_events(kind: str, keep: float) -> None:
    run_state_machine_as_test(lambda: StoreMachine(kind, keep), settings=settings(stateful_step_count=40))
