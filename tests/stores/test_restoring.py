"""Persisting, and a store made again from its files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from tests.io_thread.rig import PATIENCE, Gate
from tests.stores.rig import Rig


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
    assert rig.store.files() == {f.file_no: ((0, f.blocks - 1),) for f in (*first, *second)}


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


def test_dead_blocks_of_a_file_are_not_restored(rig: Rig) -> None:
    rig.append((0, 0), (1, 10), (2, 20))
    (file,) = rig.store.persist()
    rig.reopen([file], {file.file_no: ((1, 1),)})
    assert rig.read(0, 10, 20) == [1]
    assert rig.store.files() == {file.file_no: ((1, 1),)}
    assert rig.store.files(skip=[10]) == {}
    rig.store.purge([10])
    assert rig.store.files() == {}


def test_files_do_not_change_once_they_are_written(rig: Rig) -> None:
    rig.append((0, 0), (1, 10))
    files = rig.store.persist()
    before = rig.durable()
    assert set(before) == {Path(f.path).name for f in files}
    rig.store.purge([0])
    rig.reopen(files, {f.file_no: ((f.blocks - 1, f.blocks - 1),) for f in files})
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
