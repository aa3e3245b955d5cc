"""What a root asks of its tenants: on Spark's side, and in a task.

Each time a query starts, Spark makes a root in a separate process and only asks for the schema of its state. So this
module imports little, and definitions import what works when a task begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle, TimerValues
from pyspark.sql.types import LongType, StringType, StructField, StructType

from aion.spark.tasks.root_config import TaskConfig

if TYPE_CHECKING:
    from aion.config import Policy
    from aion.execute.tenant import Tenant
    from state_backends.server.client import RemoteAttempt


class State(NamedTuple):
    """What Spark keeps of a shard. ``token``: of its version, or None if it has none yet. ``timer_ms``: its timer.

    ``seen_ms``: the watermark of the last batch. Rows up to it are late in the next batch. ``due_ms``: when the shard
    has something to do, even if no row comes. None, where a definition does not keep it: when the timer fires.
    """

    token: str | None = None
    timer_ms: int | None = None
    seen_ms: int | None = None
    due_ms: int | None = None


class Batch(NamedTuple):
    """A batch on one shard. ``now_ms``: the time up to which timers expire in it. ``seen_ms``: see State."""

    shard: int
    number: int
    query: str
    times: TimerValues
    now_ms: int
    seen_ms: int | None


class Tenants:
    """What one task has for its tenants. ``definition``: what versions of the operator must have in common.

    ``store``, ``asks``: arguments of ``store_config`` and of ``RemoteAttempt``'s ``open``. ``deleted``: the state
    variables that the definition deletes in all shards. ``undone``: those that it defined and deleted again.
    ``rows_first``: the rows of a batch come before its watermark moves.
    """

    definition: dict[str, Any]
    store: dict[str, Any]
    asks: dict[str, bool]
    deleted: frozenset[str] = frozenset()
    undone: frozenset[str] = frozenset()
    rows_first: bool = False

    def open(self, attempt: RemoteAttempt, batch: Batch) -> tuple[Tenant, Callable[[Iterable[Any]], Iterable[Any]]]:
        """Makes the tenant of a shard, at the version that the attempt has opened.

        Also returns a function that converts Spark's rows, lazily, to what the tenant takes.
        """
        raise NotImplementedError

    def initial(self, tenant: Any, rows: Sequence[Any]) -> None:
        """Hands the rows of a shard's initial state to its tenant, if the definition has an initial state."""
        raise NotImplementedError

    def results(self, results: Iterator[Any]) -> Iterator[Any]:
        """Converts what the tenant yields in a batch to what Spark takes."""
        raise NotImplementedError

    def committed(self) -> None:
        """All shards of the task have committed."""

    def close(self) -> None:
        """The task is over."""


class TenantDefinition:
    """What kind of tenants a root has, and how Spark drives them.

    ``STATE``, ``FIELDS``: the state variable in which Spark keeps State, and what it keeps beside the token. Spark
    compares both with what a checkpoint has. ``time_mode``: Spark's mode of time, in lower case. ``AT_ONCE``: the task
    begins before a shard has something to do. ``SHOWS_ALL``: each shard is called in the last batch of a run, too, and
    has something to do in it. ``asked``: each shard is called in the first batch of a run. ``batch``: the number of the
    batch, or None for Spark's.
    """

    STATE: ClassVar[str]
    FIELDS: ClassVar[tuple[str, ...]]
    AT_ONCE: ClassVar[bool] = False
    SHOWS_ALL: ClassVar[bool] = False
    asked = False
    batch: int | None = None
    time_mode = "eventtime"

    def __init__(self, config: TaskConfig) -> None:
        self.config = config

    @classmethod
    def schema(cls) -> StructType:
        """Not as text, which the JVM would parse for each task."""
        return StructType([StructField("token", StringType()), *(StructField(name, LongType()) for name in cls.FIELDS)])

    def declare(self, handle: StatefulProcessorHandle) -> None:
        """Spark asks for the schema of the state, before the first batch."""

    def close(self) -> None:
        """Spark needs this no longer, in a task or where it has asked for the schema."""

    def now_ms(self, times: TimerValues) -> int:
        """Returns the time up to which timers expire in this batch."""
        match self.time_mode:
            case "eventtime":
                return int(times.getCurrentWatermarkInMs())
            case "processingtime":
                return int(times.getCurrentProcessingTimeInMs())
        return -1

    def timer_ms(self, due_ms: int | None, now_ms: int, fires_ms: int | None) -> int | None:
        """Returns the timer for a shard that has something to do at ``due_ms``. ``fires_ms``: its timer that fires."""
        raise NotImplementedError

    def soon_ms(self, now_ms: int) -> int | None:
        """Returns a timer that opens a shard again, after the rows of this batch, or None if nothing needs one."""
        return None

    def arrived(self, rows: Iterator[Any]) -> Iterable[Any]:
        """Returns Spark's rows for a shard. Something false: they say only that the batch has come."""
        return rows

    def initial(self, rows: Any) -> Any:
        """Returns rows of the initial state, as the tenant takes them."""
        return rows

    def tenants(self, policy: Policy, handle: StatefulProcessorHandle) -> Tenants:
        """Called in a task."""
        raise NotImplementedError
