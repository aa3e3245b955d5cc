"""A join as the tenant of a root. Both sides come as rows of :class:`aion.spark.tasks.join_child.JoinChild`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

from aion.spark.tasks.join_child import JoinConfig, packed_in
from aion.spark.tasks.tenants import TenantDefinition, Tenants

if TYPE_CHECKING:
    from aion.config import Policy


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
