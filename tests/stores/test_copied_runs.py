"""Keyed values on a file system without hard links: RocksDB gets copies of the runs, block by block."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from state_backends.files import storage
from state_backends.files.names import SstFile
from state_backends.store.map.run_files import RunFiles
from state_backends.store.p_bucket import PBucket
from tests.stores.rig import make_block

VALUES = {b"%06d" % n: os.urandom(100) for n in range(2000)}
BLOCK = 4 << 10


def done(steps: Generator[int, None, Any]) -> tuple[list[int], Any]:
    """The bytes of each step, and what they led to."""
    sizes = []
    while True:
        try:
            sizes.append(next(steps))
        except StopIteration as end:
            return sizes, end.value


@pytest.fixture
def files(tmp_path: Path) -> Iterator[RunFiles]:
    p_bucket = PBucket(tmp_path / "files", tmp_path / "live", durable=True)
    made = RunFiles(p_bucket, tmp_path / "keyed")
    yield made
    made.close()
    p_bucket.close()
    assert not (tmp_path / "keyed").exists()


@pytest.fixture
def runs(files: RunFiles, monkeypatch: pytest.MonkeyPatch) -> tuple[SstFile, ...]:
    """Two runs, and from now on no links."""
    items = list(VALUES.items())
    made = tuple(done(files.write(part))[1] for part in (items[:1000], items[1000:]))

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "this file system has no links")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(storage, "COPY_BYTES", BLOCK)
    return made


def left(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in (".ingest", ".part")]


@pytest.mark.parametrize("how", ["adopt", "refresh", "get", "page", "merge"])
def test_no_step_copies_more_than_a_block(tmp_path: Path, files: RunFiles, runs: tuple[SstFile, ...], how: str) -> None:
    files.runs = runs
    keys = list(VALUES)
    steps: dict[str, Generator[int, None, Any]] = {
        "adopt": files.adopt(),
        "refresh": files.refresh(),
        "get": files.get(keys[:1], 1),
        "page": files.page(b"", None),
        "merge": files.merge(runs, "-merged", oldest=True),
    }
    copied = [next(steps[how]) for _ in range(10)]
    assert max(copied) <= BLOCK
    sizes, _ = done(steps[how])
    assert sum(size == BLOCK for size in (*copied, *sizes)) >= sum(run.size_bytes // BLOCK for run in runs)
    assert done(files.get(keys, 1 << 30))[1] == list(VALUES.values())
    assert left(tmp_path) == []


def test_others_go_on_between_two_blocks(tmp_path: Path, files: RunFiles, runs: tuple[SstFile, ...]) -> None:
    """What is urgent need not wait for the copy, and what is copied may not be needed any more."""
    files.runs = runs
    slow, given_up, late = files.refresh(), files.refresh(), files.refresh()
    for steps in (slow, given_up, late):
        assert next(steps) == BLOCK
    assert done(files.get(list(VALUES), 1 << 30))[1] == list(VALUES.values())
    given_up.close()
    done(slow)
    files.runs = (done(files.merge(runs, "-merged", oldest=True))[1],)
    for run in runs:
        Path(run.path).unlink()
    assert done(files.get(list(VALUES), 1 << 30))[1] == list(VALUES.values())
    done(late)
    assert left(tmp_path) == []


def test_files_of_blocks_are_copied_block_by_block_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = (PBucket(tmp_path / "files", tmp_path / name, durable=True) for name in ("live", "again"))
    made = [done(first.write([(n, make_block(0, n, 100_000))]))[1] for n in range(3)]
    first.close()

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "this file system has no links")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(storage, "COPY_BYTES", BLOCK)
    sizes, indexes = done(again.adopt(made))
    assert max(sizes) == BLOCK
    assert sum(sizes) == sum(file.size_bytes for file in made)
    assert [index[0].seq for index in indexes] == [0, 1, 2]
    assert left(tmp_path) == []
    again.close()
