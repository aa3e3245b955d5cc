"""Versions whose blocks lie in files that children handed over."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial, partialmethod
from typing import Any

import pytest

from aion.errors import CorruptBlock, CorruptState
from state_backends.files import remote_storage
from state_backends.files.bodies import ALIGNMENT, Bodies, are_resident
from state_backends.files.handed import name_of, sweep
from state_backends.files.handed_remote import HandedPlace, create, sweep_copies
from state_backends.files.remote_storage import RemoteStorage
from state_backends.format.block import Block
from state_backends.store.body_files import BodyFiles
from state_backends.store.io import MOST_TOGETHER_BYTES
from state_backends.store.merge_choice import Limits
from state_backends.versions.manifest import load
from tests.io_thread.rig import Gate
from tests.server.conftest import wait_until
from tests.stores.rig import make_block
from tests.versions.host import Host

LINEAGE = "c0ffee"
BODY_BYTES = 10_000  # so each has a page of its own


@pytest.fixture(params=["tiered", "remote"])
def make(request: pytest.FixtureRequest, make: Callable[..., Host]) -> Callable[..., Host]:
    """Hosts whose versions are in a local folder, or on a file system without links."""
    return partial(make, request.param, budget=1 << 20)


def hand_over(host: Host, batch: int, *slices: int) -> list[Block]:
    """What a child hands over for a batch: a block for each slice."""
    blocks = [make_block(slice_us, slice_us, BODY_BYTES) for slice_us in slices]
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
        assert host.body(block) == bytes(make_block(slice_us, slice_us, BODY_BYTES).body)
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
    settle(host)  # what the child left is gone, too
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


@pytest.mark.slow
def test_merging_files_copies_references_and_not_bodies(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    for name in ("read", "stage"):

        def noted(self: BodyFiles, reference: Block, real: Any) -> Any:
            moved.append(reference.header.slice_us)
            return real(self, reference)

        monkeypatch.setattr(BodyFiles, name, partialmethod(noted, real=getattr(BodyFiles, name)))
    host = make(retain=1, limits=Limits(worth_bytes=1, file_share=1.0, disk=100.0))
    token = None
    for i in range(40):
        token = commit(host, token, 10 * i)
        host.settle()
    assert token is not None and host.shard.stats().merges > 0
    assert moved == [], "nobody needs the bodies"
    assert bodies(host) == set(range(40))
    assert read(host, token, *range(0, 400, 10)) == list(range(0, 400, 10))
    host.restart()
    lose_cached_pages(host)
    attempt, _ = host.open(token)
    host.shard.prestage(attempt, range(0, 400, 10))
    wait_until(lambda: len(set(moved)) == 40)


def test_a_prestage_is_over_when_the_bodies_are_in_shared_memory(make: Callable[..., Host]) -> None:
    """What is learnt of the disk's speed, and so when the next one begins, includes them. Memory counts them."""
    host = make()
    token = commit(host, None, 0, 10)
    host.restart()
    attempt, _ = host.open(token)
    lose_cached_pages(host)
    store = host.shard.store
    assert store is not None
    far, staged = store.size_on_disk([0, 10]), prestaged(host, 0, 10)
    assert staged == far > 2 * 1500 and store.size_on_disk([0, 10]) == 0
    assert staged_files(host) == 2 and store.stats().m_bucket_bytes == staged
    assert host.budget.used_bytes == staged and host.budget.reserved_bytes == 0
    # Where they came from is of no interest any more.
    shutil.rmtree(host.folder / "state" / "files")
    shutil.rmtree(host.storage.files, ignore_errors=True)
    for _, block in host.shard.read(attempt, [0, 10]):
        assert block.at is not None, "it is mapped, and not sent"
        slice_us = block.header.slice_us
        assert host.body(block) == bytes(make_block(slice_us, slice_us, BODY_BYTES).body)
    counts = host.shard.stats().staging
    assert (counts.hits, counts.misses, counts.staged_bytes, counts.vain_bytes) == (2, 0, staged, 0)
    host.shard.release(attempt, destage=[0, 10])
    assert staged_files(host) == 0 and host.budget.used_bytes == 0, "memory is free after the execution"


def prestaged(host: Host, *slices: int) -> int:
    """Prestages, and waits until it is over. Returns the bytes that were moved."""
    moved: list[int] = []
    assert host.shard.store is not None
    host.shard.store.listen(lambda size_bytes, seconds, waited_s: moved.append(size_bytes))  # type: ignore[attr-defined]
    host.shard.store.prestage(slices)
    wait_until(lambda: bool(moved))
    return moved[0]


def test_what_the_system_has_in_memory_is_mapped_and_not_copied(make: Callable[..., Host]) -> None:
    host = make()
    token = commit(host, None, 10)
    if host.kind == "remote":
        pytest.skip("nothing of it is on this host")
    (path,) = host.folder.glob("state/files/*.bodies")
    host.restart()
    attempt, _ = host.open(token)
    path.read_bytes()
    reference_bytes = prestaged(host, 10)
    assert reference_bytes < 1000 and staged_files(host) == 0
    ((_, block),) = host.shard.read(attempt, [10])
    assert block.at is not None and host.body(block) == bytes(make_block(10, 10, BODY_BYTES).body)
    assert host.shard.stats().staging.hits == 1


def staged_files(host: Host) -> int:
    return len(list(host.staged.glob("*")))


def test_a_body_that_is_staged_stays_with_who_has_mapped_it(make: Callable[..., Host]) -> None:
    host = make()
    token = commit(host, None, 10)
    host.restart()
    attempt, _ = host.open(token)
    lose_cached_pages(host)
    prestaged(host, 10)
    ((_, block),) = host.shard.read(attempt, [10])
    mapped = Bodies(host.shard.bodies).of(block).body
    host.shard.release(attempt, purge=[10])
    host.shard.commit(attempt, {"next_seq": 1})
    assert staged_files(host) == 0
    assert bytes(mapped) == bytes(make_block(10, 10, BODY_BYTES).body)


def test_an_execution_gets_what_was_not_staged_by_itself(make: Callable[..., Host]) -> None:
    """A worker that maps the file would wait for its pages, one after another, and nobody would know."""
    host = make()
    token = commit(host, None, *range(0, 80, 10))
    host.restart()
    lose_cached_pages(host)
    attempt, _ = host.open(token)
    found = [block for _, block in host.shard.read(attempt, range(0, 80, 10))]
    assert [block.header.slice_us for block in found] == list(range(0, 80, 10))
    assert all(block.at is None for block in found), "they came with their bodies"
    assert all(bytes(b.body) == bytes(make_block(n, n, BODY_BYTES).body) for b in found for n in [b.header.slice_us])
    counts = host.shard.stats().staging
    assert counts.hits == 0 and counts.misses + counts.ahead == 8
    assert host.budget.used_bytes == host.budget.reserved_bytes == 0


def test_a_reference_in_memory_is_no_hit_if_its_body_has_to_be_read(make: Callable[..., Host]) -> None:
    host = make()
    attempt, _ = host.open(None)
    references = hand_over(host, 0, 10, 20, 30)
    host.shard.append(attempt, [(i, False, reference) for i, reference in enumerate(references)])
    lose_cached_pages(host)
    found = [block for _, block in host.shard.read(attempt, [10, 20, 30])]
    assert [bytes(block.body) for block in found] == [bytes(make_block(n, n, BODY_BYTES).body) for n in (10, 20, 30)]
    assert all(block.at is None for block in found)
    counts = host.shard.stats().staging
    assert counts.hits == 0 and counts.misses + counts.ahead == 3
    lose_cached_pages(host)
    assert prestaged(host, 10, 20, 30) == sum(reference.header.body_bytes for reference in references)
    assert all(block.at is not None for _, block in host.shard.read(attempt, [10, 20, 30]))
    assert host.shard.stats().staging.hits == 3


def lose_cached_pages(host: Host) -> None:
    """The system has no page of a body in memory; and nothing of a remote file is on this host."""
    for folder in ("copies", "written here"):
        for path in (host.folder / folder).rglob("*.bodies"):
            path.unlink()
    for path in host.folder.rglob("*.bodies"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if any(are_resident(path, [(0, path.stat().st_size)])):
            pytest.skip("this file system keeps all pages")


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES])
def test_without_room_in_shared_memory_bodies_are_read_when_they_are_needed(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    host = make()
    token = commit(host, None, 0, 10, 20)
    host.restart()
    attempt, _ = host.open(token)
    real = os.write
    full = OSError(error, os.strerror(error))

    def fails(*_: Any) -> int:
        raise full

    if error == errno.ENOSPC:
        monkeypatch.setattr(os, "write", fails)
    else:
        host.staged.write_text("not a folder")
    lose_cached_pages(host)
    host.shard.prestage(attempt, [0, 10, 20])
    found = [block for _, block in host.shard.read(attempt, [0, 10, 20])]
    monkeypatch.setattr(os, "write", real)
    bodies = [bytes(block.body) if block.at is None else host.body(block) for block in found]
    assert bodies == [bytes(make_block(n, n, BODY_BYTES).body) for n in (0, 10, 20)]
    assert host.shard.stats().staging.hits == 0
    said = [r.message for r in caplog.records if "no room for staged bodies" in r.message]
    assert len(said) == 1 and "/dev/shm" in said[0], "once"
    host.shard.abort(attempt)
    assert host.budget.reserved_bytes == 0
    host.staged.unlink() if host.staged.is_file() else None


def test_a_host_reads_ranges_of_what_another_host_s_children_wrote(make: Callable[..., Host]) -> None:
    """Before they are needed, and nothing else of the files."""
    host = make()
    if not isinstance(host.storage, RemoteStorage):
        pytest.skip("the files are in a folder of all hosts")
    token = commit(host, None, *range(0, 200, 10))
    host.restart()
    attempt, _ = host.open(token)
    before = host.remote.requests.to_json()["read_bytes"]
    prestaged(host, 0)
    assert list(host.storage.files.glob("*.bodies")) == []
    ((_, block),) = host.shard.read(attempt, [0])
    assert block.at is not None and host.body(block) == bytes(make_block(0, 0, BODY_BYTES).body)
    assert host.remote.requests.to_json()["read_bytes"] - before == block.header.body_bytes


def test_neighbours_of_a_child_s_file_are_read_together(make: Callable[..., Host]) -> None:
    """Rows and bodies, staged or when they are needed; behind an object store, each range is a request."""
    host = make()
    token = commit(host, None, *range(0, 160, 10))
    sizes = sum(make_block(n, n, BODY_BYTES).header.body_bytes for n in range(0, 160, 10))
    for staged in (True, False):
        host.restart()
        attempt, _ = host.open(token)
        lose_cached_pages(host)
        before = host.remote.requests.to_json() if host.kind == "remote" else {}
        if staged:
            with Gate(host.io):
                host.shard.prestage(attempt, range(0, 160, 10))
        found = [block for _, block in host.shard.read(attempt, range(0, 160, 10), blocking=True)]
        contents = [bytes(block.body) if block.at is None else host.body(block) for block in found]
        assert contents == [bytes(make_block(n, n, BODY_BYTES).body) for n in range(0, 160, 10)]
        if host.kind == "remote":
            after = host.remote.requests.to_json()
            assert sizes <= after["read_bytes"] - before["read_bytes"] < sizes + 16 * ALIGNMENT
            together = max(1, MOST_TOGETHER_BYTES // BODY_BYTES)
            assert after["range"] - before["range"] <= (4 if staged else 16) + -(-16 // together)
        host.shard.abort(attempt)
        assert host.budget.reserved_bytes == 0


def test_a_neighbour_that_cannot_be_read_harms_no_other(make: Callable[..., Host]) -> None:
    host = make()
    token = commit(host, None, 0, 10, 20, 30)
    settle(host)  # what the child left is gone, too
    (path,) = host.folder.glob("state/files/*.bodies")
    host.restart()
    attempt, _ = host.open(token)
    lose_cached_pages(host)
    end = sum(-(-make_block(n, n, BODY_BYTES).header.body_bytes // ALIGNMENT) * ALIGNMENT for n in (0, 10, 20))
    os.truncate(path, end + 100)
    with Gate(host.io):
        host.shard.prestage(attempt, [0, 10, 20, 30])
    reader = host.shard.read(attempt, [0, 10, 20, 30])
    for n in (0, 10, 20):
        _, block = next(reader)
        body = bytes(block.body) if block.at is None else host.body(block)
        assert body == bytes(make_block(n, n, BODY_BYTES).body)
    with pytest.raises(CorruptBlock, match="it ends before the block"):
        next(reader)
    host.shard.abort(attempt)


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
    assert prestaged(host, 10) == reference.header.body_bytes
    assert staged_files(host) == 1


def test_bodies_that_were_not_committed_are_read_where_the_child_left_them(make: Callable[..., Host]) -> None:
    host = make()
    attempt, _ = host.open(None)
    (reference,) = hand_over(host, 0, 10)
    if host.kind == "remote":
        shutil.rmtree(host.handed.local)  # the child was on another host
    host.shard.append(attempt, [(0, False, reference)])
    assert host.body(reference) == bytes(make_block(10, 10, BODY_BYTES).body)
    host.shard.commit(attempt, {"next_seq": 1})
    assert host.body(reference) == bytes(make_block(10, 10, BODY_BYTES).body)


def test_what_no_attempt_used_goes_when_a_shard_that_was_opened_later_commits(make: Callable[..., Host]) -> None:
    host = make()
    token = commit(host, None, 0)
    hand_over(host, 1, 10)  # by an attempt of a child that failed
    other = host.hand_over(name_of(7, LINEAGE, "other"), make_block(70, 70, BODY_BYTES))  # of a batch to come
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
        file.add(make_block(0, 0, BODY_BYTES))
        file.end()
        file.seal()
    with closing(create(host.remote, host.handed, name_of(1, LINEAGE, "open"))) as file:
        file.add(make_block(1, 1, BODY_BYTES))
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
            reference = file.add(make_block(batch, batch, BODY_BYTES))
            file.end()
            file.seal()
        host.shard.append(attempt, [(batch, False, reference)])
        token = host.shard.commit(attempt, {"next_seq": batch + 1})
        kept |= {int(path.name[11:21]) for path in away.local.iterdir()}
        assert [int(path.name[11:21]) for path in away.local.iterdir()] == [batch]
    assert kept == bodies(host) == {0, 1, 2, 3}
    attempt, _ = host.open(token)
    assert len(list(host.shard.read(attempt, [0, 1, 2, 3]))) == 4


def test_copies_of_bodies_stay_within_their_budget(make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go first, and are read from the other file system again."""
    # The references to them, 5 KB for each batch, share the budget.
    monkeypatch.setitem(globals(), "BODY_BYTES", 200_000)
    host = make()
    if not isinstance(host.storage, RemoteStorage):
        pytest.skip("the files are in a folder of all hosts")
    copies = host.storage._budget
    copies.limit(5 * BODY_BYTES // 2)
    token = None
    for number in range(8):
        token = commit(host, token, 10 * number)
    assert token is not None
    here = sorted(path.name[11:21] for path in host.storage.files.glob("*.bodies"))
    assert here == [f"{number:010d}" for number in (6, 7)] and bodies(host) == set(range(8))
    assert read(host, token, *range(0, 80, 10)) == list(range(0, 80, 10))
    for number in range(8, 11):  # what no version needs gives its room back
        token = commit(host, token, 10 * number, purge=(10 * number - 20,))
    assert sum(path.stat().st_size for path in host.storage.files.glob("*.bodies")) <= 5 * BODY_BYTES // 2
    host.storage.close()
    assert copies.used() == 0


def test_what_is_under_way_neither_delays_commits_nor_outlives_the_shard(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make()
    if not isinstance(host.storage, RemoteStorage):
        pytest.skip("the files are in a folder of all hosts")
    token = commit(host, None, *range(0, 100, 10))
    host.restart()
    attempt, _ = host.open(token)
    slow, begun, real = threading.Event(), threading.Event(), remote_storage.read_body

    def slowly(*where: Any) -> bytes:
        begun.set()
        assert slow.wait(60)
        return real(*where)

    monkeypatch.setattr(remote_storage, "read_body", slowly)
    host.shard.prestage(attempt, range(0, 100, 10))
    assert begun.wait(60)
    token = host.shard.commit(attempt, {"next_seq": 10})  # does not wait
    closing_it = threading.Thread(target=host.shard.close)
    closing_it.start()
    slow.set()
    closing_it.join(60)
    assert not closing_it.is_alive() and staged_files(host) == 0
