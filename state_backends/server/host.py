"""Everything that one executor host holds: its shards, the budget they share, the I/O thread, and the pressure."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import orjson
import psutil
from rocksdict import Cache

from aion.core.ingest.block import Block
from aion.errors import (
    AionError,
    PolicyError,
    RequestError,
    ServerError,
    ServerUnreachable,
    SessionSuperseded,
    StateError,
)
from policies.destage import DestagePolicy
from policies.prestage import PrestagePolicy
from policies.sizing import Execution, processing_bytes_per_s
from state_backends.files.location import locate
from state_backends.server import requests
from state_backends.server.endpoint import MetricsEndpoint
from state_backends.server.folders import Folders
from state_backends.server.guard import Guard, GuardedDestage, GuardedPrestage
from state_backends.server.machine import memory_limit_bytes, memory_share_used
from state_backends.store.backends import StoreConfig
from state_backends.store.counting import Committed
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.p_bucket import PBucket, cache_bytes
from state_backends.store.pressure import PressureManager, Sampler
from state_backends.store.protocol import BlockStore, StoredBlock, StoreStats
from state_backends.versions.manifest import Identity
from state_backends.versions.shard import Shard

log = logging.getLogger(__name__)
ShardKey = tuple[str, str, int]
_IDLE_S = 600.0
_IDLE_AT_WORK_S = 86_400.0  # an attempt whose worker died never ends
_REMEMBERED = 32  # sessions of a shard that are over and may still hear so
_REMEMBERED_MOVES = 1024  # prestages, and files written, of a shard that nobody has asked about yet


class _Planned(NamedTuple):
    """A prestage that waits for its time."""

    start_s: float
    key: ShardKey
    token: str
    slices: Sequence[int]


@dataclass(slots=True)
class _Session:
    """A turn of an attempt at a shard. ``last_seq``: of the newest block; numbers only grow."""

    key: ShardKey
    attempt: str
    last_seq: int = -1


@dataclass(frozen=True, slots=True)
class _Moved:
    """Bytes and seconds of the latest prestages of a shard, with those waited, and of the latest files written."""

    staged: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_MOVES))
    written: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_MOVES))

    def taken(self) -> dict[str, list[tuple[float, ...]]]:
        """All of it, which is forgotten then. The I/O thread may add meanwhile."""
        both: dict[str, deque[Any]] = {"staged": self.staged, "written": self.written}
        return {name: [moves.popleft() for _ in range(len(moves))] for name, moves in both.items()}


class Host:
    """The shards of a host and what they share. Requests have been checked: see :mod:`state_backends.server.requests`.

    The first operator's policy decides about the I/O thread and about memory pressure; the budget is the largest that
    any operator asks for. RocksDB's block cache is part of the budget. ``shard``: what makes shards, for experiments.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, shard: Callable[..., Shard] = Shard) -> None:
        self.budget = MemoryBudget(0)
        self._clock = clock
        self._new_shard = shard
        self._cache: Cache | None = None
        self._lock = threading.Lock()
        self._io: IoThread | None = None
        self._pressure: PressureManager | None = None
        self._prestage: PrestagePolicy | None = None
        self._sampler: Sampler | None = None
        self._shards: dict[ShardKey, tuple[Shard, threading.Lock]] = {}
        self._wanted: dict[ShardKey, tuple[str, StoreConfig, str]] = {}  # what each was made for
        self._moved: dict[ShardKey, _Moved] = {}
        self._sessions: dict[str, _Session] = {}
        self._at_work: dict[ShardKey, str] = {}
        self._over: dict[ShardKey, deque[str]] = {}
        self._guard: Guard | None = None
        self._owners: dict[tuple[str, str], tuple[str, str]] = {}
        self._planned: list[_Planned] = []
        self._opened: dict[ShardKey, float] = {}
        self._intervals: dict[ShardKey, float] = {}
        self._executions_s: list[float] = []
        self._folders = Folders(locate)
        self._committed = Committed()
        self._leaving: list[Shard] = []  # another took their place, and they are being closed
        self._left = StoreStats()  # what those counted that are gone
        self._endpoint = MetricsEndpoint(self.stats)

    # -- attempts -----------------------------------------------------------------------------------------

    def open(self, request: requests.Open) -> dict[str, Any]:
        """Starts an attempt; see :meth:`Shard.open`. Raises PolicyError for a policy class that cannot be used."""
        identity, config = request.identity.known(), request.store.config()
        key = (identity.query, identity.operator, identity.shard)
        with self._lock:
            known = self._sessions.get(request.session)
            if known is not None and known.key != key:
                raise RequestError(f"open: session {request.session} is at work on another shard")
            self._check_owner(identity, request.run, request.operator_uid)
            self._start(config)
            there, wanted = self._shards.get(key), (request.state_dir, config, identity.checkpoint)
            if there is None or self._wanted[key] != wanted:
                # Also for a query that was restarted with another policy, or whose state or checkpoint was moved.
                self._shards[key] = self._make(identity, request.state_dir, config), threading.Lock()
                if there is not None:
                    self._leaving.append(there[0])
                self._wanted[key] = wanted
            shard, lock = self._shards[key]
            self._end(self._at_work.get(key))
            self._at_work[key] = request.session
            self._sessions[request.session] = session = _Session(key, request.attempt)
            if request.session == request.attempt or key not in self._opened:
                self._note_interval(key)
        if there is not None and there[0] is not shard:
            self._let_go(*there)
        with lock:
            before = shard.rebuilds
            try:
                snapshot = shard.open(request.token, request.session, identity)
            except BaseException:
                self.ended(request.session)
                raise
            session.last_seq = snapshot["next_seq"] - 1 if snapshot else -1
            answer: dict[str, Any] = {"snapshot": snapshot, "rebuilt": shard.rebuilds > before}
        if answer["rebuilt"] and snapshot is not None:
            with self._lock:
                self._committed.restored(key[:2])
        if request.moved:
            answer["moved"] = self._moved[key].taken()
        return {**answer, "others": _told(self._others(key, identity))} if request.others else answer

    def learnt(self, request: requests.Learnt) -> dict[str, Any]:
        """What the operator's other shards stand on, and what each observed of lateness, as of its last commit here."""
        session, shard, _ = self._find(request.session)
        others = self._others(session.key, shard.identity)
        return {**_told(others), "learnt": [told["lateness"] for told in others]}

    def _others(self, key: ShardKey, identity: Identity) -> list[dict[str, Any]]:
        """Never this shard's own, which it has in its snapshot; nothing of another definition's."""
        with self._lock:
            shards = [shard for k, (shard, _) in self._shards.items() if k[:2] == key[:2] and k != key]
        # A commit puts another snapshot in the place of this one, and leaves this one as it is.
        held = [shard.snapshot for shard in shards if shard.identity.definition == identity.definition]
        return [snapshot["lateness"] for snapshot in held if snapshot is not None and "lateness" in snapshot]

    def append(self, name: str, blocks: Callable[[int], Sequence[tuple[int, bool, Block]]]) -> None:
        """``blocks``: given the number of the last block so far, those that come now."""
        with self._turn(name) as (session, shard):
            found = blocks(session.last_seq)
            # What fails half-way is undone with the attempt; its numbers are not given out twice.
            session.last_seq = max([session.last_seq, *(seq for seq, _, _ in found)])
            shard.append(name, found)

    def read(self, request: requests.Read) -> Iterator[StoredBlock]:
        """Not in turn: a read goes on beside appends."""
        _, shard, _ = self._find(request.session)
        return shard.read(request.session, request.slices, blocking=request.blocking, only=request.only())

    def prestage(self, request: requests.Prestage) -> None:
        with self._turn(request.session) as (_, shard):
            shard.prestage(request.session, request.slices, request.only())

    def replace(self, request: requests.Supersede) -> None:
        with self._turn(request.session) as (_, shard):
            shard.replace(request.session, requests.spans_by_slice(request.spans), request.below)

    def release(self, request: requests.Release) -> None:
        with self._turn(request.session) as (_, shard):
            shard.destage(request.session, request.destage)
            shard.purge(request.session, request.purge)

    def commit(self, request: requests.Commit) -> None:
        with self._turn(request.session) as (session, shard):
            if request.snapshot["next_seq"] <= session.last_seq:
                raise RequestError(f"commit: snapshot.next_seq is not above block {session.last_seq}, which is there")
            before = shard.snapshot
            shard.commit(request.session, request.snapshot, token=session.attempt)
            with self._lock:
                self._committed.committed(session.key[:2], before, request.snapshot)
        self.plan_prestage(session.key, session.attempt, request.prestage, [Execution(*e) for e in request.executions])
        self.ended(request.session)

    def abort(self, request: requests.Abort) -> None:
        with self._turn(request.session) as (_, shard):
            shard.abort(request.session)
        self.ended(request.session)

    def ended(self, name: str) -> None:
        with self._lock:
            self._end(name)

    def _end(self, name: str | None) -> None:
        session = self._sessions.pop(name, None) if name is not None else None
        if session is not None and name is not None:
            self._over.setdefault(session.key, deque(maxlen=_REMEMBERED)).append(name)
            if self._at_work.get(session.key) == name:
                del self._at_work[session.key]

    def _find(self, name: str) -> tuple[_Session, Shard, threading.Lock]:
        with self._lock:
            session = self._sessions.get(name)
            if session is not None:
                return session, *self._shards[session.key]
            if any(name in over for over in self._over.values()):
                raise SessionSuperseded(f"session {name} is over: it was ended, or another attempt took its place")
        raise ServerUnreachable(f"session {name} was never opened here: the state server was restarted")

    @contextlib.contextmanager
    def _turn(self, name: str) -> Iterator[tuple[_Session, Shard]]:
        session, shard, lock = self._find(name)
        with lock:
            try:
                yield session, shard
            except AionError:
                raise
            except BaseException:
                # What RocksDB failed to write once it may refuse for good. The versions are whole: whoever opens the
                # shard next gets it built from them.
                with contextlib.suppress(Exception):
                    shard.close()
                raise

    def plan_prestage(self, key: ShardKey, token: str, slices: Sequence[int], executions: Sequence[Execution]) -> None:
        """Stages these slices of a shard just before its next attempt is due (paper 3.2).

        ``token``: the version that they are of; ``executions``: those that led to it.
        """
        with self._lock:
            self._executions_s = [*self._executions_s, *(e.seconds for e in executions)][-256:]
            shard, _ = self._shards[key]
            if executions and shard.store is not None:
                shard.store.processing_bytes_per_s = processing_bytes_per_s(executions)
            if not slices or shard.store is None or self._prestage is None:
                return
            now = self._clock()
            due = self._opened[key] + self._intervals.get(key, 0.0)
            size = shard.store.size_on_disk(slices)
            start = self._prestage.start_at_s(max(due, now), size, now)
            self._planned.append(_Planned(start, key, token, tuple(slices)))
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
            due = [(self._shards[p.key], p) for p in ready if p.key in self._shards]
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

    def let_go_of_idle(self) -> None:
        """Closes the shards to which no attempt has come for long: their query stopped, or they work elsewhere.

        Such a shard is built from its version when it is opened again. How often its batches came stays known.
        """
        now = self._clock()
        with self._lock:
            idle = [key for key in self._shards if now - self._opened.get(key, now) > self._patience_s(key)]
            left = [self._shards.pop(key) for key in idle]
            self._leaving += [shard for shard, _ in left]
            for key in idle:
                self._end(self._at_work.get(key))
                for known in (self._wanted, self._moved, self._over):
                    known.pop(key, None)
            operators = {key[:2] for key in self._shards}
            self._owners = {key: owner for key, owner in self._owners.items() if key in operators}
        for shard, lock in left:
            log.info("shard %d of operator %s is idle, and closed", shard.identity.shard, shard.identity.operator)
            self._let_go(shard, lock)

    def _patience_s(self, key: ShardKey) -> float:
        """After how long without an attempt a shard counts as idle; the query may have a slow trigger."""
        return max(_IDLE_AT_WORK_S if key in self._at_work else _IDLE_S, 20 * self._intervals.get(key, 0.0))

    def _let_go(self, shard: Shard, lock: threading.Lock) -> None:
        """Closes a shard that was put on the list of those that leave."""
        with lock, contextlib.suppress(StateError):
            try:
                shard.close()
            finally:
                shard.depot.close()
        with self._lock:
            self._leaving.remove(shard)
            self._left.add(shard.stats())

    # -- the whole ----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        totals = StoreStats()
        with self._lock:
            shards = list(self._shards.items())
            leaving = list(self._leaving)
            totals.add(self._left)
            sessions, planned = len(self._sessions), len(self._planned)
            queries = self._committed.to_json((key[:2], shard.snapshot) for key, (shard, _) in shards)
        for shard in leaving:
            totals.add(shard.stats())
        operators: dict[str, Any] = {}
        rebuilds = 0
        for (_, operator, _), (shard, _) in shards:
            rebuilds += shard.rebuilds
            totals.add(shard.stats())
            if shard.snapshot is not None:
                _add(operators.setdefault(operator, {}), shard.snapshot["counters"])
        return {
            **totals.to_json(),
            "peak_m_bucket_bytes": self.budget.peak_bytes,
            "budget_bytes": self.budget.limit_bytes,
            "used_bytes": self.budget.used_bytes,
            "reserved_bytes": self.budget.reserved_bytes,
            "ledger_bytes": self.budget.ledger_bytes,
            "resident_bytes": psutil.Process().memory_info().rss,
            "metrics_port": self._endpoint.port,
            "sessions": sessions,
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
            for shard, lock in self._shards.values():
                with lock, contextlib.suppress(Exception):
                    shard.close()
            self._shards.clear()
        if self._io is not None:
            self._io.close()
        if self._guard is not None:
            self._guard.close()
        self._folders.close()

    @property
    def ailment(self) -> str | None:
        """Why this host can serve nobody any more; None while all is well."""
        return self._io.died() if self._io is not None else None

    def still_here(self) -> None:
        """Tells those with whom folders are shared; call it now and then."""
        with self._lock:
            live = self._folders.live()
        for folder in live:
            folder.touch()

    def _start(self, config: StoreConfig) -> None:
        self._endpoint.serve(config.metrics_port)
        limit = memory_limit_bytes()
        if self._io is not None:
            self.budget.raise_to(min(config.budget(limit), limit))
            return
        policy, prestage = self._make_policies(config)
        self.budget.raise_to(min(config.budget(limit), limit))
        self._io = config.make_io()
        size = cache_bytes(self.budget.limit_bytes)
        self.budget.reserve(size)
        self._cache = Cache(size)
        self._prestage = prestage if config.prestages else None
        self._pressure = PressureManager(self.budget, policy, memory_share_used)
        if config.backend == "tiered":
            self._sampler = Sampler(self.tick)

    def _make_policies(self, config: StoreConfig) -> tuple[DestagePolicy, PrestagePolicy]:
        """Those of the user's are kept from doing harm. Raises PolicyError."""
        guard = Guard() if config.destage_class or config.prestage_class else None
        try:
            if guard is None:
                return config.make_destage(), config.make_prestage()
            destage, prestage = guard.make(config.make_destage), guard.make(config.make_prestage)
        except ValueError as error:
            if guard is not None:
                guard.close()
            raise PolicyError(str(error)) from error
        self._guard = guard
        if config.destage_class:
            destage = GuardedDestage(guard, config.destage_class, destage)
        if config.prestage_class:
            prestage = GuardedPrestage(guard, config.prestage_class, prestage)
        return destage, prestage

    def _note_interval(self, key: ShardKey) -> None:
        """Learns how long a batch takes to come after the one before: an average that follows."""
        now = self._clock()
        before = self._opened.get(key)
        self._opened[key] = now
        if before is not None:
            known = self._intervals.get(key)
            self._intervals[key] = now - before if known is None else 0.7 * known + 0.3 * (now - before)

    def _make(self, identity: Identity, state_dir: str, config: StoreConfig) -> Shard:
        folders = self._folders.of(state_dir, identity)
        io, prestage = self._io, self._prestage
        assert io is not None
        moved = self._moved.setdefault((identity.query, identity.operator, identity.shard), _Moved())

        def on_staged(size_bytes: int, seconds: float, waited_s: float) -> None:
            moved.staged.append((size_bytes, seconds, waited_s))
            if prestage is not None:
                prestage.observe(size_bytes, seconds)

        def store(p_bucket: PBucket) -> BlockStore:
            made = config.make_store(p_bucket, io, self.budget)
            made.listen(on_staged, lambda size_bytes, seconds: moved.written.append((size_bytes, seconds)))
            return made

        return self._new_shard(
            identity,
            folders.depot,
            folders.live,
            store,
            retain=config.retain_versions,
            place=folders.place,
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


def _told(others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many they are, and what they stand on; most stand on the same."""
    different = {orjson.dumps(told["standing"]): told["standing"] for told in others}
    return {"shards": len(others), "told": list(different.values())}


def _add(total: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if isinstance(value, dict):
            _add(total.setdefault(name, {}), value)
        else:
            known = total.get(name, 0)
            total[name] = max(known, value) if name == "largest" else known + value
