"""Shards of one operator on one host hear of each other: as of their last commits, and of nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from state_backends.server.remote_attempt import RemoteAttempt
from state_backends.versions.manifest import Identity
from tests.server.conftest import STORE, Connect, Executor, kill, open_shard, snapshot


def knowing(next_seq: int, what: int) -> dict[str, Any]:
    """The snapshot of an operator that has learnt something of lateness."""
    return {
        **snapshot(next_seq),
        "lateness": {"learnt_bound": {"bound": what}, "lateness": {"seen": what}, "own": [what]},
    }


def test_shards_of_an_operator_hear_of_each_other_as_of_their_commits(connect: Connect, tmp_path: Path) -> None:
    client = connect()

    def opened(shard: int, token: str | None, attempt: str, **more: Any) -> RemoteAttempt:
        return open_shard(client, tmp_path, token, attempt, shard=shard, others=True, **more)

    first, second, third = (opened(i, None, f"a{i}") for i in range(3))
    assert first.others == (0, []) and first.learnt() == (0, [], []), "nobody has committed"
    first.commit(knowing(0, 7))
    third.commit(snapshot(0))  # of an operator that tells nothing
    assert second.others == (0, []), "that was before"
    assert second.learnt() == (1, [{"bound": 7}], [{"seen": 7}])
    second.commit(knowing(0, 7))
    # What both found is told once; what is at work, what failed, and one's own are not told.
    opened(0, "a0", "b0").abort()
    third = opened(2, "a2", "b2")
    assert third.others == (2, [{"bound": 7}]) and third.learnt() == (2, [{"bound": 7}], [{"seen": 7}, {"seen": 7}])
    third.abort()
    third = opened(2, "a2", "c2")
    third.commit(knowing(0, 9))
    assert opened(0, "a0", "c0").others == (2, [{"bound": 7}, {"bound": 9}])
    # Nothing of another operator, or of another query, nor for those who did not ask.
    elsewhere = {"query": "query", "operator": "other", "shard": 0, "shards": 3, "definition": {"windows": "w"}}
    where = {"run": "run", "operator_uid": "u", "state_dir": str(tmp_path), "store": STORE, "others": True}
    for number, change in enumerate(({}, {"query": "q2", "operator": "windowed"})):
        identity = Identity(**{**elsewhere, **change})  # type: ignore[arg-type]
        assert client.open(identity, token=None, makes=f"0000000000-x{number}", **where).others == (0, [])  # type: ignore[arg-type]
    assert open_shard(client, tmp_path, "a1", "b1", shard=1).others == (0, [])


@pytest.mark.slow
def test_a_new_server_hears_of_nobody_until_they_are_back(
    application: str, executor: Executor, connect: Connect, tmp_path: Path
) -> None:
    for number in range(2):
        open_shard(connect(), tmp_path, None, f"a{number}", shard=number).commit(knowing(0, number))
    kill(application)
    first = open_shard(connect(), tmp_path, "a0", "b0", shard=0, others=True)
    assert first.others == (0, []) and first.learnt() == (0, [], [])
    second = open_shard(connect(), tmp_path, "a1", "b1", shard=1, others=True)
    assert second.others == (1, [{"bound": 0}]), "as of its last commit, also while it is at work"
