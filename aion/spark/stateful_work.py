"""The work of a stateful root's task: for each of its shards one attempt of one batch, through the state server."""

from __future__ import annotations

import gc
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues
from pyspark.sql.types import StructType

from aion.config import policy_from_text
from aion.execute.assembly import prestages, store_config
from aion.spark.shards import partition_of
from aion.spark.stateful_child import unpack
from aion.spark.stateful_config import Columns, StatefulConfig
from aion.spark.task import ShardTask, in_background
from aion.stateful.handle import Handle
from aion.stateful.keys import Group, Keys, group_frames, group_table
from aion.stateful.restore import Declaration, restored_keys
from aion.stateful.run import ShardRun, variables_of
from aion.stateful.variables import Variables
from state_backends.server.client import RemoteAttempt
from state_backends.thresholds import threshold
from state_backends.versions.retention import batch_of

_FRAME_ROWS = threshold(10_000)
_FRAME_BYTES = threshold(4 << 20, 256)
_OBJECTS = 400_000  # new ones, before Python looks for cycles
_ENCODING = "spark.sql.streaming.stateStore.encodingFormat"
_PARTITIONS = ("spark.sql.streaming.internal.stateStore.partitions", "spark.sql.shuffle.partitions")
"""Where Spark keeps the number of partitions of state. Older versions only have the second one."""
_IMMUTABLE = frozenset({"string", "bytes", "integer", "floating", "boolean", "decimal", "date", "datetime", "empty"})
"""What pandas calls columns of objects that cannot change."""


class StatefulTask(ShardTask):
    """One task, its processor and the processor's handle. ``spark_handle``: Spark's, which can parse schemas.

    ``deleted``: the state variables that the processor's ``init`` deletes. ``undone``: those that it defined before.
    """

    def __init__(
        self, config: StatefulConfig, processor: StatefulProcessor, spark_handle: StatefulProcessorHandle
    ) -> None:
        policy = policy_from_text(config.policy)
        store = store_config(policy, retain_versions=config.retain_versions)
        super().__init__(config, policy, store, {"kind": "stateful", "key": json.loads(config.key.json())["fields"]})
        self._stateful = config
        self._processor = processor
        context = TaskContext.get()
        assert context is not None
        # The query's own settings, from its checkpoint.
        self._by_name = context.getLocalProperty(_ENCODING) == "avro"
        self._partition = context.partitionId()
        self._partitions = next((int(found) for name in _PARTITIONS if (found := context.getLocalProperty(name))), 0)
        self._keys = Keys(config.key)
        self._handle = Handle(config.time_mode, 0, _parser(spark_handle))
        processor.init(self._handle)
        self._handle.initialized()
        self.deleted, self.undone = self._handle.deleted, self._handle.undone

    @property
    def partitions(self) -> list[list[int]]:
        """The shards that Spark sends to each partition of state. The first one is most likely that of this task.

        It is not if the result is part of a union: then Spark numbers the partitions of the whole union.
        """
        if not self._partitions:
            return [list(self._config.ids)]
        found = defaultdict(list)
        for shard in self._config.ids:
            found[(partition_of(shard, self._partitions) - self._partition) % self._partitions].append(shard)
        return [found[distance] for distance in sorted(found)]

    def may_have(self, shard: int, token: str, names: frozenset[str]) -> bool:
        """Returns whether the version ``token`` of a shard may have one of these state variables."""
        known, there = _variables.get((self._query, self._config.name, shard), ("", names))
        return known != token or not names.isdisjoint(there)

    def learn(self, shard: int, token: str, work: StatefulWork) -> None:
        """Notes which state variables the version ``token`` of a shard has, for :meth:`may_have`."""
        _variables[self._query, self._config.name, shard] = token, work.names

    def work(self, shard: int, token: str | None, times: TimerValues, now_ms: int) -> StatefulWork:
        """Starts an attempt on a shard, at the version ``token``. None: the shard has no version yet.

        ``now_ms``: the time up to which timers expire in this batch.
        """
        self._handle.now_ms = times.getCurrentProcessingTimeInMs()
        attempt = self.open(shard, token)
        ahead = prestages(self.policy)
        variables = variables_of(attempt.snapshot, self._by_name)
        return StatefulWork(
            self._stateful, self._processor, self._handle, attempt, variables, self._keys, times, now_ms, ahead
        )


class StatefulWork:
    """One attempt of one batch on one shard. ``ended``: whether the batch's rows have been processed."""

    def __init__(
        self,
        config: StatefulConfig,
        processor: StatefulProcessor,
        handle: Handle,
        attempt: RemoteAttempt,
        variables: Variables,
        keys: Keys,
        times: TimerValues,
        now_ms: int,
        reads_ahead: bool,
    ) -> None:
        self._config, self._keys, self._handle = config, keys, handle
        self.attempt = attempt
        self._variables = variables
        self._now_ms = now_ms
        due_ms = None if config.time_mode == "none" else now_ms
        backwards = batch_of(attempt.makes) % 2 == 1
        self._run = ShardRun(
            processor, handle, variables, attempt, keys, times, due_ms, attempt.snapshot, reads_ahead, backwards
        )
        self._initial: list[Any] = []
        self._commit: Future[None] | None = None
        self._due_ms: int | None = None
        self.ended = False

    @property
    def makes(self) -> str:
        return self.attempt.makes

    @property
    def due_ms(self) -> int | None:
        return self._due_ms

    @property
    def names(self) -> frozenset[str]:
        """The state variables of the shard: as its version has them, and when its work has ended, as it leaves them."""
        return self._variables.names

    @property
    def soon_ms(self) -> int | None:
        """The time of a timer that opens this shard again, after the rows of this batch. None: there are no timers."""
        return None if self._config.time_mode == "none" else self._now_ms

    def initial_rows(self, rows: Any) -> None:
        """Keeps rows of the initial state until all of the shard are there."""
        self._initial.append(rows)

    def rows(self, rows: Iterator[Any], seen_ms: int) -> Iterator[Any]:
        """Processes the batch: initial state, rows, timers. ``rows``: frames, or packed by the child.

        ``seen_ms``: rows with event times up to this are late.
        """
        self._handle.begin_shard(self._variables)
        self._take_initial()
        results = self._results(self._groups(rows, self._config.columns, seen_ms))
        with _rare_collections():
            yield from joined(results) if self._config.pandas else results
        self.ended = True

    def end_without_rows(self) -> None:
        """Processes the initial state of a shard for which no row and no timer came."""
        self._handle.begin_shard(self._variables)
        self._take_initial()
        self.ended = True

    def restore(self, packed: Sequence[bytes], declared: Sequence[Declaration]) -> None:
        """Puts state from elsewhere into the shard, which has none. ``packed``: rows as :func:`restored_keys` reads."""
        self._handle.begin_shard(self._variables)
        if packed:
            states = restored_keys(unpack(packed), self._keys, len(self._config.key), len(declared))
            self._run.restore(states, declared)
        self.ended = True

    def begin_commit(self) -> None:
        if self._config.time_mode != "none":
            self._due_ms = self._run.next_wake_ms()
        self._commit = in_background(self.attempt.commit, self._run.snapshot())

    def committed(self) -> None:
        assert self._commit is not None
        self._commit.result()

    def abort(self) -> None:
        if self._commit is not None:
            wait([self._commit])
        self.attempt.abort()

    def _results(self, groups: Iterator[Group]) -> Iterator[Any]:
        yield from self._run.rows(groups)
        yield from self._run.timers()

    def _take_initial(self) -> None:
        rows, self._initial = self._initial, []
        if rows:
            assert self._config.initial is not None
            self._run.initial(self._groups(iter(rows), self._config.initial, None))

    def _groups(self, rows: Iterator[Any], columns: Columns, seen_ms: int | None) -> Iterator[Group]:
        listed = list(rows)
        if not listed:
            return iter(())
        if self._config.pandas:
            return group_frames(listed, self._keys, columns.key, slice(columns.own, len(columns.names)))
        table = unpack(listed)
        if seen_ms is not None and self._config.event_time is not None:
            time_us = table.column(self._config.event_time)
            in_time = pc.fill_null(pc.greater(time_us, seen_ms * 1000), True)
            arrived, table = table.num_rows, table.filter(in_time)
            self._run.dropped(arrived - table.num_rows)
        return group_table(table, self._keys, columns.key, columns.names)


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
            yield _joined(waiting, names)
            waiting, rows, size = [], 0, 0
        if columns is None:
            yield frame
            continue
        names, types = frame.columns, of_columns
        waiting.append(columns)
        rows += len(frame)
        size += sum(map(_size_bytes, columns))
        if rows >= _FRAME_ROWS or size >= _FRAME_BYTES:
            yield _joined(waiting, names)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield _joined(waiting, names)


def _size_bytes(column: npt.NDArray[Any]) -> int:
    """About the memory of a column, with the texts and bytes that it refers to."""
    if column.dtype != object:
        return column.nbytes
    return column.nbytes + sum(len(value) for value in column if isinstance(value, str | bytes))


def _copied(frame: pd.DataFrame) -> tuple[list[npt.NDArray[Any]] | None, list[Any]]:
    """Returns copies of the columns, and their types. None: they are not numpy's, or what is in them may change, as
    lists may.

    The type of a column of objects is what pandas finds in it.
    """
    columns, types = [], []
    for _, column in frame.items():  # noqa: PERF102 (a frame's values are something else)
        type_: Any = column.dtype
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


def _joined(waiting: list[list[npt.NDArray[Any]]], names: Any) -> pd.DataFrame:
    frame = pd.DataFrame(dict(enumerate(map(np.concatenate, zip(*waiting, strict=True)))))
    frame.columns = names
    return frame


_parsed: dict[str, StructType] = {}
_variables: dict[tuple[str, str, int], tuple[str, frozenset[str]]] = {}
"""By query, operator and shard: a version's token, and its state variables."""


def _parser(handle: StatefulProcessorHandle) -> Callable[[str], StructType]:
    """Parses schemas of state variables in DDL, as Spark's own handle does: by asking the JVM. Once for each text."""

    def parse(text: str) -> StructType:
        found = _parsed.get(text)
        if found is None:
            found = _parsed[text] = handle._statefulProcessorApiClient._parse_string_schema(text)
        return found

    return parse
