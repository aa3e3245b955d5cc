"""The root: one Spark key is one shard. It opens the shard, appends blocks, executes windows and commits.

See docs/operating.md. Each time a query starts, Spark makes a Root in a separate process and only asks for the schema
of its state. This module therefore imports :mod:`aion.spark.work` when the first shard comes: without the import that
process, and with it the start of the query, takes half the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import LongType, StringType, StructField, StructType

from aion.errors import ServerUnreachable
from aion.spark.root_config import RootConfig

if TYPE_CHECKING:
    import pandas as pd

    from aion.spark.work import RootTask, ShardWork

# Not as text, which the JVM would parse for each task.
STATE_SCHEMA = StructType([StructField("token", StringType()), StructField("timer_ms", LongType())])
"""What Spark keeps of a shard: the token of its version, and its timer if it has one."""


class Root(StatefulProcessor):
    """Spark's side of the operator. An instance lives for one task. Hot state lies in the host's state server."""

    def __init__(self, config: RootConfig) -> None:
        self._config = config
        self._work: dict[int, ShardWork] = {}
        self._task: RootTask | None = None  # made in the task, because its threads cannot be sent there

    def init(self, handle: StatefulProcessorHandle) -> None:
        # Spark also calls this where it only wants the schema of the state. So nothing is opened here.
        self._handle = handle
        self._state = handle.getValueState("state", STATE_SCHEMA)

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        with self._failing_cleanly():
            watermark_ms = timerValues.getCurrentWatermarkInMs()
            work, timer_ms = self._open(int(key[0]))
            yield from work.advance(watermark_ms)
            for frame in rows:
                yield from work.arrive(frame["block"])
            yield from work.end_batch()
            self._leave(work, timer_ms, watermark_ms)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        with self._failing_cleanly():
            shard = int(key[0])
            if shard not in self._work:
                watermark_ms = timerValues.getCurrentWatermarkInMs()
                work, timer_ms = self._open(shard)
                yield from work.advance(watermark_ms)
                yield from work.end_batch()
                self._leave(work, timer_ms, watermark_ms)

    def close(self) -> None:
        """Commits inside the task. If the commit fails, the task fails, and Spark keeps the old token."""
        with self._failing_cleanly():
            for work in self._work.values():
                work.committed()
            if self._task is not None:
                self._task.committed()
        self._end()

    def _open(self, shard: int) -> tuple[ShardWork, int | None]:
        """Opens a shard. Returns its work in this batch, and its timer."""
        if self._task is None:
            from aion.spark.work import RootTask

            self._task = RootTask(self._config)
        token, timer_ms = self._state.get() or (None, None)
        self._work[shard] = work = self._task.work(shard, token)
        return work, timer_ms

    def _leave(self, work: ShardWork, timer_ms: int | None, watermark_ms: int) -> None:
        """Begins the commit. Meanwhile Spark learns the new token, and the next watermark that makes something due.

        Spark's state store keeps the new token only if this attempt of the batch wins. A shard has one timer at most.
        """
        work.begin_commit()
        due_ms = work.due_ms
        if timer_ms is not None and due_ms != timer_ms > watermark_ms:  # Spark deletes an expired timer itself
            self._handle.deleteTimer(timer_ms)
        if due_ms is not None and due_ms != timer_ms:
            self._handle.registerTimer(due_ms)
        self._state.update((work.makes, due_ms))

    @contextmanager
    def _failing_cleanly(self) -> Iterator[None]:
        """A task that fails undoes its work. Spark runs it again, from the versions that it started with."""
        try:
            yield
        except BaseException as error:
            for work in self._work.values():
                work.abort()
            self._end()
            if isinstance(error, ServerUnreachable):
                raise ServerUnreachable(f"{error}. {self._what_now()}") from error
            raise

    def _what_now(self) -> str:
        failures = self._config.task_failures
        if failures > 1:
            return f"The task fails and has changed nothing. Spark runs it again, up to {failures} times in all"
        return (
            "The task fails and has changed nothing. In local mode Spark does not run a failed task again: "
            "use the master local[n, 4], or start the query again from its checkpoint"
        )

    def _end(self) -> None:
        if self._task is not None:
            self._task.close()
            self._task = None
