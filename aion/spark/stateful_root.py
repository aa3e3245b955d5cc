"""The root of a stateful processor: it opens a shard, runs the user's processor on its keys, and commits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark import TaskContext
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues
from pyspark.sql.types import LongType, StringType, StructField, StructType

from aion.spark.shard_root import ShardRoot
from aion.spark.stateful_child import ROWS
from aion.spark.stateful_config import StatefulConfig

if TYPE_CHECKING:
    from aion.spark.stateful_work import StatefulTask, StatefulWork


class _State(NamedTuple):
    """What Spark keeps of a shard. ``token``: of its version; None: it has none yet. ``timer_ms``: its timer.

    ``seen_ms``: the watermark of the last batch. Rows up to it are late in the next batch. ``due_ms``: when the shard
    has something to do, even if no row comes.
    """

    token: str | None = None
    timer_ms: int | None = None
    seen_ms: int | None = None
    due_ms: int | None = None


class StatefulRoot(ShardRoot):
    """Runs a user's processor on the keys of a shard.

    If it drops late rows itself, it is called in each batch in which the watermark has moved: by a timer, or by an
    empty row of the child. So it knows the watermark of the batch before, as Spark does.
    """

    STATE = "__aion_shard"
    SCHEMA = StructType(
        [
            StructField("token", StringType()),
            *(StructField(name, LongType()) for name in ("timer_ms", "seen_ms", "due_ms")),
        ]
    )

    def __init__(self, config: StatefulConfig, processor: StatefulProcessor) -> None:
        super().__init__(config)
        self._stateful = config
        self._processor = processor
        self._states: dict[int, _State] = {}  # of the shards at work
        self._fires_ms: int | None = None  # the shard's timer that fires; None: Spark hands over rows

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        if TaskContext.get() is None:
            # Spark asks for the schema of the state, before the first batch. It checks the names, types and options of
            # the processor's variables, and whether their types may change to what they are now.
            self._processor.init(handle)
            return
        with self._failing_cleanly():
            self._task = self._make_task()
            if self._task.deleted:
                self._delete()

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        with self._failing_cleanly():
            shard = int(key[0])
            if not self._stateful.pandas:
                packed = [data for row in rows if (data := row[ROWS])]
                if not packed and self._has_nothing_to_do(shard, timerValues):
                    return
                rows = iter(packed)
            yield from self._batch(shard, rows, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        with self._failing_cleanly():
            shard = int(key[0])
            self._fires_ms = expiredTimerInfo.getExpiryTimeInMs()
            if shard in self._work and self._work[shard].ended:
                if self._is_due(shard, timerValues):
                    self._set_timer(shard, self._states[shard], self._states[shard], timerValues)
            elif not self._has_nothing_to_do(shard, timerValues):
                yield from self._batch(shard, iter(()), timerValues)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        with self._failing_cleanly():
            shard = int(key[0])
            new = shard not in self._work
            work = self._open(shard, timerValues)
            work.initial_rows(initialState if self._stateful.pandas else initialState[ROWS])
            if new:
                # A timer opens the shard again after the rows of this batch, if it has none. Without timers the commit
                # comes in close(), where Spark no longer takes the token. So the token is set now.
                soon_ms = work.soon_ms
                if soon_ms is not None:
                    self._handle.registerTimer(soon_ms)
                self._keep(shard, _State(work.makes, soon_ms, self._seen(timerValues), soon_ms))

    def close(self) -> None:
        with self._failing_cleanly():
            for shard, work in self._work.items():
                if not work.ended:
                    work.end_without_rows()
                    work.begin_commit()
                if self._task.deleted:
                    self._task.learn(shard, work.makes, work)
            self._processor.close()  # also if Spark has only asked for the schema
        super().close()

    def _delete(self) -> None:
        """Deletes state variables in all shards of this task, also in those without rows, as Spark does."""
        client, deleted = self._handle._statefulProcessorApiClient, self._task.deleted
        times = TimerValues(*client.get_timestamps(self._stateful.time_mode))
        found = set(self._task.undone)
        for shards in self._task.partitions:
            here = False
            for shard in shards:
                client.set_implicit_key((shard,))
                state = _State(*(self._state.get() or ()))
                if state.token is None:  # it has no version, or is in another partition
                    continue
                here = True
                if self._task.may_have(shard, state.token, deleted):
                    found |= self._delete_in(shard, state, times)
            if here:
                break
        client.remove_implicit_key()
        for name in found:  # Spark's own count of deleted variables
            self._handle.getValueState(name, self.SCHEMA)
            self._handle.deleteIfExists(name)

    def _delete_in(self, shard: int, state: _State, times: Any) -> frozenset[str]:
        """Deletes state variables in a shard, and returns those that it had."""
        assert state.token is not None
        work = self._open(shard, times)
        there: frozenset[str] = work.names & self._task.deleted
        if there:
            # Without rows the commit comes in close(), where Spark no longer takes the token.
            self._keep(shard, state._replace(token=work.makes))
        else:
            self._task.learn(shard, state.token, work)
            self._work.pop(shard).abort()
        return there

    def _batch(self, shard: int, rows: Iterator[Any], times: Any) -> Iterator[Any]:
        work = self._open(shard, times)
        yield from work.rows(rows, self._states[shard].seen_ms or 0)  # Spark's watermark before the first batch is 0
        self._commit(shard, times)

    def _commit(self, shard: int, times: Any) -> None:
        """Begins the commit of a shard. Meanwhile Spark learns its token, and when it has something to do."""
        work = self._work[shard]
        work.begin_commit()
        self._set_timer(shard, self._states[shard], _State(work.makes, None, None, work.due_ms), times)

    def _has_nothing_to_do(self, shard: int, times: Any) -> bool:
        """Returns whether a shard without rows need not be opened. If so, remembers the watermark, and sets the next
        timer.
        """
        if shard in self._work:
            return False
        self._states[shard] = state = _State(*(self._state.get() or ()))
        if self._is_due(shard, times):
            return False
        self._set_timer(shard, state, state, times)
        return True

    def _is_due(self, shard: int, times: Any) -> bool:
        due_ms = self._states[shard].due_ms
        return due_ms is not None and due_ms <= self._now(times)

    def _set_timer(self, shard: int, before: _State, now: _State, times: Any) -> None:
        """Sets the shard's timer, and what Spark keeps of it."""
        now_ms = self._now(times)
        timer_ms = now.due_ms
        if self._stateful.event_time is not None:
            timer_ms = now_ms + 1  # whenever the watermark moves
        elif timer_ms is not None and timer_ms <= now_ms:
            # The processor has set a timer in the past, after those that had expired were looked for. It is due in the
            # next batch, even if the watermark stays. So is a timer of the shard that is set while another one fires.
            # One that is set while rows are processed fires in this batch, and then sets another one.
            timer_ms = now_ms if self._fires_ms != now_ms else now_ms - 1
        # Spark deletes an expired timer itself.
        if before.timer_ms is not None and timer_ms != before.timer_ms > now_ms:
            self._handle.deleteTimer(before.timer_ms)
        if timer_ms is not None and timer_ms != before.timer_ms:
            self._handle.registerTimer(timer_ms)
        self._keep(shard, _State(now.token, timer_ms, self._seen(times), now.due_ms))

    def _keep(self, shard: int, state: _State) -> None:
        self._states[shard] = state
        self._state.update(tuple(state))

    def _now(self, times: Any) -> int:
        """Returns the time up to which timers expire in this batch."""
        match self._stateful.time_mode:
            case "eventtime":
                return int(times.getCurrentWatermarkInMs())
            case "processingtime":
                return int(times.getCurrentProcessingTimeInMs())
        return -1

    def _seen(self, times: Any) -> int | None:
        return None if self._stateful.event_time is None else self._now(times)

    def _make_task(self) -> StatefulTask:
        from aion.spark.stateful_work import StatefulTask

        return StatefulTask(self._stateful, self._processor, self._handle)

    def _open(self, shard: int, times: Any) -> StatefulWork:
        """Opens a shard, or goes on with it."""
        if shard not in self._work:
            self._states[shard] = state = _State(*(self._state.get() or ()))
            self._work[shard] = self._task.work(shard, state.token, times, self._now(times))
        work: StatefulWork = self._work[shard]
        return work
