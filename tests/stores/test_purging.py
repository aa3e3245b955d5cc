"""Blocks that nobody needs any more: they were purged, or replaced by compaction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from aion.errors import StateError
from state_backends.format.block import Compacted
from state_backends.store.p_bucket import PBucket
from tests.io_thread.rig import Gate
from tests.stores.rig import WHEREVER, Rig, make_block


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
    assert rig.rocksdb_bytes() == 0, "RocksDB gives back the space"


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


@pytest.mark.parametrize("where", WHEREVER)
def test_replaced_blocks_are_not_read_and_are_back_after_a_rollback(rig: Rig, where: str) -> None:
    rig.append((0, 0), (1, 10), (2, 0), (3, 0))
    WHEREVER[where](rig)
    rig.append((4, 0), compacted=Compacted(2, 0, 9))
    rig.store.replace({0: (-1, 2)}, 4)
    rig.validate()
    assert rig.read(0, 10) == [4, 3, 1], "what stands for the first two has their place"
    assert rig.store.stats().blocks == 5
    rig.store.prestage([0, 10])
    rig.settle()
    rig.store.rollback(4)
    rig.validate()
    assert rig.read(0, 10) == [0, 2, 3, 1]


@pytest.mark.parametrize("where", WHEREVER)
def test_a_rollback_brings_back_only_what_its_blocks_replaced(rig: Rig, where: str) -> None:
    rig.append((0, 0), (1, 0), (2, 10), (3, 10))
    WHEREVER[where](rig)
    rig.append((4, 0), compacted=Compacted(1, 0, 9))
    rig.store.replace({0: (-1, 1)}, 4)
    rig.append((5, 10), compacted=Compacted(3, 0, 9))
    rig.store.replace({10: (-1, 3)}, 5)
    rig.append((6, 0), compacted=Compacted(1, 0, 9))
    rig.store.replace({0: (-1, 1)}, 6)
    rig.store.rollback(5)
    rig.validate()
    assert rig.read(0, 10) == [4, 2, 3]
    rig.store.drop_replaced()
    rig.validate()
    assert rig.read(0, 10) == [4, 2, 3]


@pytest.mark.parametrize("where", WHEREVER)
def test_a_version_does_not_need_replaced_blocks(rig: Rig, where: str) -> None:
    rig.append((0, 0), (1, 10), (2, 0), (3, 0))
    files = rig.store.persist()
    rig.reopen(files) if where == "restored" else WHEREVER[where](rig)
    rig.append((4, 0), (5, 0), late=True)
    rig.append((6, 0), compacted=Compacted(5, 0, 9))
    rig.store.replace({0: (0, 5)}, 6)
    files += rig.store.persist()
    holds = rig.store.files()
    assert sum(last - first + 1 for runs in holds.values() for first, last in runs) == 3
    rig.store.drop_replaced()
    rig.validate()
    assert rig.read(0, 10) == [0, 6, 1] and rig.store.stats().blocks == 3
    assert rig.store.files() == holds
    rig.reopen(files, holds)
    rig.validate()
    assert rig.read(0, 10) == [0, 6, 1]
    assert rig.store.files() == holds


def test_what_nobody_will_read_is_not_written(make: Callable[..., Rig]) -> None:
    for kind in ("memory", "tiered"):
        rig = make(kind)
        rig.append(*((seq, 0) for seq in range(5)))
        rig.append((5, 0), compacted=Compacted(4, 0, 9))
        rig.store.replace({0: (-1, 4)}, 5)
        (file,) = rig.store.persist()
        assert file.blocks == 1 and rig.store.files() == {file.file_no: ((0, 0),)}


@pytest.mark.parametrize("where", WHEREVER)
def test_a_slice_that_was_purged_may_get_blocks_again(rig: Rig, where: str) -> None:
    rig.append((0, 0), (1, 10), (2, 20))
    files = rig.store.persist()
    rig.reopen(files) if where == "restored" else WHEREVER[where](rig)
    rig.store.purge([10])
    rig.append((3, 10))
    files += rig.store.persist()
    assert rig.read(0, 10, 20) == [0, 3, 2]
    rig.validate()
    rig.reopen(files, rig.store.files())
    assert rig.read(0, 10, 20) == [0, 3, 2]
    rig.validate()
