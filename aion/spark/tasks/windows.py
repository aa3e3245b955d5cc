"""Windows as tenants of a root."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessorHandle

from aion.spark.tasks.root_config import RootConfig
from aion.spark.tasks.tenants import TenantDefinition, Tenants

if TYPE_CHECKING:
    from aion.config import Policy


class WindowsDefinition(TenantDefinition):
    """See TenantDefinition."""

    STATE, FIELDS = "state", ("timer_ms",)
    SHOWS_ALL = True
    asked = True

    def __init__(self, config: RootConfig) -> None:
        super().__init__(config)
        self._windows = config

    def arrived(self, rows: Iterator[Any]) -> Iterable[Any]:
        first = next((frame for frame in rows if any(map(len, frame["block"]))), None)
        return () if first is None else chain([first], rows)

    def timer_ms(self, due_ms: int | None, now_ms: int, fires_ms: int | None) -> int | None:
        # Spark looks only for timers after the watermark of the batch before, which is 0 at first. A window that ended
        # before 1970 would wait for ever, and all others of its shard with it.
        return None if due_ms is None else max(due_ms, now_ms + 1)

    def tenants(self, policy: Policy, handle: StatefulProcessorHandle) -> Tenants:
        from aion.spark.tasks.windows_task import WindowsTenants

        return WindowsTenants(self._windows, policy)
