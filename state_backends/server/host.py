"""Everything on one executor host: its shards, their shared memory budget, the I/O thread, and memory pressure."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import orjson
import psutil
from rocksdict import Cache

from policies.destage import StandardDestage
from policies.prestage import PrestagePolicy
from policies.sizing import Execution, processing_bytes_per_s
from state_backends.backends import StoreConfig, Stores, make_cache
from state_backends.files.location import locate
from state_backends.files.request_counts import newest
from state_backends.files.requests import Requests
from state_backends.format.errors import StateError
from state_backends.server.attempts import Attempts, ShardKey, Work
from state_backends.server.endpoint import MetricsEndpoint
from state_backends.server.folders import Folders
from state_backends.server.guard import Guard, make_policies
from state_backends.server.heap import Holes
from state_backends.server.machine import memory_limit_bytes, memory_share_used
from state_backends.server.requests import (
    AttemptRequest,
    CommitRequest,
    ExpectRequest,
    LearntRequest,
    OpenRequest,
    StatsRequest,
    TiersRequest,
)
from state_backends.server.schedule import PlannedPrestage, Schedule
from state_backends.server.verbs import VERBS
from state_backends.store.counting import Committed
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.p_bucket import PBucket
from state_backends.store.pressure import PressureManager, Sampler
from state_backends.store.protocol import BlockStore, StoreStats
from state_backends.versions.manifest import Identity
from state_backends.versions.opening import check_begins
from state_backends.versions.shard import Shard

log = logging.getLogger(__name__)
_REMEMBERED_MOVES = 1024  # prestages and written files of a shard whose times no client has asked for yet
_REMEMBERED_EXECUTIONS = 256
_CALM = 0.5  # the share of the budget that prestages for batches after the next one fill, if nobody knows a better one
_SPARE = 8  # the part of the budget that prestages leave free which could still wait: one in this many


@dataclass(frozen=True, slots=True)
class _DiskTimes:
    """How long the disk took for a shard.

    ``staged``: the latest prestages, as (bytes, seconds, how many of these seconds it waited for other I/O).
    ``written``: the latest written files, as (bytes, seconds).
    """

    staged: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_MOVES))
    written: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_MOVES))

    def take(self) -> dict[str, list[tuple[float, ...]]]:
        """Returns all times and forgets them. The I/O thread may add some meanwhile."""
        both: dict[str, deque[Any]] = {"staged": self.staged, "written": self.written}
        return {name: [times.popleft() for _ in range(len(times))] for name, times in both.items()}


class Host:
    """The shards of a host and what they share. :mod:`state_backends.server.requests` has checked all requests.

    A verb that concerns more than the blocks of one shard is a method here; :meth:`work` passes other verbs to the
    shard. The first operator's policy decides about the I/O thread, and the first one with the backend ``tiered`` about
    memory pressure and the times of prestages. The budget is the largest that any operator asks for; RocksDB's block
    cache is part of it. ``shard``: the class of shards, for experiments.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, shard: Callable[..., Shard] = Shard) -> None:
        self.budget = MemoryBudget(0)
        self._new_shard = shard
        self._cache: Cache | None = None
        self._lock = threading.Lock()
        self._io: IoThread | None = None
        self._pressure: PressureManager | None = None
        self._prestage: PrestagePolicy | None = None
        self._starts_early = True
        self._calm = self._staging_share = 0.0
        self._sampler: Sampler | None = None
        self._guard: Guard | None = None
        self._shards: dict[ShardKey, tuple[Shard, threading.Lock]] = {}
        self._made_for: dict[ShardKey, tuple[str, StoreConfig, str]] = {}  # state_dir, settings, checkpoint
        self._disk_times: dict[ShardKey, _DiskTimes] = {}
        self.attempts = Attempts()
        self._schedule = Schedule(clock)
        self._executions_s: deque[float] = deque(maxlen=_REMEMBERED_EXECUTIONS)
        self._folders = Folders(locate)
        self._committed = Committed()
        self._requests: dict[tuple[str, str], Requests] = {}  # by operator
        self._closing: list[tuple[Shard, threading.Lock]] = []  # no attempt can find them any more
        self._closed_counts = StoreStats()  # counts of the shards that were closed
        self._endpoint = MetricsEndpoint(self.stats)
        self._holes = Holes()

    # -- attempts -----------------------------------------------------------------------------------------

    def open(self, request: OpenRequest) -> dict[str, Any]:
        """Starts an attempt; see :meth:`Shard.open`. Raises PolicyError for a policy class that cannot be used."""
        identity, config = request.identity.identity(), request.store.config()
        with self._lock:
            key = self.attempts.check(request.attempt, identity, request.run, request.operator_uid, request.place)
            self._start(config)
            before, made_for = self._shards.get(key), (request.state_dir, config, identity.checkpoint)
            if before is None or self._made_for[key] != made_for:
                # The shard is new, or the query was restarted with another policy, state.dir or checkpoint.
                self._shards[key] = self._make(key, identity, request.state_dir, config), threading.Lock()
                if before is not None:
                    self._closing.append(before)
                self._made_for[key] = made_for
            shard, lock = self._shards[key]
            self.attempts.begin(request.attempt, Work(key, shard, lock))
            reopened = request.attempt != request.makes
            self._schedule.opened(key, reopened=reopened, next_start=request.next_start)
        if before is not None and before[0] is not shard:
            self._close(*before)
        with lock:
            rebuilds = shard.rebuilds
            try:
                snapshot = shard.open(request.token, request.attempt, identity, makes=request.makes)
                others = request.token is None and check_begins(
                    shard.storage, identity, request.committed, asked=request.asked
                )
            except BaseException:
                self.attempts.end(request.attempt)
                raise
            bodies, rebuilt = shard.bodies, shard.rebuilds > rebuilds
            on_disk = shard.on_disk or (rebuilt and snapshot is not None)
            answer: dict[str, Any] = {
                "server": self.attempts.server,
                "snapshot": snapshot,
                "rebuilt": rebuilt,
                "bodies": bodies,
                "on_disk": on_disk,
                "finds_others": others,
            }
        if answer["rebuilt"] and snapshot is not None:
            with self._lock:
                self._committed.restored(key[:2])
        if request.moved:
            answer["moved"] = self._disk_times[key].take()
        return {**answer, "others": _summary(self._others(key, identity))} if request.others else answer

    def learnt(self, request: LearntRequest) -> dict[str, Any]:
        """Returns what the operator's other shards on this host have observed of lateness, as of their last commits."""
        work = self.attempts.find(request.attempt, request.server)
        others = self._others(work.key, work.shard.identity)
        return {**_summary(others), "learnt": [other["lateness"] for other in others]}

    def expect(self, request: ExpectRequest) -> bool:
        """Starts bringing keyed values to memory for a shard's next attempt, if the shard is on this host."""
        with self._lock:
            found = self._shards.get((request.query, request.operator, request.shard))
        keys: Any = request.keys  # as a list: see requests.Keys
        return found is not None and found[0].expect(keys)

    def tiers(self, request: TiersRequest) -> list[tuple[int, int, int]]:
        """Returns where the bytes of a version are now: see :meth:`BlockStore.tiers`. Waits for no attempt.

        As (slice, in memory, only on disk). Empty if the shard is not open here at this version or a later one.
        """
        with self._lock:
            found = self._shards.get((request.query, request.operator, request.shard))
        store = None if found is None or not found[0].has_had(request.token) else found[0].store
        tiers = {} if store is None else store.tiers(request.below)
        return [(slice_us, *sizes) for slice_us, sizes in tiers.items()]

    def work(self, name: str, request: AttemptRequest, *blocks: Any) -> Any:
        """Passes a request for a verb of :data:`state_backends.server.verbs.VERBS` to the attempt's shard."""
        verb, fields = VERBS[name], {field: getattr(request, field) for field in type(request).model_fields}
        work = self.attempts.find(fields.pop("attempt"), fields.pop("server"))
        del fields["before"]  # done already
        with work.locked() if verb.locks else contextlib.nullcontext():
            answer = getattr(work.shard, name)(request.attempt, *blocks, **fields)
        if verb.ends:
            self.attempts.end(request.attempt)
        return answer

    def commit(self, request: CommitRequest) -> None:
        """Commits a new version; see :meth:`Shard.commit`. Then plans the prestages for the next attempt."""
        work = self.attempts.find(request.attempt, request.server)
        with work.locked():
            before = work.shard.snapshot
            token = work.shard.commit(request.attempt, request.snapshot, [*request.prestage, *request.later])
            with self._lock:
                self._committed.committed(work.key[:2], before, request.snapshot)
        executions = [Execution(*e) for e in request.executions]
        self.plan_prestage(work.key, token, request.prestage, executions, later=request.later)
        self.attempts.end(request.attempt)

    def _others(self, key: ShardKey, identity: Identity) -> list[dict[str, Any]]:
        """Returns what the operator's other shards with the same definition have learnt of lateness."""
        with self._lock:
            shards = [shard for k, (shard, _) in self._shards.items() if k[:2] == key[:2] and k != key]
        # A commit sets a new snapshot object, so these objects do not change.
        snapshots = [shard.snapshot for shard in shards if shard.identity.definition == identity.definition]
        return [snapshot["lateness"] for snapshot in snapshots if snapshot is not None and "lateness" in snapshot]

    def plan_prestage(
        self,
        key: ShardKey,
        token: str,
        slices: Sequence[int],
        executions: Sequence[Execution],
        *,
        later: Sequence[int] = (),
    ) -> None:
        """Plans to stage these slices of a shard before its next attempt is due (paper 3.2).

        At once, if memory has room for them, and otherwise just early enough. A policy of the user's always decides.

        ``token``: the version that has these slices. ``executions``: those of the attempt that committed it. ``later``:
        slices for the attempts after the next one, the soonest first. They follow as far as there is room.
        """
        with self._lock:
            self._executions_s.extend(e.seconds for e in executions)
            found = self._shards.get(key)
            store = None if found is None else found[0].store  # another request may be closing it
            if store is None:
                return
            store.plan(slices, later)
            if executions:
                store.processing_bytes_per_s = processing_bytes_per_s(executions)
            if not (slices or later) or self._prestage is None:
                return
            size = store.size_on_disk(slices)
            start = now_s = self._schedule.now_s()
            for other, _ in self._shards.values():
                if other.store is not None and (missing := size - self._staging_room()) > 0:
                    other.store.let_go(missing)
            store.make_room(self._staging_room())
            # What waits for its time, although there is room, comes too late if the batch comes early.
            if self._starts_early and size <= self._staging_room():
                later = tuple(_fitting(store, later, self.budget.room(until_share=self._calm) - size))
            else:
                later = ()
                start = self._prestage.start_at_s(self._schedule.due_s(key), size, now_s)
            self._schedule.plan(PlannedPrestage(start, key, token, tuple(slices), later))
        self.tick_prestages()
        if self._sampler is not None:
            self._sampler.wake()

    def _staging_room(self) -> int:
        """Returns how many bytes may be staged so that memory pressure does not take them out of memory again."""
        return self.budget.room(spare_bytes=self.budget.limit_bytes // _SPARE, until_share=self._staging_share)

    # -- periodic work ------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Starts prestages that are due, and checks memory pressure. Gives back what the heap keeps for itself."""
        self.tick_prestages()
        self._holes.tick(self.budget.limit_bytes)
        with self._lock:
            stores = [(key, shard.store) for key, (shard, _) in self._shards.items() if shard.store is not None]
            median_s = median(self._executions_s) if self._executions_s else None
        if self._pressure is not None:
            self._pressure.tick(stores, median_s)

    def _next_prestage_s(self) -> float | None:
        """Returns the seconds until the next planned prestage starts, or None if none is planned."""
        with self._lock:
            start_s = self._schedule.next_s()
            return None if start_s is None else start_s - self._schedule.now_s()

    def tick_prestages(self) -> None:
        """Starts prestages that are due."""
        with self._lock:
            due = [(self._shards[p.key], p) for p in self._schedule.take_due() if p.key in self._shards]
        for (shard, lock), planned in due:
            if not lock.acquire(blocking=False):
                # The shard is busy, perhaps with a commit over a slow network. The others must not wait for that.
                with self._lock:
                    self._schedule.plan(planned)
                continue
            try:
                # If the next attempt came earlier than expected and has committed, the plan is obsolete.
                if shard.token == planned.token and shard.store is not None:
                    shard.store.prestage(planned.slices, later=planned.later)
            finally:
                lock.release()

    def close_idle(self, ended: Container[str] = ()) -> None:
        """Closes the shards of runs that ended, and shards without an attempt for long: they are on another host now.

        If such a shard is opened again, it is rebuilt from its version. A shard that a request still works on is closed
        by a later call: nothing else may wait for a request that hangs. What was counted for an operator goes when no
        batch of it has come for a week.
        """
        with self._lock:
            finished = self.attempts.operators_of(ended)
            at_work = self.attempts.at_work
            idle = [k for k in self._shards if k[:2] in finished or self._schedule.is_idle(k, in_use=at_work(k))]
            self._closing += [self._shards.pop(key) for key in idle]
            closing = list(self._closing)
            for key in idle:
                log.debug("shard %d of operator %s is idle, and will be closed", key[2], key[1])
                self._made_for.pop(key, None)
                self._disk_times.pop(key, None)
            self.attempts.forget(idle, self._shards)
            for operator in self._schedule.gone(self._shards):
                self._committed.forget(operator)
                self._requests.pop(operator, None)
        for shard, lock in closing:
            self._close(shard, lock, wait=False)

    def _close(self, shard: Shard, lock: threading.Lock, *, wait: bool = True) -> None:
        """Closes a shard that is in the list of closing shards. Without ``wait``, only if no request works on it."""
        if not lock.acquire(blocking=wait):
            return
        try:
            with self._lock:
                if all(other is not shard for other, _ in self._closing):
                    return  # another thread has closed it
            with contextlib.suppress(StateError):
                try:
                    shard.close()
                finally:
                    shard.storage.close()
            with self._lock:
                self._closing.remove((shard, lock))
                self._closed_counts.add(shard.stats())
        finally:
            lock.release()

    # -- the whole ----------------------------------------------------------------------------------------

    def stats(self, request: StatsRequest | None = None) -> dict[str, Any]:
        totals = StoreStats()
        with self._lock:
            shards = list(self._shards.items())
            closing = list(self._closing)
            totals.add(self._closed_counts)
            attempts, planned = len(self.attempts), len(self._schedule)
            queries = self._committed.to_json((key[:2], shard.snapshot) for key, (shard, _) in shards)
            asked = [(operator, requests.to_json()) for operator, requests in self._requests.items()]
        for (query, operator), counts in asked:
            if any(counts.values()) and operator in queries.get(query, {}):
                batches = [shard.requested for key, (shard, _) in shards if key[:2] == (query, operator)]
                queries[query][operator] |= {"requests": newest(batches), "requests_total": counts}
        for shard, _ in closing:
            totals.add(shard.stats())
        operators: dict[str, Any] = {}
        rebuilds = 0
        for (query, operator, _), (shard, _) in shards:
            rebuilds += shard.rebuilds
            stats = shard.stats()
            totals.add(stats)
            of_operator = queries[query][operator]
            of_operator["memory_bytes"] += stats.m_bucket_bytes + stats.value_bytes
            of_operator["disk_bytes"] += stats.p_bucket_bytes + stats.run_bytes
            if shard.snapshot is not None:
                _add(operators.setdefault(operator, {}), shard.snapshot["counters"])
        return {
            **totals.to_json(),
            "peak_m_bucket_bytes": self.budget.peak_bytes,
            "budget_bytes": self.budget.limit_bytes,
            "used_bytes": self.budget.used_bytes,
            "reserved_bytes": self.budget.reserved_bytes,
            "ledger_bytes": self.budget.ledger_bytes,
            "cached_bytes": self.budget.cached_bytes,
            "resident_bytes": psutil.Process().memory_info().rss,
            "metrics_port": self._endpoint.port,
            "attempts": attempts,
            "planned_prestages": planned,
            "queries": queries,
            "shards": len(shards),
            "rebuilds": rebuilds,
            "operators": operators,
            "io": self._io.stats.to_json() | {"waiting": self._io.waiting()} if self._io is not None else {},
            "destaged_under_pressure": self._pressure.destaged if self._pressure else 0,
            "refused_under_pressure": self._pressure.refused if self._pressure else 0,
        }

    def close(self) -> None:
        self._endpoint.close()
        if self._sampler is not None:
            self._sampler.stop()
        with self._lock:
            self._closing += self._shards.values()
            self._shards.clear()
            closing = list(self._closing)
        for shard, lock in closing:
            with contextlib.suppress(Exception):
                self._close(shard, lock)
        if self._io is not None:
            self._io.close()
        if self._guard is not None:
            self._guard.close()
        self._folders.close()

    @property
    def failure(self) -> str | None:
        """Why this host cannot serve any more. None: it works."""
        return self._io.died() if self._io is not None else None

    def touch_folders(self) -> None:
        """Shows other hosts that share a state folder that this one is alive. Call it every few hours at least."""
        with self._lock:
            live = self._folders.live()
        for folder in live:
            folder.touch()

    def _start(self, config: StoreConfig) -> None:
        self._endpoint.serve(config.metrics_port)
        limit = memory_limit_bytes()
        self.budget.raise_to(min(config.budget(limit), limit))
        if self._io is None:
            self._io = config.make_io()
            self._cache = make_cache(self.budget)
        if self._sampler is None and config.backend == "tiered":
            policy, self._prestage, self._guard = make_policies(config)
            self._starts_early = config.prestage_class is None
            # Where the standard policy stops to free memory. Above it, what was staged would leave memory again.
            self._calm = policy.resume if isinstance(policy, StandardDestage) else _CALM
            self._staging_share = config.staging_share
            self._pressure = PressureManager(self.budget, policy, memory_share_used)
            self._sampler = Sampler(self.tick, self._next_prestage_s)

    def _make(self, key: ShardKey, identity: Identity, state_dir: str, config: StoreConfig) -> Shard:
        requests = self._requests.setdefault(key[:2], Requests())
        copies = config.kept_copies_bytes, config.local_copies_bytes
        folders = self._folders.of(state_dir, identity, requests, *copies)
        assert self._io is not None
        io, prestage = self._io.of_shard(), self._prestage
        times = self._disk_times.setdefault(key, _DiskTimes())

        def on_staged(size_bytes: int, seconds: float, waited_s: float) -> None:
            times.staged.append((size_bytes, seconds, waited_s))
            if prestage is not None:
                prestage.observe(size_bytes, seconds)

        def stores(p_bucket: PBucket) -> Stores:
            made = config.make_stores(p_bucket, io, self.budget)
            made.blocks.listen(on_staged, lambda size_bytes, seconds: times.written.append((size_bytes, seconds)))
            return made

        return self._new_shard(
            identity,
            folders.storage,
            folders.live,
            stores,
            retain=config.retain_versions,
            home=folders.home,
            cache=self._cache,
            requests=folders.requests,
            staged=folders.staged,
        )


def _fitting(store: BlockStore, slices: Sequence[int], room_bytes: int) -> Iterator[int]:
    """Yields slices, in their order, as long as there is room for what is only on disk of them."""
    for slice_us in slices:
        room_bytes -= store.size_on_disk([slice_us])
        if room_bytes < 0:
            return
        yield slice_us


def _summary(others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the number of other shards, and their different ``learnt_bound``s. Most shards have the same."""
    different = {orjson.dumps(other["learnt_bound"]): other["learnt_bound"] for other in others}
    return {"shards": len(others), "learnt_bound": list(different.values())}


def _add(total: dict[str, Any], part: dict[str, Any]) -> None:
    """Adds an operator's counters to a total. ``largest`` is a maximum."""
    for name, value in part.items():
        if isinstance(value, dict):
            _add(total.setdefault(name, {}), value)
        else:
            known = total.get(name, 0)
            total[name] = max(known, value) if name == "largest" else known + value
