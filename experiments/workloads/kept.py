"""Windows over kept events in stock Spark's state, as a careful user without ``aion.windowed`` would write them.

Each window of each key is a ``ListState`` of its events (``transformWithState``). Two timers in event time run the
function: at the window's end, and at its end plus the allowed lateness, when the state is cleared. So the function runs
as often as in Aion with ``executions: twice``. The state is in the RocksDB of Spark's own state store provider.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from aion.base.schema import parse_schema
from aion.core.query.functions import Window
from experiments.workloads.collected import Branch, pane, tagged
from experiments.workloads.model import TIMESTAMP, Probe, Shape

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BATCH_ROWS = 10_000
WINDOW = ("stage", "window_start", "window_end")


def kept(
    branches: Sequence[Branch],
    key: Sequence[str],
    function: Any,
    schema: str,
    probe: Probe,
    shape: Shape,
    names: Sequence[str] = (),
) -> DataFrame:
    """Panes of ``function(key, window, events)``, as in ``aion.windowed(apply=...)``, with ``pane`` and ``kind``.

    ``names``: the columns of the events; by default all but the key's and ``arrived``, the watermark's.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    # Spark filters out events without the time of a window. With the watermark's column in it, it does so above the
    # watermark, so that heartbeats move it.
    events = tagged(branches, F.when(F.col("arrived").isNotNull(), F.col("ts")))
    held = [name for name in events.columns if name not in (*key, "arrived", "stage", "w")] if not names else [*names]
    window = [F.unix_micros(f"w.{side}").alias(f"window_{side}") for side in ("start", "end")]
    rows = events.select("arrived", "stage", *window, *key, *held).withColumn("ts", F.unix_micros("ts"))
    fields = to_arrow_schema(rows.schema, timezone="UTC")
    result = pa.schema(
        [
            *(fields.field(name) for name in (*WINDOW, *key)),
            *parse_schema(probe.schema(schema)),
            pa.field("events", pa.int64()),
            pa.field("pane", pa.int32()),
            pa.field("kind", pa.string()),
        ]
    )
    processor = Windows(probe(function), len(key), pa.schema([fields.field(name) for name in held]), result, shape)
    panes = rows.groupBy(*WINDOW, *key).transformWithState(
        processor, from_arrow_schema(result), outputMode="append", timeMode="EventTime"
    )
    times = {name: F.timestamp_micros(name) for name in WINDOW[1:]}
    return panes.withColumns(times)


class Windows(StatefulProcessor):  # type: ignore[misc, unused-ignore]
    """The events of a window of a key, and the two executions of its function."""

    def __init__(self, function: Any, keys: int, events: pa.Schema, result: pa.Schema, shape: Shape) -> None:
        self._function, self._keys, self._result = function, keys, result
        self._events = events
        self._late_us = shape.past_windows * shape.window_us

    def init(self, handle: Any) -> None:
        from pyspark.sql.pandas.types import from_arrow_schema

        self._handle = handle
        self._held = handle.getListState("held", from_arrow_schema(self._events))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        if not self._held.exists():
            end_ms, last_ms = self._timers(key)
            if timerValues.getCurrentWatermarkInMs() < end_ms:
                self._handle.registerTimer(end_ms)
            self._handle.registerTimer(last_ms)
        names = self._events.names
        while some := list(islice(rows, BATCH_ROWS)):
            self._held.appendList([tuple(row[name] for name in names) for row in some])
        yield from ()

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        final = expiredTimerInfo.getExpiryTimeInMs() == self._timers(key)[1]
        given = {field.name: pa.scalar(value, field.type) for field, value in zip(self._result, key, strict=False)}
        given |= {"pane": pa.scalar(int(final), pa.int32()), "kind": pa.scalar("final" if final else "on_time")}
        events = Batches(self._held, self._events)
        window = Window(int(key[1]), int(key[2]), str(key[0]))
        found = self._function(tuple(key[len(WINDOW) :]), window, iter(events))
        yield from (Row(**row) for row in pane(found, given, events.count, self._result).to_pylist())
        if final:
            self._held.clear()

    def _timers(self, key: Any) -> tuple[int, int]:
        """The last millisecond of the window, and that of its lateness, from the window's end in µs."""
        end_us = int(key[2])
        return end_us // 1_000 - 1, (end_us + self._late_us) // 1_000 - 1


class Batches:
    """The events in a list state as Arrow batches, read while they are iterated. It counts them."""

    def __init__(self, held: Any, schema: pa.Schema) -> None:
        self._held, self._schema = held, schema
        self.count = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        rows: list[tuple[Any, ...]] = []
        for row in self._held.get():
            rows.append(row)
            if len(rows) == BATCH_ROWS:
                yield self._batch(rows)
                rows = []
        if rows:
            yield self._batch(rows)

    def _batch(self, rows: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
        self.count += len(rows)
        columns = [
            pa.array(values, field.type) for values, field in zip(zip(*rows, strict=True), self._schema, strict=True)
        ]
        columns[self._schema.get_field_index("ts")] = columns[self._schema.get_field_index("ts")].cast(TIMESTAMP)
        return pa.record_batch(columns, names=self._schema.names)
