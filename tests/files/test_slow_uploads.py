"""While a storage takes its time, nobody waits but for what he asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import orjson
import pytest

from state_backends.backends import StoreConfig, Stores
from state_backends.files.location import RemoteLocation
from state_backends.files.remote import Remote
from state_backends.server import requests
from state_backends.server.host import Host
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.versions.manifest import Identity
from state_backends.versions.shard import Shard
from tests.files.rig import (
    IDENTITY,
    URI,
    Place,
)
from tests.io_thread.rig import PATIENCE
from tests.stores.rig import make_block

FIRST = "0000000000-first"


class SlowUploads:
    """Uploads of one shard that wait until they may go on."""

    def __init__(self, place: Place, shard: str) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.shard = shard
        place.before = self.before

    def before(self, call: str, path: str) -> None:
        if call == "open_output_stream" and f"/{self.shard}/" in path:
            self.begun.set()
            assert self.may_end.wait(PATIENCE)


def test_nobody_waits_for_the_uploads_of_another_shard(make: Callable[..., Place], tmp_path: Path) -> None:
    """Nor does a reader of the same one, or whatever the I/O thread has to do for them."""
    place = make()
    io, budget = IoThread(), MemoryBudget(1 << 20)
    shards = [
        Shard(
            IDENTITY,
            place.storage(f"shard-{i}"),
            tmp_path / f"live-{i}",
            lambda p: Stores.of("tiered", p, io, budget, StoreOptions(bucket_limit_bytes=1 << 20)),
            retain=2,
        )
        for i in range(2)
    ]
    blocks = [make_block(0, n, 1000) for n in range(2)]
    for i, shard in enumerate(shards):
        shard.open(None, FIRST, IDENTITY)
        shard.append(FIRST, [(0, True, blocks[i])])
    slow = SlowUploads(place, "shard-0")
    with ThreadPoolExecutor(1) as pool:
        committed = pool.submit(shards[0].commit, FIRST, {"next_seq": 1})
        assert slow.begun.wait(PATIENCE)
        shards[1].commit(FIRST, {"next_seq": 1})
        assert sorted(p.name for p in (tmp_path / "base/query").glob("*/manifests/*")) == ["0000000000-first.json"]
        store = shards[0].store
        assert store is not None and store.size_on_disk([0]), "written, and let go"
        assert [bytes(b.block.stored) for b in store.read([0])] == [bytes(blocks[0].stored)]
        store.prestage([0])
        assert [bytes(b.block.stored) for b in store.read([0])] == [bytes(blocks[0].stored)]
        assert store.stats().staging.misses == 1, "the second time it was prestaged"
        assert not committed.done()
        slow.may_end.set()
        committed.result(PATIENCE)
    assert {shard.token for shard in shards} == {FIRST}
    for shard in shards:
        shard.close()
    io.close()


def test_a_host_stages_for_others_while_a_shard_commits(
    make: Callable[..., Place], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make()
    remote = Remote(URI, (place.fs, "base"))
    monkeypatch.setattr("state_backends.server.host.locate", lambda _: RemoteLocation(remote, tmp_path / "scratch"))
    clock = [0.0]
    host = Host(clock=lambda: clock[0])
    config = StoreConfig(backend="tiered", budget_bytes=32 << 20, bucket_limit_bytes=1 << 20)

    def open_(shard: int, token: str | None, attempt: str) -> Shard:
        request = {
            "identity": asdict(Identity("q", "o", shard, 2, {})),
            "store": config.to_json(),
            "state_dir": URI,
            "run": "r",
            "operator_uid": "u",
            "others": False,
            "token": token,
            "makes": attempt,
            "attempt": attempt,
        }
        opening = requests.OpenRequest.model_validate_json(orjson.dumps(request))
        assert host.open(opening)["rebuilt"] == (token is None)
        return host.attempts.find(attempt)[1]

    try:
        for i in range(2):
            shard = open_(i, None, f"0000000000-first-{i}")
            shard.append(f"0000000000-first-{i}", [(0, True, make_block(0, i, 1000))])
            shard.commit(f"0000000000-first-{i}", {"next_seq": 1, "counters": {}})
        clock[0] = 100.0  # so that the next batch is expected in 100 s
        open_(0, "0000000000-first-0", "0000000001-second-0")
        open_(1, "0000000000-first-1", "0000000001-second-1")
        for i in range(2):
            _, shard, lock = host.attempts.find(f"0000000001-second-{i}")
            with lock:
                shard.commit(f"0000000001-second-{i}", {"next_seq": 1, "counters": {}})
            host.plan_prestage(("q", "o", i), f"0000000001-second-{i}", [0], [])
        stores = [host.attempts.find(f"0000000001-second-{i}")[1].store for i in range(2)]
        clock[0] = 1000.0
        with host.attempts.find("0000000001-second-0")[2]:  # as if it were at its commit
            host.tick_prestages()
            assert stores[1] is not None and [*stores[1].read([0])]
            assert stores[1].stats().staging.misses == 0
        host.tick_prestages()
        assert stores[0] is not None and [*stores[0].read([0])]
        assert stores[0].stats().staging.misses == 0, "what waited for the lock is not forgotten"
    finally:
        host.close()
    assert not (tmp_path / "scratch").exists()
