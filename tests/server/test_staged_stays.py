"""What is staged for the next batches stays in memory until they read it, however far apart they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest

from state_backends.backends import StoreConfig
from state_backends.server import requests
from state_backends.server.host import Host
from state_backends.versions.manifest import Identity
from tests.server.conftest import wait_until
from tests.stores.rig import make_block

BUDGET_BYTES = 1 << 20
SLICE_BYTES = 40 << 10
CONFIG = StoreConfig(backend="tiered", budget_bytes=BUDGET_BYTES, bucket_limit_bytes=1 << 18)
SLICES = range(0, 400, 10)


class Batches:
    """A host in this process, and batches of its shards. Each slice has one block of 40 KiB."""

    def __init__(self, state: Path, config: StoreConfig = CONFIG) -> None:
        self.host, self.state, self.config = Host(), state, config
        self._numbers = 0
        self._tokens: dict[int, str] = {}

    def open(self, shard: int = 0) -> str:
        self._numbers += 1
        attempt = f"{self._numbers:010d}-attempt"
        request = {
            "identity": asdict(Identity("q", "o", shard, 4, {})),
            "store": self.config.to_json(),
            "state_dir": str(self.state),
            "run": "r",
            "operator_uid": "u",
            "others": False,
            "token": self._tokens.get(shard),
            "makes": attempt,
            "attempt": attempt,
        }
        self.host.open(requests.OpenRequest.model_validate_json(orjson.dumps(request)))
        return attempt

    def append(self, attempt: str, slices: Sequence[int], *, late: bool, size: int = SLICE_BYTES) -> None:
        blocks = [(1000 * self._numbers + n, late, make_block(s, n, size)) for n, s in enumerate(slices)]
        self.host.work("append", requests.AppendRequest(attempt=attempt), blocks)

    def commit(self, attempt: str, *, shard: int = 0, next_: Sequence[int] = (), later: Sequence[int] = ()) -> None:
        """The plan is staged when it returns."""
        request: dict[str, Any] = {
            "attempt": attempt,
            "snapshot": {"next_seq": 1000 * (self._numbers + 1), "counters": {}},
            "prestage": [*next_],
            "later": [*later],
            "executions": [],
        }
        self.host.commit(requests.CommitRequest.model_validate_json(orjson.dumps(request)))
        self._tokens[shard] = attempt
        wait_until(lambda: not self.stats()["planned_prestages"] and self.is_quiet())

    def fill(self, shard: int = 0, **plan: Sequence[int]) -> None:
        attempt = self.open(shard)
        self.append(attempt, SLICES, late=True)
        self.commit(attempt, shard=shard, **plan)

    def misses(self, attempt: str, slices: Sequence[int]) -> list[int]:
        """Reads slices, in this order. Returns those whose blocks were not in memory."""
        missed = []
        for slice_us in slices:
            before = self.stats()["staging"]["misses"]
            request = {"attempt": attempt, "slices": [slice_us], "blocking": True}
            found = [*self.host.work("read", requests.ReadRequest.model_validate_json(orjson.dumps(request)))]
            assert {stored.block.header.slice_us for stored in found} == {slice_us}
            if self.stats()["staging"]["misses"] > before:
                missed.append(slice_us)
        return missed

    def is_quiet(self) -> bool:
        """Whether nothing is on its way to memory or to disk: of the budget, only RocksDB's cache is reserved."""
        stats = self.stats()
        return stats["reserved_bytes"] <= BUDGET_BYTES // 16 and not sum(stats["io"]["waiting"].values())

    def stats(self) -> dict[str, Any]:
        return self.host.stats()


@pytest.fixture
def batches(tmp_path: Path) -> Iterator[Batches]:
    made = Batches(tmp_path / "state")
    yield made
    made.host.close()


def test_no_more_is_staged_than_memory_pressure_leaves_there(batches: Batches) -> None:
    """Forty slices take 1.6 times the budget. Windows leave memory when three quarters of it are in use."""
    batches.fill(next_=SLICES)
    # On a busy machine, the events themselves may have been under pressure while they came.
    before = batches.stats()["destaged_under_pressure"]
    for _ in range(3):
        batches.host.tick()
    stats = batches.stats()
    assert (stats["destaged_under_pressure"], stats["staging"]["vain_bytes"]) == (before, 0)
    assert 0.6 * BUDGET_BYTES < stats["used_bytes"] < 0.75 * BUDGET_BYTES
    assert not batches.misses(batches.open(), SLICES[:15])


def test_what_the_next_batch_reads_leaves_memory_last(batches: Batches) -> None:
    """New events of other windows bring memory above the limit before the batch reads what was staged for it."""
    planned = [200, 10, 300, 20, 390, 30, 100, 40, 50, 60, 70, 80, 90]
    batches.fill(next_=planned)
    attempt = batches.open()
    new = [1000, 1010, 1020, 1030, 1040, 1050, 1060, 1070, 1080]
    batches.append(attempt, new, late=False, size=SLICE_BYTES * 3 // 4)
    batches.host.tick()
    wait_until(lambda: batches.stats()["used_bytes"] <= 0.65 * BUDGET_BYTES)
    assert batches.stats()["destaged_under_pressure"] > 0
    missed = batches.misses(attempt, planned)
    assert missed == planned[len(planned) - len(missed) :], "those that it reads last"
    assert len(missed) <= 1


def test_what_is_read_last_makes_room_for_what_is_planned_before_it(batches: Batches) -> None:
    batches.fill(next_=SLICES[:20])
    staged = batches.stats()["staging"]["staged_bytes"] // SLICE_BYTES
    batches.commit(batches.open(), next_=[390, 380, *SLICES[:20]])
    stats = batches.stats()["staging"]
    assert stats["vain_bytes"] // SLICE_BYTES <= 3, "the new plan makes room for its three slices, and for nothing else"
    kept = [*SLICES[: staged - 3]]
    assert not batches.misses(batches.open(), [390, 380, *kept])


def test_a_window_that_the_next_batch_reads_is_not_idle(tmp_path: Path) -> None:
    config = StoreConfig(**{**CONFIG.to_json(), "destage": {"idle_after_s": 1e-9}})
    batches = Batches(tmp_path / "state", config)
    try:
        batches.fill(next_=[20, 10], later=[30])
        batches.host.tick()
        assert not batches.misses(batches.open(), [20, 10, 30])
    finally:
        batches.host.close()


def test_what_one_shard_reads_next_takes_the_room_of_what_others_read_later(batches: Batches) -> None:
    batches.fill(0)
    batches.fill(1)
    batches.commit(batches.open(0), shard=0, next_=[0, 10], later=SLICES[2:])
    assert batches.stats()["used_bytes"] > 0.4 * BUDGET_BYTES
    next_ = [*SLICES[:12]]
    batches.commit(batches.open(1), shard=1, next_=next_)
    batches.host.tick()
    assert not batches.misses(batches.open(1), next_)
    assert not batches.misses(batches.open(0), [0, 10, 20]), "what is read soonest stays"
