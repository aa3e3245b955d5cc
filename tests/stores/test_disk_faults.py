"""Disks that are full, read-only, slow, or fail at any call: an attempt fails by name, and nothing else happens."""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import state_backends.store.p_bucket as p_bucket
import state_backends.store.sst_file as sst_file
from aion.errors import CorruptState, DiskError
from aion.metrics import StateMetrics
from state_backends.files.faults import disk_errors
from state_backends.server import host, wire
from state_backends.store.file_index import Indexed
from state_backends.store.protocol import StoreStats
from tests.io_thread.rig import PATIENCE
from tests.stores.conftest import make
from tests.stores.rig import EAGER, Rig
from tests.versions.host import Host

__all__ = ["make"]

ROOT = Path(__file__).parents[2]


# -- disks that are really full -------------------------------------------------------------------------------


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
def test_a_full_disk(quick_folder: Path) -> None:
    """The kernel refuses: files above a size everywhere, and, where this user may mount one, a small file system."""
    ways: dict[str, list[str]] = {"rlimit": []}
    mount = "mount -t tmpfs -o size=1m none"
    if shutil.which("unshare") and not run("unshare", "-rm", "sh", "-c", f"{mount} '{quick_folder}'").returncode:
        ways["tmpfs"] = ["unshare", "-rm", "sh", "-c", f'{mount} "$0" && exec "$@"', str(quick_folder / "tmpfs")]
    for way, inside in ways.items():
        (quick_folder / way).mkdir()
        done = run(*inside, sys.executable, "-m", "tests.full_disk", way, quick_folder / way)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(f"{way}: ") == 3


# -- what users and operators see -----------------------------------------------------------------------------


def test_an_error_of_the_disk_reaches_the_task_under_its_name() -> None:
    with pytest.raises(DiskError, match="no room"):
        wire.raise_error(wire.encode_error(DiskError("no room in /state")))


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EROFS, "mount it writable"),
        (errno.EIO, "the disk is failing"),
        (errno.ENOTDIR, "a file is where a folder must be"),
        (errno.ENOENT, "was removed"),
        (errno.ENXIO, "mend the disk"),
    ],
)
def test_a_cause_is_told_with_what_can_be_done(code: int, hint: str, tmp_path: Path) -> None:
    text = os.strerror(code)
    for cause in (OSError(code, text), Exception(f"IO error: {text}: While appending to file: x.sst: {text}")):
        with pytest.raises(DiskError) as told, disk_errors("writing state", tmp_path):
            raise cause
        assert f"writing state in {tmp_path} failed" in str(told.value) and text in str(told.value)
        assert hint in str(told.value)
        assert told.value.__cause__ is cause
    for other in (CorruptState("named already"), ValueError("a bug")):
        with pytest.raises(type(other)), disk_errors("writing state", tmp_path):
            raise other


def test_a_destage_that_fails_is_logged_and_counted(make: Callable[..., Rig], caplog: pytest.LogCaptureFixture) -> None:
    rig = make("tiered")
    rig.append((0, 0))
    rig.store.persist()
    assert rig.store.stats().failed_writes == 0
    rig.break_disk()
    rig.append((1, 0), late=True)
    with caplog.at_level(logging.ERROR):
        rig.to_disk(0)
    assert "stay in memory" in caplog.text and str(rig.folder / "files") in caplog.text
    stats = rig.store.stats()
    assert (stats.failed_writes, stats.m_bucket_bytes) == (1, rig.blocks[1].size_bytes)
    total = StoreStats()
    total.add(stats)
    total.add(stats)
    assert (total.failed_writes, total.blocks) == (2, 4)
    rig.heal_disk()


def test_what_stores_count_is_in_the_metrics() -> None:
    server = host.Host()
    assert {f.name for f in fields(StateMetrics)} == server.stats().keys()
    server.close()


def test_a_file_that_did_not_become_whole_is_closed_at_once(tmp_path: Path) -> None:
    """Deleted is not enough: its bytes are free when nobody has it open, and exceptions are kept for long."""
    bucket = p_bucket.PBucket(tmp_path / "files", tmp_path / "live", durable=False)
    index = [Indexed(slice_us=0, seq=0, size_bytes=3)]

    def is_open() -> bool:
        return any(".part" in str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())

    with pytest.raises(DiskError) as kept, bucket.writing(index) as out:
        out.put(0, 0, b"abc")
        assert is_open()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert not is_open()
    assert list((tmp_path / "files").iterdir()) == []
    assert kept.value.__cause__ is not None
    bucket.close()


# -- disks that are slow --------------------------------------------------------------------------------------


def test_a_slow_disk_keeps_nobody_waiting_but_who_needs_it(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make("tiered")
    rig.append((0, 0), (1, 0))
    stuck, let_go = threading.Event(), threading.Event()
    fsync = os.fsync

    def slow(fd: int) -> None:
        stuck.set()
        assert let_go.wait(PATIENCE)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", slow)
    files: list[Any] = []
    committing = threading.Thread(target=lambda: files.extend(rig.store.persist()))
    committing.start()
    assert stuck.wait(PATIENCE)
    rig.append((2, 0), (3, 10))
    rig.append((4, 10), late=True)
    rig.store.destage([10])
    rig.store.flush()
    assert rig.read(0, 10) == [0, 1, 2, 3, 4]
    rig.store.purge([10])
    assert not files and committing.is_alive(), "a commit is one when it is on the disk"
    let_go.set()
    committing.join(PATIENCE)
    assert files
    assert rig.read(0, 10) == [0, 1, 2]


def test_rocksdb_that_cannot_drop_files_is_made_anew(make: Callable[..., Rig]) -> None:
    """A flush that fails leaves RocksDB refusing everything for good, also when there is room again."""
    rig = make("rocksdb")
    rig.append((0, 0), (1, 10))
    rig.store.persist()
    rig.append((2, 20))
    rig.store.persist()
    database = rig.p_bucket._db

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            if name in ("get", "close", "live_files"):
                return getattr(database, name)
            raise Exception("IO error: No space left on device: While appending to file: 000012.sst")

    rig.p_bucket._db = Refusing()
    reader = rig.store.read([0, 10])
    assert rig.check(next(reader)) == 0
    rig.store.purge([20])
    rig.settle()
    rig.append((3, 30))
    rig.store.persist()
    assert [rig.check(stored) for stored in reader] == [1]
    assert rig.read(0, 10, 30) == [0, 1, 3]
    assert not isinstance(rig.p_bucket._db, Refusing)


# -- every call, one after the other --------------------------------------------------------------------------


class Faults:
    """Stands before every call to the system and to RocksDB that touches a folder, and makes the n-th fail.

    ``how``: "instead" of doing it; "after" it was done, as when only the answer is lost; from then "on" all of them.
    """

    def __init__(self, folder: Path, nth: int, how: str, code: int) -> None:
        self.folder, self.nth, self.how, self.code = str(folder), nth, how, code
        self.calls = 0
        self.failed: list[str] = []
        self._lock = threading.Lock()

    def call(self, name: str, function: Callable[..., Any], *args: Any, rocksdb: bool = False, **options: Any) -> Any:
        with self._lock:
            self.calls += 1
            fails = self.calls == self.nth or (self.how == "on" and self.calls > self.nth)
            if fails:
                self.failed.append(name)
        if fails and self.how == "after":
            done = function(*args, **options)
            if name == "os.open":
                os.close(done)  # nobody else knows it
            elif isinstance(done, io.IOBase):
                done.close()
        if fails:
            text = os.strerror(self.code)
            raise Exception(f"IO error: {text}: While {name}") if rocksdb else OSError(self.code, text, name)
        return function(*args, **options)

    def over(self) -> None:
        """Nothing fails any more."""
        self.nth, self.how = 0, "instead"

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("mkdir", "rename", "replace", "link", "unlink", "stat", "open"):
            patch.setattr(os, name, self._of_path(f"os.{name}", getattr(os, name)))
        fsync, open_ = os.fsync, io.open
        patch.setattr(os, "fsync", lambda fd: self.call("os.fsync", fsync, fd))

        def opens(path: Any, *args: Any, **options: Any) -> Any:
            if not self._mine(path):
                return open_(path, *args, **options)
            return _File(self, self.call("open", open_, path, *args, **options))

        patch.setattr(io, "open", opens)
        faults = self

        class Db(_RocksDb):
            kind = p_bucket.Rdict

            def __init__(self, *args: Any) -> None:
                super().__init__(faults, *args)

        class Writer(_RocksDb):
            kind = sst_file.SstFileWriter

            def __init__(self, *args: Any) -> None:
                super().__init__(faults, *args)

        patch.setattr(p_bucket, "Rdict", Db)
        patch.setattr(sst_file, "SstFileWriter", Writer)

    def _of_path(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def maybe(*args: Any, **options: Any) -> Any:
            if args and self._mine(args[0]):
                return self.call(name, function, *args, **options)
            return function(*args, **options)

        return maybe

    def _mine(self, path: Any) -> bool:
        return isinstance(path, str | Path) and str(path).startswith(self.folder)


class _File:
    """A file whose writes can fail."""

    def __init__(self, faults: Faults, file: Any) -> None:
        self._faults, self._file = faults, file

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._file, name)
        if name not in ("read", "write", "flush"):
            return method
        return lambda *args: self._faults.call(f"file.{name}", method, *args)


class _RocksDb:
    """A database, or a writer of files, of rocksdict."""

    kind: Any

    def __init__(self, faults: Faults, *args: Any) -> None:
        self._faults = faults
        self._real = faults.call(self.kind.__name__, self.kind, *args, rocksdb=True)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._real, name)
        return lambda *args, **options: self._faults.call(name, method, *args, rocksdb=True, **options)

    def __setitem__(self, key: bytes, value: bytes) -> None:
        self._faults.call("put", self._real.__setitem__, key, value, rocksdb=True)


Blocks = list[tuple[int, int]]
"""Of (seq, slice)."""


def in_order(blocks: Blocks) -> list[int]:
    return [seq for seq, _ in sorted(blocks, key=lambda b: (b[1], b[0]))]


class Story:
    """Two batches on a shard of three versions, and what must be true of it whatever happens."""

    PLAN: tuple[tuple[Blocks, list[int]], ...] = (
        ([(6, 0), (7, 30), (8, 30), (9, 40)], [10]),
        ([(10, 30), (11, 40), (12, 50)], [20]),
    )

    def __init__(self, kind: str, folder: Path) -> None:
        self.host = Host(kind, folder, retain=2, limits=EAGER, budget=8 << 10, block_bytes=2000)
        self.tokens: list[str | None] = [None]
        self.versions: dict[str | None, Blocks] = {None: []}
        self.done = 0

    def begin(self) -> None:
        for blocks in ([(0, 0), (1, 10)], [(2, 20), (3, 0)], [(4, 20), (5, 0)]):
            self.next(blocks, [])

    def next(self, blocks: Blocks, purge: list[int]) -> None:
        """An attempt; given up if anything fails."""
        attempt = self.host.next_attempt(self.tokens[-1])
        mine = [*self.versions[self.tokens[-1]], *blocks]
        try:
            self.host.open(self.tokens[-1])
            self.host.shard.prestage(attempt, [0])
            self.host.append(attempt, *blocks[:2])
            self.host.append(attempt, *blocks[2:], late=True)
            self.host.shard.release(attempt, [0, 30])
            assert [seq for seq, _ in self.host.read(attempt, *range(0, 70, 10))] == in_order(mine)
            self.host.shard.release(attempt, purge=purge)
            self.host.shard.commit(attempt, {"next_seq": blocks[-1][0] + 1})
        except BaseException:
            self.host.shard.abort(attempt)
            raise
        self.versions[attempt] = [(seq, s) for seq, s in mine if s not in purge]
        self.tokens.append(attempt)

    def go_on(self) -> None:
        """The batches that are not done yet."""
        while self.done < len(self.PLAN):
            self.next(*self.PLAN[self.done])
            self.done += 1

    def holds(self, versions: int) -> None:
        """The last versions are whole: every block once."""
        for token in self.tokens[-1 : -versions - 1 : -1]:
            assert self.host.seqs(token, *range(0, 70, 10)) == in_order(self.versions[token]), f"version {token}"
        assert self.host.shard.store is not None
        self.host.shard.store.validate()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def beginnings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Story]]:
    made: dict[str, Story] = {}

    def begin(kind: str) -> Story:
        if kind not in made:
            made[kind] = Story(kind, tmp_path_factory.mktemp(kind))
            made[kind].begin()
            made[kind].host.stop()
        return made[kind]

    yield begin


def copy_of(story: Story, folder: Path) -> Story:
    shutil.copytree(story.host.folder / "state", folder / "state")
    copy = Story(story.host.kind, folder)
    copy.tokens, copy.versions = list(story.tokens), dict(story.versions)
    copy.host.attempts, copy.host.blocks = story.host.attempts, dict(story.host.blocks)
    return copy


WAYS = [
    ("tiered", "instead", errno.EIO, 1),
    ("tiered", "after", errno.EIO, 3),
    ("tiered", "on", errno.ENOSPC, 3),
    ("rocksdb", "instead", errno.ENOSPC, 5),
    ("rocksdb", "on", errno.EROFS, 5),
    ("memory", "instead", errno.EIO, 5),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how", "code", "step"),
    [*((*way, 11) for *way, _ in WAYS), *(pytest.param(*way, marks=pytest.mark.proof) for way in WAYS)],
)
def test_a_fault_at_any_call(
    beginnings: Callable[[str], Story],
    quick_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    how: str,
    code: int,
    step: int,
) -> None:
    """One call of two batches fails, then the next one, until there is none that fails."""
    beginning = beginnings(kind)
    failures = 0
    for nth in range(1, 10_000, step):
        folder = quick_folder / f"{nth}"
        story = copy_of(beginning, folder)
        faults = Faults(folder, nth, how, code)
        try:
            with monkeypatch.context() as patch:
                faults.install(patch)
                try:
                    story.go_on()
                except DiskError as error:
                    failures += 1
                    assert str(folder) in str(error) and os.strerror(code) in str(error)
                finally:
                    faults.over()
            if how != "on":
                made = {str(token) for token in story.tokens}
                assert story.host.manifests() <= made, "what failed does not look like a version"
            whole_after(story, every_version=nth % 7 == 1)
        except BaseException as error:
            error.add_note(f"call {nth} failed: {faults.failed[:1]}")
            raise
        finally:
            story.host.stop()
            shutil.rmtree(folder)
        if not faults.failed:
            break
    assert nth > 50 and failures > 25 / step


def whole_after(story: Story, *, every_version: bool) -> None:
    """What was there is there, what failed can be done again, and nothing is left of it."""
    story.holds(1)
    story.go_on()
    story.holds(1)
    story.host.restart()
    story.holds(2 if every_version else 1)
    for i in range(3):
        story.next([(13 + i, 60)], [])
    kept = {str(token) for token in story.tokens[-3:]}
    assert story.host.manifests() == kept
    assert story.host.files() == story.host.named_files(*kept)
