"""The root: one Spark key is one shard, whose version Spark keeps as a token. Its tenant does the work.

See docs/inside/architecture.md. Each time a query starts, Spark makes a root in a separate process and only asks for
the schema of its state. So this module imports :mod:`aion.spark.tasks.work` when a task begins: without that import a
query starts in half the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues

from aion.errors import ServerUnreachable
from aion.spark.tasks.tenants import Batch, State, TenantDefinition

if TYPE_CHECKING:
    from aion.spark.tasks.work import Task, Work


class Root(StatefulProcessor):
    """Spark's side of an operator. An instance lives for one task. Hot state lies in the host's state server."""

    def __init__(self, definition: TenantDefinition) -> None:
        self._definition = definition
        self._works: dict[int, Work] = {}
        self._states: dict[int, State] = {}  # of the shards at work, and of those that have nothing to do
        self._begun: Task | None = None  # made in the task, because its threads cannot be sent there
        self._fires_ms: int | None = None  # the shard's timer that fires, if one does

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._state = handle.getValueState(self._definition.STATE, self._definition.schema())
        if TaskContext.get() is None:
            # Spark only asks for the schema of the state. So nothing is opened here.
            self._definition.declare(handle)
        elif self._definition.AT_ONCE:
            with self._failing_cleanly():
                if self._task().tenants.deleted:
                    self._delete()

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        with self._failing_cleanly():
            shard = int(key[0])
            arrived = self._definition.arrived(rows)
            if arrived or self._is_asked(shard, timerValues) or not self._has_nothing_to_do(shard, timerValues):
                yield from self._batch(shard, arrived, timerValues)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        with self._failing_cleanly():
            shard = int(key[0])
            self._fires_ms = expiredTimerInfo.getExpiryTimeInMs()
            if shard in self._works and self._works[shard].ended:
                if self._is_due(shard, timerValues):
                    self._set_timer(shard, self._states[shard], self._states[shard], timerValues)
            elif not self._has_nothing_to_do(shard, timerValues):
                yield from self._batch(shard, (), timerValues)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        with self._failing_cleanly():
            shard = int(key[0])
            new = shard not in self._works
            work = self._open(shard, timerValues)
            work.initial.append(self._definition.initial(initialState))
            if new:
                # A timer opens the shard again after the rows of this batch, if it has none. Without timers the commit
                # comes in close(), where Spark no longer takes the token. So the token is set now.
                now_ms = self._definition.now_ms(timerValues)
                soon_ms = self._definition.soon_ms(now_ms)
                if soon_ms is not None:
                    self._handle.registerTimer(soon_ms)
                self._keep(shard, State(work.makes, soon_ms, now_ms, soon_ms))

    def close(self) -> None:
        """Commits inside the task. If the commit fails, the task fails, and Spark keeps the old token."""
        with self._failing_cleanly():
            for shard, work in self._works.items():
                if not work.ended:
                    work.end_without_rows()
                    work.begin_commit()
                if self._task().tenants.deleted:
                    self._task().learn(shard, work.makes, work)
            self._definition.close()
            for work in self._works.values():
                work.committed()
            if self._begun is not None:
                self._begun.tenants.committed()
        self._end()

    # -- state variables that the definition deletes ------------------------------------------------------

    def _delete(self) -> None:
        """Deletes state variables in all shards of this task, also in those without rows, as Spark does."""
        client, task = self._handle._statefulProcessorApiClient, self._task()
        times = TimerValues(*client.get_timestamps(self._definition.time_mode))
        found = set(task.tenants.undone)
        for shards in task.partitions:
            here = False
            for shard in shards:
                client.set_implicit_key((shard,))
                state = self._read()
                if state.token is None:  # it has no version, or is in another partition
                    continue
                here = True
                if task.may_have(shard, state.token):
                    found |= self._delete_in(shard, state, times)
            if here:
                break
        client.remove_implicit_key()
        for name in found:  # Spark's own count of deleted variables
            self._handle.getValueState(name, self._definition.schema())
            self._handle.deleteIfExists(name)

    def _delete_in(self, shard: int, state: State, times: Any) -> frozenset[str]:
        """Deletes state variables in a shard, and returns those that it had."""
        assert state.token is not None
        work = self._open(shard, times)
        there: frozenset[str] = work.tenant.names & self._task().tenants.deleted
        if there:
            # Without rows the commit comes in close(), where Spark no longer takes the token.
            self._keep(shard, state._replace(token=work.makes))
        else:
            self._task().learn(shard, state.token, work)
            self._works.pop(shard).abort()
        return there

    # -- a shard ------------------------------------------------------------------------------------------

    def _batch(self, shard: int, rows: Iterable[Any], times: Any) -> Iterator[Any]:
        """Begins the commit at the end. Meanwhile Spark learns the new token, and when the shard has something to do.

        Spark's state store keeps the new token only if this attempt of the batch wins.
        """
        work = self._open(shard, times)
        yield from work.batch(rows)
        work.begin_commit()
        self._set_timer(shard, self._states[shard], State(work.makes, None, None, work.due_ms), times)

    def _open(self, shard: int, times: Any) -> Work:
        """Opens a shard, or goes on with it."""
        if shard not in self._works:
            self._states[shard] = state = self._read()
            task = self._task()
            batch = Batch(shard, task.batch, task.query, times, self._definition.now_ms(times), state.seen_ms)
            self._works[shard] = task.work(state.token, batch)
        return self._works[shard]

    def _is_asked(self, shard: int, times: Any) -> bool:
        """Returns whether a shard without rows has something to do because of the batch.

        In the last batch of a run, windows show late events. In the first one, a shard without a version gets one if
        there are versions that Spark does not name: attempts that failed have left them. From then on nothing that is
        there can be taken for a version whose token was lost (:func:`state_backends.versions.opening.check_begins`).
        """
        if shard in self._works:
            return False
        token = self._read().token
        if not self._task().asks(token):
            return False
        if token is not None or self._open(shard, times).finds_others:
            return True
        self._works.pop(shard).abort()
        return False

    def _has_nothing_to_do(self, shard: int, times: Any) -> bool:
        """Returns whether a shard without rows need not be opened. If so, remembers the watermark, and sets the next
        timer.
        """
        if shard in self._works:
            return False
        self._states[shard] = state = self._read()
        if self._is_due(shard, times):
            return False
        self._set_timer(shard, state, state, times)
        return True

    def _is_due(self, shard: int, times: Any) -> bool:
        due_ms = self._states[shard].due_ms
        return due_ms is not None and due_ms <= self._definition.now_ms(times)

    def _set_timer(self, shard: int, before: State, now: State, times: Any) -> None:
        """Sets the shard's timer, and what Spark keeps of it. A shard has one timer at most."""
        now_ms = self._definition.now_ms(times)
        timer_ms = self._definition.timer_ms(now.due_ms, now_ms, self._fires_ms)
        # Spark deletes an expired timer itself.
        if before.timer_ms is not None and timer_ms != before.timer_ms > now_ms:
            self._handle.deleteTimer(before.timer_ms)
        if timer_ms is not None and timer_ms != before.timer_ms:
            self._handle.registerTimer(timer_ms)
        kept, fields = State(now.token, timer_ms, now_ms, now.due_ms), 1 + len(self._definition.FIELDS)
        if kept[:fields] != before[:fields]:
            self._keep(shard, kept)
        else:
            self._states[shard] = kept

    def _read(self) -> State:
        """What Spark keeps of the shard whose turn it is."""
        state = State(*(self._state.get() or ()))
        return state if "due_ms" in self._definition.FIELDS else state._replace(due_ms=state.timer_ms)

    def _keep(self, shard: int, state: State) -> None:
        self._states[shard] = state
        self._state.update(state[: 1 + len(self._definition.FIELDS)])

    # -- the task -----------------------------------------------------------------------------------------

    def _task(self) -> Task:
        if self._begun is None:
            from aion.spark.tasks.work import Task

            self._begun = Task(self._definition, self._handle)
        return self._begun

    @contextmanager
    def _failing_cleanly(self) -> Iterator[None]:
        """A task that fails undoes its work. Spark runs it again, from the versions that it started with."""
        try:
            yield
        except BaseException as error:
            for work in self._works.values():
                work.abort()
            self._end()
            if isinstance(error, ServerUnreachable):
                raise ServerUnreachable(f"{error}. {self._what_now()}") from None
            raise

    def _what_now(self) -> str:
        failures = self._definition.config.task_failures
        if failures > 1:
            return f"The task fails and has changed nothing. Spark runs it again, up to {failures} times in all"
        return (
            "The task fails and has changed nothing. In local mode Spark does not run a failed task again: "
            "use the master local[n, 4], or start the query again from its checkpoint"
        )

    def _end(self) -> None:
        if self._begun is not None:
            self._begun.tenants.close()
            self._begun = None
