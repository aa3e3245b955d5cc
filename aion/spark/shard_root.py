"""What all roots have in common: one Spark key is one shard, whose version Spark keeps as a token.

See docs/operating.md. Each time a query starts, Spark makes a root in a separate process and only asks for the schema
of its state. So this module imports little.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import LongType, StringType, StructField, StructType

from aion.errors import ServerUnreachable
from aion.spark.root_config import TaskConfig

# Not as text, which the JVM would parse for each task.
STATE_SCHEMA = StructType([StructField("token", StringType()), StructField("timer_ms", LongType())])
"""What Spark keeps of a shard: the token of its version, and its timer if it has one."""


class Work(Protocol):
    """One attempt of one batch on one shard."""

    @property
    def makes(self) -> str:
        """The token of the version that the commit makes."""

    @property
    def due_ms(self) -> int | None:
        """The next time at which the shard has something to do, even if no row comes."""

    def begin_commit(self) -> None:
        """Commits in another thread. Meanwhile the task goes on with what does not need this shard."""

    def committed(self) -> None:
        """Waits for the commit. Raises what it raised."""

    def abort(self) -> None:
        """Undoes the attempt. If it has committed, nobody will name its version."""


class Task(Protocol):
    """A task, and what its shards share."""

    def committed(self) -> None:
        """All shards of the task have committed."""

    def close(self) -> None:
        """The task is over."""


class ShardRoot(StatefulProcessor):
    """Spark's side of an operator. An instance lives for one task. Hot state lies in the host's state server."""

    STATE, SCHEMA = "state", STATE_SCHEMA
    """The state variable in which Spark keeps the token: its name and its schema."""

    def __init__(self, config: TaskConfig) -> None:
        self._config = config
        self._work: dict[int, Any] = {}  # the Work of each shard
        self._task: Any = None  # a Task, made in the task, because its threads cannot be sent there

    def init(self, handle: StatefulProcessorHandle) -> None:
        # Spark also calls this where it only wants the schema of the state. So nothing is opened here.
        self._handle = handle
        self._state = handle.getValueState(self.STATE, self.SCHEMA)

    def close(self) -> None:
        """Commits inside the task. If the commit fails, the task fails, and Spark keeps the old token."""
        with self._failing_cleanly():
            for work in self._work.values():
                work.committed()
            if self._task is not None:
                self._task.committed()
        self._end()

    def _leave(self, work: Work, timer_ms: int | None, now_ms: int) -> None:
        """Begins the commit. Meanwhile Spark learns the new token, and when the shard has something to do.

        Spark's state store keeps the new token only if this attempt of the batch wins. A shard has one timer at most.
        ``timer_ms``: its timer until now. ``now_ms``: the time up to which timers expire in this batch.
        """
        work.begin_commit()
        due_ms = work.due_ms
        if due_ms is not None:
            # Spark looks only for timers after the watermark of the batch before, which is 0 at first. A window that
            # ended before 1970 would wait for ever, and all others of its shard with it.
            due_ms = max(due_ms, now_ms + 1)
        if timer_ms is not None and due_ms != timer_ms > now_ms:  # Spark deletes an expired timer itself
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
