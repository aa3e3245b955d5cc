"""A copy of a checkpoint and its original both go on, however many batches apart their tasks open the shards."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest

from aion.errors import DiskError, ForeignState, MissingState, StateError, StorageError
from state_backends.backends import Stores
from state_backends.files import storage
from state_backends.files.location import LocalLocation, Location, RemoteLocation
from state_backends.files.remote import Remote
from state_backends.files.remote_storage import RemoteStorage
from state_backends.files.storage import LocalStorage, Storage
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.versions.audit import StateFolder
from state_backends.versions.lineage import digest_of, home_of
from state_backends.versions.shard import Shard
from tests.stores.rig import make_block
from tests.versions.host import IDENTITY

SHARDS = 3
RETAIN = 1
"""Batches that Spark keeps: so each shard has two versions."""
Tokens = list[str | None]


class Operator:
    """Its shards, as an application of some checkpoint works on them. Each batch writes one block into a shard."""

    def __init__(self, location: Location, folder: Path) -> None:
        self.location, self.folder, self.io = location, folder, IoThread()
        self.retain = RETAIN

    def batch(
        self, checkpoint: str, number: int, tokens: Tokens, shards: range = range(SHARDS), keeps: int = 99
    ) -> Tokens:
        """Returns the tokens of the versions after it. Shards that are not named keep theirs, as if no rows came.

        ``keeps``: how many of the last slices a version has.
        """
        after = list(tokens)
        for no in shards:
            shard = self.shard(checkpoint, no)
            name = f"{number:010d}-{checkpoint}-{no}"
            snapshot = shard.open(tokens[no], name, shard.identity)
            next_seq = snapshot["next_seq"] if snapshot else 0
            shard.append(name, [(next_seq, False, make_block(number, number))])
            shard.release(name, purge=[number - keeps])
            after[no] = shard.commit(name, {"next_seq": next_seq + 1})
            shard.close()
            if isinstance(shard.storage, RemoteStorage):
                shard.storage.settle()  # it deletes in the background
        return after

    def slices(self, checkpoint: str, number: int, token: str | None, no: int) -> list[int]:
        """What a version has."""
        shard = self.shard(checkpoint, no)
        name = f"{number:010d}-look-{no}"
        try:
            shard.open(token, name, shard.identity)
            return sorted(block.header.slice_us for _, block in shard.read(name, list(range(100))))
        finally:
            shard.close()

    def shard(self, checkpoint: str, no: int, **changes: Any) -> Shard:
        identity = replace(IDENTITY, shard=no, checkpoint=checkpoint, **changes)
        live = self.folder / "live" / f"{checkpoint}-{no}"
        names = identity.query, identity.operator, f"shard-{no:05d}"
        return Shard(
            identity,
            self.location.storage(names, live / "copies", digest_of(checkpoint)),
            live / "shard",
            lambda p: Stores.of("tiered", p, self.io, MemoryBudget(16 << 10), StoreOptions(bucket_limit_bytes=8 << 10)),
            retain=self.retain,
            home=lambda now: home_of(self.location, now, live / "copies"),
        )


@pytest.fixture(params=["local", "remote", pytest.param("no links", marks=pytest.mark.proof)])
def operator(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operator]:
    if request.param == "no links":

        def link(*_: object) -> None:
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(storage.os, "link", link)
    location: Location = LocalLocation(tmp_path / "state")
    if request.param == "remote":
        (tmp_path / "state").mkdir()
        fs = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
        location = RemoteLocation(Remote("test://remote", (fs, "state")), tmp_path / "host")
    found = Operator(location, tmp_path)
    yield found
    found.io.close()
    location.close()


@pytest.mark.slow
def test_shards_that_a_copy_opens_later_are_kept_for_it(operator: Operator) -> None:
    original: Tokens = [None] * SHARDS
    for number in range(3):
        original = operator.batch("original", number, original)
    copy = operator.batch("copy", 3, original, range(1))  # rows for the first shard only
    for number in range(3, 8):
        original = operator.batch("original", number, original)
    for number in range(4, 6):
        copy = operator.batch("copy", number, copy)
    assert [operator.slices("copy", 6, copy[no], no) for no in range(SHARDS)] == [
        [0, 1, 2, 3, 4, 5], [0, 1, 2, 4, 5], [0, 1, 2, 4, 5],
    ]  # fmt: skip
    assert all(operator.slices("original", 8, original[no], no) == list(range(8)) for no in range(SHARDS))


@pytest.mark.slow
def test_a_copy_whose_first_batch_cannot_take_everything_takes_it_when_it_runs_again(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the shard without rows would lack its version for ever, and nobody would know."""
    original: Tokens = [None] * SHARDS
    for number in range(3):
        original = operator.batch("original", number, original)
    failing = [RemoteStorage, LocalStorage]
    for kind in failing:
        monkeypatch.setattr(kind, "save", no_room(kind.save, failing))
    with pytest.raises(StateError, match="no room"):
        operator.batch("copy", 3, original, range(1))
    failing.clear()
    copy = operator.batch("copy", 3, original, range(1))
    for number in range(3, 8):
        original = operator.batch("original", number, original)
    assert operator.slices("copy", 4, copy[2], 2) == [0, 1, 2]


def no_room(save: Callable[..., None], failing: list[type]) -> Callable[..., None]:
    """Fails for the last shard, as long as there is something in ``failing``."""

    def fails(self: Storage, token: str, manifest: bytes, *, first: bool = False) -> None:
        if failing and f"shard-{SHARDS - 1:05d}" in self.where(token):
            raise DiskError("no room") if isinstance(self, LocalStorage) else StorageError("no room")
        save(self, token, manifest, first=first)

    return fails


@pytest.mark.slow
def test_a_copy_of_a_copy(operator: Operator) -> None:
    first = operator.batch("copy", 1, operator.batch("original", 0, [None] * SHARDS))
    second = operator.batch("copy-2", 2, first, range(1, 2))
    for number in range(2, 6):
        first = operator.batch("copy", number, first)
    assert [operator.slices("copy-2", 3, second[no], no) for no in range(SHARDS)] == [[0, 1], [0, 1, 2], [0, 1]]


@pytest.mark.slow
def test_a_copy_that_is_made_again_in_the_same_place(operator: Operator) -> None:
    original = operator.batch("original", 0, [None] * SHARDS)
    operator.batch("copy", 1, original)
    for number in range(1, 5):
        original = operator.batch("original", number, original)
    copy = operator.batch("copy", 5, original, range(1))
    for number in range(5, 9):
        original = operator.batch("original", number, original)
    assert [operator.slices("copy", 6, copy[no], no) for no in range(SHARDS)] == [
        [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4],
    ]  # fmt: skip


@pytest.mark.slow
def test_a_copy_of_a_copy_whose_first_rows_are_for_a_shard_that_the_first_copy_left_alone(operator: Operator) -> None:
    copy = operator.batch("copy", 1, operator.batch("original", 0, [None] * SHARDS), range(1, 2))
    second = operator.batch("copy-2", 2, copy, range(1))
    for number in range(2, 6):
        copy = operator.batch("copy", number, copy)
    assert [operator.slices("copy-2", 3, second[no], no) for no in range(SHARDS)] == [[0, 2], [0, 1], [0]]


@pytest.mark.slow
def test_a_copy_that_is_made_again_soon(operator: Operator) -> None:
    """Its folder still has versions that the original has, too."""
    original = operator.batch("original", 0, [None] * SHARDS)
    operator.batch("copy", 1, original, range(1))
    original = operator.batch("original", 1, original)
    copy = operator.batch("copy", 2, original, range(1))
    for number in range(2, 6):
        original = operator.batch("original", number, original)
    assert [operator.slices("copy", 3, copy[no], no) for no in range(SHARDS)] == [[0, 1, 2], [0, 1], [0, 1]]


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("moved_to", ["third", "first"])
def test_lineages_that_are_forgotten_leave_what_idle_shards_need(operator: Operator, moved_to: str) -> None:
    """A checkpoint was moved twice, and each shard had rows in one place only. Its old lineages are forgotten."""
    tokens = operator.batch("first", 0, [None] * SHARDS)
    tokens = operator.batch("second", 1, tokens, range(1, 2))
    tokens = operator.batch(moved_to, 2, tokens, range(1))
    folder = StateFolder(str(operator.folder / "state"))
    for lineage in folder.lineages():
        if lineage.checkpoint != moved_to:
            folder.forget(lineage)
    assert [lineage.checkpoint for lineage in folder.lineages()] == [moved_to]
    folder.close()
    assert [operator.slices(moved_to, 3, tokens[no], no) for no in range(SHARDS)] == [[0, 2], [0, 1], [0]]
    tokens = operator.batch(moved_to, 3, tokens)
    tokens = operator.batch(moved_to, 4, tokens)
    assert len([*operator.folder.glob("state/**/manifests/*")]) <= 2 * SHARDS, "what nobody needs is deleted"


@pytest.mark.slow
def test_what_a_copy_took_and_does_not_need_is_deleted(operator: Operator) -> None:
    tokens: Tokens = [None] * SHARDS
    for number in range(3):
        tokens = operator.batch("original", number, tokens)
    for number in range(3, 8):
        tokens = operator.batch("copy", number, tokens)
    kept = {f"{number:010d}-copy-{no}.json" for number in (6, 7) for no in range(SHARDS)}
    assert {path.name for path in operator.folder.glob("**/lineage-*/shard-*/manifests/*")} == kept


@pytest.mark.slow
def test_a_copy_that_comes_too_late_is_refused(operator: Operator) -> None:
    copied = tokens = operator.batch("original", 0, [None] * SHARDS)
    for number in range(1, 6):
        tokens = operator.batch("original", number, tokens)
    with pytest.raises(MissingState, match="copied long ago"):
        operator.batch("copy", 1, copied)


def test_a_copy_goes_on_after_it_was_started_with_another_definition_by_mistake(operator: Operator) -> None:
    (token, *_) = operator.batch("original", 0, [None] * SHARDS)
    shard = operator.shard("copy", 0, definition={"time": "ts2"})
    right = operator.shard("copy", 0).identity
    with pytest.raises(ForeignState, match="another definition"):
        shard.open(token, "0000000001-mistaken", shard.identity)
    assert shard.open(token, "0000000001-right", right) is not None  # the server has kept the shard
    shard.close()
    assert operator.slices("copy", 1, token, 0) == [0]


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["local", "remote", "no links"], indirect=True)
def test_each_file_is_copied_once(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many versions name a file, and the tasks of all shards begin at the same time."""
    operator.retain = 100
    original: Tokens = [None] * SHARDS
    for number in range(7):
        original = operator.batch("original", number, original)
    copies: Counter[tuple[str, str]] = Counter()
    for kind in (RemoteStorage, LocalStorage):

        def counted(self: Any, other: Any, names: Sequence[str], take: Any = kind.take) -> None:
            copies.update((self.where("t"), name) for name in names)
            take(self, other, names)

        monkeypatch.setattr(kind, "take", counted)
    begin = threading.Barrier(SHARDS)

    def task(no: int) -> Tokens:
        begin.wait()
        return operator.batch("copy", 7, original, range(no, no + 1))

    with ThreadPoolExecutor(SHARDS) as pool:
        copied = [tokens[no] for no, tokens in enumerate(pool.map(task, range(SHARDS)))]
    assert len(copies) >= SHARDS * 7
    assert set(copies.values()) == {1}
    for no in range(SHARDS):
        assert operator.slices("copy", 8, copied[no], no) == list(range(8))


@pytest.mark.slow
def test_a_shard_that_is_opened_while_another_task_takes_its_versions(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task has taken the files of an older version of shard 1, and not yet its manifest, when shard 1 commits."""
    original: Tokens = [None] * SHARDS
    for number in range(3):
        original = operator.batch("original", number, original, keeps=1)
    half_way, go_on = threading.Event(), threading.Event()
    for kind in (RemoteStorage, LocalStorage):

        def waits(self: Any, token: str, manifest: bytes, *, first: bool = False, save: Any = kind.save) -> None:
            if token == "0000000001-original-1":
                half_way.set()
                assert go_on.wait(60)
            save(self, token, manifest, first=first)

        monkeypatch.setattr(kind, "save", waits)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(operator.batch, "copy", 3, original, range(1), 1)
        assert half_way.wait(60)
        copy = operator.batch("copy", 3, original, range(1, 2), 1)
        go_on.set()
        copy[0] = other.result()[0]
    assert damage_of(operator) == []
    for number in range(4, 7):
        copy = operator.batch("copy", number, copy, keeps=1)
        assert damage_of(operator) == []
    assert operator.slices("copy", 7, copy[1], 1) == [6]
    assert len([*operator.folder.glob("state/**/lineage-*/shard-00001/manifests/*")]) == 2


def damage_of(operator: Operator) -> list[str]:
    """What ``aion inspect`` finds."""
    folder = StateFolder(str(operator.folder / "state"))
    try:
        return [line for shard in folder.shards() for line in folder.check(shard).damage]
    finally:
        folder.close()
