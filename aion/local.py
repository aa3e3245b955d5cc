"""The same operator in one process, without Spark: for tests, simulation and small data."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from time import time_ns
from types import TracebackType
from typing import Any

import pyarrow as pa
from rocksdict import Cache

from aion.aggregates import Aggregate
from aion.config import Policy, load_policy
from aion.core.ingest.hashing import ShardOfKeys
from aion.core.plan import ApplyFunction, Plan, make_plan
from aion.core.time import instant_us
from aion.core.windows import Definitions, named
from aion.errors import SchemaError
from aion.execute.assembly import make_builder, make_executor, make_operator, predicts, store_config
from aion.execute.executor import Executor
from aion.execute.trace import Definition, Recorder
from policies.sizing import processing_bytes_per_s
from state_backends.server.machine import memory_limit_bytes, memory_share_used
from state_backends.store.codec_pool import CodecPool
from state_backends.store.io_thread import IoStats
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.p_bucket import PBucket, cache_bytes
from state_backends.store.pressure import PressureManager
from state_backends.store.protocol import BlockStore
from state_backends.store.session import StoreSession

_EXECUTIONS_REMEMBERED = 256  # of which the median is what idle_after means by a multiple


class LocalOperator:
    """Windowed aggregation over pyarrow tables, with the same panes as on Spark.

    ``process(table)`` and ``advance(watermark)`` return tables of the columns that :func:`aion.windowed`
    yields. Late executions that a call triggers come out of the next one, as those of a Spark batch come out
    at its end. Close it, or use it as a context manager: its state lies in a temporary folder. ``record``: a folder
    for a trace of what comes (docs/tuning.md).
    """

    def __init__(
        self,
        *,
        windows: Definitions,
        time: str,
        key: str | Sequence[str] | None = None,
        aggregates: Mapping[str, Aggregate] | None = None,
        apply: ApplyFunction | None = None,
        schema: str | pa.Schema | None = None,
        blocking: bool = True,
        policy: str | Path | Mapping[str, Any] | Policy = "standard",
        record: str | Path | None = None,
    ) -> None:
        self._record = record
        self._recorder: Recorder | None = None
        self._batches = 0
        self._definition: dict[str, Any] = {
            "windows": windows,
            "time": time,
            "key": key,
            "aggregates": aggregates,
            "apply": apply,
            "outputs": schema,
            "blocking": blocking,
        }
        self.policy = load_policy(policy)
        self._folder = tempfile.TemporaryDirectory(prefix="aion-local-")
        config = store_config(self.policy, windows=named(windows).values(), blocking=blocking and apply is not None)
        self._io = config.make_io()
        self._budget = MemoryBudget(config.budget(memory_limit_bytes()))
        folder = Path(self._folder.name)
        size = cache_bytes(self._budget.limit_bytes)
        self._budget.reserve(size)
        cache = Cache(size)
        p_bucket = PBucket(folder / "files", folder / "live", durable=False, cache=cache)
        self._store = config.make_store(p_bucket, self._io, self._budget)
        self._codec = CodecPool(self.policy.io.codec_threads)
        self._pressure = PressureManager(self._budget, config.make_destage(), memory_share_used)
        self._executor: Executor | None = None
        self._executions_s: deque[float] = deque(maxlen=_EXECUTIONS_REMEMBERED)
        self._watermark: int | None = None
        self._has_events = False  # in the batch at work
        self._closed = False

    def process(self, table: pa.Table | pa.RecordBatch) -> pa.Table:
        """Takes events; returns late panes of the call before, and dropped rows of this one.

        Raises SchemaError for a table whose columns do not fit the first one's, or the definition.
        """
        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        executor = self._executor or self._start(table.schema)
        plan = executor.plan
        # A batch is an advance, if there is one, and what is processed after it: as on Spark.
        rows = self._end_batch(executor) if self._has_events else []
        self._has_events = True
        builder = make_builder(plan, self.policy, self._codec, ShardOfKeys([0]))
        for batch in _conform(table, plan).to_batches():
            rows += executor.arrive([b.block for b in builder.add(batch)])
        rows += executor.arrive([b.block for b in builder.finish()])
        return self._answer(rows)

    def advance(self, watermark: int | datetime) -> pa.Table:
        """Moves the watermark (µs since the epoch, or a datetime); an older one changes nothing."""
        at_us = instant_us(watermark)
        if self._executor is None:
            self._watermark = at_us if self._watermark is None else max(at_us, self._watermark)
            return pa.table({})
        rows = [*self._end_batch(self._executor), *self._executor.advance(at_us)]
        self._has_events = False
        return self._answer(rows)

    def close(self) -> pa.Table:
        """Executes late windows that got events since they were executed last; lets go of everything."""
        if self._closed:
            return pa.table({})
        self._closed = True
        try:
            if self._recorder is not None:
                self._recorder.ended()
            return self._answer(self._end_batch(self._executor, last=True)) if self._executor else pa.table({})
        finally:
            self._store.close()
            self._codec.close()
            self._io.close()
            self._folder.cleanup()

    @property
    def counters(self) -> dict[str, Any]:
        """Events, late events, dropped, windows, and executions by kind, so far."""
        return self._executor.operator.counters.to_json() if self._executor else {}

    @property
    def store(self) -> BlockStore:
        """Where the blocks are, for those who want to look."""
        return self._store

    @property
    def io(self) -> IoStats:
        """What the disk was asked so far, by priority."""
        return self._io.stats

    def __enter__(self) -> LocalOperator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, schema: pa.Schema) -> Executor:
        plan = make_plan(normal_schema(schema, self._definition["time"]), **self._definition)
        operator = make_operator(plan, self.policy, None)
        self._executor = make_executor(plan, operator, StoreSession(self._store), self._codec, self.policy)
        if self._record is not None:
            self._recorder = Recorder(Path(self._record), Definition.of(plan, commits=False))
            self._recorder.begin(0, None)
            self._executor.recorder = self._recorder
            self._store.listen(self._recorder.staged, self._recorder.written)
        if self._watermark is not None:
            for _ in self._executor.advance(self._watermark):
                raise AssertionError("an operator without events has nothing to say")
        return self._executor

    def _end_batch(self, executor: Executor, *, last: bool = False) -> list[pa.RecordBatch]:
        begin_us = time_ns() // 1000
        rows = list(executor.end_batch(last=last))
        if self._recorder is not None:
            self._recorder.write()
            self._batches += 1
            # What the call began with was of the batch before, but it began when the call did.
            self._recorder.begin(self._batches, executor.operator.watermark.at_us, begin_us)
        return rows

    def _answer(self, rows: Iterable[pa.RecordBatch]) -> pa.Table:
        assert self._executor is not None
        table = pa.Table.from_batches(list(rows), self._executor.plan.result_schema)
        executor = self._executor
        if executor.executions:
            self._store.processing_bytes_per_s = processing_bytes_per_s(executor.executions)
            self._executions_s.extend(execution.seconds for execution in executor.executions)
            executor.executions.clear()
        self._store.flush()
        self._store.compact()
        if predicts(self.policy):
            self._store.prestage(executor.due_next(executor.operator.watermark.expected_next()))
        self._pressure.tick([("local", self._store)], median(self._executions_s) if self._executions_s else None)
        return table


def normal_schema(schema: pa.Schema, time: str) -> pa.Schema:
    """Timestamps in microseconds, UTC or without zone; dictionaries as the values they stand for."""
    if time in schema.names and not pa.types.is_timestamp(schema.field(time).type):
        raise SchemaError(f"time: column {time!r} is of type {schema.field(time).type}; a timestamp is needed")
    return pa.schema([pa.field(f.name, _normal_type(f.type)) for f in schema])


def _normal_type(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(type_):
        return _normal_type(type_.value_type)
    if pa.types.is_timestamp(type_):
        return pa.timestamp("us", "UTC" if type_.tz else None)
    return type_


def _conform(table: pa.Table, plan: Plan) -> pa.Table:
    missing = [name for name in plan.schema.names if name not in table.schema.names]
    if missing:
        raise SchemaError(f"process: the table has no column {missing[0]!r}; it has {', '.join(table.schema.names)}")
    try:
        return table.select(plan.schema.names).cast(plan.schema)
    except (pa.ArrowException, ValueError, TypeError) as error:
        raise SchemaError(f"process: the table does not fit the first one's columns: {error}") from error
