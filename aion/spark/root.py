"""The root: one Spark key is one shard. Opens it, appends blocks, executes windows, commits (docs/operating.md).

At each start of a query Spark makes a Root in a process of its own, only to hear of its state: so what works on shards
is imported when there is one (:mod:`aion.spark.work`), which spares that process, and the start, half of its time.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from aion.errors import ServerUnreachable
from aion.spark.root_config import RootConfig

if TYPE_CHECKING:
    import pandas as pd

    from aion.spark.work import ShardWork
    from state_backends.store.codec_pool import CodecPool

TOKEN_SCHEMA = "token string"


class Root(StatefulProcessor):
    """Spark's side of the operator. One instance lives for one task; hot state is in the host's server."""

    def __init__(self, config: RootConfig) -> None:
        self._config = config
        self._work: dict[int, ShardWork] = {}
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
            from aion.spark.work import codec_pool

            self._codec_pool = codec_pool(self._config)
        return self._codec_pool

    def _open(self, shard: int) -> ShardWork:
        from aion.spark.work import ShardWork, connect

        known = self._token.get()
        token = known[0] if known else None
        context = TaskContext.get()
        assert context is not None
        batch = context.getLocalProperty("streaming.sql.batchId") or "0"
        attempt = f"{int(batch):010d}-{uuid.uuid4().hex[:16]}"
        session = connect(self._config, context, shard, token, attempt)
        # Spark's store keeps the new token exactly if this attempt of this batch wins.
        self._token.update((attempt,))
        self._work[shard] = work = ShardWork(self._config, session, self._codec, shard, int(batch))
        return work

    def _set_timer(self, work: ShardWork, but: int | None = None) -> None:
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
