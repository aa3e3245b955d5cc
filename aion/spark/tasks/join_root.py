"""A join as the tenant of a root. Both sides come as rows of :class:`aion.spark.tasks.stateful_child.StatefulChild`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

from aion.core.join.plan import JoinPlan
from aion.spark.tasks.root_config import TaskConfig
from aion.spark.tasks.stateful_child import StatefulChild
from aion.spark.tasks.tenants import TenantDefinition, Tenants

if TYPE_CHECKING:
    from aion.config import Policy

SIDE = b"aion.side"
"""In the metadata of packed rows: which side they are of."""


def packed_in(frame: Any) -> Any:
    """Returns the packed rows in a frame. Behind a union, Spark gives its columns other names."""
    return frame.iloc[:, -1]


class JoinChild(StatefulChild):
    """Packs the rows of one side. ``side``: its number."""

    def __init__(self, operator: str, ids: tuple[int, ...], side: int) -> None:
        super().__init__(operator, ids, asks=side == 0)
        self._side = side

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        said = {SIDE: str(self._side)}
        yield from super().__call__(batch.replace_schema_metadata(said) for batch in batches)


@dataclass(frozen=True, kw_only=True)
class JoinConfig(TaskConfig):
    """For :class:`JoinDefinition`."""

    plan: JoinPlan


class JoinDefinition(TenantDefinition):
    """See TenantDefinition."""

    STATE, FIELDS = "state", ("timer_ms",)
    asked = True

    def __init__(self, config: JoinConfig) -> None:
        super().__init__(config)
        self._join = config

    def arrived(self, rows: Iterator[Any]) -> Iterable[Any]:
        first = next((frame for frame in rows if any(map(len, packed_in(frame)))), None)
        return () if first is None else chain([first], rows)

    def timer_ms(self, due_ms: int | None, now_ms: int, fires_ms: int | None) -> int | None:
        return None if due_ms is None else max(due_ms, now_ms + 1)

    def tenants(self, policy: Policy, handle: StatefulProcessorHandle) -> Tenants:
        from aion.spark.tasks.join_task import JoinTenants

        return JoinTenants(self._join, policy)
