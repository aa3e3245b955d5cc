"""Versions whose blocks lie in files that children handed over."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from aion.errors import CorruptBlock, CorruptState
from state_backends.files import handed_remote
from state_backends.files.handed import name_of, sweep
from state_backends.files.handed_remote import HandedPlace, create, sweep_copies
from state_backends.files.remote import THREADS
from state_backends.files.remote_storage import RemoteStorage
from state_backends.format.block import Block
from state_backends.store.merge_choice import Limits
from state_backends.versions.manifest import load
from tests.server.conftest import wait_until
from tests.stores.rig import make_block
from tests.versions.host import Host

LINEAGE = "c0ffee"


@pytest.fixture(params=["tiered", "remote"])
def make(request: pytest.FixtureRequest, make: Callable[..., Host]) -> Callable[..., Host]:
    """Hosts whose versions are in a local folder, or on a file system without links."""
    return partial(make, request.param)


def hand_over(host: Host, batch: int, *slices: int) -> list[Block]:
    """What a child hands over for a batch: a block for each slice."""
    blocks = [make_block(slice_us, slice_us, 2000) for slice_us in slices]
    return host.hand_over(name_of(batch, LINEAGE, f"{host.attempts}"), *blocks)


def commit(host: Host, token: str | None, *slices: int, purge: tuple[int, ...] = ()) -> str:
    """The next version, with handed-over blocks of these slices more."""
    attempt, old = host.open(token)
    first = old["next_seq"] if old else 0
    references = hand_over(host, int(attempt[:10]), *slices) if slices else []
    host.shard.append(attempt, [(first + i, False, reference) for i, reference in enumerate(references)])
    host.shard.release(attempt, purge=purge)
    host.shard.commit(attempt, {"next_seq": first + len(slices)})
    return attempt


def bodies(host: Host) -> set[int]:
    """The batches whose files the shard's folder has."""
    settle(host)
    return {int(path.name[11:21]) for path in (host.folder / "state" / "files").glob("*.bodies")}


def settle(host: Host) -> None:
    if isinstance(host.storage, RemoteStorage):
        host.storage.settle()


def left(host: Host) -> list[str]:
    """The files that children wrote, where they left them."""
    settle(host)
    return [path.name for path in host.folder.glob("handed/*")] + [p.name for p in host.handed.local.glob("*")]


def read(host: Host, token: str, *slices: int) -> list[int]:
    attempt, _ = host.open(token)
    found = [block for _, block in host.shard.read(attempt, slices)]
    for block in found:
        slice_us = block.header.slice_us
        assert host.body(block) == bytes(make_block(slice_us, slice_us, 2000).body)
    host.shard.abort(attempt)
    return [block.header.slice_us for block in found]


def test_a_version_keeps_what_it_needs_after_the_child_s_file_is_swept(make: Callable[..., Host]) -> None:
    host = make()
    token = commit(host, None, 0, 10)
    sweep(host.folder / "handed", LINEAGE, 1)
    assert left(host) == []
    host.restart()
    assert read(host, token, 0, 10) == [0, 10]
    manifest = load(host.manifest(token).read_bytes(), "m")
    assert [(f.name.rpartition(".")[2], f.blocks) for f in manifest.files] == [("sst", 2), ("bodies", 2)]
    written = sum(path.stat().st_size for path in host.folder.glob("state/files/*.sst"))
    assert written < 4 * 4096, "the bodies were not written again"


def test_a_file_goes_when_no_kept_version_names_it(make: Callable[..., Host]) -> None:
    host = make(retain=1)
    token = commit(host, None, 0)
    token = commit(host, token, 10, purge=(0,))
    assert bodies(host) == {0, 1}, "the version before may still be asked for"
    token = commit(host, token, 20)
    token = commit(host, token, 30)
    assert bodies(host) == {1, 2, 3}
    assert read(host, token, 0, 10, 20, 30) == [10, 20, 30]


def test_a_commit_that_fails_takes_no_file_from_a_version_that_others_committed(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two attempts of one batch have the same references. One commits on another host, this one fails."""
    host = make(retain=1)
    token = commit(host, None, 0)
    attempt, _ = host.open(token)
    (reference,) = hand_over(host, 1, 10)
    host.shard.append(attempt, [(1, False, reference)])

    def fails(token: str, manifest: bytes) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(host.storage, "save", fails)
        with pytest.raises(OSError, match="full"):
            host.shard.commit(attempt, {"next_seq": 2})
        host.shard.abort(attempt)
    assert bodies(host) == {0, 1}, "the other attempt may have linked it, too"
    token = commit(host, token, 20)
    token = commit(host, token, 30)
    names = {f.name for f in load(host.manifest(token).read_bytes(), "m").files}
    assert reference.at is not None and reference.at.file not in names
    settle(host)
    assert reference.at.file not in [path.name for path in host.folder.glob("*/files/*")], (
        "a later batch's commit deletes what nobody names"
    )
    assert read(host, token, 0, 10, 20, 30) == [0, 20, 30]


def test_a_file_that_is_missing_is_named_when_the_shard_is_opened(make: Callable[..., Host]) -> None:
    host = make()
    token = commit(host, None, 0)
    (path,) = host.folder.glob("state/files/*.bodies")
    host.stop()
    path.unlink()
    host.start()
    # On a remote file system nobody looks for all files when a shard is opened, and the reader says it.
    with pytest.raises((CorruptState, CorruptBlock), match=path.name):
        read(host, token, 0)


def test_a_file_that_was_swept_too_early_fails_the_commit(make: Callable[..., Host]) -> None:
    host = make()
    token = commit(host, None, 0)
    attempt, _ = host.open(token)
    host.shard.append(attempt, [(1, False, hand_over(host, 1, 10)[0])])
    shutil.rmtree(host.folder / "handed")
    with pytest.raises(CorruptState, match="a child handed over, is missing"):
        host.shard.commit(attempt, {"next_seq": 2})
    host.shard.abort(attempt)
    assert read(host, token, 0, 10) == [0], "the version before is whole"


def test_merging_files_copies_references_and_not_bodies(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead: list[int] = []
    for place in ("storage", "remote_storage"):
        note = lambda _, blocks: ahead.extend(block.header.slice_us for block in blocks)  # noqa: E731
        monkeypatch.setattr(f"state_backends.files.{place}.advise", note)
    host = make(retain=1, limits=Limits(worth_bytes=1, file_share=1.0, disk=100.0))
    token = None
    for i in range(40):
        token = commit(host, token, 10 * i)
        host.settle()
    assert token is not None and host.shard.stats().merges > 0
    assert ahead == [], "nobody reads the bodies"
    assert bodies(host) == set(range(40))
    assert read(host, token, *range(0, 400, 10)) == list(range(0, 400, 10))
    if host.kind == "remote":
        return
    host.restart()
    assert read(host, token, *range(0, 400, 10)) == list(range(0, 400, 10))
    assert set(ahead) == set(range(0, 400, 10)), "a reader does"


def test_a_prestage_is_over_when_the_bodies_are_in_memory(make: Callable[..., Host]) -> None:
    """What is learnt of the disk's speed, and so when the next one begins, includes them."""
    host = make()
    token = commit(host, None, 0, 10)
    host.restart()
    attempt, _ = host.open(token)
    assert host.shard.store is not None
    (path,) = (host.folder / "state" / "files").glob("*.bodies") if host.kind != "remote" else (None,)
    if path is not None:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    staged: list[int] = []
    learnt: list[tuple[int, int]] = []
    for _ in range(2):  # the references come from disk, and then they are in memory
        size = host.shard.store.size_on_disk([0, 10])
        host.shard.store.listen(lambda size_bytes, seconds, waited_s: staged.append(size_bytes))
        host.shard.store.prestage([0, 10])
        wait_until(lambda: bool(staged))
        learnt.append((staged.pop(), size))
        wait_until(lambda: list(host.storage.files.glob("*.bodies")))  # a remote storage downloads them
    (first, first_size), (second, second_size) = learnt
    assert second == second_size > 2 * 1500
    assert first == first_size or (host.kind == "remote" and first < 1500), "what is still downloaded is not fast"
    if path is not None:
        with path.open("rb") as file:
            buffer = bytearray(2 * 1500)
            try:
                assert os.preadv(file.fileno(), [buffer], 0, os.RWF_NOWAIT) == len(buffer)
            except OSError as error:
                assert error.errno == errno.EOPNOTSUPP, "a disk is asked"  # some file systems cannot say
    host.shard.abort(attempt)


def test_a_host_brings_what_another_host_s_children_wrote_before_it_is_read(make: Callable[..., Host]) -> None:
    host = make()
    if host.kind != "remote":
        pytest.skip("the files are in a folder of all hosts")
    token = commit(host, None, 0, 10)
    host.restart()
    (name,) = (path.name for path in host.folder.glob("state/files/*.bodies"))
    attempt, _ = host.open(token)
    assert list(host.storage.files.glob("*.bodies")) == []
    host.shard.prestage(attempt, [0])
    host.settle()
    wait_until(lambda: (host.storage.files / name).exists())
    (host.folder / "state" / "files" / name).unlink()
    host.shard.abort(attempt)
    assert read(host, token, 0, 10) == [0, 10], "nobody asks the remote file system again"


def test_a_body_is_fetched_ahead_though_its_reference_is_in_memory(make: Callable[..., Host]) -> None:
    """The usual case on a cluster: the child was on another host, and the window ends soon."""
    host = make()
    if host.kind != "remote":
        pytest.skip("the files are in a folder of all hosts")
    attempt, _ = host.open(None)
    (reference,) = hand_over(host, 0, 10)
    shutil.rmtree(host.handed.local)
    host.shard.append(attempt, [(0, False, reference)])
    assert reference.at is not None and host.shard.store is not None
    assert host.shard.store.stats().m_bucket_bytes > 0
    assert host.shard.store.size_on_disk([10]) == reference.header.body_bytes
    host.shard.prestage(attempt, [10])
    wait_until(lambda: (host.storage.files / reference.at.file).exists())


def test_bodies_that_were_not_committed_are_read_where_the_child_left_them(make: Callable[..., Host]) -> None:
    host = make()
    attempt, _ = host.open(None)
    (reference,) = hand_over(host, 0, 10)
    if host.kind == "remote":
        shutil.rmtree(host.handed.local)  # the child was on another host
    host.shard.append(attempt, [(0, False, reference)])
    assert host.body(reference) == bytes(make_block(10, 10, 2000).body)
    host.shard.commit(attempt, {"next_seq": 1})
    assert host.body(reference) == bytes(make_block(10, 10, 2000).body)


def test_what_no_attempt_used_goes_when_a_shard_that_was_opened_later_commits(make: Callable[..., Host]) -> None:
    host = make()
    token = commit(host, None, 0)
    hand_over(host, 1, 10)  # by an attempt of a child that failed
    other = host.hand_over(name_of(7, LINEAGE, "other"), make_block(70, 70, 2000))  # of a batch to come
    host.restart()
    for slice_us in (20, 30):
        token = commit(host, token, slice_us)
    sweep(host.folder / "handed", LINEAGE, 3)  # as a task does where files are local
    assert other[0].at is not None and left(host) == [other[0].at.file]


def test_a_shard_that_is_closed_here_lets_children_finish_their_files(make: Callable[..., Host]) -> None:
    """The shard may have moved to another host, and children on this one still write for it."""
    host = make()
    if not isinstance(host.storage, RemoteStorage):
        pytest.skip("the files are in a folder of all hosts")
    with closing(create(host.remote, host.handed, name_of(0, LINEAGE, "sealed"))) as file:
        file.add(make_block(0, 0, 2000))
        file.end()
        file.seal()
    with closing(create(host.remote, host.handed, name_of(1, LINEAGE, "open"))) as file:
        file.add(make_block(1, 1, 2000))
        host.storage.close()
        assert not (host.handed.local / name_of(0, LINEAGE, "sealed")).exists()
        file.end()
        file.seal()
    assert len(list(host.folder.glob("handed/*"))) == 2, "both are in the store"


def test_a_host_without_the_shard_keeps_no_copies_of_what_its_children_wrote(make: Callable[..., Host]) -> None:
    host = make()
    if not isinstance(host.storage, RemoteStorage):
        pytest.skip("the files are in a folder of all hosts")
    away = HandedPlace("handed", host.folder / "another host" / "shard-00003")
    token, kept = None, set()
    for batch in range(4):
        attempt, _ = host.open(token)
        sweep_copies(away, LINEAGE, batch)  # as a child does before it writes its first file
        with closing(create(host.remote, away, name_of(batch, LINEAGE, "child"))) as file:
            reference = file.add(make_block(batch, batch, 2000))
            file.end()
            file.seal()
        host.shard.append(attempt, [(batch, False, reference)])
        token = host.shard.commit(attempt, {"next_seq": batch + 1})
        kept |= {int(path.name[11:21]) for path in away.local.iterdir()}
        assert [int(path.name[11:21]) for path in away.local.iterdir()] == [batch]
    assert kept == bodies(host) == {0, 1, 2, 3}
    attempt, _ = host.open(token)
    assert len(list(host.shard.read(attempt, [0, 1, 2, 3]))) == 4


def test_a_download_ahead_neither_delays_commits_nor_outlives_the_shard(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make()
    if not isinstance(host.storage, RemoteStorage):
        pytest.skip("the files are in a folder of all hosts")
    away, references = HandedPlace("handed", host.folder / "another host"), []
    for number in range(THREADS):
        with closing(create(host.remote, away, name_of(0, LINEAGE, f"child{number}"))) as file:
            references.append(file.add(make_block(number, number, 2000)))
            file.end()
            file.seal()
    slow, real = threading.Event(), handed_remote.chunks_of

    def slowly(*where: Any) -> Iterator[bytes]:
        assert slow.wait(60)
        yield from real(*where)

    monkeypatch.setattr(handed_remote, "chunks_of", slowly)
    host.storage.read_ahead(references)
    commit(host, None)  # does not wait
    host.storage.close()
    slow.set()
    host.remote.ahead.shutdown()
    assert not list((host.folder / "copies").glob("*"))
