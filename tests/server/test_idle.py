"""Shards to which nothing comes any more: their server lets go of what they hold."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from aion.errors import ServerUnreachable
from state_backends.backends import StoreConfig
from state_backends.format.block import Block
from state_backends.server import requests
from state_backends.server.host import Host
from state_backends.server.server_folder import ended, note_end
from state_backends.versions.manifest import Identity
from tests.stores.rig import make_block

CONFIG = StoreConfig(backend="tiered", budget_bytes=32 << 20, bucket_limit_bytes=1 << 20)


class Served:
    """A host whose clock the test moves, and its shards' batches."""

    def __init__(self, state: Path) -> None:
        self.state, self.now = state, 0.0
        self.host = Host(clock=lambda: self.now)

    def open(self, query: str, shard: int, token: str | None, attempt: str, run: str = "run") -> dict[str, Any]:
        request = {
            "identity": asdict(Identity(query, "tolls", shard, 4, {})),
            "store": CONFIG.to_json(),
            "state_dir": str(self.state),
            "run": run,
            "operator_uid": "uid",
            "others": False,
            "token": token,
            "makes": attempt,
            "attempt": attempt,
        }
        return self.host.open(requests.OpenRequest.model_validate_json(orjson.dumps(request)))

    def batch(self, query: str, shard: int, number: int) -> str:
        """Brings a block; the version that it makes."""
        token = f"{number - 1:010d}-{query}{shard}" if number else None
        attempt = f"{number:010d}-{query}{shard}"
        self.open(query, shard, token, attempt)
        self.host.work(
            "append", requests.AppendRequest(attempt=attempt), [(number, False, make_block(number, number, 1000))]
        )
        commit = {"attempt": attempt, "snapshot": {"next_seq": number + 1, "counters": {}}, "prestage": [0]}
        self.host.commit(requests.CommitRequest.model_validate_json(orjson.dumps({**commit, "executions": []})))
        return attempt

    def live_files(self, query: str) -> list[Path]:
        """The files that the open shards of a query have on disk."""
        return [path for path in (self.state / ".live").rglob("*") if path.is_file() and query in path.parts]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "state")
    yield made
    made.host.close()


@pytest.mark.slow
def test_what_a_stopped_query_held_is_let_go_of(served: Served) -> None:
    for number in range(3):
        served.now = 10.0 * number
        for query in ("stopped", "goes-on"):
            served.batch(query, 0, number)
    before, freed = served.host.stats(), []
    assert before["shards"] == 2
    for number in range(3, 100):
        served.now = 10.0 * number
        served.batch("goes-on", 0, number)
        served.host.tick_prestages()
        files = psutil.Process().num_fds()
        served.host.close_idle()
        freed.append(files - psutil.Process().num_fds())
    after = served.host.stats()
    assert after["shards"] == 1, "ten minutes after its last batch"
    assert not served.live_files("stopped"), "its files went with it"
    assert max(freed) >= 3, "RocksDB's files, once"
    assert after["staging"]["misses"] >= before["staging"]["misses"], "what it counted is counted still"
    answer = served.open("stopped", 0, "0000000002-stopped0", "0000000003-stopped0")
    assert answer["rebuilt"] and answer["snapshot"]["next_seq"] == 3, "and it comes back from its version"


def test_what_a_query_held_is_let_go_of_when_its_run_ended(served: Served) -> None:
    served.batch("stopped", 0, 0)
    version = served.batch("stopped", 0, 1)
    served.open("stopped", 0, version, "0000000002-cancelled")  # Spark killed its worker
    served.host.close_idle({"another"})
    assert served.host.stats()["shards"] == 1
    served.host.close_idle({"run"})
    stats = served.host.stats()
    assert (stats["shards"], stats["attempts"], stats["operators"]) == (0, 0, {})
    assert stats["queries"]["stopped"]["tolls"]["commits"] == 2, "what it counted is counted still"
    with pytest.raises(ServerUnreachable):
        served.host.work(
            "append", requests.AppendRequest(attempt="0000000002-cancelled"), [(2, False, make_block(2, 2, 1000))]
        )


def test_what_was_counted_for_a_query_goes_a_week_after_its_last_batch(served: Served) -> None:
    """Here, or anywhere: a server serves for months, and queries come and go."""
    for number in range(3):
        for query in ("gone", "moved", "goes-on"):
            served.batch(query, 0, number)
    served.host.close_idle({"run"})
    week = 7 * 86_400.0
    served.now = week - 1
    served.host.close_idle()
    assert set(served.host.stats()["queries"]) == {"gone", "moved", "goes-on"}
    version = served.batch("goes-on", 0, 3)
    served.open("moved", 1, None, "0000000003-moved1")
    served.now = week + 1
    served.host.close_idle()
    counts = served.host.stats()["queries"]
    assert set(counts) == {"moved", "goes-on"}
    assert counts["goes-on"]["tolls"]["commits"] == 4, "what goes on does not begin at 0 again"
    served.open("goes-on", 0, version, "0000000004-goes-on0")
    served.host.close_idle()
    assert served.host.stats()["queries"]["goes-on"]["tolls"]["commits"] == 4
    served.batch("gone", 0, 3)
    assert served.host.stats()["queries"]["gone"]["tolls"]["commits"] == 1, "it has come back"


def test_nothing_else_waits_for_a_request_that_hangs(served: Served) -> None:
    version = served.batch("hangs", 0, 0)
    served.open("hangs", 0, version, "0000000001-hangs0")
    served.batch("stopped", 0, 0)
    begun, go_on = threading.Event(), threading.Event()

    def blocks() -> Iterator[tuple[int, bool, Block]]:
        begun.set()
        assert go_on.wait(20)
        yield 1, False, make_block(1, 1, 1000)

    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(served.host.work, "append", requests.AppendRequest(attempt="0000000001-hangs0"), blocks())
        assert begun.wait(20)
        served.host.close_idle({"run"})
        assert served.live_files("hangs") and not served.live_files("stopped")
        go_on.set()
        hanging.result(20)
    served.host.close_idle()
    assert not served.live_files("hangs"), "the next look closes it"


def test_a_query_that_runs_again_keeps_what_it_holds(served: Served) -> None:
    version = served.batch("again", 0, 0)
    served.open("again", 0, version, "0000000001-again0", run="the next")
    served.host.close_idle({"run"})
    served.host.work(
        "append", requests.AppendRequest(attempt="0000000001-again0"), [(1, False, make_block(1, 1, 1000))]
    )
    assert served.host.stats()["shards"] == 1


def test_the_end_of_a_run_is_named_once_and_to_a_server_only(tmp_path: Path) -> None:
    note_end(tmp_path / "nobody", "a")
    assert not (tmp_path / "nobody").exists()
    tmp_path.chmod(0o700)
    note_end(tmp_path, "a")
    assert ended(tmp_path) == set(), "a query that is started again at once finds its shards"
    for note in tmp_path.iterdir():
        os.utime(note, (0, 0))
    assert (ended(tmp_path), ended(tmp_path)) == ({"a"}, set())


def test_a_query_with_a_slow_trigger_is_not_idle_between_its_batches(served: Served) -> None:
    for number in range(4):
        served.now = 3600.0 * number
        served.host.close_idle()
        served.batch("hourly", 0, number)
    served.now += 3600.0 * 19
    served.host.close_idle()
    assert served.host.stats()["shards"] == 1
    served.now += 3600.0 * 2
    served.host.close_idle()
    assert served.host.stats()["shards"] == 0


def test_an_attempt_at_work_is_not_idle(served: Served) -> None:
    attempt = served.batch("slow", 0, 0)
    served.open("slow", 0, attempt, "0000000001-slow0")
    served.now = 4000.0
    served.host.close_idle()
    served.host.work("append", requests.AppendRequest(attempt="0000000001-slow0"), [(1, False, make_block(1, 1, 1000))])
    assert served.host.stats()["shards"] == 1


def test_an_attempt_whose_worker_died_long_ago_is_over(served: Served) -> None:
    attempt = served.batch("dead", 0, 0)
    served.open("dead", 0, attempt, "0000000001-dead0")
    served.now = 200_000.0
    served.host.close_idle()
    assert (served.host.stats()["shards"], served.host.stats()["attempts"]) == (0, 0)
    with pytest.raises(ServerUnreachable, match="never began here"):
        served.host.work(
            "append", requests.AppendRequest(attempt="0000000001-dead0"), [(1, False, make_block(1, 1, 1000))]
        )
