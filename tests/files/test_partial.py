"""A shard is opened by parts of its files. What a batch reads is fetched when it is read, and the rest behind it."""

from __future__ import annotations

import functools
import logging
import random
import threading
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aion.errors import CorruptState, StateError
from state_backends.files import partial
from state_backends.files.names import SstFile
from state_backends.files.remote import Remote
from state_backends.format.sst_table import Span
from state_backends.store.io_thread import Priority
from state_backends.store.map import run_files
from state_backends.versions.manifest import load
from tests.files.rig import IDENTITY, Host
from tests.io_thread.rig import PATIENCE
from tests.object_store import ObjectStore
from tests.stores.rig import make_block, nothing

READER = "0000009999-reader"


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"PIECE_BYTES": 1 << 10, "LEAST_BYTES": 4 << 10, "AHEAD_BYTES": 1 << 10, "MOST_BYTES": 8 << 10}
    for name, size in sizes.items():
        monkeypatch.setattr(partial, name, size)
    monkeypatch.setattr(run_files, "SCANNED_BLOCKS", 2)


@pytest.fixture
def hosts(hosts: Any) -> Any:
    """Hosts that write one file for each batch."""
    return functools.partial(hosts, budget=32 << 20)


def fill(host: Host, files: int, blocks: int, size: int = 3000) -> str:
    """Files with this many blocks each, which are of slices of their own. Returns the token."""
    token: str | None = None
    for number in range(files):
        attempt = f"{number:010d}-a"
        host.shard.open(token, attempt, IDENTITY)
        for seq in range(number * blocks, (number + 1) * blocks):
            host.shard.append(attempt, [(seq, True, make_block(seq, seq, size))])
        host.shard.commit(attempt, {"next_seq": (number + 1) * blocks})
        token = attempt
    assert token is not None
    host.storage.settle()
    return token


def read(host: Host, slices: Sequence[int], size: int = 3000) -> list[int]:
    found = [(b.seq, bytes(b.block.stored)) for b in host.shard.read(READER, slices)]
    assert all(data == bytes(make_block(seq, seq, size).stored) for seq, data in found)
    return [seq for seq, _ in found]


def bytes_of(bucket: ObjectStore) -> int:
    return sum(len(data) for path, data in bucket.objects().items() if path.endswith(".sst"))


@contextmanager
def nothing_behind_it(remote: Remote) -> Iterator[None]:
    """For a while, nothing is fetched that nobody waits for."""
    go_on = threading.Event()
    busy = [remote.ahead.submit(go_on.wait, PATIENCE) for _ in range(remote.ahead._max_workers)]
    try:
        yield
    finally:
        go_on.set()
        for future in busy:
            future.result()


def complete(host: Host) -> None:
    """What is fetched behind the batch is here when this returns."""
    files = [entry.in_folder(str(host.shard.storage.files)) for entry in host.shard.current.numbered.values()]
    host.io.submit(Priority.MAINTENANCE, host.p_bucket.complete(files)).result()
    assert all(host.storage.copies.partial(file.name) is None for file in files)


@pytest.mark.slow
@pytest.mark.usual_sizes
def test_requests_and_bytes_of_an_opening_do_not_depend_on_the_size_of_the_state(
    bucket: ObjectStore, hosts: Any
) -> None:
    seen = []
    for number, blocks in enumerate((20, 80)):
        uri = bucket.uri(f"state-{number}")
        token = fill(hosts(uri), 3, blocks)
        other = hosts(uri)
        with nothing_behind_it(other.remote), bucket.watched() as watched:
            other.shard.open(token, READER, IDENTITY)
            other.storage.settle()  # it looks for uploads that died, behind the opening
            opened = watched.count()
            assert read(other, [blocks + 5]) == [blocks + 5]
            after = watched.count()
        seen.append(opened)
        assert opened["range"] == 2 * 3, "the beginning and the end of each file"
        assert after["range"] == opened["range"] + 1, "the block that was read"
        assert after["read_bytes"] - opened["read_bytes"] < 3 * 3000
        complete(other)  # what this host still fetches is not what the next one asks for
    requests = [{name: n for name, n in opened.items() if name != "read_bytes"} for opened in seen]
    assert requests[0] == requests[1]
    more = seen[1]["read_bytes"] - seen[0]["read_bytes"]
    assert more < 3 * 60 * 200, "of three files with 60 blocks more, only what says where they are"


@pytest.mark.slow
def test_the_rest_comes_behind_it_and_then_nothing_is_asked_for(bucket: ObjectStore, hosts: Any) -> None:
    token = fill(hosts(), 3, 20)
    other = hosts()
    with nothing_behind_it(other.remote):
        other.shard.open(token, READER, IDENTITY)
        assert read(other, [3, 59]) == [3, 59]
    complete(other)
    other.storage.settle()  # it looks for uploads that died, behind the opening
    with bucket.watched() as watched:
        assert read(other, range(60)) == [*range(60)]
        assert watched.count() == {}
    copies = {path.name: path.read_bytes() for path in other.storage.files.iterdir()}
    assert copies == {path.rpartition("/")[2]: d for path, d in bucket.objects().items() if path.endswith(".sst")}


@pytest.mark.slow
def test_a_rebuild_does_not_take_a_copy_with_holes_for_a_whole_one(
    bucket: ObjectStore, hosts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Spark asks for an older version, because another attempt of the batch has won. Most of the files are the same."""
    one = hosts()
    token = fill(one, 3, 20)
    later = one.commit(token, "3", (60, 60))
    other = hosts(renews=True)
    with nothing_behind_it(other.remote), bucket.watched() as watched:
        other.shard.open(later, READER, IDENTITY)
        opened = watched.count()
        other.shard.open(token, READER, IDENTITY)
        assert read(other, [3, 59]) == [3, 59]
        again = watched.count()
        assert again["get"] - opened["get"] <= opened["get"], "no file is fetched as a whole"
        assert again["read_bytes"] < 3 * opened["read_bytes"] < bytes_of(bucket)
    assert "made again" not in caplog.text
    complete(other)
    assert read(other, range(60)) == [*range(60)]
    copies = {path.name: path.read_bytes() for path in other.storage.files.iterdir()}
    assert copies == {p.rpartition("/")[2]: d for p, d in bucket.objects().items() if p.rpartition("/")[2] in copies}


def test_who_completes_a_copy_waits_until_it_was_compared(tmp_path: Path) -> None:
    """Otherwise it would be complete, and still not whole."""
    data = random.Random(1).randbytes(5 << 10)
    path = tmp_path / "1.sst"
    file = SstFile(1, str(path), len(data), zlib.crc32(data), 0, 1)
    compares, go_on = threading.Event(), threading.Event()

    def checked(right: bool) -> None:
        compares.set()
        assert go_on.wait(PATIENCE)

    with ThreadPoolExecutor(2) as pool:
        copy = partial.PartialCopy(file, lambda n, at: data[at : at + n], pool, checked=checked)
        copy.begin()
        whole = Span(0, len(data))
        fetched = copy.bring(whole)
        assert compares.wait(PATIENCE)
        assert copy.bring(whole) == [], "all is here: nobody who reads has to wait"
        (future,) = copy.bring(whole, ahead=True)
        assert not future.done() and not copy.is_whole
        go_on.set()
        for other in (future, *fetched):
            other.result(PATIENCE)
        assert copy.is_whole and copy.bring(whole, ahead=True) == []
    with ThreadPoolExecutor(2) as pool:
        compares.clear(), go_on.clear()
        kept = partial.PartialCopy(file, lambda n, at: data[at : at + n], pool, checked=checked)
        kept.begin(is_here=True)
        kept.check_kept()
        assert compares.wait(PATIENCE)
        (future,) = kept.bring(whole, ahead=True)
        assert kept.bring(whole) == [] and not future.done()
        go_on.set()
        future.result(PATIENCE)
        assert kept.is_whole


@pytest.mark.slow
def test_commits_and_merges_go_on_while_parts_are_missing(bucket: ObjectStore, hosts: Any) -> None:
    """Files are purged and merged although RocksDB has only a part of each."""
    token = fill(hosts(), 4, 10)
    other = hosts()
    with nothing_behind_it(other.remote):
        other.shard.open(token, READER, IDENTITY)
        other.shard.abort(READER)
        # The second file dies, and a half of the others, so that they are merged.
        token = other.commit(token, "5", (40, 1000), purge=[*range(10, 20), *range(5), *range(20, 28)])
        for number in range(6, 16):
            other.io.submit(Priority.MAINTENANCE, nothing()).result()
            token = other.commit(token, str(number), (35 + number, 1000 + number), purge=[999 + number])
        left = [*range(5, 10), 28, 29, *range(30, 40)]
        other.shard.open(token, READER, IDENTITY)
        assert read(other, range(40)) == left
    third = hosts()
    third.shard.open(token, READER, IDENTITY)
    assert read(third, range(40)) == left


@pytest.mark.slow
def test_keyed_values_are_found_and_scanned_while_parts_are_missing(bucket: ObjectStore, hosts: Any) -> None:
    one, token = hosts(), None
    chosen = random.Random(7)
    wanted: dict[bytes, bytes | None] = {}
    for number in range(3):
        keys = chosen.sample(range(5000), 1500)
        change: dict[bytes, bytes | None] = {b"%08d" % k: chosen.randbytes(40) if k % 7 else None for k in keys}
        token = one.put(token, str(number), change)
        wanted |= change
    wanted = {key: value for key, value in sorted(wanted.items()) if value is not None}
    other = hosts()
    with nothing_behind_it(other.remote), bucket.watched() as watched:
        other.shard.open(token, READER, IDENTITY)
        opened = watched.count()["read_bytes"]
        asked = chosen.sample([*wanted, b"absent", b"00000000x", b"99999999"], 20)
        found = [value for page in other.shard.get(READER, asked) for value in page]
        assert found == [wanted.get(key) for key in asked]
        begin, end = b"00002000", b"00002100"
        assert dict(other.shard.scan(READER, begin, end)) == {k: v for k, v in wanted.items() if begin <= k < end}
        assert watched.count()["read_bytes"] < bytes_of(bucket), "not everything was needed"
        assert opened < bytes_of(bucket) / 4
        assert dict(other.shard.scan(READER, b"", None)) == wanted
    assert dict(other.shard.scan(READER, b"", None)) == wanted


@pytest.mark.slow
def test_a_merge_of_runs_fetches_them(bucket: ObjectStore, hosts: Any) -> None:
    one, token = hosts(), None
    values: dict[bytes, bytes | None] = {}
    for number in range(3):
        change: dict[bytes, bytes | None] = {b"%d-%d" % (k, number): bytes(100) for k in range(200)}
        token = one.put(token, str(number), change)
        values |= change
    other = hosts()
    with nothing_behind_it(other.remote):
        other.shard.open(token, READER, IDENTITY)
        other.shard.abort(READER)
        for number in range(3, 9):
            change = {b"%d-%d" % (k, number): bytes(100) for k in range(200)}
            token = other.put(token, str(number), change)
            values |= change
        assert other.values(token) == dict(sorted(values.items()))
        assert any("-merged" in path for path in bucket.objects())


def manifest_of(bucket: ObjectStore, token: str) -> Any:
    path = next(path for path in bucket.objects() if path.endswith(f"/{token}.json"))
    return load(bucket.get(f"{bucket.bucket}/{path}"), token)


def test_a_file_of_another_size_is_refused_when_the_shard_is_opened(bucket: ObjectStore, hosts: Any) -> None:
    token = fill(hosts(), 2, 20)
    file = manifest_of(bucket, token).files[0]
    path, data = next((p, d) for p, d in bucket.objects().items() if p.endswith(file.name))
    for changed in (data[:-1], data + b"x", data[:-20] + bytes(20)):
        bucket.put(path, changed)
        with pytest.raises(CorruptState, match=file.name):
            hosts().shard.open(token, READER, IDENTITY)


@pytest.mark.slow
def test_a_damaged_part_is_found_when_it_is_read_and_named_when_all_is_here(
    bucket: ObjectStore, hosts: Any, caplog: pytest.LogCaptureFixture
) -> None:
    token = fill(hosts(), 1, 40)
    (file,) = manifest_of(bucket, token).files
    path, data = next((p, d) for p, d in bucket.objects().items() if p.endswith(file.name))
    at = data.index(bytes(make_block(30, 30, 3000).stored)) + 1000
    bucket.put(path, data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    other = hosts()
    with nothing_behind_it(other.remote):
        other.shard.open(token, READER, IDENTITY)
        assert read(other, [3]) == [3]
        with pytest.raises(StateError, match=r"block 30 of slice 30 in file .*RocksDB cannot read it"):
            read(other, [30])
        other.shard.abort(READER)
        with pytest.raises(CorruptState, match=f"file {file.name} at s3://.* is damaged"):
            other.shard.open(token, READER, IDENTITY)
    other.close()
    caplog.clear()
    third = hosts()
    with caplog.at_level(logging.ERROR):
        third.shard.open(token, READER, IDENTITY)
        complete(third)
    assert f"file {file.name} is damaged" in caplog.text
    assert not (third.storage.files / file.name).exists(), "it is not taken for a whole copy"


def test_what_is_fetched_is_never_lost_when_the_network_fails(bucket: ObjectStore, hosts: Any) -> None:
    """The batch fails, and the next attempt reads what was missing."""
    token = fill(hosts(), 1, 40)
    other = hosts()
    with nothing_behind_it(other.remote):
        other.shard.open(token, READER, IDENTITY)
        with bucket.denied(), pytest.raises(StateError, match="s3://"):
            read(other, [20])
        assert read(other, [20]) == [20], "no new opening is needed"


@pytest.mark.slow
def test_copies_without_links_are_whole(bucket: ObjectStore, hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    token = fill(hosts(), 1, 40)
    other = hosts()
    monkeypatch.setattr("state_backends.files.local_copies._has_links", lambda folder: False)
    with nothing_behind_it(other.remote):
        other.shard.open(token, READER, IDENTITY)
        (file,) = manifest_of(bucket, token).files
        assert other.storage.copies.partial(file.name) is None
        assert read(other, range(40)) == [*range(40)]


def test_who_waits_for_a_range_does_not_wait_for_what_is_fetched_ahead(tmp_path: Path) -> None:
    """A range that is to be fetched ahead, and that somebody reads before its turn comes, is fetched for the reader."""
    data = random.Random(1).randbytes(8 << 10)
    asked: list[tuple[int, int]] = []

    def read_at(size: int, offset: int) -> bytes:
        asked.append((offset, size))
        return data[offset : offset + size]

    go_on = threading.Event()
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as ahead:
        file = SstFile(1, str(tmp_path / "f"), len(data), zlib.crc32(data), 0, 5)
        copy = partial.PartialCopy(file, read_at, pool, ahead)
        copy.begin()
        others = ahead.submit(go_on.wait, PATIENCE)
        behind = copy.bring(Span(0, len(data)), ahead=True)
        for future in copy.bring(Span(2100, 2200)):
            future.result(PATIENCE)
        assert asked == [(2048, 1024)] and not any(future.done() for future in behind)
        go_on.set()
        assert others.result()
        while futures := copy.bring(Span(0, len(data)), ahead=True):
            for future in futures:
                future.result(PATIENCE)
    assert copy.is_whole and (tmp_path / "f").read_bytes() == data
    assert sorted(asked) == [(0, 2048), (2048, 1024), (3072, 5120)], "each byte once"


def test_pieces_are_fetched_once_and_neighbours_together(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    data = random.Random(1).randbytes(20_500)
    asked: list[tuple[int, int]] = []

    def read_at(size: int, offset: int) -> bytes:
        asked.append((offset, size))
        return data[offset : offset + size]

    with ThreadPoolExecutor(4) as pool:
        copy = partial.PartialCopy(SstFile(1, str(tmp_path / "f"), len(data), zlib.crc32(data), 0, 5), read_at, pool)
        copy.begin()
        for begin, end in ((3000, 3100), (2000, 5000), (0, 20_500), (0, 20_500)):
            for future in copy.bring(partial.Span(begin, end)):
                future.result()
            assert (tmp_path / "f").read_bytes()[begin:end] == data[begin:end]
    assert sorted(asked) == [(0, 1024), (1024, 1024), (2048, 2048), (4096, 1024), (5120, 8192), (13312, 7188)]
