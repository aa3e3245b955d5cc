"""A task of an operator's root: opens attempts on its shards, through the host's state server."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pyspark import TaskContext

from aion.config import Policy
from aion.spark.root_config import TaskConfig
from aion.spark.starts import checkpoint_of
from aion.spark.worker import begin_task
from state_backends.backends import StoreConfig
from state_backends.server.client import RemoteAttempt, StateClient, daemon_pid, executor_pid
from state_backends.versions.manifest import Identity


class ShardTask:
    """One task, and what its shards share: the policy, and the connection to the server."""

    def __init__(self, config: TaskConfig, policy: Policy, store: StoreConfig, definition: dict[str, Any]) -> None:
        begin_task()
        self._config = config
        self.policy = policy
        self._store = store
        self._definition = definition
        context = TaskContext.get()
        assert context is not None
        self._query = query_of(context)
        # Spark runs a streaming query in a job group named by the run.
        self._run = context.getLocalProperty("spark.jobGroup.id") or ""
        self.batch = int(context.getLocalProperty("streaming.sql.batchId") or "0")
        self._checkpoint = checkpoint_of(context)
        self._place = context.stageId(), context.partitionId()

    def open(self, shard: int, token: str | None, *, others: bool = False, moved: bool = False) -> RemoteAttempt:
        """Starts an attempt on a shard, at the version ``token``. None: the shard has no version yet.

        ``others``, ``moved``: what the answer contains; see requests.OpenRequest.
        """
        config = self._config
        return client_of(config.application, self.policy).open(
            Identity(
                query=self._query,
                operator=config.name,
                shard=shard,
                shards=len(config.ids),
                definition=self._definition,
                ids=config.ids,
                key_types=config.key_types,
                checkpoint=self._checkpoint,
            ),
            token=token,
            makes=f"{self.batch:010d}-{uuid.uuid4().hex[:16]}",
            run=self._run,
            operator_uid=config.uid,
            place=self._place,
            state_dir=config.state_dir,
            store=self._store,
            others=others,
            moved=moved,
        )

    def committed(self) -> None:
        """All shards of the task have committed."""

    def close(self) -> None:
        """The task is over."""


# A worker serves many tasks, one at a time. They share the thread that commits, and a client for each application and
# timeout.
_commits = ThreadPoolExecutor(1, "aion-commit")
_clients: dict[tuple[str, float], StateClient] = {}


def in_background(commit: Callable[..., None], *arguments: Any) -> Future[None]:
    """Commits in another thread."""
    return _commits.submit(commit, *arguments)


def query_of(context: TaskContext) -> str:
    """Returns the id of the query that a task belongs to."""
    return context.getLocalProperty("sql.streaming.queryId") or "no-query"


def client_of(application: str, policy: Policy) -> StateClient:
    """This worker's connection to the state server of its host."""
    timeout_s = policy.io.request_timeout_us / 1e6
    client = _clients.get((application, timeout_s))
    if client is None:
        client = StateClient.connect(
            application, watch_pid=executor_pid(), daemon_pid=daemon_pid(), timeout_s=timeout_s
        )
        _clients[application, timeout_s] = client
    return client
