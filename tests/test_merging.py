"""Files are merged in the background, and nobody notices but the disk: reads, versions and crashes go on as before."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import state_backends.checkpoint as checkpoint
import state_backends.p_bucket as p_bucket
from aion.errors import CorruptBlock
from state_backends.block import Block
from state_backends.compaction import Limits
from state_backends.io_thread import Priority, Steps
from state_backends.manifest import load
from state_backends.merging import OVERDUE_COMMITS
from state_backends.p_bucket import PBucket
from state_backends.retention import MERGED
from tests.test_checkpoint import Host, in_the_way
from tests.test_io_thread import PATIENCE, Gate
from tests.test_store_contract import KIB, Rig, make, make_block

__all__ = ["make"]

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


# -- blocks ---------------------------------------------------------------------------------------------------


def test_small_files_become_one_with_the_same_blocks(rig: Rig) -> None:
    before = {seq: bytes(block.data) for seq, block in rig.blocks.items()}
    assert len(rig.store.files()) == 8
    merge(rig)
    (number,) = rig.store.files()
    assert number == 8, "a new number"
    assert rig.store.files() == {8: {0: 2, 1: 4, 2: 4, 3: 4, 4: 2}}
    assert rig.read(*range(5)) == ALL
    assert {seq: bytes(b.data) for seq, b in rig.store.read(range(5))} == before
    assert rig.store.merges == 1 and rig.store.merged_bytes == sum(b.size_bytes for b in rig.blocks.values())  # type: ignore[attr-defined]
    (new,) = [f for f in rig.store.persist() if f.file_no == 8]
    assert new.path.endswith(f"{MERGED}.sst") and new.blocks == 16
    assert 0 < rig.p_bucket.disk_bytes() <= 2 * Path(new.path).stat().st_size, "RocksDB has let go of the others"
    assert len(rig.durable()) == 9, "for good they are retention's"


def test_a_merged_file_is_restored_like_any_other(rig: Rig) -> None:
    merge(rig)
    files = rig.store.persist()
    rig.reopen(files, frozenset([1]))
    assert rig.read(*range(5)) == [seq for seq in ALL if seq not in (1, 3, 4, 6)]
    rig.validate()


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

    def late(file_no: int, slice_us: int, seq: int) -> Steps[Block]:
        if not moved:
            moved.append(file_no)
            rig.store.compact([])
            for _ in rig.p_bucket.drop(*range(8)):
                pass
        return fetch(file_no, slice_us, seq)

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
    purged = frozenset(s for slices in holds.values() for s, n in slices.items() if not n)
    assert purged <= {1, 3}
    rig.reopen([f for f in files if f.file_no in holds], purged)
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
    assert rig.p_bucket.disk_bytes() == 0


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
    before = rig.p_bucket.disk_bytes()
    rig.store.purge([0, 1, 3])
    merge(rig)
    assert rig.p_bucket.disk_bytes() < before / 2
    assert rig.read(*range(4)) == [*range(2, 40, 4)]


# -- blocks that are damaged ----------------------------------------------------------------------------------


def damaged(block: Block) -> Block:
    data = bytearray(bytes(block.data))
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
    assert rig.store.failed_merges == 1 and rig.durable() == before  # type: ignore[attr-defined]
    rig.append((16, 9), (17, 9), size=2 * KIB)
    rig.store.persist()
    for _ in range(4):  # it is tried again, without that file
        merge(rig)
    assert 3 in rig.store.files() and len(rig.store.files()) == 2
    assert [seq for seq, _ in rig.store.read(range(5))] == ALL


def test_a_file_that_cannot_be_read_stays_as_it_is(rig: Rig) -> None:
    fetch = rig.p_bucket.fetch

    def failing(file_no: int, slice_us: int, seq: int) -> Steps[Block]:
        if seq == 9:
            raise CorruptBlock("block 9 of slice 3 in file 4: damaged")
        return fetch(file_no, slice_us, seq)

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
    assert 3 <= rig.store.failed_merges <= 6  # type: ignore[attr-defined]
    assert rig.read(*range(5)) == ALL
    rig.heal_disk()
    for _ in range(70):
        rig.store.compact(rig.store.files())
        rig.settle()
    assert len(rig.store.files()) == 1
    assert rig.read(*range(5)) == ALL


# -- the I/O thread -------------------------------------------------------------------------------------------


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
            stop = half_way.store._stop_merging  # type: ignore[attr-defined]
            half_way.store._stop_merging = lambda: (stop(), stopped.set())  # type: ignore[attr-defined]
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
    stop = rig.store._stop_merging  # type: ignore[attr-defined]
    rig.store._stop_merging = lambda: (stop(), stopped.set())  # type: ignore[attr-defined]

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
    rig.store = type(rig.store)(rig.p_bucket, rig.io, rig.budget, **rig.options)  # type: ignore[call-arg]
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


# -- versions -------------------------------------------------------------------------------------------------


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Callable[..., Host]]:
    made: list[Host] = []

    def make(**options: Any) -> Host:
        made.append(Host("rocksdb", tmp_path / str(len(made)), limits=LIMITS, **options))
        return made[-1]

    yield make
    for host in made:
        host.stop()


def settle(host: Host) -> None:
    def nothing() -> Steps[None]:
        return
        yield 0

    host.io.submit(Priority.MAINTENANCE, nothing()).result()


def commits(host: Host, count: int, token: str | None = None, begin: int = 0) -> list[str]:
    """Versions of one block more each, of slice seq // 4."""
    tokens: list[str] = []
    for i in range(begin, begin + count):
        tokens.append(host.commit(tokens[-1] if tokens else token, (i, i // 4)))
    settle(host)
    return tokens


def named(host: Host, token: str) -> set[str]:
    return host.named_files(token)


def everything(host: Host, token: str) -> list[int]:
    return host.seqs(token, *range(100))


def test_the_next_version_names_what_was_merged_and_older_ones_their_files(hosts: Callable[..., Host]) -> None:
    host = hosts()
    tokens = commits(host, 8)
    last = host.commit(tokens[-1], (8, 2))
    assert len(named(host, tokens[-1])) == 8
    assert len([name for name in named(host, last) if MERGED in name]) == 1
    assert len(named(host, last)) == 2, "and the batch's own"
    assert host.files() == named(host, tokens[-1]) | named(host, last)
    for token, count in [(tokens[3], 4), (tokens[-1], 8), (last, 9), (tokens[0], 1)]:
        assert everything(host, token) == [*range(count)]
    host.restart()
    for token, count in [(last, 9), (tokens[-1], 8)]:
        assert everything(host, token) == [*range(count)]


def test_what_was_merged_goes_when_no_version_needs_it(hosts: Callable[..., Host]) -> None:
    host = hosts(retain=3)
    tokens = commits(host, 8)
    inputs = named(host, tokens[-1])
    for i in range(8, 12):
        assert (inputs <= host.files()) == (i < 11), "three versions after the one that names them last"
        tokens.append(host.commit(tokens[-1], (i, i // 4)))
    settle(host)
    assert inputs.isdisjoint(host.files())
    assert everything(host, tokens[-1]) == [*range(12)]


@pytest.mark.parametrize("how", ["the manifest cannot be written", "aborted", "superseded", "files cannot be written"])
def test_an_attempt_that_fails_does_not_take_along_what_was_merged(hosts: Callable[..., Host], how: str) -> None:
    host = hosts()
    tokens = commits(host, 8)
    attempt, _ = host.open(tokens[-1])
    host.append(attempt, (8, 2))
    if "written" in how:
        folder = "manifests" if "manifest" in how else "files"
        with in_the_way(host.folder / "state" / folder), pytest.raises(OSError):
            host.shard.commit(attempt, {"next_seq": 9})
    if how != "superseded":
        host.shard.abort(attempt)
    assert everything(host, tokens[-1]) == [*range(8)]
    last = host.commit(tokens[-1], (8, 2))
    assert everything(host, last) == [*range(9)]
    assert any(MERGED in name for name in named(host, last))
    assert host.files() == host.named_files(*tokens, last), "nothing of the attempt is left"
    host.restart()
    assert everything(host, last) == [*range(9)]
    assert everything(host, tokens[-1]) == [*range(8)]


def test_what_no_version_named_before_a_crash_is_an_orphan_that_is_deleted(hosts: Callable[..., Host]) -> None:
    host = hosts(retain=2)
    tokens = commits(host, 8)
    folder = host.folder / "state" / "files"
    (orphan,) = [p for p in folder.glob("*") if MERGED in p.name]
    part = folder / "0000000003-attempt-0.part"
    part.write_bytes(b"half of a file")
    half = host.folder / "state" / "manifests" / "attempt-0.part"
    half.write_bytes(b"{")
    crashed = hosts(retain=2)
    shutil.copytree(host.folder / "state", crashed.folder / "state")
    crashed.blocks = dict(host.blocks)
    assert everything(crashed, tokens[-1]) == [*range(8)]
    for i in range(8, 12):
        tokens.append(crashed.commit(tokens[-1], (i, i // 4)))
        settle(crashed)
    assert everything(crashed, tokens[-1]) == [*range(12)]
    left = {p.name for kind in ("files", "manifests") for p in (crashed.folder / "state" / kind).glob("*")}
    assert left.isdisjoint({orphan.name, part.name, half.name})


def test_a_file_of_which_nothing_is_in_the_version_is_deleted_with_the_commit(hosts: Callable[..., Host]) -> None:
    host = hosts()
    token = host.commit(None, (0, 0))
    attempt, _ = host.open(token)
    host.append(attempt, (1, 10), late=True)
    host.shard.destage(attempt, [10])
    assert host.shard.store is not None
    host.shard.store.flush()
    settle(host)
    assert len(host.files()) == 2
    host.shard.purge(attempt, [10])
    host.shard.commit(attempt, {"next_seq": 2})
    assert host.files() == named(host, attempt)


def test_old_versions_are_looked_into_once(hosts: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit costs what is new: not the manifests that are kept, nor a look at each of the folder's files."""
    host = hosts(retain=10)
    tokens = commits(host, 12)
    host.restart()
    tokens.append(host.commit(tokens[-1], (12, 3)))  # looks around once
    loads, lists = Counter[str](), Counter[str]()
    glob = Path.glob

    def noting(data: bytes, name: str) -> Any:
        loads[name] += 1
        return load(data, name)

    monkeypatch.setattr(checkpoint, "load", noting)
    monkeypatch.setattr(Path, "glob", lambda path, pattern: (lists.update([path.name]), glob(path, pattern))[1])
    for i in range(13, 42):
        tokens.append(host.commit(tokens[-1], (i, i // 4)))
    assert loads == {}
    assert lists == {"files": 2, "manifests": 2}
    assert host.shard.rebuilds == 1


def test_a_file_that_cannot_be_deleted_is_deleted_later(
    hosts: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = hosts(retain=2)
    tokens = [host.commit(None, (0, 0))]
    unlink = Path.unlink

    def refusing(path: Path, missing_ok: bool = False) -> None:
        if path.suffix in (".json", ".sst"):
            raise OSError(5, "Input/output error")
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", refusing)
        for i in range(1, 5):
            tokens.append(host.commit(tokens[-1], (i, i), purge=[i - 1]))  # the version is made all the same
    assert len(host.manifests()) == 5
    tokens.append(host.commit(tokens[-1], (5, 5), purge=[4]))
    assert host.manifests() == set(tokens[-2:])
    assert host.files() == host.named_files(*tokens[-2:])


# -- a long run -----------------------------------------------------------------------------------------------


@pytest.fixture
def quick_folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a folder: the run is about what lies there, not about how fast it is synced."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or shutil.disk_usage(shm).free < 256 << 20:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="aion-test-", dir=shm) as folder:
        yield Path(folder)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_disk_use_stays_within_twice_the_live_bytes(quick_folder: Path) -> None:
    """2,000 small batches whose windows live for 300 of them, one block in twenty late, 20 versions kept."""
    batches, lifetime, size = 2000, 300, 4 * KIB
    host = Host("tiered", quick_folder, retain=20, budget=1 << 20)
    live: Counter[int] = Counter()
    token: str | None = None
    most_files, manifests = 0, list[int]()
    for i in range(batches):
        attempt, _ = host.open(token)
        blocks = []
        for seq in range(4 * i, 4 * i + 4):
            slice_us = i if seq % 20 else i - min(i, seq // 20 % (lifetime - 1))
            block = make_block(slice_us, seq, size)
            blocks.append((seq, slice_us != i, block))
            live[slice_us] += block.size_bytes
        host.shard.append(attempt, blocks)
        host.shard.destage(attempt, [i - 2])
        host.shard.purge(attempt, [i - lifetime])
        live.pop(i - lifetime, None)
        host.shard.commit(attempt, {"next_seq": 4 * i + 4})
        token = attempt
        if i > lifetime and i % 20 == 0:
            assert size_of(quick_folder / "state") <= 2 * live.total(), f"batch {i}"
            most_files = max(most_files, len(list((quick_folder / "state" / "files").glob("*"))))
            manifests.append(host.manifest(token).stat().st_size)
    assert most_files < 100, "of the last 300 batches, and 20 versions"
    assert max(manifests[len(manifests) // 2 :]) < 1.2 * max(manifests[: len(manifests) // 2])
    assert max(manifests) < 16 * KIB
    assert host.shard.store is not None
    stats = host.shard.store.stats()
    assert stats.blocks == sum(n // (size - 400) for n in live.values())
    assert host.shard.store.merged_bytes < 2 * batches * 4 * size  # type: ignore[attr-defined]
    host.restart()
    attempt, _ = host.open(token)
    found = [seq for seq, _ in host.shard.read(attempt, sorted(live))]
    assert len(found) == len(set(found)) == stats.blocks
    host.stop()
