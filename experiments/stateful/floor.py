"""The floor of ``aion experiment stateful``: the same processor over the same rows, with its state in a dict.

The rows go through the same shuffle, in ``mapInArrow`` behind it, and become rows or frames in the fastest way we know.
The state is in the memory of the Python worker and is lost with it. So this is what a processor costs if state is
free.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

WHEN_UNSEEN_MS = 0


class Handle:
    """State by key in dicts; for one partition. Timers are of event time."""

    def __init__(self) -> None:
        self.key: Any = None
        self.due: list[tuple[int, Any]] = []
        self.timers: set[tuple[int, Any]] = set()
        self.watermark_ms = WHEN_UNSEEN_MS
        self.newest_ms = WHEN_UNSEEN_MS

    def getValueState(self, name: str, schema: Any, ttl_ms: int | None = None) -> Value:
        return Value(self)

    def getListState(self, name: str, schema: Any, ttl_ms: int | None = None) -> Values:
        return Values(self)

    def getMapState(self, name: str, key_schema: Any, schema: Any, ttl_ms: int | None = None) -> Map:
        return Map(self)

    def registerTimer(self, at_ms: int) -> None:
        timer = (at_ms, self.key)
        if timer not in self.timers:
            self.timers.add(timer)
            heapq.heappush(self.due, timer)

    def deleteTimer(self, at_ms: int) -> None:
        self.timers.discard((at_ms, self.key))

    def expired(self) -> Iterator[tuple[int, Any]]:
        while self.due and self.due[0][0] <= self.watermark_ms:
            timer = heapq.heappop(self.due)
            if timer in self.timers:
                self.timers.discard(timer)
                yield timer


class Value:
    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._of: dict[Any, Any] = {}

    def get(self) -> Any:
        return self._of.get(self._handle.key)

    def update(self, value: Any) -> None:
        self._of[self._handle.key] = value

    def clear(self) -> None:
        self._of.pop(self._handle.key, None)


class Values:
    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._of: dict[Any, list[Any]] = {}

    def get(self) -> Iterator[Any]:
        return iter(self._of.get(self._handle.key, ()))

    def appendValue(self, value: Any) -> None:
        self._of.setdefault(self._handle.key, []).append(value)

    def put(self, values: list[Any]) -> None:
        self._of[self._handle.key] = list(values)


class Map:
    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._of: dict[Any, dict[Any, Any]] = {}

    def getValue(self, key: Any) -> Any:
        return self._of.get(self._handle.key, {}).get(key)

    def updateValue(self, key: Any, value: Any) -> None:
        self._of.setdefault(self._handle.key, {})[key] = value


PARTITIONS: dict[tuple[str, int], tuple[Handle, Any]] = {}
"""In a Python worker: handle and processor of each partition of a run."""


def driver_of(
    run: str, processor: Callable[[], Any], pandas: bool, delay_ms: int
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """The function for ``mapInArrow``; its input is partitioned by ``key``."""

    def drive(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext
        from pyspark.sql.streaming.stateful_processor import ExpiredTimerInfo, TimerValues

        from experiments.stateful import (
            floor as stateful_floor,  # by its name: this function was sent without its module
        )

        context = TaskContext.get()
        place = (run, context.partitionId() if context else 0)
        if place not in stateful_floor.PARTITIONS:
            for earlier in [other for other in stateful_floor.PARTITIONS if other[0] != run]:
                del stateful_floor.PARTITIONS[earlier]
            handle, made = Handle(), processor()
            made.init(handle)
            stateful_floor.PARTITIONS[place] = (handle, made)
        handle, of_user = stateful_floor.PARTITIONS[place]
        found = list(batches)
        if not found:
            return
        table = pa.Table.from_batches(found).sort_by("key").combine_chunks()
        times = TimerValues(0, handle.watermark_ms)
        given: list[Any] = []
        for key, rows in _groups(table, pandas):
            handle.key = key
            given += of_user.handleInputRows((key,), rows, times)
        for at_ms, key in handle.expired():
            handle.key = key
            given += of_user.handleExpiredTimer((key,), times, ExpiredTimerInfo(at_ms))
        newest_us = pc.max(table["ts"]).cast(pa.int64()).as_py()
        handle.newest_ms = max(handle.newest_ms, newest_us // 1_000)
        handle.watermark_ms = handle.newest_ms - delay_ms
        yield _as_batch(given, pandas)

    return drive


def _groups(table: pa.Table, pandas: bool) -> Iterator[tuple[Any, Iterator[Any]]]:
    """The rows of each key, from a table in the order of its keys."""
    import numpy as np

    from aion.stateful.rows import python_values, row_maker

    keys = table["key"].to_numpy()
    starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]]).tolist()
    ends = [*starts[1:], len(keys)]
    if pandas:
        frame = table.to_pandas()
        frame["ts"] = frame["ts"].dt.tz_localize(None)
        for start, end in zip(starts, ends, strict=True):
            yield int(keys[start]), iter([frame.iloc[start:end]])
    else:
        make = row_maker(table.column_names)
        rows = list(map(make, zip(*map(python_values, table.columns), strict=True)))
        for start, end in zip(starts, ends, strict=True):
            yield rows[start][0], iter(rows[start:end])


def _as_batch(given: list[Any], pandas: bool) -> pa.RecordBatch:
    schema = pa.schema([("key", pa.int64()), ("result", pa.float64())])
    if pandas:
        columns = [[value for frame in given for value in frame[name].tolist()] for name in schema.names]
    else:
        columns = [[getattr(row, name) for row in given] for name in schema.names]
    return pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema
    )
