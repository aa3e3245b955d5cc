"""Copies that a host keeps after it has closed a shard: within a budget, and trusted only after a look at them."""

from __future__ import annotations

import functools
import logging
import os
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from state_backends.files.kept_copies import KeptCopies
from state_backends.files.location import RemoteLocation
from state_backends.files.names import SstFile
from state_backends.files.remote import Remote
from state_backends.format.errors import CorruptBlock, CorruptState
from state_backends.server.reading import held
from tests.files.rig import IDENTITY
from tests.files.test_partial import READER, complete, fill, manifest_of, nothing_behind_it, read, small_ranges  # noqa: F401
from tests.io_thread.rig import PATIENCE
from tests.object_store import ObjectStore
from tests.stores.rig import make_block

PLACE = "s3://bucket/state/files"


def of(folder: Path, name: str, data: bytes = b"x" * 100) -> SstFile:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    return SstFile(1, str(folder / name), len(data), zlib.crc32(data), 0, 1)


def elsewhere(folder: Path, file: SstFile) -> SstFile:
    folder.mkdir(exist_ok=True)
    return file._replace(path=str(folder / file.name))


def kept_names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "kept").glob("*/*")}


def test_what_was_used_least_recently_goes_first(tmp_path: Path) -> None:
    kept = KeptCopies(tmp_path, 350)
    files = [of(tmp_path / "one", f"{n}.sst") for n in range(3)]
    for number, file in enumerate(files):
        kept.put(PLACE, Path(file.path))
        os.utime(file.path, (number, number))  # the same file, and so the time at which the copy was used
    assert kept.take(PLACE, elsewhere(tmp_path / "other", files[0]))
    kept.put(PLACE, Path(of(tmp_path / "one", "3.sst").path))
    assert kept_names(tmp_path) == {"0.sst", "2.sst", "3.sst"}
    kept.put(PLACE, Path(of(tmp_path / "one", "large.sst", bytes(351)).path))
    assert kept_names(tmp_path) == {"0.sst", "2.sst", "3.sst"}, "nothing goes for what is too large anyhow"
    kept.put(PLACE, Path(of(tmp_path / "one", "4.sst", bytes(340)).path))
    assert kept_names(tmp_path) == {"4.sst"}


def test_without_a_budget_nothing_is_kept(tmp_path: Path) -> None:
    kept = KeptCopies(tmp_path)
    file = of(tmp_path / "one", "1.sst")
    kept.put(PLACE, Path(file.path))
    assert not kept.take(PLACE, elsewhere(tmp_path / "other", file))
    assert not (tmp_path / "kept").exists()


@pytest.mark.slow
def test_copies_go_when_their_query_is_opened_on_a_host_that_keeps_none(
    bucket: ObjectStore, hosts: Any, tmp_path: Path
) -> None:
    """Also those of the operator's shards that are on other hosts now. Those of other queries stay."""
    kept = KeptCopies(tmp_path, 1 << 30)
    one = hosts(kept=kept)
    token = fill(one, 2, 20)
    one.storage.settle()
    uri = one.remote.shown
    others = [f"{uri}/query/tolls/shard-00004/files", f"{uri}/query/other/shard-00003/files", "s3://other/shard-00003"]
    for number, other in enumerate(others):
        kept.put(other, Path(of(tmp_path / "files", f"of-{number}.sst").path))
    before = kept_names(tmp_path)
    assert {"of-0.sst", "of-1.sst", "of-2.sst"} < before
    hosts(kept=KeptCopies(tmp_path, 1 << 30)).shard.open(token, READER, IDENTITY)
    assert kept_names(tmp_path) == before
    later = hosts(kept=KeptCopies(tmp_path))
    later.shard.open(token, READER, IDENTITY)
    assert kept_names(tmp_path) == {"of-1.sst", "of-2.sst"}
    assert read(later, range(40)) == [*range(40)]
    kept.put(others[0], Path(of(tmp_path / "files", "of-0.sst").path))
    assert "of-0.sst" in kept_names(tmp_path), "a server that is alive goes on keeping"


@pytest.mark.slow
def test_copies_stay_when_a_version_is_only_looked_at(bucket: ObjectStore, hosts: Any, tmp_path: Path) -> None:
    one = hosts(kept=KeptCopies(tmp_path, 1 << 30))
    token = fill(one, 2, 20)
    before = kept_names(tmp_path)
    assert before
    location = RemoteLocation(Remote(one.remote.uri), tmp_path)
    names = "query", "tolls", "shard-00003"
    with held(location, names, manifest_of(bucket, token)) as version, version.reading() as reader:
        assert len([*reader.read(range(40))]) == 40
    location.close()
    assert kept_names(tmp_path) == before


def test_what_is_not_the_file_is_not_taken(tmp_path: Path) -> None:
    kept = KeptCopies(tmp_path, 1000)
    file = of(tmp_path / "one", "1.sst")
    kept.put(PLACE, Path(file.path))
    other = elsewhere(tmp_path / "other", file)
    assert not kept.take("s3://bucket/another/files", other), "of another shard"
    (copy,) = (tmp_path / "kept").glob("*/1.sst")
    copy.unlink()
    copy.symlink_to(file.path)
    assert not kept.take(PLACE, other), "a link"
    copy.write_bytes(b"short")
    assert not kept.take(PLACE, other) and not copy.exists()
    (tmp_path / "kept").joinpath("file in the way").write_text("")
    kept.put(PLACE, Path(file.path))
    assert kept.take(PLACE, other)


def test_several_processes_keep_within_one_budget(tmp_path: Path) -> None:
    """Each has its own object, as state servers have. What they take meanwhile is whole."""
    together = threading.Barrier(4)

    def work(number: int) -> None:
        kept, folder = KeptCopies(tmp_path, 1000), tmp_path / str(number)
        files = [of(folder, f"{n}.sst", bytes([n]) * 100) for n in range(30)]
        together.wait(60)
        for file in files:
            kept.put(PLACE, Path(file.path))
            target = elsewhere(tmp_path / f"{number} takes", file)
            if kept.take(PLACE, target):
                assert zlib.crc32(Path(target.path).read_bytes()) == file.crc

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert 5 <= len(kept_names(tmp_path)) <= 10


@pytest.fixture
def host(hosts: Any, tmp_path: Path) -> Any:
    """Makes hosts that are the same machine, one after the other."""
    return functools.partial(hosts, budget=32 << 20, kept=KeptCopies(tmp_path / "scratch", 64 << 20))


def closed(host: Any) -> None:
    host.storage.settle()
    host.shard.close()
    host.storage.close()


def test_a_shard_that_is_opened_again_asks_for_no_file(bucket: ObjectStore, host: Any) -> None:
    one = host()
    token = fill(one, 3, 20)
    closed(one)
    again = host()
    with bucket.watched() as watched:
        again.shard.open(token, READER, IDENTITY)
        assert read(again, range(60)) == [*range(60)]
        complete(again)
        assert not any(path.endswith(".sst") for path in watched.read), "what it wrote itself is here"
    closed(again)


@pytest.mark.slow
def test_what_was_fetched_is_kept_when_it_is_whole(bucket: ObjectStore, host: Any, hosts: Any) -> None:
    token = fill(hosts(budget=32 << 20), 3, 20)
    one, other = host(), host()
    with nothing_behind_it(one.remote):
        one.shard.open(token, READER, IDENTITY)
        assert read(one, [3]) == [3]
        one.shard.abort(READER)
        one.storage.settle()
        scratch = one.folder.parent / "scratch"
        assert kept_names(scratch) == set(), "a part is no copy"
    one.shard.open(token, READER, IDENTITY)
    complete(one)
    closed(one)
    assert len(kept_names(scratch)) == 3
    with bucket.watched() as watched:
        other.shard.open(token, READER, IDENTITY)
        assert read(other, range(60)) == [*range(60)]
        assert not any(path.endswith(".sst") for path in watched.read)


def test_what_was_whole_when_it_was_to_be_kept_is_not_kept_with_holes(bucket: ObjectStore, host: Any) -> None:
    """A commit leaves it to a thread to keep its files. Before that comes to it, the shard is opened from the store."""
    one = host(renews=True)
    token, go_on = fill(one, 1, 20), threading.Event()
    busy = one.remote.cleaning.submit(go_on.wait, PATIENCE)
    attempt = "0000000001-a"
    one.shard.open(token, attempt, IDENTITY)
    for seq in range(20, 40):
        one.shard.append(attempt, [(seq, True, make_block(seq, seq, 3000))])
    one.shard.commit(attempt, {"next_seq": 40})
    one.shard.close()
    one.storage.close()
    with nothing_behind_it(one.remote):
        one.shard.open(attempt, READER, IDENTITY)
        assert one.storage.copies.partial(next(iter(one.shard.current.numbered.values())).name) is not None
        go_on.set()
        assert busy.result()
        one.storage.settle()
        one.remote.cleaning.submit(lambda: None).result()
        kept = copies(one.folder.parent / "scratch")
        assert all(path.read_bytes() == original(bucket, path.name) for path in kept)
        assert read(one, range(40)) == [*range(40)]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["a block", "the index", "the end", "small"])
def test_a_damaged_copy_is_fetched_again(
    bucket: ObjectStore, host: Any, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    one = host()
    token = fill(one, 1, 1 if where == "small" else 40, 500 if where == "small" else 3000)
    size = 500 if where == "small" else 3000
    closed(one)
    scratch = one.folder.parent / "scratch"
    (copy,) = (scratch / "kept").glob("*/*.sst")
    data = bytearray(copy.read_bytes())
    at = {"a block": len(data) // 2, "the index": 100, "the end": len(data) - 30, "small": len(data) // 2}[where]
    data[at] ^= 1
    copy.write_bytes(data)
    again = host()
    with caplog.at_level(logging.WARNING):
        again.shard.open(token, READER, IDENTITY)
        again.shard.abort(READER)
    for future in [again.remote.ahead.submit(lambda: None) for _ in range(again.remote.ahead._max_workers)]:
        future.result()
    for _ in range(2):  # a batch may have met it before it was found; then the next attempt does not
        again.shard.open(token, READER, IDENTITY)
        try:
            found = read(again, range(40), size)
        except (CorruptBlock, CorruptState):
            again.shard.abort(READER)
            continue
        break
    assert found == ([0] if where == "small" else [*range(40)])
    complete(again)
    closed(again)
    assert all(zlib.crc32(path.read_bytes()) == zlib.crc32(original(bucket, path.name)) for path in copies(scratch))


def copies(scratch: Path) -> list[Path]:
    return list((scratch / "kept").glob("*/*.sst"))


def original(bucket: ObjectStore, name: str) -> bytes:
    return next(data for path, data in bucket.objects().items() if path.endswith(name))


def test_what_no_version_needs_is_not_kept(bucket: ObjectStore, host: Any) -> None:
    one = host(retain=1)
    token = None
    for number in range(4):
        token = one.commit(token, str(number), (number, number), purge=[number - 1])
    one.storage.settle()
    assert kept_names(one.folder.parent / "scratch") == {path.name for path in one.storage.files.iterdir()}
