"""Local copies of open shards stay within the host's disk (state.local_copies), and reads say the same."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from state_backends.files import local_copies, partial
from state_backends.files.disk_budget import DiskBudget
from state_backends.files.kept_copies import KeptCopies
from state_backends.files.punching import can_punch
from state_backends.files.remote import Remote
from state_backends.files.remote_storage import RemoteStorage
from state_backends.store import trimming
from state_backends.store.io_thread import Priority
from state_backends.store.map import run_files
from tests.files.rig import IDENTITY, URI, Host, Place
from tests.object_store import ObjectStore
from tests.stores.rig import make_block, nothing

READER = "0000009999-reader"
BLOCK, BLOCKS = 40_000, 8  # bytes of a block, and blocks of each batch
LIMIT = 1 << 20
SLACK = 512 << 10
"""For one batch, or a merged file that no version names yet; for the first and the last block of each file; and for
RocksDB's own log."""

pytestmark = pytest.mark.skipif(not can_punch(Path(os.environ.get("TMPDIR", "/tmp"))), reason="no holes in files here")


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"PIECE_BYTES": 4 << 10, "LEAST_BYTES": 16 << 10, "AHEAD_BYTES": 4 << 10, "MOST_BYTES": 64 << 10}
    for name, size in sizes.items():
        monkeypatch.setattr(partial, name, size)
    monkeypatch.setattr(trimming, "_SLACK_BYTES", 64 << 10)
    monkeypatch.setattr(run_files, "SCANNED_BLOCKS", 2)


def limited(limit_bytes: int = LIMIT) -> DiskBudget:
    budget = DiskBudget()
    budget.limit(limit_bytes)
    return budget


@pytest.fixture
def hosts(hosts: Any) -> Any:
    """Hosts whose disk is small. They write one file for each batch."""
    return functools.partial(hosts, budget=8 << 20, disk=limited())


def on_disk(*folders: Path) -> int:
    """What the files of folders take, each once."""
    paths = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return 512 * sum({(s := path.stat()).st_ino: s.st_blocks for path in paths}.values())


def settled(host: Host) -> None:
    """Deletions, merges, and what makes room are over when this returns."""
    host.storage.settle()
    host.io.submit(Priority.MAINTENANCE, nothing()).result()
    while host.io.busy():
        host.io.submit(Priority.MAINTENANCE, nothing()).result()


def append(host: Host, token: str | None, number: int, due: Any = (), purge: Any = ()) -> str:
    """A batch with blocks of slices of its own. Returns the token of its version."""
    attempt = f"{number:010d}-a"
    host.shard.open(token, attempt, IDENTITY)
    for seq in range(number * BLOCKS, (number + 1) * BLOCKS):
        host.shard.append(attempt, [(seq, True, make_block(seq, seq, BLOCK))])
    host.shard.release(attempt, purge=purge)
    host.shard.commit(attempt, {"next_seq": (number + 1) * BLOCKS}, due)
    settled(host)
    return attempt


def fill(host: Host, batches: int, **options: Any) -> str:
    token = None
    for number in range(batches):
        token = append(host, token, number, **options)
    assert token is not None
    return token


def read(host: Host, token: str, slices: Any) -> list[int]:
    host.shard.open(token, READER, IDENTITY)
    seqs = []
    for seq, block in host.shard.read(READER, list(slices)):
        assert bytes(block.stored) == bytes(make_block(seq, seq, BLOCK).stored)
        seqs.append(seq)
    host.shard.abort(READER)
    return seqs


def near(host: Host) -> dict[int, int]:
    """How many bytes of each slice are on the disk of this host."""
    return {slice_us: disk for slice_us, (_, disk) in host.shard.store.tiers(1 << 40).items()}


@pytest.mark.slow
def test_a_state_several_times_larger_than_the_disk_stays_within_it(bucket: ObjectStore, hosts: Any) -> None:
    host, token = hosts(), None
    for number in range(24):
        token = append(host, token, number)
        assert on_disk(host.folder) <= LIMIT + SLACK, number
        if number % 6 == 5:
            slices = range((number + 1) * BLOCKS)
            assert read(host, token, slices) == [*slices]
            assert on_disk(host.folder) <= LIMIT + SLACK, "reading all of it makes room, too"
    stored = sum(len(data) for path, data in bucket.objects().items() if path.endswith(".sst"))
    assert stored > 6 * LIMIT
    assert host.shard.rebuilds == 1, "no hole was taken for damage"


def test_without_a_budget_everything_stays(bucket: ObjectStore, hosts: Any) -> None:
    host = hosts(disk=DiskBudget())
    token = fill(host, 8)
    with bucket.watched() as watched:
        assert read(host, token, range(8 * BLOCKS)) == [*range(8 * BLOCKS)]
        assert watched.count() == {}
    assert not [*host.storage.files.glob("*.holes")]


def test_what_is_due_stays_and_the_oldest_slices_go_first(bucket: ObjectStore, hosts: Any) -> None:
    host = hosts()
    due = [3, 4, 8 * BLOCKS + 2]
    token = fill(host, 12, due=due)
    with bucket.watched() as watched:
        assert read(host, token, due) == due
        assert read(host, token, [12 * BLOCKS - 3]) == [12 * BLOCKS - 3], "the newest"
        assert "range" not in watched.count()
        assert near(host)[1] == 0 and all(near(host)[slice_us] > BLOCK // 2 for slice_us in due)
        assert read(host, token, [1]) == [1]
        assert watched.count()["range"] >= 1
        assert near(host)[1] > BLOCK // 2


@pytest.mark.slow
def test_an_opening_fetches_only_as_much_as_there_is_room_for(bucket: ObjectStore, hosts: Any) -> None:
    token = fill(hosts(), 12)
    other = hosts(disk=limited())
    other.shard.open(token, READER, IDENTITY)
    settled(other)
    assert on_disk(other.folder) <= LIMIT + SLACK
    assert read(other, token, range(12 * BLOCKS)) == [*range(12 * BLOCKS)]
    assert on_disk(other.folder) <= LIMIT + SLACK
    token = append(other, token, 12)
    assert on_disk(other.folder) <= LIMIT + SLACK


@pytest.mark.slow
def test_a_restart_and_a_rebuild_do_not_take_holes_for_data(bucket: ObjectStore, hosts: Any) -> None:
    host = hosts(renews=True)
    token = fill(host, 8)
    later = append(host, token, 8)
    assert read(host, token, range(8 * BLOCKS)) == [*range(8 * BLOCKS)]
    assert read(host, later, range(9 * BLOCKS)) == [*range(9 * BLOCKS)]
    assert host.shard.rebuilds == 3
    # As after a death: the folder is what it was, and nobody remembers it.
    again = Host(host.remote.uri, host.folder, budget=8 << 20, disk=limited())
    try:
        assert read(again, later, range(9 * BLOCKS)) == [*range(9 * BLOCKS)]
    finally:
        again.io.close()
        again.remote.close()


@pytest.mark.slow
def test_files_with_holes_are_purged_and_merged(bucket: ObjectStore, hosts: Any, caplog: Any) -> None:
    host, token = hosts(retain=2), None
    left: list[int] = []
    for number in range(40):
        purge = [slice_us for slice_us in left if slice_us % 3 and slice_us < (number - 8) * BLOCKS]
        purge += [slice_us for slice_us in left if slice_us < (number - 20) * BLOCKS]
        token = append(host, token, number, purge=purge)
        left = [*(seq for seq in left if seq not in purge), *range(number * BLOCKS, (number + 1) * BLOCKS)]
        assert on_disk(host.folder) <= LIMIT + 2 * SLACK, "also with a file that was just merged"
        assert token is not None
    assert read(host, token, range(40 * BLOCKS)) == left
    assert host.shard.stats().merges > 0 and host.shard.stats().failed_merges == 0
    assert host.shard.rebuilds == 1
    assert "could not drop" not in caplog.text and "cannot merge" not in caplog.text


@pytest.mark.slow
def test_keyed_values_are_found_scanned_and_merged(bucket: ObjectStore, hosts: Any) -> None:
    disk = limited(64 << 10)
    host, token = hosts(disk=disk), None
    values: dict[bytes, bytes | None] = {}
    for number in range(12):
        change: dict[bytes, bytes | None] = {b"%06d" % (k * 12 + number): bytes([number]) * 60 for k in range(300)}
        token = host.put(token, str(number), change)
        values |= change
        settled(host)
        assert host.values(token) == dict(sorted(values.items()))
    assert any("-merged" in path for path in bucket.objects())
    assert host.shard.rebuilds == 1


@pytest.mark.slow
def test_a_kept_copy_never_has_holes(bucket: ObjectStore, hosts: Any, tmp_path: Path) -> None:
    """Another state server of this host may have taken it, and takes it for whole."""
    kept = KeptCopies(tmp_path, 1 << 30)
    one = hosts(kept=kept, disk=DiskBudget())
    token = fill(one, 8)
    other = hosts(kept=kept, disk=DiskBudget())
    assert read(other, token, range(8 * BLOCKS)) == [*range(8 * BLOCKS)]
    one.disk.limit(LIMIT // 4)
    later = append(one, token, 8)
    assert one.disk.used() > LIMIT, "these are the other's, too"
    settled(other)  # its first opening has work behind it
    with bucket.watched() as watched:
        assert read(other, token, range(8 * BLOCKS)) == [*range(8 * BLOCKS)]
        assert watched.count() == {}
    other.close()
    later = append(one, later, 9)
    assert on_disk(one.folder, tmp_path / "kept") <= LIMIT // 4 + SLACK
    third = hosts(kept=kept, disk=DiskBudget())
    assert read(third, later, range(10 * BLOCKS)) == [*range(10 * BLOCKS)]


def test_bodies_and_rows_share_the_budget(tmp_path: Path) -> None:
    budget = limited(1000)
    bodies = []
    for number in range(12):
        bodies.append(tmp_path / f"{number}.bodies")
        bodies[-1].write_bytes(bytes(100))
        budget.add(bodies[-1])
    assert [path.exists() for path in bodies] == [False] * 2 + [True] * 10
    one, two = tmp_path / "one", tmp_path / "two"
    budget.has(one / "1.sst", 300)
    assert budget.used() == 1000 and budget.excess(one) == 0, "bodies make room down to a half"
    budget.has(two / "1.sst", 400)
    assert budget.used() == 1200 and budget.room() == -200
    assert budget.excess(one) == 50 and budget.excess(two) == 150, "each down to its share of the rest"
    budget.grew(one / "1.sst", -50)
    budget.grew(two / "1.sst", -150)
    assert budget.excess(one) == budget.excess(two) == budget.room() == 0
    budget.forget([one / "1.sst", *bodies])
    budget.grew(one / "1.sst", 5)
    budget.forget_folder(two)
    assert budget.used() == 0


def test_bodies_that_an_opening_removes_take_no_more_room(make: Callable[..., Place], tmp_path: Path) -> None:
    budget, place = limited(1000), make()
    place.remotes.append(Remote(URI, (place.fs, "base")))
    storage = RemoteStorage(place.remotes[-1], "query/shard", tmp_path / "copies", budget=budget)
    storage.files.mkdir()
    path = storage.files / "1.bodies"
    path.write_bytes(bytes(400))
    budget.add(path)
    storage.fetch([])
    assert not path.exists() and budget.used() == 0


def test_where_no_holes_can_be_made_everything_stays_and_the_log_says_so(
    bucket: ObjectStore, hosts: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(local_copies, "can_punch", lambda folder: False)
    monkeypatch.setattr(local_copies, "_able", {})
    host = hosts()
    with caplog.at_level(logging.INFO):
        token = fill(host, 8)
    assert caplog.text.count("makes no holes") == 1
    with bucket.watched() as watched:
        assert read(host, token, range(8 * BLOCKS)) == [*range(8 * BLOCKS)]
        assert watched.count() == {}


def test_a_damaged_hole_is_found_and_the_shard_is_made_again(bucket: ObjectStore, hosts: Any) -> None:
    """A hole that somebody else made fails like any other damage, and never gives zeros."""
    from aion.errors import StateError
    from state_backends.files.punching import punch

    host = hosts(disk=DiskBudget())
    token = fill(host, 2)
    for path in host.storage.files.glob("*.sst"):
        fd = os.open(path, os.O_WRONLY)
        punch(fd, 8 << 10, path.stat().st_size // 2)
        os.close(fd)
    with pytest.raises(StateError):
        read(host, token, range(2 * BLOCKS))
    host.shard.abort(READER)
    assert read(host, token, range(2 * BLOCKS)) == [*range(2 * BLOCKS)]
    assert host.shard.rebuilds == 2
