"""Disks that fail, and files that are damaged."""

from __future__ import annotations

import contextlib
import re
import resource
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aion.errors import CorruptState, DiskError
from tests.stores.rig import KIB, Rig


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
    rig = make("rocksdb", budget=80 * KIB)  # of which the ledger takes 16
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


@pytest.mark.slow
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
