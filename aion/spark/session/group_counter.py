"""Decides whether it pays that Spark groups events (:mod:`aion.spark.session.partials`), by what tasks count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from state_backends.thresholds import threshold

if TYPE_CHECKING:
    from pyspark import SparkContext

    from aion.core.ingest.builder import ShardBlock

_LEAST_GROUPS = threshold(1 << 12, 2)
"""With fewer groups in a batch than this, grouping costs little, and the root alone can make the blocks."""
_FEW, _ENOUGH = threshold(6, 2), threshold(10, 4)
"""With fewer events in a group, and with at least that many again, Spark stops and begins to group them."""


class GroupCounter:
    """How many events a call has had, and how many groups the tasks made of them. It decides how those of the next
    batches cross. Spark does not group them if few events share a group, because then more crosses to Python than the
    events. If there are few groups in all, they go to the root without Python before it
    (:mod:`aion.core.ingest.packed`).

    Tasks add to it, and Spark brings their numbers to the driver.
    """

    def __init__(self, context: SparkContext, call: str, strategy: Any) -> None:
        self._call, self._strategy = call, strategy
        self._events, self._groups = (context.accumulator(0) for _ in range(2))
        self._seen = 0, 0
        self._way = "grouped"

    def __getstate__(self) -> dict[str, Any]:
        return {"_events": self._events, "_groups": self._groups}

    def of(self, blocks: Iterable[ShardBlock]) -> Iterator[ShardBlock]:
        """Counts blocks on their way. Call it inside a task."""
        for each in blocks:
            self._events += each.block.header.events
            self._groups += each.block.header.rows
            yield each

    def decide(self) -> None:
        """Decides after a batch. Call it on the driver."""
        now = self._events.value, self._groups.value
        events, groups = (new - old for new, old in zip(now, self._seen, strict=True))
        self._seen = now
        if not events:
            return
        if groups < _LEAST_GROUPS:
            way = "packed"
        else:
            way = "rows" if events < groups * (_ENOUGH if self._way == "rows" else _FEW) else "grouped"
        if way != self._way:
            self._strategy.setWay(self._call, way)
            self._way = way
