"""Ways to average values per key and window over one stream, with Aion and with stock Spark.

Each is a function of the watermarked events and a Shape, and returns a streaming DataFrame. They differ in late events,
and no option changes that: Aion keeps them and executes their windows again, stock Spark drops them. So Aion does
strictly more work for the same input.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from experiments.shared.stream import SPARK_ALONE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from aion.spark.api.files import Files


HAND_OVER = "spark.aion.distribution.hand_over"
JVM_PARTIALS = "spark.aion.jvm_partials"


@dataclass(frozen=True, slots=True)
class Shape:
    """The windows that all contenders compute. Durations as Spark writes them ("20 seconds"), and in milliseconds."""

    size: str
    size_ms: int
    slide: str | None
    payload: bool


@dataclass(frozen=True, slots=True)
class Contender:
    """A label, whether it is Aion (and so needs Aion's session settings), and how to build its DataFrame.

    ``reads_files``: its events come from ``aion.read_files``. ``alone``: Spark writes checkpoints as it does without
    ``aion.configure``.
    """

    label: str
    is_aion: bool
    build: Callable[[Any, Shape], DataFrame]
    reads_files: bool = False
    alone: bool = False

    @property
    def settings(self) -> Mapping[str, str]:
        """Settings of the session while its query starts."""
        return SPARK_ALONE if self.alone else {}


def partials(events: DataFrame | Files, shape: Shape) -> DataFrame:
    """Aion with decomposable aggregates: only partial aggregates per slice reach the state."""
    import aion
    from aion import aggregates as A

    window = aion.Sliding(shape.size, shape.slide) if shape.slide else aion.Tumbling(shape.size)
    return aion.windowed(
        events,
        key=["key"],
        time="ts",
        windows=[window],
        aggregates={"n": A.count(), "mean": A.mean("value")},
    )


def grouped_in_python(events: DataFrame, shape: Shape) -> DataFrame:
    """The same, and each event crosses to Python before it is grouped (docs/inside/distribution.md)."""
    conf = events.sparkSession.conf
    conf.set(JVM_PARTIALS, "off")
    try:
        return partials(events, shape)
    finally:
        conf.unset(JVM_PARTIALS)


def kept(events: DataFrame | Files, shape: Shape) -> DataFrame:
    """Aion with a holistic function: every event, with its payload, is kept until its window is final."""
    import aion

    return aion.windowed(
        events,
        key=["key"],
        time="ts",
        windows=[aion.Tumbling(shape.size)],
        apply=aion.Apply(mean_of_events, "mean double"),
    )


def unique(events: DataFrame | Files, shape: Shape) -> DataFrame:
    """The aggregates of :func:`partials`, and an event that comes again counts once (docs/how-to/bad-data.md)."""
    import aion
    from aion import aggregates as A

    return aion.windowed(
        events,
        key=["key"],
        time="ts",
        windows=[aion.Tumbling(shape.size)],
        aggregates={"n": A.count(), "mean": A.mean("value")},
        unique="value",
    )


def kept_as_rows(events: DataFrame, shape: Shape) -> DataFrame:
    """The same, and every block crosses the shuffle and the state server as bytes (docs/inside/hand-over.md)."""
    conf = events.sparkSession.conf
    conf.set(HAND_OVER, "null")
    try:
        return kept(events, shape)
    finally:
        conf.unset(HAND_OVER)


def scan(events: DataFrame, shape: Shape) -> DataFrame:
    """Only brings the events to Python, which drops them: what every other way has to do first."""

    def drop(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield batch.slice(0, 0)

    return events.mapInArrow(drop, events.schema)


def token(events: DataFrame, shape: Shape) -> DataFrame:
    """The floor of a batch's cost: a row for each shard, and a stateful operator with one token for each."""
    return _row_for_each_shard(events).transformWithStateInPandas(Token(), "n bigint", "Append", "None")


def token_and_timer(events: DataFrame, shape: Shape) -> DataFrame:
    """The floor of what the watermark sets off, even where no event comes: a timer for each token, in each batch."""
    return _row_for_each_shard(events).transformWithStateInPandas(TokenAndTimer(), "n bigint", "Append", "EventTime")


def _row_for_each_shard(events: DataFrame) -> Any:
    """The number of events, once for each shard, grouped by shard."""
    shards = int(events.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1)

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts = pa.array([sum(batch.num_rows for batch in batches)] * shards, pa.int64())
        yield pa.record_batch([pa.array(range(shards), pa.int32()), counts], ["shard", "n"])

    return events.select("ts").mapInArrow(rows, "shard int, n bigint").groupBy("shard")


class Token(StatefulProcessor):
    """Keeps how often it was called, as text."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.token = handle.getValueState("token", "token string")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        known = self.token.get()
        self.token.update((str(int(known[0]) + 1 if known else 0),))
        yield pd.DataFrame({"n": [sum(int(frame["n"].sum()) for frame in rows)]})

    def close(self) -> None:
        pass


class TokenAndTimer(Token):
    """Keeps a timer, too, which the next watermark sets off."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        yield from super().handleInputRows(key, rows, timerValues)
        self.handle.registerTimer(timerValues.getCurrentWatermarkInMs() + 1)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        return iter(())


def mean_of_events(key: tuple[Any, ...], window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, float | None]:
    """The mean of ``value`` over lazily read record batches. Ignores nulls, as Spark's ``avg`` does."""
    total, count = 0.0, 0
    for batch in events:
        values = batch.column("value")
        total += pc.sum(values).as_py() or 0.0
        count += len(values) - values.null_count
    return {"mean": total / count if count else None}


def stock_window(events: DataFrame, shape: Shape) -> DataFrame:
    """Spark's own windowed aggregation, in ``append`` mode: one result per window, like an on-time pane."""
    window = F.window("ts", shape.size, shape.slide) if shape.slide else F.window("ts", shape.size)
    return events.groupBy("key", window).agg(F.count(F.lit(1)).alias("n"), F.avg("value").alias("mean"))


def list_state(events: DataFrame, shape: Shape) -> DataFrame:
    """Spark's way of keeping events: a ListState per key and window, read when a timer fires at its end.

    It is as fast as that API allows: the window is computed in the JVM, a window's rows of a batch are appended in one
    call, and the event time is kept as a number (datetimes cost far more to convert).
    """
    end_ms = F.expr(f"(unix_millis(ts) div {shape.size_ms}) * {shape.size_ms} + {shape.size_ms}")
    columns = ["key", "end_ms", "ts", "time_us", "value", *(["payload"] if shape.payload else [])]
    rows = events.withColumn("end_ms", end_ms).withColumn("time_us", F.expr("unix_micros(ts)")).select(columns)
    return rows.groupBy("key", "end_ms").transformWithStateInPandas(
        ListStateMean(shape.payload),
        outputStructType="key bigint, end_ms bigint, n bigint, mean double",
        outputMode="append",
        timeMode="EventTime",
    )


class ListStateMean(StatefulProcessor):
    """Keeps the events of one key and window. At the window's end it yields their number and mean."""

    def __init__(self, payload: bool) -> None:
        self.columns = ["time_us", "value", *(["payload"] if payload else [])]

    def init(self, handle: StatefulProcessorHandle) -> None:
        types = {"time_us": "bigint", "value": "double", "payload": "binary"}
        self.handle = handle
        self.events = handle.getListState("events", ", ".join(f"{name} {types[name]}" for name in self.columns))

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        for frame in rows:
            self.events.appendList(list(zip(*(frame[name].tolist() for name in self.columns), strict=True)))
        self.handle.registerTimer(int(key[1]))
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        values = [event[1] for event in self.events.get()]
        self.events.clear()
        yield pd.DataFrame(
            {"key": [key[0]], "end_ms": [key[1]], "n": [len(values)], "mean": [statistics.fmean(values)]}
        )

    def close(self) -> None:
        pass


CONTENDERS: dict[str, Contender] = {
    "partials": Contender("Aion, partials", True, partials),
    "apply": Contender("Aion, events kept (apply)", True, kept),
    "apply-rows": Contender("Aion, events kept, no files", True, kept_as_rows),
    "unique": Contender("Aion, partials, unique", True, unique),
    "partials-python": Contender("Aion, grouped in Python", True, grouped_in_python),
    "stock-window": Contender("Spark window().agg", False, stock_window, alone=True),
    "tuned-window": Contender("Spark window().agg, tuned", False, stock_window),
    "list-state": Contender("Spark ListState of events", False, list_state, alone=True),
    "scan": Contender("Spark's scan into Python", False, scan),
}

FLOORS = {
    "token": Contender("the floor: one token", False, token),
    "token-timer": Contender("the floor with timers", False, token_and_timer),
}

OF_FILES: dict[str, Contender] = {
    "files": Contender("Aion, files, partials", True, partials, reads_files=True),
    "files-apply": Contender("Aion, files, events kept", True, kept, reads_files=True),
    **CONTENDERS,
}
"""With the contenders of ``--source files``."""
