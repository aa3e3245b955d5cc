"""An attempt goes on when files of its server's host go or are damaged: it opens its shard again, once."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aion.errors import CorruptBlock, CorruptState
from state_backends.backends import StoreConfig
from state_backends.server.remote_attempt import RemoteAttempt
from state_backends.versions.manifest import Identity
from tests.server.conftest import STORE, Connect, block, open_shard, snapshot, values

ON_DISK = StoreConfig(backend="rocksdb", budget_bytes=1 << 20)


@pytest.mark.slow
def test_the_working_folder_is_removed_while_a_task_works(connect: Connect, tmp_path: Path) -> None:
    client = connect()
    attempt = open_shard(client, tmp_path, None, "a0", store=ON_DISK)
    attempt.append([(0, False, block(1)), (1, False, block(2, slice_us=10))])
    attempt.commit(snapshot(2))
    attempt = open_shard(client, tmp_path, "a0", "a1", store=ON_DISK)
    attempt.append([(2, False, block(3))])
    shutil.rmtree(tmp_path / ".live")
    attempt.append([(3, False, block(4, slice_us=10))])
    assert values(attempt, 0, 10) == [1, 3, 2, 4]
    attempt.commit(snapshot(4))
    attempt = open_shard(client, tmp_path, "a1", "a2", store=ON_DISK)
    assert values(attempt, 0, 10) == [1, 3, 2, 4]
    attempt.abort()


@pytest.mark.slow
def test_a_version_that_is_damaged_itself_is_named(connect: Connect, tmp_path: Path) -> None:
    client = connect()
    attempt = open_shard(client, tmp_path, None, "a0", store=ON_DISK)
    attempt.append([(0, False, block(*range(1000)))])
    attempt.commit(snapshot(1))
    (path,) = tmp_path.rglob("files/*.sst")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    with path.open("r+b") as file:
        file.write(data)
    attempt = open_shard(client, tmp_path, "a0", "a1", store=ON_DISK)
    with pytest.raises((CorruptBlock, CorruptState), match=r"file 0000000000-0000000000-a0\.sst"):
        values(attempt, 0)
    assert attempt.servers == 2, "it tried once more"
    attempt.abort()


@pytest.mark.slow
def test_a_shard_whose_token_is_lost_does_not_begin_again(connect: Connect, tmp_path: Path) -> None:
    """Spark has kept a token of it once, since a second version was made from a first one."""
    client = connect()
    first = open_shard(client, tmp_path, None, "a0")
    first.commit(snapshot(1))
    again = open_shard(client, tmp_path, None, "a0b", committed=0)
    again.commit(snapshot(1))  # what may be left of a failed attempt proves nothing
    second = open_shard(client, tmp_path, again.makes, "a1", committed=0)
    second.commit(snapshot(2))
    with pytest.raises(
        CorruptState, match=r"no version of shard 0.*'windowed'.*batch 1 made.*begin again with nothing"
    ):
        open_shard(client, tmp_path, None, "a2", committed=1)
    open_shard(client, tmp_path, None, "b1", committed=0).abort()  # the checkpoint was set back
    open_shard(client, tmp_path, None, "c2").abort()  # the state comes from elsewhere
    open_shard(client, tmp_path, None, "d2", shard=0, committed=1, state_dir=str(tmp_path / "other")).abort()


@pytest.mark.slow
def test_one_version_is_enough_if_nothing_else_can_have_left_it(connect: Connect, tmp_path: Path) -> None:
    client = connect()
    first = open_shard(client, tmp_path, None, "a1", committed=0, asked=True)
    assert not first.finds_others
    first.commit(snapshot(1))
    with pytest.raises(CorruptState, match=r"no version of shard 0.*batch 1 made.*begin again with nothing"):
        open_shard(client, tmp_path, None, "a2", committed=1, asked=True)
    again = open_shard(client, tmp_path, None, "b1", committed=0, asked=True)
    assert again.finds_others, "a failed attempt has left it, or the checkpoint was set back"
    again.abort()


def test_a_version_of_another_lineage_is_not_enough(connect: Connect, tmp_path: Path) -> None:
    """It is taken with those that the checkpoint names, whoever made it."""
    client = connect()
    identities = [Identity("query", "windowed", shard, 2, {"windows": "w"}, checkpoint="here") for shard in (0, 1)]
    where = {"run": "run", "operator_uid": "uid", "state_dir": str(tmp_path), "store": STORE}

    def open_at(identity: Identity, token: str | None, makes: str, **more: Any) -> RemoteAttempt:
        return client.open(identity, token=token, makes=makes, **where, **more)

    for identity in identities:
        open_at(identity, None, "0000000000-a").commit(snapshot(1))
    copies = [replace(identity, checkpoint="there") for identity in identities]
    open_at(copies[0], "0000000000-a", "0000000001-b", committed=0, asked=True).commit(snapshot(1))
    copy = open_at(copies[1], None, "0000000001-b", committed=0, asked=True)
    assert copy.finds_others
    copy.abort()
