"""Merged files and versions: each names what it needs, and nothing stays that none does."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from state_backends.files.names import MERGED
from state_backends.store.io_thread import Priority, Steps
from state_backends.store.merge_choice import Limits
from state_backends.versions import lineage
from state_backends.versions.manifest import load
from tests.stores.rig import KIB, make_block
from tests.versions.host import Host, in_the_way

pytestmark = pytest.mark.usual_sizes

LIMITS = Limits(worth_bytes=1, file_share=1.0, disk=100.0)
"""Merges what is worth it, however little there is."""


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
    host = hosts(retain=2)
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


def test_a_merge_that_no_version_names_is_seen_by_nobody(hosts: Callable[..., Host]) -> None:
    """Another host, which commits a version and tidies up, cannot take away what this one is going to name."""
    host = hosts(retain=1)
    tokens = commits(host, 8)
    assert host.shard.store is not None and host.shard.store.stats().merges == 1
    assert host.files() == host.named_files(*tokens[-2:]), "the merged file is this host's own"
    other = hosts(retain=1)
    other.blocks = host.blocks
    other.stop()
    other.folder, here = host.folder, other.folder
    other.start()
    other.shard._local._live = here / "live"
    other.commit(tokens[-1], (8, 2))  # by a task that is lost
    again = host.commit(tokens[-1], (8, 2))  # and runs again here
    assert any(MERGED in name for name in named(host, again))
    last = other.commit(again, (9, 2))
    assert everything(other, last) == [*range(10)]
    other.stop()
    shutil.rmtree(here, ignore_errors=True)
    other.folder = here
    other.start()
    host.restart()
    assert everything(host, last) == [*range(10)]


def test_a_file_of_which_nothing_is_in_the_version_is_deleted_with_the_commit(hosts: Callable[..., Host]) -> None:
    host = hosts()
    token = host.commit(None, (0, 0))
    attempt, _ = host.open(token)
    host.append(attempt, (1, 10), late=True)
    host.shard.release(attempt, [10])
    assert host.shard.store is not None
    host.shard.store.flush()
    settle(host)
    new = host.folder / "live" / "new"
    assert len(list(new.iterdir())) == 2
    host.shard.release(attempt, purge=[10])
    host.shard.commit(attempt, {"next_seq": 2})
    settle(host)
    assert host.files() == named(host, attempt)
    assert [path.name for path in new.iterdir()] == [*host.files()]


def test_old_versions_are_looked_into_once(hosts: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit costs what is new: not the manifests that are kept, nor a look at each of the folder's files."""
    host = hosts(retain=10)
    tokens = commits(host, 12)
    host.restart()
    host.open(tokens[-1])  # looks around once
    loads, lists = Counter[str](), Counter[str]()
    glob = Path.glob

    def noting(data: bytes, name: str) -> Any:
        loads[name] += 1
        return load(data, name)

    monkeypatch.setattr(lineage, "load", noting)
    monkeypatch.setattr(Path, "glob", lambda path, pattern: (lists.update([path.name]), glob(path, pattern))[1])
    for i in range(12, 42):
        tokens.append(host.commit(tokens[-1], (i, i // 4)))
    assert loads == {}
    assert lists == {}
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
    assert host.manifests() == set(tokens[-3:])
    assert host.files() == host.named_files(*tokens[-3:])


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
def test_disk_use_stays_within_twice_the_live_bytes(quick_folder: Path) -> None:
    """1,000 small batches whose windows live for 300 of them, one block in twenty late, 20 versions kept."""
    batches, lifetime, size = 1000, 300, 4 * KIB
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
        host.shard.release(attempt, [i - 2])
        host.shard.release(attempt, purge=[i - lifetime])
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
    assert host.shard.store.stats().merged_bytes < 2 * batches * 4 * size
    host.restart()
    attempt, _ = host.open(token)
    found = [seq for seq, _ in host.shard.read(attempt, sorted(live))]
    assert len(found) == len(set(found)) == stats.blocks
    host.stop()
