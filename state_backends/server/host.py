"""The shards of one executor host, and the attempts that work on them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import orjson
import psutil

from policies.sizing import Execution, processing_bytes_per_s
from state_backends.backends import StoreConfig, Stores
from state_backends.files.location import locate
from state_backends.files.request_counts import newest
from state_backends.files.requests import Requests
from state_backends.format.errors import StateError
from state_backends.server.attempts import Attempts, ShardKey, Work
from state_backends.server.endpoint import MetricsEndpoint
from state_backends.server.folders import Folders
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
from state_backends.server.shared import Shared
from state_backends.server.verbs import VERBS
from state_backends.store.counting import Committed
from state_backends.store.p_bucket import PBucket
from state_backends.store.protocol import BlockStore, StoreStats
from state_backends.versions.manifest import Identity
from state_backends.versions.opening import check_begins
from state_backends.versions.shard import Shard

log = logging.getLogger(__name__)
_REMEMBERED_MOVES = 1024  # prestages and written files of a shard whose times no client has asked for yet
_REMEMBERED_EXECUTIONS = 256


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


class _Held(NamedTuple):
    """A shard. A request that works on it holds its ``lock``. ``made_for``: the state_dir, settings and checkpoint."""

    shard: Shard
    lock: threading.Lock
    made_for: tuple[str, StoreConfig, str]
    times: _DiskTimes


class Host:
    """The shards of a host and what they share. :mod:`state_backends.server.requests` has checked all requests.

    A verb that concerns more than the blocks of one shard is a method here; :meth:`work` passes other verbs to the
    shard. ``shard``: the class of shards, for experiments.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, shard: Callable[..., Shard] = Shard) -> None:
        self.shared = Shared()
        self._new_shard = shard
        self._lock = threading.Lock()
        self._shards: dict[ShardKey, _Held] = {}
        self.attempts = Attempts()
        self._schedule = Schedule(clock)
        self._executions_s: deque[float] = deque(maxlen=_REMEMBERED_EXECUTIONS)
        self._folders = Folders(locate)
        self._committed = Committed()
        self._requests: dict[tuple[str, str], Requests] = {}  # by operator
        self._closing: list[_Held] = []  # no attempt can find them any more
        self._closed_counts = StoreStats()  # counts of the shards that were closed
        self._endpoint = MetricsEndpoint(self.stats)

    # -- attempts -----------------------------------------------------------------------------------------

    def open(self, request: OpenRequest) -> dict[str, Any]:
        """Starts an attempt; see :meth:`Shard.open`. Raises PolicyError for a policy class that cannot be used."""
        identity, config = request.identity.identity(), request.store
        with self._lock:
            key = self.attempts.check(request.attempt, identity, request.run, request.operator_uid, request.place)
            self._endpoint.serve(config.metrics_port)
            self.shared.start(config, self.tick, self._next_prestage_s)
            before, made_for = self._shards.get(key), (request.state_dir, config, identity.checkpoint)
            if before is None or before.made_for != made_for:
                # The shard is new, or the query was restarted with another policy, state.dir or checkpoint.
                times = _DiskTimes() if before is None else before.times
                shard = self._make(key, identity, request.state_dir, config, times)
                self._shards[key] = _Held(shard, threading.Lock(), made_for, times)
                if before is not None:
                    self._closing.append(before)
            shard, lock, _, times = held = self._shards[key]
            self.attempts.begin(request.attempt, Work(key, shard, lock))
            reopened = request.attempt != request.makes
            self._schedule.opened(key, reopened=reopened, next_start=request.next_start)
        if before is not None and before is not held:
            self._close(before)
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
        if request.disk_times:
            answer["disk_times"] = times.take()
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
        return found is not None and found.shard.expect(keys)

    def tiers(self, request: TiersRequest) -> list[tuple[int, int, int]]:
        """Returns where the bytes of a version are now: see :meth:`BlockStore.tiers`. Waits for no attempt.

        As (slice, in memory, only on disk). Empty if the shard is not open here at this version or a later one.
        """
        with self._lock:
            found = self._shards.get((request.query, request.operator, request.shard))
        store = None if found is None or not found.shard.has_had(request.token) else found.shard.store
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
        keys: Any = request.keys  # as a list: see requests.Keys
        work = self.attempts.find(request.attempt, request.server)
        with work.locked():
            before = work.shard.snapshot
            token = work.shard.commit(request.attempt, request.snapshot, [*request.prestage, *request.later])
            with self._lock:
                self._committed.committed(work.key[:2], before, request.snapshot)
        executions = [Execution(*e) for e in request.executions]
        self.plan_prestage(work.key, token, request.prestage, executions, later=request.later)
        if keys:
            work.shard.expect(keys)
        self.attempts.end(request.attempt)

    def _others(self, key: ShardKey, identity: Identity) -> list[dict[str, Any]]:
        """Returns what the operator's other shards with the same definition have learnt of lateness."""
        with self._lock:
            shards = [held.shard for k, held in self._shards.items() if k[:2] == key[:2] and k != key]
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
            store = None if found is None else found.shard.store  # another request may be closing it
            if store is None:
                return
            store.plan(slices, later)
            if executions:
                store.processing_bytes_per_s = processing_bytes_per_s(executions)
            shared = self.shared
            if not (slices or later) or shared.prestage is None:
                return
            size = store.size_on_disk(slices)
            start = now_s = self._schedule.now_s()
            for other in [held.shard.store for held in self._shards.values()]:
                if other is not None and (missing := size - shared.staging_room()) > 0:
                    other.let_go(missing)
            store.make_room(shared.staging_room())
            # What waits for its time, although there is room, comes too late if the batch comes early.
            if shared.starts_early and size <= shared.staging_room():
                later = tuple(_fitting(store, later, shared.room_for_later() - size))
            else:
                later = ()
                start = shared.prestage.start_at_s(self._schedule.due_s(key), size, now_s)
            self._schedule.plan(PlannedPrestage(start, key, token, tuple(slices), later))
        self.tick_prestages()
        if self.shared.sampler is not None:
            self.shared.sampler.wake()

    # -- periodic work ------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Starts prestages that are due, and checks memory pressure. Gives back what the heap keeps for itself."""
        self.tick_prestages()
        self.shared.fill_holes()
        with self._lock:
            all_stores = [(key, held.shard.store) for key, held in self._shards.items()]
            median_s = median(self._executions_s) if self._executions_s else None
        if self.shared.pressure is not None:
            self.shared.pressure.tick([(key, store) for key, store in all_stores if store is not None], median_s)

    def _next_prestage_s(self) -> float | None:
        """Returns the seconds until the next planned prestage starts, or None if none is planned."""
        with self._lock:
            start_s = self._schedule.next_s()
            return None if start_s is None else start_s - self._schedule.now_s()

    def tick_prestages(self) -> None:
        """Starts prestages that are due."""
        with self._lock:
            due = [(self._shards[p.key], p) for p in self._schedule.take_due() if p.key in self._shards]
        for (shard, lock, *_), planned in due:
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
            self.attempts.forget(idle, self._shards)
            for operator in self._schedule.gone(self._shards):
                self._committed.forget(operator)
                self._requests.pop(operator, None)
        for held in closing:
            self._close(held, wait=False)

    def _close(self, held: _Held, *, wait: bool = True) -> None:
        """Closes a shard that is in the list of closing shards. Without ``wait``, only if no request works on it."""
        shard, lock, *_ = held
        if not lock.acquire(blocking=wait):
            return
        try:
            with self._lock:
                if all(other is not held for other in self._closing):
                    return  # another thread has closed it
            with contextlib.suppress(StateError):
                try:
                    shard.close()
                finally:
                    shard.storage.close()
            with self._lock:
                self._closing = [other for other in self._closing if other is not held]
                self._closed_counts.add(shard.stats())
        finally:
            lock.release()

    # -- the whole ----------------------------------------------------------------------------------------

    def stats(self, request: StatsRequest | None = None) -> dict[str, Any]:
        totals = StoreStats()
        with self._lock:
            shards = [(key, held.shard) for key, held in self._shards.items()]
            closing = list(self._closing)
            totals.add(self._closed_counts)
            attempts, planned = len(self.attempts), len(self._schedule)
            queries = self._committed.to_json((key[:2], shard.snapshot) for key, shard in shards)
            asked = [(operator, requests.to_json()) for operator, requests in self._requests.items()]
        for (query, operator), counts in asked:
            if any(counts.values()) and operator in queries.get(query, {}):
                batches = [shard.requested for key, shard in shards if key[:2] == (query, operator)]
                queries[query][operator] |= {"requests": newest(batches), "requests_total": counts}
        for held in closing:
            totals.add(held.shard.stats())
        operators: dict[str, Any] = {}
        rebuilds = 0
        for (query, operator, _), shard in shards:
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
            **self.shared.stats(),
            "resident_bytes": psutil.Process().memory_info().rss,
            "metrics_port": self._endpoint.port,
            "attempts": attempts,
            "planned_prestages": planned,
            "queries": queries,
            "shards": len(shards),
            "rebuilds": rebuilds,
            "operators": operators,
        }

    def close(self) -> None:
        self._endpoint.close()
        if self.shared.sampler is not None:
            self.shared.sampler.stop()
        with self._lock:
            self._closing += self._shards.values()
            self._shards.clear()
            closing = list(self._closing)
        for held in closing:
            with contextlib.suppress(Exception):
                self._close(held)
        self.shared.close()
        self._folders.close()

    def touch_folders(self) -> None:
        """Shows other hosts that share a state folder that this one is alive. Call it every few hours at least."""
        with self._lock:
            live = self._folders.live()
        for folder in live:
            folder.touch()

    def _make(self, key: ShardKey, identity: Identity, state_dir: str, config: StoreConfig, times: _DiskTimes) -> Shard:
        requests = self._requests.setdefault(key[:2], Requests())
        copies = config.kept_copies_bytes, config.local_copies_bytes
        folders = self._folders.of(state_dir, identity, requests, *copies)
        assert self.shared.io is not None
        io, prestage = self.shared.io, self.shared.prestage

        def on_staged(size_bytes: int, seconds: float, waited_s: float) -> None:
            times.staged.append((size_bytes, seconds, waited_s))
            if prestage is not None:
                prestage.observe(size_bytes, seconds)

        def stores(p_bucket: PBucket) -> Stores:
            made = config.make_stores(p_bucket, io, self.shared.budget)
            made.blocks.listen(on_staged, lambda size_bytes, seconds: times.written.append((size_bytes, seconds)))
            return made

        return self._new_shard(
            identity,
            folders.storage,
            folders.live,
            stores,
            retain=config.retain_versions,
            home=folders.home,
            cache=self.shared.cache,
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
