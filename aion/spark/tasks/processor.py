"""A stateful processor as the tenant of a root."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from aion.spark.tasks.stateful_child import ROWS
from aion.spark.tasks.stateful_config import StatefulConfig
from aion.spark.tasks.tenants import TenantDefinition, Tenants

if TYPE_CHECKING:
    from aion.config import Policy
    from aion.stateful.restore import Declaration


class ProcessorDefinition(TenantDefinition):
    """See TenantDefinition. The tenants run a user's processor on the keys of a shard.

    If Aion drops late rows itself, a shard is called in each batch in which the watermark has moved: by a timer, or by
    an empty row of the child. So it knows the watermark of the batch before, as Spark does.
    """

    STATE, FIELDS = "__aion_shard", ("timer_ms", "seen_ms", "due_ms")
    AT_ONCE = True

    def __init__(self, config: StatefulConfig, processor: StatefulProcessor) -> None:
        super().__init__(config)
        self.time_mode = config.time_mode
        self.asked = not config.pandas  # where Spark makes the frames, there is no child to ask
        self._stateful = config
        self._processor = processor
        self._restored: Sequence[Declaration] | None = None

    def declare(self, handle: StatefulProcessorHandle) -> None:
        # Spark checks the names, types and options of the processor's variables, and whether their types may change to
        # what they are now.
        self._processor.init(handle)

    def close(self) -> None:
        self._processor.close()

    def timer_ms(self, due_ms: int | None, now_ms: int, fires_ms: int | None) -> int | None:
        if self._stateful.event_time is not None:
            return now_ms + 1  # whenever the watermark moves
        if due_ms is not None and due_ms <= now_ms:
            # The processor has set a timer in the past, after those that had expired were looked for. It is due in the
            # next batch, even if the watermark stays. So is a timer of the shard that is set while another one fires.
            # One that is set while rows are processed fires in this batch, and then sets another one.
            return now_ms if fires_ms != now_ms else now_ms - 1
        return due_ms

    def soon_ms(self, now_ms: int) -> int | None:
        return None if self.time_mode == "none" else now_ms

    def arrived(self, rows: Iterator[Any]) -> Iterable[Any]:
        return rows if self._stateful.pandas else [data for row in rows if (data := row[ROWS])]

    def initial(self, rows: Any) -> Any:
        return rows if self._stateful.pandas else rows[ROWS]

    def tenants(self, policy: Policy, handle: StatefulProcessorHandle) -> Tenants:
        from aion.spark.tasks.processor_task import ProcessorTenants

        return ProcessorTenants(self._stateful, policy, self._processor, handle, self._restored)
