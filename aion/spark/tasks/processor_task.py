"""A stateful processor in a task of its root: rows and timers go to the user's processor, and its results to Spark."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import StructType

from aion.config import Policy
from aion.execute.assembly import prestages
from aion.spark.tasks.stateful_child import unpack
from aion.spark.tasks.stateful_config import Columns, StatefulConfig
from aion.spark.tasks.tenants import Batch, Tenants
from aion.stateful.handle import Handle
from aion.stateful.keys import Group, Keys, group_frames, group_table
from aion.stateful.restore import Declaration, restored_keys
from aion.stateful.run import ShardRun, variables_of
from state_backends.server.client import RemoteAttempt
from state_backends.thresholds import threshold
from state_backends.versions.retention import batch_of

_FRAME_ROWS = threshold(10_000)
_FRAME_BYTES = threshold(4 << 20, 256)
_OBJECTS = 400_000  # new ones, before Python looks for cycles
ENCODING = "spark.sql.streaming.stateStore.encodingFormat"
_IMMUTABLE = frozenset({"string", "bytes", "integer", "floating", "boolean", "decimal", "date", "datetime", "empty"})
"""What pandas calls columns of objects that cannot change."""


class ProcessorTenants(Tenants):
    """See :class:`aion.spark.tasks.tenants.Tenants`. A task has one processor and one handle, for one shard after the
    other.

    ``spark_handle``: Spark's, which can parse schemas. ``restored``: the state variables whose state comes from
    elsewhere, or None if the processor does its work.
    """

    def __init__(
        self,
        config: StatefulConfig,
        policy: Policy,
        processor: StatefulProcessor,
        spark_handle: StatefulProcessorHandle,
        restored: Sequence[Declaration] | None,
    ) -> None:
        self.store, self.asks = {}, {}
        self.definition = config.definition
        self._config = config
        self._processor = processor
        self._restored = restored
        context = TaskContext.get()
        assert context is not None
        # The query's own setting, from its checkpoint.
        self._by_name = context.getLocalProperty(ENCODING) == "avro"
        self._reads_ahead = prestages(policy)
        self._keys = Keys(config.key)
        self._handle = Handle(config.time_mode, 0, _parser(spark_handle))
        processor.init(self._handle)
        self._handle.initialized()
        self.deleted, self.undone = self._handle.deleted, self._handle.undone

    def open(self, attempt: RemoteAttempt, batch: Batch) -> tuple[ShardRun, Callable[[Iterable[Any]], Iterable[Any]]]:
        self._handle.now_ms = batch.times.getCurrentProcessingTimeInMs()
        run = (ShardRun if self._restored is None else _Restored)(
            self._processor,
            self._handle,
            variables_of(attempt.snapshot, self._by_name),
            attempt,
            self._keys,
            batch.times,
            None if self._config.time_mode == "none" else batch.now_ms,
            attempt.snapshot,
            self._reads_ahead,
            batch_of(attempt.makes) % 2 == 1,
        )

        def groups(rows: Iterable[Any]) -> Iterator[Iterator[Group]]:
            if (listed := list(rows)) and self._restored is None:
                # Spark's watermark before the first batch is 0.
                yield self._groups(run, listed, self._config.columns, batch.seen_ms or 0)

        return run, groups

    def initial(self, run: ShardRun, rows: Sequence[Any]) -> None:
        """Takes the rows of the initial state: for the processor, or as :func:`restored_keys` reads them."""
        if self._restored is None:
            assert self._config.initial is not None
            run.initial(self._groups(run, rows, self._config.initial, None))
        elif packed := [data for some in rows for data in some]:
            states = restored_keys(unpack(packed), self._keys, len(self._config.key), len(self._restored))
            run.restore(states, self._restored)

    def results(self, results: Iterator[Any]) -> Iterator[Any]:
        with _rare_collections():
            yield from joined(results) if self._config.pandas else results

    def _groups(self, run: ShardRun, rows: Sequence[Any], columns: Columns, seen_ms: int | None) -> Iterator[Group]:
        """Groups frames, or rows as the child packed them. Those with event times up to ``seen_ms`` are late."""
        if self._config.pandas:
            return group_frames(rows, self._keys, columns.key, slice(columns.own, len(columns.names)))
        table = unpack(rows)
        if seen_ms is not None and self._config.event_time is not None:
            time_us = table.column(self._config.event_time)
            in_time = pc.fill_null(pc.greater(time_us, seen_ms * 1000), True)
            arrived, table = table.num_rows, table.filter(in_time)
            run.dropped(arrived - table.num_rows)
        return group_table(table, self._keys, columns.key, columns.names)


class _Restored(ShardRun):
    """State from elsewhere was put into the shard. Its processor is not at hand."""

    def end_batch(self) -> Iterator[Any]:
        return iter(())


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Lets Python look for cycles less often: a batch has many objects and few cycles, and each look visits all."""
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def joined(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
    """Joins small frames with the same columns and types: each frame has a cost of its own in pyspark.

    The columns of a frame that waits for others are copied, because the user may change it and yield it again.
    """
    waiting: list[list[npt.NDArray[Any]]] = []
    names: Any = None
    types: list[Any] = []
    rows = size = 0
    for frame in frames:
        # If it is no frame, pyspark says what is wrong.
        columns, of_columns = _copied(frame) if isinstance(frame, pd.DataFrame) else (None, [])
        if waiting and (columns is None or of_columns != types or not names.equals(frame.columns)):
            yield _joined(waiting, names, types)
            waiting, rows, size = [], 0, 0
        if columns is None:
            yield frame
            continue
        names, types = frame.columns, of_columns
        waiting.append(columns)
        rows += len(frame)
        size += sum(map(_size_bytes, columns))
        if rows >= _FRAME_ROWS or size >= _FRAME_BYTES:
            yield _joined(waiting, names, types)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield _joined(waiting, names, types)


def _size_bytes(column: npt.NDArray[Any]) -> int:
    """About the memory of a column, with the texts and bytes that it refers to."""
    if column.dtype != object:
        return column.nbytes
    return column.nbytes + sum(len(value) for value in column if isinstance(value, str | bytes))


def _copied(frame: pd.DataFrame) -> tuple[list[npt.NDArray[Any]] | None, list[Any]]:
    """Returns copies of the columns, and their types, or None if they are neither numpy's nor text, or what is in them
    may change, as lists may.

    The type of a column of objects is what pandas finds in it. Since pandas 3, text has a type of its own.
    """
    columns, types = [], []
    for _, column in frame.items():  # noqa: PERF102 (a frame's values are something else)
        type_: Any = column.dtype
        if isinstance(type_, pd.StringDtype):
            columns.append(column.to_numpy(object, copy=True))
            types.append(type_)
            continue
        if not isinstance(type_, np.dtype):
            return None, []
        copied = column.to_numpy(copy=True)
        if type_.kind == "O":
            type_ = pd.api.types.infer_dtype(copied, skipna=True)
            if type_ not in _IMMUTABLE:
                return None, []
        columns.append(copied)
        types.append(type_)
    return columns or None, types


def _joined(waiting: list[list[npt.NDArray[Any]]], names: Any, types: list[Any]) -> pd.DataFrame:
    """Joins columns. ``types``: what pandas found in a column of objects, or its type."""
    columns = [np.concatenate(parts) for parts in zip(*waiting, strict=True)]
    dtypes = [object if isinstance(type_, str) else type_ for type_ in types]
    frame = pd.DataFrame(
        {at: pd.Series(column, dtype=dtype) for at, (column, dtype) in enumerate(zip(columns, dtypes, strict=True))}
    )
    frame.columns = names
    return frame


_parsed: dict[str, StructType] = {}


def _parser(handle: StatefulProcessorHandle) -> Callable[[str], StructType]:
    """Parses schemas of state variables in DDL, as Spark's own handle does: by asking the JVM. Once for each text."""

    def parse(text: str) -> StructType:
        found = _parsed.get(text)
        if found is None:
            found = _parsed[text] = handle._statefulProcessorApiClient._parse_string_schema(text)
        return found

    return parse
