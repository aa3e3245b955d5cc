"""Files of a batch are uploaded while it computes. A version has them once, or nobody ever asks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aion.errors import StorageError
from state_backends.store.io_thread import Priority
from tests.files.rig import IDENTITY, Host, names
from tests.io_thread.rig import PATIENCE
from tests.object_store import ObjectStore
from tests.stores.rig import make_block, nothing

SIZE = 3000


class Uploads:
    """Watches the uploads of a host's files, holds them, and lets them fail."""

    def __init__(self, host: Host) -> None:
        self.seen: list[str] = []
        self.ended = threading.Semaphore(0)
        self.begun = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.fails = False
        real = host.storage._upload_from

        def upload(path: Path, name: str) -> None:
            self.begun.set()
            assert self.may_go_on.wait(PATIENCE)
            try:
                if self.fails:
                    raise StorageError("the network is down")
                real(path, name)
                self.seen.append(name)
            finally:
                self.ended.release()

        host.storage._upload_from = upload  # type: ignore[method-assign]

    def wait(self, count: int) -> None:
        for _ in range(count):
            assert self.ended.acquire(timeout=PATIENCE)


def append(host: Host, attempt: str, *seqs: int) -> None:
    """Blocks that are late and more than memory takes, so that they are written at once."""
    for seq in seqs:
        host.shard.append(attempt, [(seq, True, make_block(seq, seq, SIZE))])
    host.io.submit(Priority.MAINTENANCE, nothing()).result()


def attempt_of(number: int) -> str:
    return f"{number:010d}-a"


def content(host: Host, token: str, *slices: int) -> list[int]:
    host.shard.open(token, "0000009999-reader", IDENTITY)
    found = [(b.seq, bytes(b.block.stored)) for b in host.shard.read("0000009999-reader", slices)]
    host.shard.abort("0000009999-reader")
    assert all(data == bytes(make_block(seq, seq, SIZE).stored) for seq, data in found)
    return [seq for seq, _ in found]


@pytest.mark.slow
def test_files_are_uploaded_before_the_commit_and_once(bucket: ObjectStore, hosts: Any) -> None:
    host = hosts()
    uploads = Uploads(host)
    host.shard.open(None, attempt_of(0), IDENTITY)
    append(host, attempt_of(0), *range(12))
    uploads.wait(3)
    ahead = names(bucket, "files")
    assert len(ahead) >= 3 and not names(bucket, "manifests")
    host.shard.commit(attempt_of(0), {"next_seq": 12})
    assert ahead < names(bucket, "files") or ahead == names(bucket, "files")
    assert len(uploads.seen) == len(set(uploads.seen)) == len(names(bucket, "files"))
    assert content(hosts(), attempt_of(0), *range(12)) == [*range(12)]


@pytest.mark.slow
def test_the_commit_waits_for_what_is_under_way(bucket: ObjectStore, hosts: Any) -> None:
    host = hosts()
    uploads = Uploads(host)
    host.shard.open(None, attempt_of(0), IDENTITY)
    uploads.may_go_on.clear()
    append(host, attempt_of(0), *range(6))
    assert uploads.begun.wait(PATIENCE), "the batch goes on meanwhile"
    append(host, attempt_of(0), *range(6, 12))
    committing = threading.Thread(target=host.shard.commit, args=(attempt_of(0), {"next_seq": 12}))
    committing.start()
    committing.join(0.05)
    assert committing.is_alive() and not names(bucket, "manifests")
    uploads.may_go_on.set()
    committing.join(PATIENCE)
    assert content(hosts(), attempt_of(0), *range(12)) == [*range(12)]


def test_what_failed_ahead_is_uploaded_with_the_commit(bucket: ObjectStore, hosts: Any) -> None:
    host = hosts()
    uploads = Uploads(host)
    host.shard.open(None, attempt_of(0), IDENTITY)
    uploads.fails = True
    append(host, attempt_of(0), *range(12))
    uploads.wait(3)
    uploads.fails = False
    host.shard.commit(attempt_of(0), {"next_seq": 12})
    assert content(hosts(), attempt_of(0), *range(12)) == [*range(12)]


def killed(host: Host, uploads: Uploads) -> Host:
    """Nobody hears of it any more; and what it was doing is done."""
    return host


def given_up(host: Host, uploads: Uploads) -> Host:
    host.shard.abort(attempt_of(1))
    return host


@pytest.mark.slow
@pytest.mark.parametrize("end", [killed, given_up], ids=["killed", "given up"])
def test_an_attempt_that_ends_before_its_commit_leaves_nothing_for_long(
    bucket: ObjectStore, hosts: Any, end: Callable[..., Host]
) -> None:
    first = hosts(retain=1)
    first.shard.open(None, attempt_of(0), IDENTITY)
    append(first, attempt_of(0), *range(4))
    first.shard.commit(attempt_of(0), {"next_seq": 4})
    uploads = Uploads(first)
    first.shard.open(attempt_of(0), attempt_of(1), IDENTITY)
    append(first, attempt_of(1), *range(4, 16))
    uploads.wait(3)
    lost = names(bucket, "files") - {f.name for f in first.shard.current.numbered.values()}
    assert lost
    end(first, uploads)
    host = hosts(retain=1) if end is killed else first
    assert content(host, attempt_of(0), *range(20)) == [*range(4)], "the version is as it was"
    token = attempt_of(0)
    for number in range(1, 5):
        attempt = f"{number:010d}-b"
        host.shard.open(token, attempt, IDENTITY)
        host.shard.append(attempt, [(number + 3, False, make_block(number + 3, number + 3, SIZE))])
        host.shard.commit(attempt, {"next_seq": number + 4})
        host.storage.settle()
        token = attempt
    assert not lost & names(bucket, "files"), "a commit of a later batch has deleted it"
    assert content(hosts(), token, *range(20)) == [*range(8)]


@pytest.mark.slow
def test_an_attempt_that_is_repeated_under_its_name_has_its_own_bytes(bucket: ObjectStore, hosts: Any) -> None:
    """The upload of the first try is under way when the second writes a file of the same name."""
    host = hosts()
    uploads = Uploads(host)
    host.shard.open(None, attempt_of(0), IDENTITY)
    uploads.may_go_on.clear()
    append(host, attempt_of(0), *range(6))
    assert uploads.begun.wait(PATIENCE)
    again = threading.Thread(target=host.shard.open, args=(None, attempt_of(0), IDENTITY))
    again.start()
    uploads.may_go_on.set()
    again.join(PATIENCE)
    append(host, attempt_of(0), *range(20, 32))
    host.shard.commit(attempt_of(0), {"next_seq": 32})
    assert content(hosts(), attempt_of(0), *range(40)) == [*range(20, 32)]


def test_a_file_that_died_in_its_batch_is_not_in_the_version(bucket: ObjectStore, hosts: Any) -> None:
    host = hosts(retain=1)
    uploads = Uploads(host)
    host.shard.open(None, attempt_of(0), IDENTITY)
    append(host, attempt_of(0), *range(12))
    uploads.wait(3)
    host.shard.release(attempt_of(0), purge=[*range(12)])
    host.shard.commit(attempt_of(0), {"next_seq": 12})
    token = attempt_of(0)
    for number in range(1, 4):
        token = host.commit(token, str(number), (number + 20, number))
    assert {f.name for f in host.shard.current.numbered.values()} <= names(bucket, "files")
    assert not {name for name in uploads.seen if name.endswith("0000000000-a.sst")} & names(bucket, "files")


@pytest.mark.slow
@pytest.mark.usual_sizes
def test_a_merged_file_is_uploaded_while_the_next_batch_computes(bucket: ObjectStore, hosts: Any) -> None:
    host, token, values = hosts(), None, dict[bytes, bytes]()
    for number in range(1, 32):
        change = {b"%d-%d" % (key, number): b"value" * 20 for key in range(50)}
        token = host.put(token, str(number - 1), change)
        values |= change
        if any("-merged" in path.name for path in host.shard._ahead._files.values()):
            break
    uploads = Uploads(host)
    host.shard.open(token, attempt_of(number), IDENTITY)
    (merged,) = (name for name in host.shard._ahead._names if "-merged" in name)
    uploads.wait(1)
    assert merged in names(bucket, "files") and uploads.seen == [merged]
    host.shard.commit(attempt_of(number), {"next_seq": 0})
    assert merged in {f.name for f in host.shard.current.numbered.values()}
    assert uploads.seen == [merged], "once"
    assert hosts().values(attempt_of(number)) == dict(sorted(values.items()))
