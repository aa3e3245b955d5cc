"""Versions in an object store: a real S3 server, pyarrow's real client, hosts that share nothing else."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from aion.errors import CorruptState, StorageError
from state_backends.files import requests, s3
from state_backends.files.names import ToDelete
from state_backends.files.remote import Remote, pyarrow_uri
from state_backends.files.remote_storage import RemoteStorage
from state_backends.versions.manifest import load
from tests.files.rig import (
    BLOCK_BYTES,
    IDENTITY,
    Hooked,
    names,
)
from tests.io_thread.rig import PATIENCE
from tests.object_store import ObjectStore
from tests.stores.rig import make_block


@pytest.mark.slow
def test_another_host_goes_on_where_one_stopped(bucket: ObjectStore, hosts: Any) -> None:
    one = hosts()
    first = one.commit(None, "1", (0, 0), (1, 10))
    second = one.commit(first, "2", (2, 0), purge=[10])
    other = hosts(bucket.uri("state/").replace("s3://", "s3a://"))  # as Spark spells it
    assert other.seqs(second, 0, 10) == [0, 2]
    third = other.commit(second, "3", (3, 20))
    assert one.seqs(third, 0, 10, 20) == [0, 2, 3], "the first host sees what the other one did"
    assert one.seqs(first, 0, 10, 20) == [0, 1], "and goes back if it must"
    assert names(bucket, "manifests") == {f"000000000{i}-a.json" for i in (1, 2, 3)}
    manifests = [load(data, path) for path, data in bucket.objects().items() if "/manifests/" in path]
    assert names(bucket, "files") == {f.name for m in manifests for f in m.files}


@pytest.mark.slow
def test_keyed_values_are_kept_there_too(bucket: ObjectStore, hosts: Any) -> None:
    one = hosts(retain=2)
    token, wanted, versions = None, dict[bytes, bytes | None](), {}
    for n in range(8):
        change: dict[bytes, bytes | None] = {b"key-%d" % k: b"%d" % n * 100 for k in range(n, n + 10)}
        change[b"key-%d" % n] = None
        if n == 5:
            one = hosts(retain=2)
        token = one.put(token, f"{n}", change)
        wanted = {key: value for key, value in (wanted | change).items() if value is not None}
        versions[token] = wanted
    other = hosts()
    for version in list(versions)[-3:]:
        assert other.values(version) == versions[version]
    manifests = [load(data, path) for path, data in bucket.objects().items() if "/manifests/" in path]
    assert names(bucket, "manifests") == {f"{version}.json" for version in list(versions)[-3:]}
    assert names(bucket, "files") == {f.name for m in manifests for f in m.files}
    assert any("-merged" in f.name for m in manifests for f in m.files)
    in_use = {path.name for path in one.storage.files.iterdir()}
    assert in_use == {f.name for f in manifests[-1].files}, "older runs have no copy on the host"
    (folder,) = {path.rpartition("/")[0] for path in bucket.objects() if path.endswith(".sst")}
    name = min(in_use)
    bucket.put(f"{folder}/{name}", b"rubbish")
    with pytest.raises(CorruptState, match=name):
        hosts().values(token)


@pytest.mark.slow
def test_what_nobody_can_ask_for_is_deleted(bucket: ObjectStore, hosts: Any) -> None:
    host, token = hosts(retain=2), None
    manifests: dict[str, Any] = {}
    for i in range(6):
        token = host.commit(token, f"{i}", (i, i), purge=[i - 1])
        if i == 3:
            host = hosts(retain=2)  # what the one before would have deleted
        prefix = "state/query/tolls/shard-00003/manifests"
        manifests[token] = load(bucket.get(f"{bucket.bucket}/{prefix}/{token}.json"), token)
        kept = list(manifests)[-3:]
        assert names(bucket, "manifests") == {f"{t}.json" for t in kept}
        assert names(bucket, "files") == {f.name for t in kept for f in manifests[t].files}
    copies = {path.name: path for path in (host.folder / "copies").iterdir()}
    assert set(copies) == {f.name for f in manifests["0000000005-a"].files}, (
        "of what the current version needs, and no more"
    )
    assert {path.stat().st_nlink for path in copies.values()} == {3}, "those of RocksDB and of who wrote them"


def test_of_hosts_that_write_at_the_same_moment_one_is_first(bucket: ObjectStore, tmp_path: Path) -> None:
    remotes = [Remote(bucket.uri("state")) for _ in range(4)]
    storages = [RemoteStorage(r, "query/tolls/shard-00003", tmp_path / str(i)) for i, r in enumerate(remotes)]
    started = threading.Barrier(len(storages))

    def claims(number: int) -> bytes:
        remotes[number].connect()
        started.wait(60)
        return storages[number].claim(b"%d" % number, first=True)

    with ThreadPoolExecutor(len(storages)) as pool:
        claimed = set(pool.map(claims, range(len(storages))))
    assert claimed == {storages[0].owner()}
    for remote in remotes:
        remote.close()


@pytest.mark.parametrize("boto3", [True, False], ids=["boto3", "without boto3"])
def test_an_object_that_s3_does_not_copy_at_once_is_copied_in_parts(
    bucket: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boto3: bool
) -> None:
    """S3 copies nothing above 5 GiB at once. This server has no such limit, so it is refused in front of it."""
    monkeypatch.setattr(s3, "LARGEST_COPY", 1 << 20)
    if not boto3:
        monkeypatch.setitem(sys.modules, "boto3", None)

    def refuse(call: str, path: str) -> None:
        if call == "copy_file":
            raise OSError("InvalidRequest: the copy source is larger than the maximum allowable size")

    remote = Remote(bucket.uri("state"), (Hooked(bucket.fs, refuse), f"{bucket.bucket}/state"))
    one, other = (RemoteStorage(remote, f"query/tolls/shard-{i}", tmp_path / str(i)) for i in range(2))
    sizes = {"0001-t.sst": 1 << 20, "0002-t.sst": (1 << 20) + 1}
    for name, size in sizes.items():
        one.files.mkdir(exist_ok=True)
        (one.files / name).write_bytes(os.urandom(size))
    one.publish(list(sizes), list(sizes))
    with pytest.raises(StorageError, match=r"0001-t\.sst: InvalidRequest"):
        other.take(one, ["0001-t.sst"])
    if boto3:
        other.take(one, ["0002-t.sst"])
        copies = [data for path, data in bucket.objects().items() if path.endswith("shard-1/files/0002-t.sst")]
        assert copies == [(one.files / "0002-t.sst").read_bytes()]
    else:
        with pytest.raises(StorageError, match=r"0002-t\.sst: S3 copies no object above .*pip install aion\[s3\]"):
            other.take(one, ["0002-t.sst"])
    remote.close()


@pytest.mark.parametrize(
    ("uri", "wanted"),
    [
        ("s3a://b/p", "s3://b/p?allow_delayed_open=true"),
        ("s3://b/p?region=x", "s3://b/p?region=x&allow_delayed_open=true"),
        ("gs://b/p", "gs://b/p?retry_limit_seconds=30"),
        ("gs://b/p?retry_limit_seconds=900", "gs://b/p?retry_limit_seconds=900"),
        ("hdfs://host/p", "hdfs://host/p"),
    ],
)
def test_options_are_set_unless_the_user_sets_them(uri: str, wanted: str) -> None:
    assert pyarrow_uri(uri) == wanted


class Requests(logging.Handler):
    """What the server was asked meanwhile, as it logs it: method and path."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r'"([A-Z]+ \S+) HTTP', record.getMessage())
        if found:
            self.seen.append(found[1])

    def __enter__(self) -> Requests:
        self._log = logging.getLogger("werkzeug")
        self._level = self._log.level
        self._log.addHandler(self)
        self._log.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        self._log.setLevel(self._level)
        self._log.removeHandler(self)

    def count(self) -> Counter[str]:
        """By what it was: a listing and a deletion of many have a query."""
        kinds = {"GET": "LIST", "POST": "DELETE"}
        return Counter(
            kinds[method] if method in kinds and ("list-type" in path or "delete" in path) else method
            for method, path in (line.split(" ", 1) for line in self.seen)
        )


@pytest.mark.slow
def test_a_version_costs_two_requests_and_what_goes_goes_behind_it(bucket: ObjectStore, hosts: Any) -> None:
    host, token = hosts(retain=2), None
    for i in range(6):
        token = host.commit(token, f"{i}", (i, i), purge=[i - 1])
    host = hosts(retain=2)
    with Requests() as opening:
        host.shard.open(token, "0000000006-a", IDENTITY)
    assert opening.count()["LIST"] == 1 and not opening.count()["PUT"], opening.seen
    host.shard.abort("0000000006-a")
    host.storage.settle()  # it looks for uploads that died, behind the opening
    with Requests() as working:
        for i in range(6, 16):
            token = host.commit(token, f"{i}", (i, i), purge=[i - 1])
    found = working.count()
    assert found["PUT"] == 20, "a file and a manifest for each"
    assert found["DELETE"] == 10, "of what each made superfluous, together"
    assert set(found) == {"PUT", "DELETE"}, working.seen
    kept = [load(bucket.get(f"{bucket.bucket}/{path}"), path) for path in bucket.objects() if "/manifests/" in path]
    assert len(kept) == 3


@pytest.mark.usual_sizes
def test_the_shards_of_a_host_delete_together(bucket: ObjectStore) -> None:
    """However many shards there are, what waits for a deletion goes with the next request."""
    remote, counts = Remote(bucket.uri("state")), requests.Requests()
    may_delete = threading.Event()
    try:
        storages = [RemoteStorage(remote, f"query/shard-{n}", Path("unused"), requests=counts) for n in range(400)]
        paths = [f"state/query/shard-{n}/files/0000000000-0000000000-{k}.sst" for n in range(400) for k in range(3)]
        for path in paths[::50]:
            bucket.put(path, b"old")
        remote.cleaning.submit(may_delete.wait, PATIENCE)
        with bucket.watched() as watched:
            for storage in storages:
                storage.delete(ToDelete([], [f"0000000000-0000000000-{k}.sst" for k in range(3)]))
            may_delete.set()
            for storage in storages:
                storage.settle()
            assert watched.count()["delete"] == 2, "a request deletes up to a thousand"
        assert not bucket.objects() and counts.to_json()["delete"] == 2
    finally:
        may_delete.set()
        remote.close()


def test_a_commit_does_not_wait_for_what_is_deleted(bucket: ObjectStore, hosts: Any) -> None:
    host, token = hosts(retain=1), None
    for i in range(3):
        token = host.commit(token, f"{i}", (i, i), purge=[i - 1])
    held, may_go_on = threading.Event(), threading.Event()

    def slow() -> None:
        held.set()
        assert may_go_on.wait(60)

    host.remote.cleaning.submit(slow)
    assert held.wait(60)
    attempt = "0000000003-a"
    host.shard.open(token, attempt, IDENTITY)
    host.shard.append(attempt, [(3, False, make_block(3, 3, BLOCK_BYTES))])
    host.shard.commit(attempt, {"next_seq": 4})
    assert host.shard.token == attempt, "while a deletion hangs"
    may_go_on.set()
    host.storage.settle()
