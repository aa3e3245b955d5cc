"""`aion experiment overhead`: commits that do nothing do nothing, and else all is as it is."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from aion.errors import MissingState
from experiments.overhead.command import HOW, Settings, check, cpu_seconds, targets
from experiments.shared import bench
from experiments.shared.state_server import HOW as SERVERS
from experiments.shared.state_server import Forgetful, IoThreads, OfShard, state_server
from state_backends.backends import Stores
from state_backends.files.storage import LocalStorage
from state_backends.server.client import StateClient
from state_backends.server.server_folder import runtime_dir
from state_backends.store.io import Priority, Steps
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


def test_with_several_io_threads_shards_work_beside_each_other_and_each_by_itself(tmp_path: Path) -> None:
    """Two shards have a step under way at the same time, and what they keep is what was written."""
    io, both = IoThreads(3), threading.Barrier(2, timeout=30)

    def meets() -> Iterator[int]:
        both.wait()
        yield 0

    def life(name: str) -> list[int]:
        with shard(Shard, tmp_path / name, budget_bytes=4_000, threads=io) as held:
            OfShard(io).submit(Priority.READ, cast(Steps[None], meets())).result()
            token, numbers = None, range(30)
            for batch in range(5):
                attempt = f"{batch:010d}-{name}"
                held.open(token, attempt, IDENTITY)
                mine = numbers[6 * batch : 6 * batch + 6]
                held.append(attempt, [(seq, False, make_block(seq % 4, seq, 600)) for seq in mine])
                token = held.commit(attempt, {"next_seq": 6 * batch + 6})
            held.open(token, f"{9:010d}-{name}", IDENTITY)
            return sorted(block.seq for block in held.read(f"{9:010d}-{name}", range(4)))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(life, ("a", "b"))) == [list(range(30))] * 2
    io.close()


def test_a_commit_that_does_nothing_is_forgotten_with_its_host(tmp_path: Path) -> None:
    with shard(Forgetful, tmp_path) as held:
        held.open(None, "0000000000-a", IDENTITY)
        held.commit("0000000000-a", {"next_seq": 0})
    with shard(Forgetful, tmp_path) as other, pytest.raises(MissingState, match="does not exist"):
        other.open("0000000000-a", "0000000001-b", IDENTITY)


def test_what_memory_has_no_room_for_goes_to_disk_all_the_same(tmp_path: Path) -> None:
    with shard(Forgetful, tmp_path, budget_bytes=2_000) as held:
        held.open(None, "0000000000-a", IDENTITY)
        held.append("0000000000-a", [(seq, False, make_block(0, seq, 600)) for seq in range(20)])
        held.commit("0000000000-a", {"next_seq": 20})
        held.open("0000000000-a", "0000000001-b", IDENTITY)
        assert [b.seq for b in held.read("0000000001-b", [0])] == list(range(20))
        assert held.store is not None
        assert held.store.stats().disk_only_bytes > 0
    assert not list((tmp_path / "state").glob("manifests/*"))


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


@pytest.mark.slow
def test_a_server_that_died_is_told(application: str, executor: Executor, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ended too early"):  # noqa: SIM117
        with state_server(application, executor.pid, "nothing", tmp_path / "log") as server:
            executor.kill()
            executor.wait()
            server.wait()


def test_at_most_15_percent_more_time() -> None:
    (target,) = targets(SETTINGS)
    assert SETTINGS.contenders == ["partials commits", "partials nothing"]
    for seconds, holds in ((1.0, True), (1.149, True), (1.16, False)):
        rates = bench.summarise({"partials commits": [100 / seconds], "partials nothing": [100.0]})
        assert [verdict.holds for verdict in bench.verdicts([target], rates)] == [holds]


def test_each_way_has_a_shard() -> None:
    assert HOW.keys() <= SERVERS.keys()


def test_processor_time_is_that_of_children_too(executor: Executor) -> None:
    before = cpu_seconds()
    while (after := cpu_seconds())[os.getpid()] <= before[os.getpid()]:
        pass  # which takes time
    assert executor.pid in after
