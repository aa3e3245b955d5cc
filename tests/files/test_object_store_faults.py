"""What a bucket refuses or loses is named, and what was written before stays."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import boto3
import pytest

from aion.errors import CorruptState, StorageError
from state_backends.files.names import ToDelete
from state_backends.files.remote import Remote, RemoteUpload
from state_backends.files.remote_storage import RemoteStorage
from state_backends.versions.manifest import load
from tests.files.rig import (
    BLOCK_BYTES,
    IDENTITY,
    SECOND,
    Host,
    names,
)
from tests.object_store import CREDENTIALS, ObjectStore
from tests.stores.rig import make_block


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


@pytest.mark.slow
@pytest.mark.parametrize("what", ["flipped", "missing"])
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
        bucket.put(path, data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
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


@pytest.mark.slow
def test_an_upload_that_fails_fails_the_commit_and_nothing_else(bucket: ObjectStore, hosts: Any) -> None:
    host = hosts()
    token = host.commit(None, "1", (0, 0))
    before = bucket.objects()
    host.shard.open(token, SECOND, IDENTITY)
    host.shard.append(SECOND, [(1, False, make_block(0, 1, BLOCK_BYTES))])
    with (
        bucket.denied(),
        pytest.raises(
            StorageError,
            match=rf"^s3://{bucket.bucket}/state/.*2-a\.sst: the store does not know .*INVALID_ACCESS_KEY_ID",
        ),
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


@pytest.mark.slow
def test_an_upload_that_fails_between_two_parts_is_ended(bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_KEY_BUFFER_SIZE", str(64 << 20))  # the server keeps parts in memory
    client = boto3.client("s3", region_name="us-east-1", endpoint_url=f"http://127.0.0.1:{bucket.port}")
    remote = Remote(bucket.uri("state"))
    upload = RemoteUpload(remote, remote.at("file"))
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
        StorageError, match=r"^state\.dir s3://no-such-bucket/state.*there is no bucket 'no-such-bucket'; make it$"
    ):
        nowhere.shard.open(None, "0000000001-a", IDENTITY)
    ours = hosts()
    said = "the store does not know the credentials of this host: check AWS_ACCESS_KEY_ID .*INVALID_ACCESS_KEY_ID"
    with bucket.denied(), pytest.raises(StorageError, match=rf"^state\.dir s3://{bucket.bucket}/state.*: {said}"):
        ours.shard.open(None, "0000000001-a", IDENTITY)
    assert ours.commit(None, "1", (0, 0)), "what was refused before is tried again"


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        pytest.param(
            "s3://bucket/state?scheme=http&endpoint_override=127.0.0.1:1&region=us-east-1",
            r"^state\.dir s3://bucket/state\?.*: the endpoint does not answer: check .*NETWORK_CONNECTION",
            id="s3",
            marks=pytest.mark.proof,  # pyarrow tries for six seconds
        ),
        pytest.param(
            "gs://anonymous@bucket/state?scheme=http&endpoint_override=127.0.0.1:1&retry_limit_seconds=1",
            r"gs://anonymous@bucket/state.*: the endpoint does not answer: check .*Could not connect",
            id="gs",
        ),
    ],
)
def test_a_server_that_does_not_answer_is_named(
    hosts: Any, monkeypatch: pytest.MonkeyPatch, uri: str, said: str
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    host = hosts(uri)
    with pytest.raises(StorageError, match=said):
        host.shard.open(None, "0000000001-a", IDENTITY)


def test_a_deletion_that_fails_is_tried_again_while_the_shard_is_open(bucket: ObjectStore, hosts: Any) -> None:
    host, token = hosts(retain=1), None
    for i in range(3):
        token = host.commit(token, f"{i}", (i, i), purge=[i - 1])
    with bucket.denied():
        host.storage.delete(ToDelete(["0000000000-old.json"], ["0000000000-0000000000-old.sst"]))
        host.storage.settle()
    for name in ("manifests/0000000000-old.json", "files/0000000000-0000000000-old.sst"):
        bucket.put(f"state/query/tolls/shard-00003/{name}", b"old")
    for i in range(3, 6):
        token = host.commit(token, f"{i}", (i, i), purge=[i - 1])
    assert not [path for path in bucket.objects() if "old" in path]


def fail_to_save(host: Host, *, stored: bool) -> None:
    """A commit whose manifest could not be saved, or was saved without an answer."""
    save = host.storage.save

    def fails(name: str, manifest: bytes) -> None:
        if stored:
            save(name, manifest)
        raise StorageError("no answer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host.storage, "save", fails)
        with pytest.raises(StorageError, match="no answer"):
            host.shard.commit(SECOND, {"next_seq": 2})


@pytest.mark.slow
@pytest.mark.parametrize("more", [False, True], ids=["the same", "with more blocks"])
@pytest.mark.parametrize("stored", [False, True], ids=["not stored", "stored"])
def test_a_commit_that_is_tried_again_loses_nothing(bucket: ObjectStore, hosts: Any, stored: bool, more: bool) -> None:
    """Saving its manifest failed, before it was stored or after. What is deleted is deleted late."""
    host = hosts(retain=2)
    token = host.commit(None, "1", (0, 0))
    may_delete = threading.Event()
    host.remote.cleaning.submit(may_delete.wait, 60)
    host.shard.open(token, SECOND, IDENTITY)
    host.shard.append(SECOND, [(1, False, make_block(0, 1, BLOCK_BYTES))])
    fail_to_save(host, stored=stored)
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


@pytest.mark.slow
@pytest.mark.parametrize("stored", [False, True], ids=["not stored", "stored"])
def test_a_commit_that_is_given_up_after_its_manifest_failed_leaves_no_damaged_version(
    bucket: ObjectStore, hosts: Any, stored: bool
) -> None:
    host = hosts(retain=1)
    token = host.commit(None, "1", (0, 0))
    host.shard.open(token, SECOND, IDENTITY)
    host.shard.append(SECOND, [(1, False, make_block(0, 1, BLOCK_BYTES))])
    fail_to_save(host, stored=stored)
    host.shard.abort(SECOND)
    host.storage.settle()
    assert hosts().seqs(SECOND, 0) == [0, 1] if stored else "0000000002-a.json" not in names(bucket, "manifests")
    for i in range(3, 6):
        token = host.commit(token, f"{i}", (i, 0))
    assert names(bucket, "manifests") == {"0000000004-a.json", "0000000005-a.json"}
    assert not [name for name in names(bucket, "files") if "-0000000002-" in name]
