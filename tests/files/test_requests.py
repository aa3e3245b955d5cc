"""The requests to an object store are counted as the server sees them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from state_backends.files.remote import Remote
from state_backends.files.remote_storage import RemoteStorage
from state_backends.files.request_counts import CLASSES, Batch, newest
from state_backends.files.requests import Requests
from tests.files.rig import IDENTITY, here, write
from tests.object_store import ObjectStore, Watched


def counted(requests: Requests, watched: Watched) -> tuple[dict[str, int], dict[str, int]]:
    """By class and in bytes, what was counted, and what the server saw."""
    seen = watched.count()
    return requests.to_json(), {name: seen.get(name, 0) for name in (*CLASSES, "read_bytes")}


@pytest.mark.slow
@pytest.mark.usual_sizes
@pytest.mark.parametrize("boto3", [True, False], ids=["boto3", "without boto3"])
def test_all_that_a_storage_does(
    bucket: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boto3: bool
) -> None:
    if not boto3:
        monkeypatch.setitem(sys.modules, "boto3", None)
    remote = Remote(bucket.uri("state"))
    remote.connect()
    requests, others = Requests(), Requests()
    one = RemoteStorage(remote, "query/tolls/shard-1", tmp_path / "one", requests=requests)
    other = RemoteStorage(remote, "query/tolls/shard-1", tmp_path / "other", requests=others)
    small, large = write(one, "0000000001-a.sst", b"small"), write(one, "0000000002-a.sst", b"large" * (3 << 20))
    with bucket.watched() as watched:
        one.publish([small.name, large.name], [small.name, large.name])
        one.save("0000000001-a", b"manifest")
        found, seen = counted(requests, watched)
        assert {**found, "written_bytes": 0} == {**seen, "written_bytes": 0}
        assert found["put"] == 2 + (2 + 2), "two small files, and one in two parts"
        assert found["written_bytes"] == small.size_bytes + large.size_bytes + len(b"manifest")
    with bucket.watched() as watched:
        other.fetch([here(other, small), here(other, large)])
        assert other.load("0000000001-a") == b"manifest"
        found, seen = counted(others, watched)
        assert {**found, "written_bytes": 0} == {**seen, "written_bytes": 0}
        assert (found["head"], found["get"]) == (3, 2) and found["range"] > 1
        assert found["read_bytes"] == small.size_bytes + large.size_bytes + len(b"manifest")
    with bucket.watched() as watched:
        before = others.to_json()["list"]
        other.listing()
        other.settle()
        assert others.to_json()["list"] - before == watched.count()["list"]
    remote.close()


@pytest.mark.slow
def test_a_batch_has_those_between_two_commits(bucket: ObjectStore, hosts: Any) -> None:
    host = hosts()
    token = host.commit(None, "1", (0, 0))
    token = host.commit(token, "2", (1, 10))
    token = host.commit(token, "3", (2, 20))  # what the second began in the background may be counted in this one
    token = host.commit(token, "4", (3, 30))
    assert host.shard.requested.batch == 4
    counts = host.shard.requested.counts
    assert (counts["put"], counts["list"], counts["get"], counts["range"]) == (2, 0, 0, 0), "a file and a manifest"
    again = hosts()
    again.shard.open(token, "0000000005-a", IDENTITY)
    again.shard.commit("0000000005-a", {"next_seq": 4})
    counts = again.shard.requested.counts
    assert counts["put"] == 1 and counts["head"] >= 2 and counts["read_bytes"] > 0, "it was opened"


def test_shards_of_the_newest_batch_are_added_up() -> None:
    def of(batch: int, put: int) -> Batch:
        requests = Requests()
        requests.count("put", put)
        return Batch(batch, requests.since_last())

    assert newest([of(3, 2), None, of(4, 5), of(4, 1)]) == {
        **dict.fromkeys([*CLASSES, "read_bytes", "written_bytes"], 0), "put": 6, "batch": 4
    }  # fmt: skip
    assert newest([])["batch"] == -1
