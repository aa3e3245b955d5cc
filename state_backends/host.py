"""Everything that one executor host holds: its shards, the budget they share, the I/O thread, and the pressure."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil
from rocksdict import Cache

from aion.errors import PolicyError, ServerError
from policies.prestage import PrestagePolicy
from state_backends.checkpoint import Shard
from state_backends.io_thread import IoThread
from state_backends.location import Location, locate
from state_backends.m_bucket import MemoryBudget
from state_backends.machine import memory_limit_bytes, memory_share_used
from state_backends.manifest import Identity
from state_backends.p_bucket import PBucket, cache_bytes
from state_backends.pressure import PressureManager, Sampler
from state_backends.store import BlockStore, StoreStats
from state_backends.stores import StoreConfig

ShardKey = tuple[str, str, int]


class _Planned(NamedTuple):
    """A prestage that waits for its time."""

    start_s: float
    key: ShardKey
    token: str
    slices: Sequence[int]


class Host:
    """The shards of a host and what they share.

    The first operator's policy decides about the I/O thread and about memory pressure; the budget is the largest that
    any operator asks for. RocksDB's block cache is part of the budget.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = MemoryBudget(0)
        self._clock = clock
        self._cache: Cache | None = None
        self._lock = threading.Lock()
        self._io: IoThread | None = None
        self._pressure: PressureManager | None = None
        self._prestage: PrestagePolicy | None = None
        self._sampler: Sampler | None = None
        self._shards: dict[ShardKey, tuple[Shard, threading.Lock]] = {}
        self._wanted: dict[ShardKey, tuple[str, StoreConfig]] = {}  # what each was made for
        self._made = 0
        self._attempts: dict[str, ShardKey] = {}
        self._owners: dict[tuple[str, str], tuple[str, str]] = {}
        self._planned: list[_Planned] = []
        self._opened: dict[ShardKey, float] = {}
        self._intervals: dict[ShardKey, float] = {}
        self._executions_s: list[float] = []
        self._locations: dict[str, Location] = {}
        self._id = f"{os.getpid()}-{int(psutil.Process().create_time() * 1000)}"

    # -- attempts -----------------------------------------------------------------------------------------

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        """Starts an attempt; see :meth:`Shard.open`. Raises PolicyError for a policy class that cannot be used."""
        identity = Identity(**request["identity"])
        config = StoreConfig(**request["store"])
        key = (identity.query, identity.operator, identity.shard)
        with self._lock:
            self._check_owner(identity, request["run"], request["operator_uid"])
            self._start(config)
            known, wanted = self._shards.get(key), (request["state_dir"], config)
            if known is None or self._wanted[key] != wanted:
                # Also for a query that was restarted with another policy, or whose state was moved.
                self._shards[key] = self._make(identity, *wanted), threading.Lock()
                self._wanted[key] = wanted
            shard, lock = self._shards[key]
            self._attempts[request["attempt"]] = key
            self._note_interval(key)
        if known is not None and known[0] is not shard:
            with known[1]:
                known[0].close()
                known[0].depot.close()
        with lock:
            before = shard.rebuilds
            snapshot = shard.open(request["token"], request["attempt"], identity)
            return {"snapshot": snapshot, "rebuilt": shard.rebuilds > before}

    def shard(self, attempt: str) -> tuple[Shard, threading.Lock]:
        with self._lock:
            key = self._attempts.get(attempt)
            if key is None:
                raise ServerError(f"attempt {attempt} was never opened here; the state server was restarted")
            return self._shards[key]

    def ended(self, attempt: str) -> None:
        with self._lock:
            self._attempts.pop(attempt, None)

    def plan_prestage(self, attempt: str, slices: Sequence[int], executions: Sequence[tuple[int, float]]) -> None:
        """Stages these slices of a shard just before its next attempt is due (paper 3.2).

        ``executions``: bytes and seconds of each execution of this attempt.
        """
        with self._lock:
            self._executions_s = [*self._executions_s, *(s for _, s in executions)][-256:]
            key = self._attempts[attempt]
            shard, _ = self._shards[key]
            if executions and shard.store is not None:
                read, took = sum(b for b, _ in executions), sum(s for _, s in executions)
                shard.store.processing_bytes_per_s = read / max(took, 1e-6)
            if not slices or shard.store is None or self._prestage is None:
                return
            now = self._clock()
            due = self._opened[key] + self._intervals.get(key, 0.0)
            size = shard.store.size_on_disk(slices)
            start = self._prestage.start_at_s(max(due, now), size, now)
            self._planned.append(_Planned(start, key, attempt, tuple(slices)))
        self.tick_prestages()

    # -- what happens now and then ------------------------------------------------------------------------

    def tick(self) -> None:
        self.tick_prestages()
        with self._lock:
            stores = [(key, shard.store) for key, (shard, _) in self._shards.items() if shard.store is not None]
            typical = median(self._executions_s) if self._executions_s else None
        if self._pressure is not None:
            self._pressure.tick(stores, typical)

    def tick_prestages(self) -> None:
        now = self._clock()
        with self._lock:
            ready = [p for p in self._planned if p.start_s <= now]
            self._planned = [p for p in self._planned if p.start_s > now]
            due = [(self._shards[p.key], p) for p in ready]
        for (shard, lock), planned in due:
            if not lock.acquire(blocking=False):
                # The shard commits, maybe over a slow network: the others must not wait for that.
                with self._lock:
                    self._planned.append(planned)
                continue
            try:
                # Another attempt may have come earlier than expected; what it needs it reads.
                if shard.token == planned.token and shard.store is not None:
                    shard.store.prestage(planned.slices)
            finally:
                lock.release()

    # -- the whole ----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        with self._lock:
            shards = list(self._shards.items())
        totals = StoreStats()
        operators: dict[str, Any] = {}
        rebuilds = 0
        for (_, operator, _), (shard, _) in shards:
            rebuilds += shard.rebuilds
            if shard.store is not None:
                totals.add(shard.store.stats())
            if shard.snapshot is not None:
                _add(operators.setdefault(operator, {}), shard.snapshot["counters"])
        return {
            **totals.to_json(),
            "peak_m_bucket_bytes": self.budget.peak_bytes,
            "budget_bytes": self.budget.limit_bytes,
            "shards": len(shards),
            "rebuilds": rebuilds,
            "operators": operators,
            "io": self._io.stats.to_json() if self._io is not None else {},
            "destaged_under_pressure": self._pressure.destaged if self._pressure else 0,
            "refused_under_pressure": self._pressure.refused if self._pressure else 0,
        }

    def close(self) -> None:
        if self._sampler is not None:
            self._sampler.stop()
        with self._lock:
            for shard, lock in self._shards.values():
                with lock, contextlib.suppress(Exception):
                    shard.close()
            self._shards.clear()
        if self._io is not None:
            self._io.close()
        for location in self._locations.values():
            shutil.rmtree(location.live / self._id, ignore_errors=True)
            location.close()

    def _start(self, config: StoreConfig) -> None:
        self.budget.raise_to(config.budget(memory_limit_bytes()))
        if self._io is not None:
            return
        try:
            policy, prestage = config.make_destage(), config.make_prestage()
        except ValueError as error:
            raise PolicyError(str(error)) from error
        self._io = config.make_io()
        size = cache_bytes(self.budget.limit_bytes)
        self.budget.reserve(size)
        self._cache = Cache(size)
        self._prestage = prestage if config.prestages else None
        self._pressure = PressureManager(self.budget, policy, memory_share_used)
        if config.backend == "tiered":
            self._sampler = Sampler(self.tick)

    def _note_interval(self, key: ShardKey) -> None:
        """Learns how long a batch takes to come after the one before: an average that follows."""
        now = self._clock()
        before = self._opened.get(key)
        self._opened[key] = now
        if before is not None:
            known = self._intervals.get(key)
            self._intervals[key] = now - before if known is None else 0.7 * known + 0.3 * (now - before)

    def _make(self, identity: Identity, state_dir: str, config: StoreConfig) -> Shard:
        location = self._locations.get(state_dir)
        if location is None:
            location = locate(state_dir)
            _sweep(location.live)
            (location.live / self._id).mkdir(parents=True, mode=0o700, exist_ok=True)
            self._locations[state_dir] = location
        names = identity.query, identity.operator, f"shard-{identity.shard:05d}"
        self._made += 1  # no two shards share a folder, not even one and its successor
        live = location.live / self._id / str(self._made)
        io, prestage = self._io, self._prestage
        assert io is not None

        def store(p_bucket: PBucket) -> BlockStore:
            made = config.make_store(p_bucket, io, self.budget)
            if prestage is not None:
                made.on_staged = prestage.observe
            return made

        return Shard(
            identity,
            location.depot(names, live.joinpath("copies", *names)),
            live.joinpath("rocksdb", *names),
            store,
            retain=config.retain_versions,
            cache=self._cache,
        )

    def _check_owner(self, identity: Identity, run: str, uid: str) -> None:
        """Two operators of one query must not share a name: they would share their state."""
        key = (identity.query, identity.operator)
        owner = self._owners.get(key)
        if owner is not None and owner[0] == run and owner[1] != uid:
            raise ServerError(
                f"two operators of this query are both named {identity.operator!r}; "
                "give each its own: aion.windowed(..., name='...')"
            )
        self._owners[key] = (run, uid)


def _add(total: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if isinstance(value, dict):
            _add(total.setdefault(name, {}), value)
        else:
            known = total.get(name, 0)
            total[name] = max(known, value) if name == "largest" else known + value


def _sweep(live: Path) -> None:
    """Removes what servers that were killed left behind: folders named by a process that is no more."""
    for folder in live.glob("*-*"):
        pid, _, born = folder.name.partition("-")
        try:
            process = psutil.Process(int(pid))
            same = int(process.create_time() * 1000) == int(born)
            alive = same and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, ValueError):
            alive = False
        if not alive:
            shutil.rmtree(folder, ignore_errors=True)
