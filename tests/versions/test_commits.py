"""A version is there whole, or not at all."""

from __future__ import annotations

import pytest

from aion.errors import AttemptSuperseded, RequestError
from state_backends.versions.manifest import load
from tests.versions.host import Host, in_the_way


def test_a_version_is_opened_by_its_token(host: Host) -> None:
    attempt, snapshot = host.open(None)
    assert snapshot is None
    host.append(attempt, (0, 0), (1, 10))
    assert [seq for seq, _ in host.read(attempt, 0, 10)] == [0, 1], "one's own blocks are there at once"
    host.shard.commit(attempt, {"next_seq": 2, "windows": [1, 2]})
    again, snapshot = host.open(attempt)
    assert snapshot == {"next_seq": 2, "windows": [1, 2]}
    assert [seq for seq, _ in host.read(again, 0, 10)] == [0, 1]


def test_versions_build_on_one_another(host: Host) -> None:
    token = None
    for i in range(5):
        token = host.commit(token, (2 * i, 0), (2 * i + 1, 10 + i), purge=[9 + i])
    assert host.seqs(token, *range(20)) == [0, 2, 4, 6, 8, 9]
    manifest = load(host.manifest(token).read_bytes(), "the last")
    assert (manifest.version, manifest.token) == (5, token)


def test_numbers_of_blocks_only_grow(host: Host) -> None:
    """Otherwise an attempt could not be undone: a rollback forgets all blocks from a number on."""
    token = host.commit(None, (0, 0), (1, 0))
    attempt, _ = host.open(token)
    for seqs in ([1], [2, 2], [3, 2]):
        with pytest.raises(RequestError, match="block numbers must increase"):
            host.append_together(attempt, *((seq, 0) for seq in seqs))
    host.append(attempt, (2, 0), (4, 0))
    with pytest.raises(RequestError, match="next_seq must be above block 4"):
        host.shard.commit(attempt, {"next_seq": 4})
    host.shard.commit(attempt, {"next_seq": 5})
    assert host.seqs(attempt, 0) == [0, 1, 2, 4]


def test_a_new_host_opens_what_another_one_committed(host: Host) -> None:
    first = host.commit(None, (0, 0), (1, 10))
    second = host.commit(first, (2, 0), purge=[10], note="x" * 1000)
    host.restart()
    attempt, snapshot = host.open(second)
    assert snapshot == {"next_seq": 3, "note": "x" * 1000}
    assert [seq for seq, _ in host.read(attempt, 0, 10)] == [0, 2]
    host.append(attempt, (3, 20))
    host.shard.commit(attempt, {"next_seq": 4})
    host.restart()
    assert host.seqs(attempt, 0, 10, 20) == [0, 2, 3]


def test_an_attempt_that_is_aborted_leaves_no_trace(host: Host) -> None:
    token = host.commit(None, (0, 0), (1, 10))
    files = host.files()
    attempt, _ = host.open(token)
    host.append(attempt, (2, 0), (3, 20), late=True)
    host.shard.release(attempt, [0, 20])
    host.shard.release(attempt, purge=[10])
    host.shard.abort(attempt)
    assert host.seqs(token, 0, 10, 20) == [0, 1]
    assert host.files() == files
    assert host.shard.rebuilds == 1, "undone without rebuilding"


def test_an_attempt_that_just_stops_leaves_no_trace_either(host: Host) -> None:
    token = host.commit(None, (0, 0))
    attempt, _ = host.open(token)
    host.append(attempt, (1, 0))
    host.shard.release(attempt, purge=[0])
    assert host.seqs(token, 0) == [0], "another one opens, and nobody told the first to stop"
    assert host.commit(token, (1, 0))
    assert host.shard.rebuilds == 1


def test_a_very_first_attempt_can_be_undone_too(host: Host) -> None:
    attempt, _ = host.open(None)
    host.append(attempt, (0, 0))
    host.shard.release(attempt, [0])
    assert host.seqs(None, 0) == []
    assert host.seqs(host.commit(None, (0, 0)), 0) == [0]


def test_spark_may_ask_for_an_older_version(host: Host) -> None:
    """The commit came through, and Spark chose another attempt all the same."""
    first = host.commit(None, (0, 0), (1, 10))
    host.commit(first, (2, 0), purge=[10])
    rebuilds = host.shard.rebuilds
    third = host.commit(first, (2, 20))
    assert host.shard.rebuilds == rebuilds + 1
    assert host.seqs(third, 0, 10, 20) == [0, 1, 2]
    assert host.seqs(first, 0, 10, 20) == [0, 1]
    assert host.seqs(None, 0, 10, 20) == []


def test_purging_waits_for_the_commit(host: Host) -> None:
    token = host.commit(None, (0, 0), (1, 10))
    attempt, _ = host.open(token)
    host.shard.release(attempt, purge=[0])
    assert [seq for seq, _ in host.read(attempt, 0, 10)] == [0, 1]
    host.shard.commit(attempt, {"next_seq": 2})
    assert host.seqs(attempt, 0, 10) == [1]
    assert host.seqs(token, 0, 10) == [0, 1]


def test_a_commit_without_news_writes_no_file(host: Host) -> None:
    first = host.commit(None, (0, 0))
    files = host.files()
    second = host.commit(first)
    assert host.files() == files
    host.restart()
    assert host.seqs(second, 0) == [0]


def test_slices_that_die_in_the_batch_that_brought_them_are_not_in_the_version(host: Host) -> None:
    token = host.commit(None, (0, 0), (1, 10), purge=[0])
    assert sum(f.blocks for f in load(host.manifest(token).read_bytes(), token).files) == 1
    everything = host.commit(token, (2, 20), purge=[10, 20])
    assert host.named_files(everything) == set()
    host.restart()
    assert host.seqs(everything, 0, 10, 20) == []


@pytest.mark.parametrize("how", ["another opened", "aborted", "committed", "never opened"])
def test_an_attempt_that_is_over_is_told_so(host: Host, how: str) -> None:
    attempt, _ = host.open(None)
    if how == "another opened":
        host.open(None)
    elif how == "aborted":
        host.shard.abort(attempt)
    elif how == "committed":
        host.shard.commit(attempt, {"next_seq": 0})
    else:
        attempt = "stranger"
    for call in (
        lambda: host.shard.append(attempt, []),
        lambda: list(host.shard.read(attempt, [0])),
        lambda: host.shard.release(attempt, [0]),
        lambda: host.shard.release(attempt, purge=[0]),
        lambda: host.shard.commit(attempt, {"next_seq": 0}),
    ):
        with pytest.raises(AttemptSuperseded, match=rf"shard 3.*{attempt}"):
            call()


def test_a_superseded_attempt_cannot_abort_the_one_at_work(host: Host) -> None:
    old, _ = host.open(None)
    new, _ = host.open(None)
    host.append(new, (0, 0))
    host.shard.abort(old)
    host.shard.commit(new, {"next_seq": 1})
    assert host.seqs(new, 0) == [0]


def test_a_commit_whose_files_cannot_be_written_is_none(host: Host) -> None:
    token = host.commit(None, (0, 0))
    attempt, _ = host.open(token)
    host.append(attempt, (1, 0))
    with in_the_way(host.folder / "state" / "files"), pytest.raises(OSError):
        host.shard.commit(attempt, {"next_seq": 2})
    host.shard.abort(attempt)
    assert host.manifests() == {token}
    assert host.seqs(token, 0) == [0]
    assert host.seqs(host.commit(token, (1, 0)), 0) == [0, 1]


def test_a_commit_whose_manifest_cannot_be_written_is_none(host: Host) -> None:
    token = host.commit(None, (0, 0))
    attempt, _ = host.open(token)
    host.append(attempt, (1, 0))
    with in_the_way(host.folder / "state" / "manifests"), pytest.raises(OSError):
        host.shard.commit(attempt, {"next_seq": 2})
    host.shard.abort(attempt)
    assert host.seqs(token, 0) == [0]
    last = host.commit(token, (1, 0))
    assert host.seqs(last, 0) == [0, 1]
    assert host.files() == host.named_files(token, last), "nobody would ever delete the others"


def test_a_slice_that_was_purged_and_gets_blocks_again_has_these_only(host: Host) -> None:
    """Its old blocks are in a file that the version needs for another slice."""
    token = host.commit(None, (0, 0), (1, 10), (2, 20))
    token = host.commit(token, purge=[10])
    token = host.commit(token, (3, 10))
    assert host.seqs(token, 0, 10, 20) == [0, 3, 2]
    host.restart()
    assert host.seqs(token, 0, 10, 20) == [0, 3, 2]
    token = host.commit(token, (4, 10), (5, 20))
    host.restart()
    assert host.seqs(token, 0, 10, 20) == [0, 3, 4, 2, 5]


def test_a_slice_that_is_purged_in_the_batch_that_brings_it_again(host: Host) -> None:
    token = host.commit(None, (0, 0), (1, 10))
    token = host.commit(token, purge=[10])
    token = host.commit(token, (2, 10), (3, 0), purge=[10])
    host.restart()
    assert host.seqs(token, 0, 10) == [0, 3]
    token = host.commit(token, (4, 10))
    host.restart()
    assert host.seqs(token, 0, 10) == [0, 3, 4]
