"""The root of a stateful processor: it opens a shard, runs the user's processor on its keys, and commits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark import TaskContext
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import StructType

from aion.spark.root_config import TaskConfig
from aion.spark.shard_root import ShardRoot

if TYPE_CHECKING:
    from aion.spark.stateful_work import StatefulWork


class Columns(NamedTuple):
    """The columns of rows: first ``values``, which the processor gets, then further ones. ``key``: those of the key."""

    key: tuple[str, ...]
    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class StatefulConfig(TaskConfig):
    """For :class:`StatefulRoot`."""

    key: StructType
    """The type of keys, with the names that the user knows."""
    columns: Columns
    initial: Columns | None
    """The columns of the initial state. None: there is none."""
    pandas: bool
    """Whether rows are frames of pandas."""
    time_mode: str
    """As Spark spells it, in lower case."""


class StatefulRoot(ShardRoot):
    """Runs a user's processor on the keys of a shard."""

    STATE = "__aion_shard"

    def __init__(self, config: StatefulConfig, processor: StatefulProcessor) -> None:
        super().__init__(config)
        self._stateful = config
        self._processor = processor
        self._timers: dict[int, int | None] = {}  # the timer of each shard at work

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        if TaskContext.get() is None:
            # Spark asks for the schema of the state, before the first batch. It checks the names, types and options of
            # the processor's variables, and whether their types may change to what they are now.
            self._processor.init(handle)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        with self._failing_cleanly():
            work, timer_ms = self._open(int(key[0]), timerValues)
            yield from work.rows(rows)
            self._leave(work, timer_ms, work.now_ms)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        with self._failing_cleanly():
            shard = int(key[0])
            if shard not in self._work or not self._work[shard].ended:
                work, timer_ms = self._open(shard, timerValues)
                yield from work.rows(iter(()))
                self._leave(work, timer_ms, work.now_ms)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        with self._failing_cleanly():
            shard = int(key[0])
            new = shard not in self._work
            work, _ = self._open(shard, timerValues)
            work.initial_rows(initialState)
            if new:
                # If no row and no timer follows in this batch, the commit comes in close(), where Spark takes neither
                # token nor timer. So both are set now. The timer opens the shard again as soon as possible.
                self._timers[shard] = soon_ms = work.soon_ms
                if soon_ms is not None:
                    self._handle.registerTimer(soon_ms)
                self._state.update((work.makes, soon_ms))

    def close(self) -> None:
        with self._failing_cleanly():
            for work in self._work.values():
                if not work.ended:
                    work.end_without_rows()
                    work.begin_commit()
            if self._task is not None:
                self._processor.close()
        super().close()

    def _open(self, shard: int, times: Any) -> tuple[StatefulWork, int | None]:
        """Opens a shard, or goes on with it. Returns its work in this batch, and its timer."""
        if self._task is None:
            from aion.spark.stateful_work import StatefulTask

            self._task = StatefulTask(self._stateful, self._processor, self._handle)
        if shard not in self._work:
            token, self._timers[shard] = self._state.get() or (None, None)
            self._work[shard] = self._task.work(shard, token, times)
        return self._work[shard], self._timers[shard]
