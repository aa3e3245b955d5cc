"""`aion experiment overhead`: commits that do nothing do nothing, and else all is as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from experiments.overhead.command import Settings, check
from experiments.shared.state_server import HOW as SERVERS
from experiments.shared.state_server import Forgetful, OfShard, state_server
from state_backends.backends import Stores
from state_backends.files.storage import LocalStorage
from state_backends.server.client import StateClient
from state_backends.server.server_folder import runtime_dir
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.versions.shard import Shard
from tests.server.conftest import Executor, application, executor, open_shard, snapshot, values
from tests.server.conftest import block as small_block
from tests.stores.rig import make_block
from tests.versions.host import IDENTITY

__all__ = ["application", "executor"]

SETTINGS = Settings(
    queries=("partials",), events_per_batch=10, batches=3, runs=1, warm_ups=0, payload_bytes=0,
    policy="standard", cores=2,
)  # fmt: skip


@contextmanager
def shard(
    kind: type[Shard], folder: Path, budget_bytes: int = 1 << 20, threads: IoThread | None = None
) -> Iterator[Shard]:
    io = IoThread() if threads is None else cast(IoThread, OfShard(threads))
    made = kind(
        IDENTITY,
        LocalStorage(folder / "state"),
        folder / "live",
        lambda p: Stores.of("tiered", p, io, MemoryBudget(budget_bytes), StoreOptions(bucket_limit_bytes=budget_bytes)),
        retain=10,
    )
    yield made
    made.close()
    if threads is None:
        io.close()


def files(folder: Path) -> list[str]:
    return [path.name for path in (folder / "state").rglob("*") if path.is_file()]


@pytest.mark.parametrize("kind", [Shard, Forgetful])
def test_versions_follow_each_other_whatever_a_commit_does(kind: type[Shard], tmp_path: Path) -> None:
    with shard(kind, tmp_path) as held:
        assert held.open(None, "0000000000-a", IDENTITY) is None
        held.append("0000000000-a", [(0, False, make_block(0, 0, 600)), (1, False, make_block(10, 1, 600))])
        held.commit("0000000000-a", {"next_seq": 2})
        assert held.open("0000000000-a", "0000000001-lost", IDENTITY) == {"next_seq": 2}
        held.append("0000000001-lost", [(2, False, make_block(0, 2, 600))])
        held.release("0000000001-lost", purge=[0])
        opened = held.open("0000000000-a", "0000000001-b", IDENTITY, makes="0000000001-another")
        assert opened == {"next_seq": 2}, "the attempt before was lost"
        assert [b.seq for b in held.read("0000000001-b", [0, 10])] == [0, 1]
        held.release("0000000001-b", purge=[0, 0])
        assert held.commit("0000000001-b", {"next_seq": 2}) == "0000000001-another"
        assert held.open("0000000001-another", "0000000002-c", IDENTITY) == {"next_seq": 2}
        assert [b.seq for b in held.read("0000000002-c", [0, 10])] == [1]
        assert held.rebuilds == 1
    assert bool(files(tmp_path)) == (kind is Shard)


@pytest.mark.slow
@pytest.mark.parametrize("how", SERVERS)
def test_a_server_serves_as_it_was_told(how: str, application: str, executor: Executor, tmp_path: Path) -> None:
    with state_server(application, executor.pid, how, tmp_path / "log"):
        client = StateClient.connect(application, watch_pid=executor.pid)
        attempt = open_shard(client, tmp_path / "state", None, "t1")
        attempt.append([(0, False, small_block(1, 2))])
        attempt.commit(snapshot(1))
        attempt = open_shard(client, tmp_path / "state", "t1", "t2")
        assert values(attempt, 0) == [1, 2]
        client.close()
    assert not runtime_dir(application).exists()
    settings = Settings(**{**{name: getattr(SETTINGS, name) for name in SETTINGS.__slots__}, "batches": 1, "cores": 1})
    check(tmp_path / "state", "nothing" if how == "nothing" else "commits", settings)
    other = "commits" if how == "nothing" else "nothing"
    with pytest.raises(RuntimeError, match="versions"):
        check(tmp_path / "state", other, settings)
