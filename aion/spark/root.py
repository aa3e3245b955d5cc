"""The root: one Spark key is one shard. Opens it, appends blocks, executes windows, commits (docs/operating.md)."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from aion.config import policy_from_json
from aion.errors import ForeignState, ServerUnreachable
from aion.fragments import Defragmenter
from aion.operator import Operator
from aion.plan import Plan
from aion.runtime import make_bound, make_executor, make_operator, predicts, store_config
from aion.slices import NO_SLICE
from aion.spark.frames import to_frame
from aion.tuning.trace import Definition, Recorder
from state_backends.client import RemoteSession, StateClient, executor_pid
from state_backends.codec_pool import CodecPool
from state_backends.manifest import Identity

log = logging.getLogger(__name__)
TOKEN_SCHEMA = "token string"
STATE_PARTITIONS = "spark.sql.streaming.internal.stateStore.partitions"


@dataclass(frozen=True)
class RootConfig:
    """What the driver tells every task; plain values."""

    plan: Plan
    policy: dict[str, Any]
    name: str
    uid: str
    application: str
    state_dir: str
    shards: int
    partitions: int
    retain_versions: int
    watermark_delay_us: int | None
    """What withWatermark was told, where the watermark is on the event time itself."""
    task_failures: int
    """How often a task may fail before Spark gives the query up."""
    record: str | None = None
    """A folder for a trace of what comes; None: there is none."""


class Root(StatefulProcessor):
    """Spark's side of the operator. One instance lives for one task; hot state is in the host's server."""

    def __init__(self, config: RootConfig) -> None:
        self._config = config
        self._work: dict[int, _ShardWork] = {}
        self._codec_pool: CodecPool | None = None

    def init(self, handle: StatefulProcessorHandle) -> None:
        # Called once on the driver as well, only to learn the state's schema: nothing is opened here.
        self._handle = handle
        self._token = handle.getValueState("token", TOKEN_SCHEMA)

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        with self._failing_cleanly():
            work = self._open(int(key[0]))
            yield from work.advance(timerValues.getCurrentWatermarkInMs())
            for frame in rows:
                yield from work.arrive(frame["block"])
            yield from work.end_batch()
            self._set_timer(work)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        with self._failing_cleanly():
            shard = int(key[0])
            if shard not in self._work:
                work = self._open(shard)
                yield from work.advance(timerValues.getCurrentWatermarkInMs())
                yield from work.end_batch()
                # Spark deletes the expired timer itself, after this.
                self._set_timer(work, but=expiredTimerInfo.getExpiryTimeInMs())

    def close(self) -> None:
        """Commits, inside the task: if it fails, the task fails, and Spark keeps the old token."""
        with self._failing_cleanly():
            for work in self._work.values():
                work.commit()
        self._end()

    @property
    def _codec(self) -> CodecPool:
        # Made in the task: a pool of threads does not travel.
        if self._codec_pool is None:
            self._codec_pool = CodecPool(policy_from_json(self._config.policy).io.codec_threads)
        return self._codec_pool

    def _open(self, shard: int) -> _ShardWork:
        known = self._token.get()
        token = known[0] if known else None
        context = TaskContext.get()
        assert context is not None
        self._check_partitions(context)
        batch = context.getLocalProperty("streaming.sql.batchId") or "0"
        attempt = f"{int(batch):010d}-{uuid.uuid4().hex[:16]}"
        session = _connect(self._config, context, shard, token, attempt)
        # Spark's store keeps the new token exactly if this attempt of this batch wins.
        self._token.update((attempt,))
        self._work[shard] = work = _ShardWork(self._config, session, self._codec, shard, int(batch))
        return work

    def _check_partitions(self, context: TaskContext) -> None:
        """Spark takes as many partitions as the checkpoint says, and shards are where their number puts them."""
        fixed = context.getLocalProperty(STATE_PARTITIONS) or context.getLocalProperty("spark.sql.shuffle.partitions")
        if fixed and int(fixed) != self._config.partitions:
            raise ForeignState(
                f"the checkpoint of operator {self._config.name!r} fixes {fixed} shuffle partitions, and "
                f"spark.sql.shuffle.partitions is {self._config.partitions} now; set it to {fixed}, or start with a "
                "new checkpoint"
            )

    def _set_timer(self, work: _ShardWork, but: int | None = None) -> None:
        """One timer per shard, at the next watermark that makes something due."""
        due = work.due_ms
        timers = set(self._handle.listTimers())
        for timer in timers - {due, but}:
            self._handle.deleteTimer(timer)
        if due is not None and due not in timers:
            self._handle.registerTimer(due)

    @contextmanager
    def _failing_cleanly(self) -> Iterator[None]:
        """A task that fails undoes what it did; Spark runs it again, with the versions that it started from."""
        try:
            yield
        except BaseException as error:
            for work in self._work.values():
                work.session.abort()
            self._end()
            if isinstance(error, ServerUnreachable):
                raise ServerUnreachable(f"{error}. {self._what_now()}") from error
            raise

    def _what_now(self) -> str:
        failures = self._config.task_failures
        if failures > 1:
            return f"The task fails, having changed nothing, and Spark runs it again: up to {failures} times in all"
        return (
            "The task fails, having changed nothing; Spark would run it again, but in local mode a task may not fail "
            "even once: use the master local[n, 4], or start the query again from its checkpoint"
        )

    def _end(self) -> None:
        if self._codec_pool is not None:
            self._codec_pool.close()
            self._codec_pool = None


class _ShardWork:
    """One attempt of one batch on one shard."""

    def __init__(self, config: RootConfig, session: RemoteSession, codec: CodecPool, shard: int, batch: int) -> None:
        self.session = session
        policy = policy_from_json(config.policy)
        self.bound = make_bound(config.plan, policy, session.snapshot, shards=config.shards)
        if self.bound.together:
            self.bound.hear(*session.others)
        self.operator: Operator = make_operator(config.plan, policy, session.snapshot, self.bound)
        self.executor = make_executor(config.plan, self.operator, session, codec, policy)
        self.executor.load()
        self._recorder: Recorder | None = None
        if config.record is not None:
            self._recorder = Recorder(Path(config.record), Definition.of(config.plan, commits=True), shard)
            self._recorder.begin(batch, self.operator.watermark.at_us)
            self.executor.recorder = self._recorder
            staged, written = session.moved
            for size_bytes, seconds, waited_s in staged:
                self._recorder.staged(size_bytes, seconds, waited_s)
            for size_bytes, seconds in written:
                self._recorder.written(size_bytes, seconds)
        self._predicts = predicts(policy)
        if session.rebuilt and (active := self.operator.active_slices()):
            # What was in memory before comes back behind what this batch does.
            session.prestage(active)
        self._delay_us = config.watermark_delay_us
        self._latest_us: int | None = None
        self._parts = Defragmenter()

    def advance(self, watermark_ms: int) -> Iterator[pd.DataFrame]:
        # Spark says 0 as long as there is no watermark.
        if watermark_ms > 0:
            at_us, to_us = self.operator.watermark.at_us, watermark_ms * 1000
            if self.bound.together and at_us != to_us and self.bound.asks(at_us):
                self.bound.learn(*self.session.learnt())
            yield from _frames(self.executor.advance(to_us))

    def arrive(self, rows: Iterable[bytes]) -> Iterator[pd.DataFrame]:
        blocks = list(self._parts.blocks(rows))
        if not blocks:
            return
        times = [b.header.max_us for b in blocks if b.header.slice_us != NO_SLICE]
        self._latest_us = max([*times, self._latest_us] if self._latest_us is not None else times, default=None)
        yield from _frames(self.executor.arrive(blocks))

    def end_batch(self) -> Iterator[pd.DataFrame]:
        self._parts.end()
        yield from _frames(self.executor.end_batch())

    def commit(self) -> None:
        self.executor.save()
        if self._recorder is not None:
            try:
                self._recorder.write()
            except OSError as error:
                # A trace is to look at; a query does not fail for want of it.
                log.warning("a batch was not recorded: %s", error)
        self.session.commit(self.operator.snapshot(), self._next_slices(), self.executor.executions)

    def _next_slices(self) -> tuple[int, ...]:
        """What the next batch will read: its watermark follows from this batch's events (docs/operating.md)."""
        if not self._predicts:
            return ()
        expected = [self.operator.watermark.expected_next()]
        if self._delay_us is not None and self._latest_us is not None:
            expected.append(self._latest_us - self._delay_us)
        return self.executor.due_next(max((e for e in expected if e is not None), default=None))

    @property
    def due_ms(self) -> int | None:
        """The first watermark in milliseconds at which something is due."""
        due = self.operator.next_due_us
        return None if due is None else -(-due // 1000)


def _frames(batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
    for batch in batches:
        if batch.num_rows:
            yield to_frame(batch)


# One for each application and patience; a worker serves many tasks, but one at a time.
_clients: dict[tuple[str, float], StateClient] = {}


def _connect(config: RootConfig, context: TaskContext, shard: int, token: str | None, attempt: str) -> RemoteSession:
    policy = policy_from_json(config.policy)
    timeout_s = policy.io.request_timeout_us / 1e6
    client = _clients.get((config.application, timeout_s))
    if client is None:
        client = StateClient.connect(config.application, watch_pid=executor_pid(), timeout_s=timeout_s)
        _clients[config.application, timeout_s] = client
    return client.open(
        Identity(
            query=context.getLocalProperty("sql.streaming.queryId") or "no-query",
            operator=config.name,
            shard=shard,
            shards=config.shards,
            definition=config.plan.definition,
        ),
        token=token,
        attempt=attempt,
        # Spark runs a streaming query in a job group named by the run.
        run=context.getLocalProperty("spark.jobGroup.id") or "",
        operator_uid=config.uid,
        state_dir=config.state_dir,
        store=store_config(policy, blocking=config.plan.blocking, retain_versions=config.retain_versions),
        others=policy.lateness.per == "query" and config.shards > 1,
        moved=config.record is not None,
    )
