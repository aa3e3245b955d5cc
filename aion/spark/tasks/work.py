"""The work of a root's task: for each of its shards one attempt of one batch, through the host's state server."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from pyspark import TaskContext
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

from aion.config import policy_from_text
from aion.errors import MissingState
from aion.execute.assembly import store_config
from aion.spark.session.settings import CHECKPOINTS, FOLDER
from aion.spark.tasks.running import Running, checkpoint_of, is_first, next_start, shows_all
from aion.spark.tasks.shards import ids_here, partition_of
from aion.spark.tasks.task import client_of
from aion.spark.tasks.tenants import Batch, TenantDefinition, Tenants
from aion.spark.tasks.worker import begin_task
from state_backends.server.client import RemoteAttempt
from state_backends.versions.manifest import Identity

_PARTITIONS = ("spark.sql.streaming.internal.stateStore.partitions", "spark.sql.shuffle.partitions")
"""Where Spark keeps the number of partitions of state. Older versions only have the second one."""


class Task:
    """One task, and what its shards share: the policy, what their tenants need, and the connection to the server."""

    def __init__(self, definition: TenantDefinition, handle: StatefulProcessorHandle) -> None:
        begin_task()
        self._config = config = definition.config
        self._ids = ids_here(config.name, config.ids)
        self._policy = policy_from_text(config.policy)
        self._context = context = TaskContext.get()
        assert context is not None
        self.query, self._run, self.batch = Running.of(context)
        self._brings = definition.batch is not None  # state from elsewhere, where it may have been before
        self._asked = definition.asked
        self._is_first = definition.asked and is_first(context)
        self._shows_all = definition.SHOWS_ALL and shows_all(context, self.batch)
        if definition.batch is not None:
            self.batch = definition.batch
        self._checkpoint = checkpoint_of(context)
        self._place = context.stageId(), context.partitionId()
        self._partitions = next((int(found) for name in _PARTITIONS if (found := context.getLocalProperty(name))), 0)
        self.tenants = definition.tenants(self._policy, handle)
        self._store = store_config(self._policy, retain_versions=config.retain_versions, **self.tenants.store)

    def work(self, token: str | None, batch: Batch) -> Work:
        """Starts an attempt on a shard, at the version ``token``, which is None if there is none yet."""
        config = self._config
        identity = Identity(
            query=self.query,
            operator=config.name,
            shard=batch.shard,
            shards=len(self._ids),
            definition=self.tenants.definition,
            ids=self._ids,
            key_types=config.key_types,
            checkpoint=self._checkpoint,
        )
        try:
            attempt = client_of(config.application, self._policy).open(
                identity,
                token=token,
                makes=f"{self.batch:010d}-{uuid.uuid4().hex[:16]}",
                run=self._run,
                operator_uid=config.uid,
                place=self._place,
                next_start=next_start(self._context),
                state_dir=config.state_dir,
                store=self._store,
                committed=-1 if self._brings else self.batch - 1,
                asked=self._asked,
                **self.tenants.asks,
            )
        except MissingState as error:
            raise MissingState(
                f"the state of operator {config.name!r} is not in {config.state_dir}, {self._why_there}. "
                "Set spark.aion.state.dir to the folder that has it; if it was deleted, start with a new checkpoint. "
                f"{error}"
            ) from None
        return Work(self.tenants, attempt, batch)

    def asks(self, token: str | None) -> bool:
        """Returns whether this batch opens a shard that has no rows in it. ``token``: of its version, or None if it has
        none.
        """
        return self._is_first if token is None else self._shows_all

    @property
    def _why_there(self) -> str:
        """Says why the state is looked for where it is."""
        if self._policy.state.dir is not None:
            return "which is the state.dir of the policy or of the session"
        context = TaskContext.get()
        assert context is not None
        beside = context.getLocalProperty(CHECKPOINTS)
        where = f"{CHECKPOINTS}, {beside}" if beside else "the folder in which the driver was started"
        return f"where it is looked for because state.dir is not set: {FOLDER!r} in {where}"

    @property
    def partitions(self) -> list[list[int]]:
        """The shards that Spark sends to each partition of state. The first one is most likely that of this task.

        It is not if the result is part of a union: then Spark numbers the partitions of the whole union.
        """
        if not self._partitions:
            return [list(self._ids)]
        found = defaultdict(list)
        for shard in self._ids:
            found[(partition_of(shard, self._partitions) - self._place[1]) % self._partitions].append(shard)
        return [found[distance] for distance in sorted(found)]

    def may_have(self, shard: int, token: str) -> bool:
        """Returns whether the version ``token`` of a shard may have a state variable that the definition deletes."""
        known, there = _variables.get((self.query, self._config.name, shard), ("", frozenset[str]()))
        return known != token or not self.tenants.deleted.isdisjoint(there)

    def learn(self, shard: int, token: str, work: Work) -> None:
        """Notes which state variables the version ``token`` of a shard has, for :meth:`may_have`."""
        _variables[self.query, self._config.name, shard] = token, work.tenant.names


class Work:
    """One attempt of one batch on one shard. ``ended``: whether the batch's rows have been processed.

    ``due_ms``: the next time at which the shard has something to do, as of the end.
    """

    def __init__(self, tenants: Tenants, attempt: RemoteAttempt, batch: Batch) -> None:
        self._tenants, self._attempt = tenants, attempt
        self.initial: list[Any] = []  # rows, until all of the shard are there
        # Spark says 0 while there is no watermark.
        self._at_us = batch.now_ms * 1000 if batch.now_ms > 0 else None
        self.tenant: Any
        self.tenant, self._converted = tenants.open(attempt, batch)
        self._commit: Future[None] | None = None
        self.due_ms: int | None = None
        self.ended = False

    @property
    def finds_others(self) -> bool:
        """Whether the shard begins where there are versions that Spark does not name."""
        return self._attempt.finds_others

    @property
    def makes(self) -> str:
        """The token of the version that the commit makes."""
        return self._attempt.makes

    def batch(self, rows: Iterable[Any]) -> Iterator[Any]:
        """Processes the batch. Yields what Spark takes."""
        return self._tenants.results(self._results(rows))

    def end_without_rows(self) -> None:
        """The same for a shard for which no row and no timer came, where Spark takes no results any more."""
        for _ in self._begin():
            pass

    def _results(self, rows: Iterable[Any]) -> Iterator[Any]:
        if not self._tenants.rows_first:
            yield from self._begin()
        for arrived in self._converted(rows):
            yield from self.tenant.arrive(arrived)
        if self._tenants.rows_first:
            yield from self._begin()
        yield from self.tenant.end_batch()

    def _begin(self) -> Iterator[Any]:
        yield from self.tenant.advance(self._at_us)
        if self.initial:
            self._tenants.initial(self.tenant, self.initial)

    def begin_commit(self) -> None:
        """Commits in another thread. Meanwhile the task goes on with what does not need this shard."""
        self.ended = True
        self.due_ms = self.tenant.due_ms
        self._commit = _commits.submit(self._attempt.commit, *self.tenant.save())

    def committed(self) -> None:
        """Waits for the commit. Raises what it raised."""
        assert self._commit is not None
        self._commit.result()

    def abort(self) -> None:
        """Undoes the attempt. If it has committed, nobody will name its version."""
        if self._commit is not None:
            wait([self._commit])
        self._attempt.abort()


# A worker serves many tasks, one at a time. They share the thread that commits.
_commits = ThreadPoolExecutor(1, "aion-commit")
_variables: dict[tuple[str, str, int], tuple[str, frozenset[str]]] = {}
"""By query, operator and shard: a version's token, and its state variables."""
