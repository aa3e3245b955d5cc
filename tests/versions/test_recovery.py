"""Everything local is a cache: what is damaged or missing there is made again from the version."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from aion.errors import CorruptBlock, CorruptState, StateError
from tests.versions.host import Host
from tests.versions.keyed_attempt import LocalKeyedAttempt


def damage(path: Path, where: float) -> None:
    """Changes a byte of a file in place, so that all its names have it."""
    data = path.read_bytes()
    at = int(len(data) * where)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 0xFF]))


def on_disk_only(make: Callable[..., Host], kind: str) -> tuple[Host, str]:
    host = make(kind, budget=1 << 10, block_bytes=6000)
    token = host.commit(None, (0, 0), (1, 10), (2, 20))
    return host, token


def test_a_damaged_copy_of_a_remote_file_is_brought_again(make: Callable[..., Host]) -> None:
    host, token = on_disk_only(make, "remote")
    for copy in (host.folder / "copies").glob("*.sst"):
        damage(copy, 0.5)
    with pytest.raises((CorruptBlock, CorruptState)):
        host.seqs(token, 0, 10, 20)
    assert host.seqs(token, 0, 10, 20) == [0, 1, 2]
    assert host.shard.rebuilds == 2
    assert host.seqs(host.commit(token, (3, 0)), 0, 10, 20) == [0, 3, 1, 2]
    assert host.shard.rebuilds == 2, "once is enough"


@pytest.mark.parametrize("what", ["its index", "its length"])
def test_a_damaged_copy_is_noticed_and_brought_again_when_the_shard_is_opened(
    make: Callable[..., Host], what: str
) -> None:
    host, first = on_disk_only(make, "remote")
    second = host.commit(first, (3, 30))
    for copy in (host.folder / "copies").glob("*.sst"):
        damage(copy, 0.01) if what == "its index" else copy.write_bytes(b"short")
    assert host.seqs(first, 0, 10, 20) == [0, 1, 2]
    assert host.seqs(second, 0, 10, 20, 30) == [0, 1, 2, 3]


def test_if_the_remote_file_is_damaged_too_it_is_named(make: Callable[..., Host]) -> None:
    host, token = on_disk_only(make, "remote")
    name = min(host.files())
    for folder in ("copies", "state/files"):
        damage(host.folder / folder / name, 0.5)
    with pytest.raises((CorruptBlock, CorruptState)):
        host.seqs(token, 0, 10, 20)
    with pytest.raises(CorruptState, match=f"{name} .*is damaged"):
        host.seqs(token, 0, 10, 20)
    damage(host.folder / "state" / "files" / name, 0.5)
    assert host.seqs(token, 0, 10, 20) == [0, 1, 2], "it was repaired"


def test_a_working_folder_that_was_removed_between_two_attempts(host: Host) -> None:
    token = host.commit(None, (0, 0), (1, 10))
    token = host.commit(token, (2, 10))
    shutil.rmtree(host.folder / "live", ignore_errors=True)
    shutil.rmtree(host.folder / "copies", ignore_errors=True)
    token = host.commit(token, (3, 0))
    assert host.seqs(token, 0, 10) == [0, 3, 1, 2]
    host.restart()
    assert host.seqs(token, 0, 10) == [0, 3, 1, 2]


@pytest.mark.parametrize("how", ["the folder", "its files"])
def test_a_working_folder_that_is_removed_at_work_fails_one_attempt_at_most(host: Host, how: str) -> None:
    token = host.commit(None, (0, 0), (1, 10))
    attempt, _ = host.open(token)
    host.append(attempt, (2, 10), late=True)
    host.shard.release(attempt, [0, 10])
    for folder in ("live", "copies"):
        if how == "the folder":
            shutil.rmtree(host.folder / folder, ignore_errors=True)
        else:
            for path in (host.folder / folder).rglob("*.sst"):
                path.unlink()
    try:
        host.shard.commit(attempt, {"next_seq": 3})
    except (StateError, OSError):
        host.shard.abort(attempt)
        attempt = host.commit(token, (2, 10))
    for _ in range(2):
        try:
            assert host.seqs(attempt, 0, 10) == [0, 1, 2]
        except (StateError, OSError):
            continue
    token = host.commit(attempt, (3, 0))
    assert host.seqs(token, 0, 10) == [0, 3, 1, 2]
    host.restart()
    assert host.seqs(token, 0, 10) == [0, 3, 1, 2]


def test_keyed_values_come_back_too(host: Host) -> None:
    attempt, _ = host.open(None)
    LocalKeyedAttempt(host.shard, attempt).put([(b"a", b"1", None), (b"b", b"2" * 5000, None)])
    host.shard.commit(attempt, {"next_seq": 0})
    for folder in ("live", "copies"):
        shutil.rmtree(host.folder / folder, ignore_errors=True)
    for batch in range(2):
        token, (attempt, _) = attempt, host.open(attempt)
        try:
            LocalKeyedAttempt(host.shard, attempt).put([(b"c", b"%d" % batch, None)])
            host.shard.commit(attempt, {"next_seq": 0})
        except (StateError, OSError):
            attempt = token
    host.restart()
    reader, _ = host.open(attempt)
    assert LocalKeyedAttempt(host.shard, reader).get([b"a", b"b"]) == [b"1", b"2" * 5000]
