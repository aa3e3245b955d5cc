"""What windows on Spark say of a batch, beside its panes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from aion.core.operator.lifecycle import EXECUTED
from aion.execute.windows import Windows

COUNTED = "counted"
"""The kind of a row that carries a number of its shard: its name in ``reason``, its value in ``events``."""
STALE = "stale_windows"
COUNTS = (*(f"{kind}_executions" for kind in EXECUTED), STALE, "judged_events", "missed_events")


class CountingWindows(Windows):
    """Windows of a shard that end a batch with rows of numbers.

    A stateful processor in Python can only yield rows. :func:`aion.spark.progress.observed` takes these out again. A
    shard in which no number has grown yields none, because a frame with a single row has a cost of its own.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._before = self._counts()

    def end_batch(self, *, last: bool = False) -> Iterator[pa.RecordBatch]:
        yield from super().end_batch(last=last)
        before, self._before = self._before, self._counts()
        grown = {name: n - before[name] for name, n in self._before.items() if n > before[name]}
        if grown:
            schema, n = self.plan.result_schema, len(grown)
            columns = {"kind": [COUNTED] * n, "reason": [*grown], "events": [*grown.values()]}
            yield pa.record_batch([pa.array(columns.get(f.name, [None] * n), f.type) for f in schema], schema=schema)

    def _counts(self) -> dict[str, int]:
        counters, conformal = self.operator.counters, self._bound.conformal
        judged = (0, 0) if conformal is None else (conformal.late, conformal.missed)
        stale = counters.staleness.missed_between_looks + counters.staleness.missed_otherwise
        executions = [counters.executions[kind] for kind in EXECUTED]
        return dict(zip(COUNTS, (*executions, stale, *judged), strict=True))
