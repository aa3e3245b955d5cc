"""Versions in an object store: a real S3 server, pyarrow's real client, hosts that share nothing else."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pytest

from aion.errors import CorruptState, StorageError
from state_backends.backends import STORES, keyed_store
from state_backends.files import s3
from state_backends.files.names import Doomed
from state_backends.files.remote import Remote, RemoteUpload, pyarrow_uri
from state_backends.files.remote_storage import RemoteStorage
from state_backends.store.io_thread import IoThread, Priority
from state_backends.store.keyed.run_files import RunFiles
from state_backends.store.keyed.store import KeyedStore
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.p_bucket import PBucket
from state_backends.versions.manifest import Identity, load
from state_backends.versions.shard import Shard
from tests.object_store import CREDENTIALS, ObjectStore, serving
from tests.stores.rig import make_block, nothing
from tests.test_storage import Hooked

IDENTITY = Identity("query", "tolls", 3, 8, {"key": ["k"]})
BLOCK_BYTES = 3000
SECOND = "0000000002-a"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving() as port:
        yield port


@pytest.fixture
def bucket(port: int) -> ObjectStore:
    return ObjectStore(port)


class Host:
    """A host with one shard in the object store, and copies of nothing when it starts."""

    def __init__(self, uri: str, folder: Path, *, kind: str = "tiered", retain: int = 100) -> None:
        self.folder = folder
        self.io = IoThread()
        self.remote = Remote(uri)
        self.storage = RemoteStorage(self.remote, "query/tolls/shard-00003", folder / "copies")
        self.store = STORES[kind]
        self.kind = kind
        self.shard = Shard(
            IDENTITY, self.storage, folder / "live", self.make_store, retain=retain, make_keyed=self.make_keyed
        )

    def make_store(self, p_bucket: PBucket) -> Any:
        return self.store(p_bucket, self.io, MemoryBudget(64 << 10), bucket_limit_bytes=16 << 10)

    def make_keyed(self, files: RunFiles) -> KeyedStore:
        return keyed_store(self.kind, files, self.io, MemoryBudget(64 << 10))

    def put(self, token: str | None, attempt: str, values: dict[bytes, bytes | None]) -> str:
        """The next version, with these keyed values more."""
        attempt = f"{int(attempt):010d}-a"
        self.shard.open(token, attempt, IDENTITY)
        self.shard.put(attempt, [(key, value, None) for key, value in values.items()])
        self.shard.commit(attempt, {"next_seq": 0})
        self.storage.settle()
        self.io.submit(Priority.MAINTENANCE, nothing()).result()
        return attempt

    def values(self, token: str | None) -> dict[bytes, bytes]:
        self.shard.open(token, "0000009999-reader", IDENTITY)
        found = dict(self.shard.scan("0000009999-reader", b"", None))
        self.shard.abort("0000009999-reader")
        return found

    def commit(self, token: str | None, attempt: str, *blocks: tuple[int, int], purge: Sequence[int] = ()) -> str:
        """The next version: (seq, slice) more, these slices less."""
        attempt = f"{int(attempt):010d}-a"
        self.shard.open(token, attempt, IDENTITY)
        for seq, slice_us in blocks:
            self.shard.append(attempt, [(seq, False, make_block(slice_us, seq, BLOCK_BYTES))])
        self.shard.release(attempt, purge=purge)
        self.shard.commit(attempt, {"next_seq": max([seq + 1 for seq, _ in blocks], default=0)})
        self.storage.settle()
        return attempt

    def seqs(self, token: str | None, *slices: int) -> list[int]:
        """Of the blocks of a version, whose bytes are those that were appended."""
        self.shard.open(token, "0000009999-reader", IDENTITY)
        stored = list(self.shard.read("0000009999-reader", slices))
        self.shard.abort("0000009999-reader")
        for seq, block in stored:
            assert bytes(block.stored) == bytes(make_block(block.header.slice_us, seq, BLOCK_BYTES).stored)
        return [seq for seq, _ in stored]

    def close(self) -> None:
        self.shard.close()
        self.io.close()
        self.remote.close()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def hosts(bucket: ObjectStore, tmp_path: Path) -> Iterator[Any]:
    made: list[Host] = []

    def host(uri: str | None = None, **options: Any) -> Host:
        made.append(Host(uri or bucket.uri("state"), tmp_path / f"host-{len(made)}", **options))
        return made[-1]

    yield host
    for each in made:
        each.close()


def names(bucket: ObjectStore, kind: str) -> set[str]:
    prefix = f"state/query/tolls/shard-00003/{kind}/"
    return {path.removeprefix(prefix) for path in bucket.objects() if path.startswith(prefix)}


@pytest.mark.parametrize("kind", STORES)
def test_another_host_goes_on_where_one_stopped(bucket: ObjectStore, hosts: Any, kind: str) -> None:
    one = hosts(kind=kind)
    first = one.commit(None, "1", (0, 0), (1, 10))
    second = one.commit(first, "2", (2, 0), purge=[10])
    other = hosts(bucket.uri("state/").replace("s3://", "s3a://"), kind=kind)  # as Spark spells it
    assert other.seqs(second, 0, 10) == [0, 2]
    third = other.commit(second, "3", (3, 20))
    assert one.seqs(third, 0, 10, 20) == [0, 2, 3], "the first host sees what the other one did"
    assert one.seqs(first, 0, 10, 20) == [0, 1], "and goes back if it must"
    assert names(bucket, "manifests") == {f"000000000{i}-a.json" for i in (1, 2, 3)}
    manifests = [load(data, path) for path, data in bucket.objects().items() if "/manifests/" in path]
    assert names(bucket, "files") == {f.name for m in manifests for f in m.files}


@pytest.mark.parametrize("kind", STORES)
def test_keyed_values_are_kept_there_too(bucket: ObjectStore, hosts: Any, kind: str) -> None:
    one = hosts(kind=kind, retain=2)
    token, wanted, versions = None, dict[bytes, bytes | None](), {}
    for n in range(8):
        change: dict[bytes, bytes | None] = {b"key-%d" % k: b"%d" % n * 100 for k in range(n, n + 10)}
        change[b"key-%d" % n] = None
        if n == 5:
            one = hosts(kind=kind, retain=2)
        token = one.put(token, f"{n}", change)
        wanted = {key: value for key, value in (wanted | change).items() if value is not None}
        versions[token] = wanted
    other = hosts(kind=kind)
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
        hosts(kind=kind).values(token)


def test_a_failed_attempt_uploads_nothing(bucket: ObjectStore, hosts: Any) -> None:
    host = hosts()
    token = host.commit(None, "1", (0, 0))
    before = bucket.objects()
    host.shard.open(token, SECOND, IDENTITY)
    host.shard.append(SECOND, [(1, True, make_block(0, 1, BLOCK_BYTES))])
    host.shard.release(SECOND, [0])
    host.shard.abort(SECOND)
    host.storage.settle()
    assert bucket.objects() == before
    assert host.seqs(token, 0) == [0]


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


@pytest.mark.parametrize("what", ["flipped", "truncated", "emptied", "missing"])
def test_a_damaged_object_is_named(bucket: ObjectStore, hosts: Any, what: str) -> None:
    one = hosts()
    first = one.commit(None, "1", (0, 0))
    second = one.commit(first, "2", (1, 0))
    path = next(p for p in bucket.objects() if p.endswith("-0000000002-a.sst"))
    data = bucket.objects()[path]
    if what == "missing":
        bucket.fs.delete_file(f"{bucket.bucket}/{path}")
    else:
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        bucket.put(path, {"flipped": flipped, "truncated": data[:-1], "emptied": b""}[what])
    other = hosts()
    with pytest.raises(CorruptState, match=f"{path.rpartition('/')[2]}.*s3://{bucket.bucket}/{path}"):
        other.shard.open(second, "0000000003-a", IDENTITY)
    assert other.seqs(first, 0) == [0], "a version that does not need it is whole"
    bucket.put(path, data)
    assert other.seqs(second, 0) == [0, 1]


def test_a_damaged_manifest_is_named(bucket: ObjectStore, hosts: Any) -> None:
    token = hosts().commit(None, "1", (0, 0))
    path = next(p for p in bucket.objects() if p.endswith("/manifests/0000000001-a.json"))
    bucket.put(path, bucket.objects()[path].replace(b"tolls", b"t0lls"))
    with pytest.raises(CorruptState, match=r"manifest 0000000001-a\.json"):
        hosts().shard.open(token, SECOND, IDENTITY)


def test_an_upload_that_fails_fails_the_commit_and_nothing_else(bucket: ObjectStore, hosts: Any) -> None:
    host = hosts()
    token = host.commit(None, "1", (0, 0))
    before = bucket.objects()
    host.shard.open(token, SECOND, IDENTITY)
    host.shard.append(SECOND, [(1, False, make_block(0, 1, BLOCK_BYTES))])
    with (
        bucket.denied(),
        pytest.raises(StorageError, match=rf"^s3://{bucket.bucket}/state/.*2-a\.sst: .*INVALID_ACCESS_KEY_ID"),
    ):
        host.shard.commit(SECOND, {"next_seq": 2})
    assert [seq for seq, _ in host.shard.read(SECOND, [0])] == [0, 1], "the attempt may try again"
    host.shard.abort(SECOND)
    host.storage.settle()
    assert bucket.objects() == before
    assert host.seqs(token, 0) == [0]
    assert hosts().seqs(host.commit(token, "3", (1, 0)), 0) == [0, 1]


def test_what_cannot_be_written_takes_nothing_of_another_host(
    bucket: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several hosts write the manifests that a copy takes, and ``operator.json``."""
    remotes = [Remote(bucket.uri("state")) for _ in range(2)]
    one, other = (RemoteStorage(r, "query/tolls/shard-00003", tmp_path / str(i)) for i, r in enumerate(remotes))
    other.save("0000000001-taken", b"manifest", first=True)
    other.claim(b"the other's", first=True)
    there = bucket.objects()
    for write in (
        lambda: one.save("0000000001-taken", b"manifest", first=True),
        lambda: one.claim(b"one's", first=True),
    ):
        remotes[0].connect()
        with bucket.denied(), pytest.raises(StorageError):
            write()
    assert len(there) == 2 and bucket.objects() == there
    for remote in remotes:
        remote.close()


@pytest.mark.parametrize("boto3", [True, False], ids=["boto3", "without boto3"])
def test_what_another_host_wrote_first_stays(
    bucket: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boto3: bool
) -> None:
    if not boto3:
        monkeypatch.setitem(sys.modules, "boto3", None)
    remotes = [Remote(bucket.uri("state")) for _ in range(2)]
    one, other = (RemoteStorage(r, "query/tolls/shard-00003", tmp_path / str(i)) for i, r in enumerate(remotes))
    assert other.claim(b"the other's", first=True) == b"the other's"
    assert one.claim(b"one's", first=True) == b"the other's" == one.owner()
    other.save("0000000001-taken", b"the other's", first=True)
    one.save("0000000001-taken", b"the other's", first=True)
    with pytest.raises(CorruptState, match=r"0000000001-taken\.json is there already, and is not what"):
        one.save("0000000001-taken", b"one's", first=True)
    assert one.load("0000000001-taken") == b"the other's"
    for remote in remotes:
        remote.close()


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


def test_an_upload_that_fails_between_two_parts_is_ended(bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_KEY_BUFFER_SIZE", str(64 << 20))  # the server keeps parts in memory
    client = boto3.client("s3", region_name="us-east-1", endpoint_url=f"http://127.0.0.1:{bucket.port}")
    remote = Remote(bucket.uri("state"))
    upload = RemoteUpload(remote, f"{bucket.bucket}/state/file")
    for _ in range(4):
        upload.write(os.urandom(10 << 20))
    assert len(client.list_multipart_uploads(Bucket=bucket.bucket)["Uploads"]) == 1
    with bucket.denied(), pytest.raises(StorageError):
        for _ in range(4):
            upload.write(os.urandom(10 << 20))
        upload.finish()
    upload.discard()
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket.bucket)
    assert bucket.objects() == {}
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


def test_uploads_that_died_are_ended_when_their_shard_is_opened(bucket: ObjectStore, hosts: Any) -> None:
    """In parts, before the last one: the store keeps the parts, and no listing of objects shows them."""
    client = boto3.client("s3", region_name="us-east-1", endpoint_url=f"http://127.0.0.1:{bucket.port}")

    def begun() -> list[str]:
        return [upload["Key"] for upload in client.list_multipart_uploads(Bucket=bucket.bucket).get("Uploads", ())]

    host = hosts()
    token = host.commit(None, "1", (0, 0))
    folder = next(path for path in bucket.objects() if "/files/" in path).rpartition("/")[0]
    for key in (f"{folder}/0000000002-0000000002-a.sst", "of-others/file"):
        client.create_multipart_upload(Bucket=bucket.bucket, Key=key)
    assert len(begun()) == 2
    other = hosts()
    assert other.seqs(token, 0) == [0]
    other.storage.settle()
    assert begun() == ["of-others/file"]


def test_a_place_that_is_not_there_or_not_ours_is_named(bucket: ObjectStore, hosts: Any) -> None:
    nowhere = hosts(bucket.uri("state", bucket="no-such-bucket"))
    with pytest.raises(
        StorageError, match=r"^state\.dir s3://no-such-bucket/state.*there is no bucket 'no-such-bucket'$"
    ):
        nowhere.shard.open(None, "0000000001-a", IDENTITY)
    ours = hosts()
    with bucket.denied(), pytest.raises(StorageError, match=rf"^state\.dir s3://{bucket.bucket}/state.*ACCESS_DENIED"):
        ours.shard.open(None, "0000000001-a", IDENTITY)
    assert ours.commit(None, "1", (0, 0)), "what was refused before is tried again"


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        (
            "s3://bucket/state?scheme=http&endpoint_override=127.0.0.1:1&region=us-east-1",
            r"^state\.dir s3://bucket/state\?.*: .*NETWORK_CONNECTION",
        ),
        (
            "gs://anonymous@bucket/state?scheme=http&endpoint_override=127.0.0.1:1&retry_limit_seconds=1",
            r"gs://anonymous@bucket/state.*: .*Could not connect",
        ),
    ],
    ids=["s3", "gs"],
)
def test_a_server_that_does_not_answer_is_named(
    hosts: Any, monkeypatch: pytest.MonkeyPatch, uri: str, said: str
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    host = hosts(uri)
    with pytest.raises(StorageError, match=said):
        host.shard.open(None, "0000000001-a", IDENTITY)


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


def test_a_deletion_that_fails_is_tried_again_while_the_shard_is_open(bucket: ObjectStore, hosts: Any) -> None:
    host, token = hosts(retain=1), None
    for i in range(3):
        token = host.commit(token, f"{i}", (i, i), purge=[i - 1])
    with bucket.denied():
        host.storage.delete(Doomed(["0000000000-old.json"], ["0000000000-0000000000-old.sst"]))
        host.storage.settle()
    for name in ("manifests/0000000000-old.json", "files/0000000000-0000000000-old.sst"):
        bucket.put(f"state/query/tolls/shard-00003/{name}", b"old")
    for i in range(3, 6):
        token = host.commit(token, f"{i}", (i, i), purge=[i - 1])
    assert not [path for path in bucket.objects() if "old" in path]


@pytest.mark.parametrize("more", [False, True], ids=["the same", "with more blocks"])
@pytest.mark.parametrize("stored", [False, True], ids=["not stored", "stored"])
def test_a_commit_that_is_tried_again_loses_nothing(
    bucket: ObjectStore, hosts: Any, monkeypatch: pytest.MonkeyPatch, stored: bool, more: bool
) -> None:
    """Saving its manifest failed, before it was stored or after. What is deleted is deleted late."""
    host = hosts(retain=2)
    token = host.commit(None, "1", (0, 0))
    may_delete = threading.Event()
    host.remote.cleaning.submit(may_delete.wait, 60)
    host.shard.open(token, SECOND, IDENTITY)
    host.shard.append(SECOND, [(1, False, make_block(0, 1, BLOCK_BYTES))])
    save = host.storage.save

    def fails(name: str, manifest: bytes) -> None:
        if stored:
            save(name, manifest)
        monkeypatch.undo()
        raise StorageError("no answer")

    monkeypatch.setattr(host.storage, "save", fails)
    with pytest.raises(StorageError, match="no answer"):
        host.shard.commit(SECOND, {"next_seq": 2})
    if more:
        host.shard.append(SECOND, [(2, False, make_block(0, 2, BLOCK_BYTES))])
    host.shard.commit(SECOND, {"next_seq": 3})
    may_delete.set()
    host.storage.settle()
    wanted = [0, 1, 2] if more else [0, 1]
    assert hosts().seqs(SECOND, 0) == wanted
    assert host.seqs(host.commit(SECOND, "3", (3, 0)), 0) == [*wanted, 3]
    assert names(bucket, "files") == {
        f.name for path, data in bucket.objects().items() if "/manifests/" in path for f in load(data, path).files
    }


@pytest.mark.parametrize("stored", [False, True], ids=["not stored", "stored"])
def test_a_commit_that_is_given_up_after_its_manifest_failed_leaves_no_damaged_version(
    bucket: ObjectStore, hosts: Any, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    host = hosts(retain=1)
    token = host.commit(None, "1", (0, 0))
    host.shard.open(token, SECOND, IDENTITY)
    host.shard.append(SECOND, [(1, False, make_block(0, 1, BLOCK_BYTES))])
    save = host.storage.save

    def fails(name: str, manifest: bytes) -> None:
        if stored:
            save(name, manifest)
        monkeypatch.undo()
        raise StorageError("no answer")

    monkeypatch.setattr(host.storage, "save", fails)
    with pytest.raises(StorageError, match="no answer"):
        host.shard.commit(SECOND, {"next_seq": 2})
    host.shard.abort(SECOND)
    host.storage.settle()
    assert hosts().seqs(SECOND, 0) == [0, 1] if stored else "0000000002-a.json" not in names(bucket, "manifests")
    for i in range(3, 6):
        token = host.commit(token, f"{i}", (i, 0))
    assert names(bucket, "manifests") == {"0000000004-a.json", "0000000005-a.json"}
    assert not [name for name in names(bucket, "files") if "-0000000002-" in name]
