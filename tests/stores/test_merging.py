"""Files are merged in the background, and nobody notices but the disk."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import state_backends.store.p_bucket as p_bucket
from aion.errors import CorruptBlock
from state_backends.backends import STORES
from state_backends.files.names import MERGED
from state_backends.format.block import Block, Compacted
from state_backends.store.io_thread import Priority, Steps
from state_backends.store.merge_choice import Limits
from state_backends.store.merge_turns import OVERDUE_COMMITS
from state_backends.store.options import StoreOptions
from state_backends.store.p_bucket import PBucket
from tests.io_thread.rig import PATIENCE, Gate
from tests.stores.rig import KIB, Rig

pytestmark = pytest.mark.usual_sizes

LIMITS = Limits(worth_bytes=1, file_share=1.0, disk=100.0)
"""Merges what is worth it, however little there is."""


@pytest.fixture
def rig(make: Callable[..., Rig]) -> Rig:
    """Eight files on disk, of two blocks each: seqs 0 to 15, slices 0 to 3, none in memory."""
    rig = make("rocksdb", limits=LIMITS)
    fill(rig)
    return rig


def fill(rig: Rig, files: int = 8) -> None:
    for i in range(files):
        rig.append((2 * i, i // 2), (2 * i + 1, i // 2 + 1), size=2 * KIB)
        rig.store.persist()
    rig.to_disk(*range(10))


def merge(rig: Rig) -> None:
    """Merges once, and uses what came of it."""
    rig.store.compact(rig.store.files())
    rig.settle()
    rig.store.compact([])
    rig.settle()
    rig.validate()


ALL = [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15]


def test_small_files_become_one_with_the_same_blocks(rig: Rig) -> None:
    before = {seq: bytes(block.stored) for seq, block in rig.blocks.items()}
    assert len(rig.store.files()) == 8
    merge(rig)
    (number,) = rig.store.files()
    assert number == 8, "a new number"
    assert rig.store.files() == {8: ((0, 15),)}
    assert rig.read(*range(5)) == ALL
    assert {seq: bytes(b.stored) for seq, b in rig.store.read(range(5))} == before
    assert rig.store.stats().merges == 1 and rig.store.stats().merged_bytes == sum(
        b.size_bytes for b in rig.blocks.values()
    )
    (new,) = [f for f in rig.store.persist() if f.file_no == 8]
    assert new.path.endswith(f"{MERGED}.sst") and new.blocks == 16
    assert 0 < rig.rocksdb_bytes() <= 2 * Path(new.path).stat().st_size, "RocksDB has let go of the others"
    assert len(rig.durable()) == 9, "for good they are retention's"


def test_a_merged_file_is_restored_like_any_other(rig: Rig) -> None:
    merge(rig)
    files = rig.store.persist()
    rig.reopen(files, {8: ((0, 1), (6, 15))})
    assert rig.read(*range(5)) == [seq for seq in ALL if seq not in (1, 3, 4, 6)]
    rig.validate()


def test_blocks_that_stand_for_earlier_ones_are_merged_with_those_that_came_meanwhile(rig: Rig) -> None:
    """By their arrival they come before blocks of lower numbers; a file is sorted by numbers."""
    rig.append((16, 1), (17, 1), compacted=Compacted(3, 0, 9))
    rig.store.replace({1: (-1, 3)}, 16)
    rig.store.drop_replaced()
    rig.store.persist()
    merge(rig)
    stats = rig.store.stats()
    assert (stats.merges, stats.failed_merges, len(rig.store.files())) == (1, 0, 1)
    assert rig.read(*range(5)) == [0, 2, 16, 17, *ALL[4:]]


def test_nothing_is_merged_that_no_version_names(rig: Rig) -> None:
    rig.append(*((20 + i, 9) for i in range(4)))
    rig.store.persist()
    rig.store.compact(range(7))
    rig.settle()
    rig.store.compact([])
    assert len(rig.store.files()) == 9, "seven of the eight are too few"
    merge(rig)
    assert rig.read(9) == [20, 21, 22, 23]


def test_what_was_merged_is_used_by_the_next_persist(rig: Rig) -> None:
    rig.store.compact(rig.store.files())
    rig.settle()
    assert len(rig.store.files()) == 8, "not in the middle of somebody's work"
    (new,) = rig.store.persist()
    assert list(rig.store.files()) == [new.file_no]


def test_a_reader_goes_on_while_its_blocks_move(rig: Rig) -> None:
    reader = rig.store.read(range(5))
    found = [rig.check(next(reader)) for _ in range(3)]
    merge(rig)
    found += [rig.check(next(reader)) for _ in range(3)]
    merge(rig)  # of one file: nothing
    found += [rig.check(stored) for stored in reader]
    assert found == ALL


def test_a_read_that_was_queued_before_the_move_finds_its_block(rig: Rig) -> None:
    rig.store.compact(rig.store.files())
    rig.settle()
    found: list[int] = []
    entered = threading.Event()
    submit = rig.io.submit

    def noting(priority: Priority, steps: Steps[Any]) -> Any:
        request = submit(priority, steps)
        if priority is Priority.READ:
            entered.set()
        return request

    rig.io.submit = noting  # type: ignore[method-assign]
    reader = threading.Thread(target=lambda: found.extend(rig.read(*range(5))))
    with Gate(rig.io):
        entered.clear()
        reader.start()
        assert entered.wait(PATIENCE), "it is queued, with the old place of its block"
        rig.store.compact([])  # moves the blocks; the old files are dropped after what is queued
    reader.join(PATIENCE)
    assert found == ALL


def test_a_read_of_a_file_that_is_gone_is_sent_to_where_the_block_is(rig: Rig) -> None:
    """With several I/O threads a file may be dropped between the look for it and the read."""
    rig.store.compact(rig.store.files())
    rig.settle()
    fetch, moved = rig.p_bucket.fetch, []

    def late(file_no: int, blocks: Sequence[tuple[int, int]], size_bytes: int = 0) -> Steps[list[Block]]:
        if not moved:
            moved.append(file_no)
            rig.store.compact([])
            for _ in rig.p_bucket.drop(*range(8)):
                pass
        return fetch(file_no, blocks, size_bytes)

    rig.p_bucket.fetch = late  # type: ignore[method-assign]
    assert rig.read(0) == [0, 2]
    assert moved == [0]


def test_what_is_being_staged_moves_too(make: Callable[..., Rig]) -> None:
    rig = make("tiered", limits=LIMITS)
    fill(rig)
    rig.store.compact(rig.store.files())
    rig.settle()
    with Gate(rig.io):
        rig.store.prestage([0, 1])
        rig.store.compact([])
        rig.validate()
    rig.settle()
    rig.validate()
    assert rig.store.stats().m_bucket_bytes > 0
    assert rig.read(*range(5)) == ALL


def test_what_is_in_memory_as_well_moves_too(make: Callable[..., Rig], kind: str = "memory") -> None:
    rig = make(kind, limits=LIMITS)
    fill(rig)
    merge(rig)
    assert len(rig.store.files()) == 1
    rig.reopen(rig.store.persist())
    assert rig.read(*range(5)) == ALL


@pytest.mark.parametrize("when", ["before it begins", "while it is copied", "before it is used"])
def test_what_is_purged_meanwhile_does_not_come_back(rig: Rig, when: str) -> None:
    fetch = rig.p_bucket.fetch
    fetched = 0

    def purging(*where: int) -> Steps[Block]:
        nonlocal fetched
        fetched += 1
        if fetched == 6 and when == "while it is copied":
            rig.store.purge([1, 3])
        return fetch(*where)

    rig.p_bucket.fetch = purging  # type: ignore[method-assign]
    with Gate(rig.io):
        rig.store.compact(rig.store.files())
        if when == "before it begins":
            rig.store.purge([1, 3])
    rig.settle()
    if when == "before it is used":
        rig.store.purge([1, 3])
    left = [0, 2, 5, 7, 8, 10, 13, 15]
    assert rig.read(*range(5)) == left
    files = rig.store.persist()
    rig.settle()
    rig.validate()
    holds = rig.store.files()
    assert sum(last - first + 1 for runs in holds.values() for first, last in runs) == len(left)
    rig.reopen(files, holds)
    assert rig.read(*range(5)) == left


def test_a_merge_of_what_is_all_purged_by_then_leaves_nothing(make: Callable[..., Rig]) -> None:
    rig = make("rocksdb", limits=LIMITS)
    fill(rig)
    rig.store.compact(rig.store.files())
    rig.settle()
    rig.store.purge(range(5))
    files = rig.store.persist()
    rig.settle()
    assert [f.blocks for f in files] == [16] and rig.store.files() == {}, "whose version it is may delete it"
    assert rig.rocksdb_bytes() == 0


def test_a_rollback_leaves_what_was_merged(rig: Rig) -> None:
    rig.store.compact(rig.store.files())
    rig.settle()
    rig.append((16, 9), late=True)
    rig.store.flush()
    rig.store.rollback(16)
    rig.append((16, 9))
    rig.store.rollback(16)
    rig.settle()
    files = rig.store.persist()
    rig.store.rollback(16)
    assert [f.file_no for f in files] == list(rig.store.files())
    rig.reopen(files)
    assert rig.read(*range(10)) == ALL


def test_purged_ranges_are_reclaimed(make: Callable[..., Rig]) -> None:
    rig = make("rocksdb", limits=LIMITS)
    rig.append(*((seq, seq % 4) for seq in range(40)), size=2 * KIB)
    rig.store.persist()
    before = rig.rocksdb_bytes()
    rig.store.purge([0, 1, 3])
    merge(rig)
    assert rig.rocksdb_bytes() < before / 2
    assert rig.read(*range(4)) == [*range(2, 40, 4)]


def damaged(block: Block) -> Block:
    data = bytearray(bytes(block.stored))
    data[-1] ^= 1
    return Block(block.header, bytes(data))


def test_a_damaged_block_stays_in_its_file_and_is_named(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    """Copied, it would get a whole file around it: RocksDB's checksums would be right."""
    rig = make("rocksdb", limits=LIMITS)
    append = rig.store.append
    rig.store.append = lambda seq, block, late: append(seq, damaged(block) if seq == 6 else block, late=late)  # type: ignore[method-assign, assignment, misc]
    fill(rig)
    before = rig.durable()
    with caplog.at_level(logging.ERROR):
        merge(rig)
    assert "block 6 of slice 1 in file 3" in caplog.text
    assert rig.store.stats().failed_merges == 1 and rig.durable() == before
    rig.append((16, 9), (17, 9), size=2 * KIB)
    rig.store.persist()
    for _ in range(4):  # it is tried again, without that file
        merge(rig)
    assert 3 in rig.store.files() and len(rig.store.files()) == 2
    assert [seq for seq, _ in rig.store.read(range(5))] == ALL


def test_a_file_that_cannot_be_read_stays_as_it_is(rig: Rig) -> None:
    fetch = rig.p_bucket.fetch

    def failing(file_no: int, blocks: Sequence[tuple[int, int]], size_bytes: int = 0) -> Steps[list[Block]]:
        if blocks[0][1] == 9:
            raise CorruptBlock("block 9 of slice 3 in file 4: damaged")
        return fetch(file_no, blocks, size_bytes)

    before = rig.durable()
    rig.p_bucket.fetch = failing  # type: ignore[method-assign]
    merge(rig)
    rig.p_bucket.fetch = fetch  # type: ignore[method-assign]
    assert rig.durable() == before
    assert rig.read(*range(5)) == ALL


def test_a_merge_that_fails_is_tried_again_ever_more_seldom(rig: Rig) -> None:
    rig.break_disk()
    for _ in range(40):
        rig.store.compact(rig.store.files())
        rig.settle()
    assert 3 <= rig.store.stats().failed_merges <= 6
    assert rig.read(*range(5)) == ALL
    rig.heal_disk()
    for _ in range(70):
        rig.store.compact(rig.store.files())
        rig.settle()
    assert len(rig.store.files()) == 1
    assert rig.read(*range(5)) == ALL


def test_merging_steps_aside_for_everything_else(rig: Rig) -> None:
    done: list[str] = []
    fetch = rig.p_bucket.fetch

    def noting(*where: int) -> Steps[Block]:
        done.append("read")
        if len(done) == 3:
            rig.io.submit(Priority.DESTAGE, note("destage"))
            rig.io.submit(Priority.READ, note("urgent"))
        return fetch(*where)

    def note(what: str) -> Steps[None]:
        done.append(what)
        return
        yield 0

    rig.p_bucket.fetch = noting  # type: ignore[method-assign]
    merge(rig)
    assert done == [*["read"] * 3, "urgent", "destage", *["read"] * 13], "one block, at most, is waited for"


def test_a_merge_that_is_overdue_takes_its_turn(rig: Rig) -> None:
    files = list(rig.store.files())
    with Gate(rig.io):
        for _ in range(OVERDUE_COMMITS + 1):
            rig.store.compact(files)
        rig.append((16, 9), late=True)
        rig.store.flush()
    rig.settle()
    merged, late = sorted(rig.store.persist())
    assert MERGED in merged.path and late.file_no == merged.file_no + 1, "the merge went first"


def test_closing_gives_up_a_merge(rig: Rig, make: Callable[..., Rig]) -> None:
    before = rig.durable()
    rig.store.compact(rig.store.files())
    with Gate(rig.io, Priority.MAINTENANCE):
        pass
    rig.store.close()
    rig.settle()
    assert rig.durable() == before
    rig.store = rig.open()
    half_way = make("rocksdb", limits=LIMITS)
    fill(half_way)
    fetch, count = half_way.p_bucket.fetch, Counter[str]()
    closing: list[threading.Thread] = []

    def closes(*where: int) -> Steps[Block]:
        count["fetch"] += 1
        if count["fetch"] == 4:
            stopped = threading.Event()
            stop = half_way.store._merger.stop
            half_way.store._merger.stop = lambda: (stop(), stopped.set())
            closing.append(threading.Thread(target=half_way.store.close))
            closing[0].start()
            assert stopped.wait(PATIENCE)
        return fetch(*where)

    before = half_way.durable()
    half_way.p_bucket.fetch = closes  # type: ignore[method-assign]
    half_way.store.compact(half_way.store.files())
    half_way.settle()
    closing[0].join(PATIENCE)
    assert count["fetch"] == 4, "no step more"
    assert half_way.durable() == before, "and no half of a file"
    half_way.store = half_way.open()


def test_closing_while_a_merge_ends_leaves_no_file(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    before, sync = rig.durable(), p_bucket.sync
    closing = threading.Thread(target=rig.store.close)
    stopped = threading.Event()
    stop = rig.store._merger.stop
    rig.store._merger.stop = lambda: (stop(), stopped.set())

    def closes(path: Path) -> None:
        sync(path)
        closing.start()
        assert stopped.wait(PATIENCE)

    monkeypatch.setattr(p_bucket, "sync", closes)
    rig.store.compact(rig.store.files())
    rig.settle()
    closing.join(PATIENCE)
    assert rig.durable() == before
    rig.store = rig.open()


def test_a_store_without_versions_lets_go_of_what_was_merged_at_once(tmp_path: Path) -> None:
    rig = Rig("rocksdb", tmp_path, limits=LIMITS)
    rig.store.close()
    rig.p_bucket = PBucket(tmp_path / "files", tmp_path / "live", durable=False)
    rig.store = STORES["rocksdb"](rig.p_bucket, rig.io, rig.budget, StoreOptions(**rig.options))
    for i in range(80):
        rig.append((2 * i, i), (2 * i + 1, i), size=KIB)
        rig.store.flush()
        rig.store.compact()
        rig.settle()
        if i >= 40:
            rig.store.purge([i - 40])
    rig.store.compact([])
    rig.settle()
    live = sum(b.size_bytes for seq, b in rig.blocks.items() if seq >= 80)
    assert rig.read(*range(80)) == [*range(80, 160)]
    assert len(rig.durable()) == len(rig.store.files()) < 20
    assert sum(map(len, rig.durable().values())) <= 2 * live + 20 * 5 * KIB, "each file has 5 KiB of its own"
    rig.close()
