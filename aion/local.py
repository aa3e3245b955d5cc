"""The operator in one process, without Spark: for tests, for simulation and for small data."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Unpack, overload

import pyarrow as pa

from aion.base.hashing import ShardOfKeys
from aion.base.html import html_of
from aion.base.schema import parse_schema
from aion.base.time import format_instant, instant_us
from aion.config import load_policy
from aion.core.query.pane_columns import metadata_of, with_metadata
from aion.core.query.plan import Plan
from aion.core.windows import named
from aion.errors import ConfigError, SchemaError
from aion.execute.assembly import check_overlap, longest_bound_us, make_builder, make_contents, store_config
from aion.execute.record.recorder import Recorder
from aion.execute.record.trace import Definition, trace_folder
from aion.execute.windows import Windows
from aion.spec import Changes, Keywords, Spec, shows_fields, spec_of
from policies.sizing import processing_bytes_per_s
from state_backends.backends import make_cache
from state_backends.server.machine import memory_limit_bytes, memory_share_used
from state_backends.store.attempt import StoreAttempt
from state_backends.store.codec_pool import CodecPool
from state_backends.store.io_thread import IoStats
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.map.store import LocalValues
from state_backends.store.p_bucket import PBucket
from state_backends.store.pressure import PressureManager
from state_backends.store.protocol import BlockStore

_EXECUTIONS_REMEMBERED = 256  # destage.idle_after may be a multiple of their median


class LocalOperator:
    """Windowed aggregation over pyarrow tables, with the same panes as on Spark.

    ``process(table)`` and ``advance(watermark)`` return tables with the columns of :func:`aion.windowed`. Each call is
    a batch and returns what its events and its watermark trigger, late executions included. If the trigger of a late
    execution waits, the call that ends the wait returns the pane. ``process(table, watermark)`` is like a micro-batch
    of Spark: first the watermark moves, then the events come, and at the end each late window runs once.

    ``input_schema``: the columns of the tables, as a pyarrow schema or as Spark's DDL. With it, each answer has the
    types of the result, and a definition that does not fit the columns is refused at once. Without it, both wait for
    the first table: until then, a column whose type depends on the input has type ``null``.

    The keywords say what to compute. They are the fields of :class:`aion.Spec`, as for :func:`aion.windowed`. You can
    also give a ``spec``; keywords win over it. Close the operator, or use it as a context manager: its state lies in a
    temporary folder. Nothing of it survives: unlike on Spark, a batch ends without a version on disk.
    """

    @overload
    def __init__(self, /, *, input_schema: str | pa.Schema | None = None, **definition: Unpack[Keywords]) -> None: ...
    @overload
    def __init__(
        self, spec: Spec, /, *, input_schema: str | pa.Schema | None = None, **changes: Unpack[Changes]
    ) -> None: ...
    @shows_fields
    def __init__(
        self,
        spec: Spec | None = None,
        /,
        *,
        input_schema: str | pa.Schema | None = None,
        **definition: Any,
    ) -> None:
        spec = spec_of("LocalOperator", spec, definition)
        if spec.time is None:
            raise TypeError("LocalOperator() needs the keyword argument 'time'")
        if spec.apply is not None and type(spec.apply.schema).__name__ == "StructType":  # so pyspark is installed
            from aion.spark.session.types import arrow_schema

            spec = replace(spec, apply=replace(spec.apply, schema=arrow_schema(spec.apply.schema)))
        self._spec = spec
        self._recorder: Recorder | None = None
        self._batches = 0
        self.policy = load_policy("standard" if spec.policy is None else spec.policy, spec.policy_overrides)
        check_overlap(spec.windows, self.policy)
        self._folder = tempfile.TemporaryDirectory(prefix="aion-local-")
        config = store_config(
            self.policy, windows=named(spec.windows).values(), blocking=spec.apply is not None and spec.apply.blocking
        )
        self._io = config.make_io()
        self._budget = MemoryBudget(config.budget(memory_limit_bytes()))
        folder = Path(self._folder.name)
        p_bucket = PBucket(folder / "files", folder / "live", durable=False, cache=make_cache(self._budget))
        self._stores = config.make_stores(p_bucket, self._io, self._budget)
        self._store = self._stores.blocks
        self._values = LocalValues(self._stores.values)
        self._attempt = StoreAttempt(self._store, self._stores.values)
        self._codec = CodecPool(self.policy.io.codec_threads)
        self._pressure = PressureManager(self._budget, config.make_destage(), memory_share_used)
        self._windows: Windows | None = None
        self._executions_s: deque[float] = deque(maxlen=_EXECUTIONS_REMEMBERED)
        self._watermark: int | None = None
        self._closed = False
        if input_schema is not None:
            try:
                self._start(parse_schema(input_schema))
            except BaseException:
                self._let_go()
                raise

    def process(self, table: pa.Table | pa.RecordBatch, watermark: int | datetime | None = None) -> pa.Table:
        """Moves the watermark if one is given, then takes the events. Returns what both trigger.

        The answer has dropped rows, late panes, and the on-time and final panes that the watermark makes due. Raises
        SchemaError if the table's columns do not fit the first table or the definition.
        """
        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        if not isinstance(table, pa.Table):
            raise TypeError(f"process: a pyarrow table or record batch is needed, not {type(table).__name__}")
        self._check_open()
        at_us = None if watermark is None else instant_us(watermark)
        windows = self._windows or self._start(table.schema)
        return self._batch(windows, _conform(table, windows.plan), at_us)

    def advance(self, watermark: int | datetime) -> pa.Table:
        """Moves the watermark (µs since the epoch, or a datetime) and returns what becomes due.

        The watermark never goes back: an older one changes nothing.
        """
        self._check_open()
        at_us = instant_us(watermark)
        if self._windows is None:
            self._watermark = at_us if self._watermark is None else max(at_us, self._watermark)
            return self._nothing()
        return self._batch(self._windows, None, at_us)

    def close(self) -> pa.Table:
        """Executes each late window with events since its last execution, then frees memory, threads and files."""
        if self._closed:
            return self._nothing()
        self._closed = True
        try:
            if self._windows is None:
                return self._nothing()
            return self._batch(self._windows, None, None, ends_run=True)
        finally:
            self._let_go()

    @property
    def counters(self) -> dict[str, Any]:
        """What the operator has counted so far: events, late events, dropped ones, windows, executions by kind."""
        return self._windows.operator.counters.to_json() if self._windows else {}

    @property
    def store(self) -> BlockStore:
        """The store that holds the blocks, to look at."""
        return self._store

    @property
    def io(self) -> IoStats:
        """The I/O so far, by priority."""
        return self._io.stats

    def _repr_html_(self) -> str:
        at_us = self._windows.operator.watermark.at_us if self._windows else self._watermark
        watermark = "none" if at_us is None else format_instant(at_us)
        state = {"watermark": watermark, "closed": self._closed, **self.counters}
        return self._spec._repr_html_() + html_of("aion.LocalOperator", state)

    def __enter__(self) -> LocalOperator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this operator is closed; make another one")

    def _start(self, schema: pa.Schema) -> Windows:
        plan = self._spec.plan(normal_schema(schema, self._spec.time_column))
        contents = make_contents(plan, self._codec, self.policy)
        windows = Windows(plan, self.policy, self._attempt, None, contents)
        if self.policy.trace.folder is not None:
            folder = Path(trace_folder(self.policy.trace.folder, self._spec.name))
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"trace.folder: {folder} cannot be a folder: {error.strerror}") from error
            self._recorder = Recorder(folder, Definition.of(plan, commits=False))
            self._recorder.begin(0, None)
            windows.record(self._recorder)
            self._store.listen(self._recorder.staged, self._recorder.written)
        if self._watermark is not None:
            for _ in (*windows.advance(self._watermark), *windows.end_batch()):
                raise AssertionError("an operator without events has nothing to say")
        self._windows = windows
        return windows

    def _nothing(self) -> pa.Table:
        """A table of the result's columns without rows. A type that depends on unknown input is null."""
        if self._windows is not None:
            return self._result_schema(self._windows.plan).empty_table()
        return self._spec.unbound_result().empty_table()

    def _batch(
        self, windows: Windows, table: pa.Table | None, watermark_us: int | None, *, ends_run: bool = False
    ) -> pa.Table:
        """The watermark first, then the events, and late executions at the end: like a micro-batch of Spark."""
        self._attempt.begin(windows.operator.next_seq)
        try:
            rows = self._carry_out(windows, table, watermark_us, ends_run=ends_run)
            windows.executor.save()  # no version is made, so no snapshot is needed
            self._values.settle()
        finally:
            # The operator keeps what it decided, even if a user's function fails. So the store keeps its part too.
            self._attempt.end()
        if self._recorder is not None:
            self._recorder.write()
            self._batches += 1
            # The store's I/O between two calls belongs to the next batch.
            self._recorder.begin(self._batches, windows.operator.watermark.at_us)
        return self._answer(windows, rows)

    def _carry_out(
        self, windows: Windows, table: pa.Table | None, watermark_us: int | None, *, ends_run: bool
    ) -> list[pa.RecordBatch]:
        rows: list[pa.RecordBatch] = []
        if self._recorder is not None:
            self._recorder.called()
            if ends_run:
                self._recorder.ended()
        if watermark_us is not None:
            rows += windows.advance(watermark_us)
        if table is not None:
            builder = make_builder(windows.plan, self.policy, self._codec, ShardOfKeys([0]))
            for batch in table.to_batches():
                rows += windows.arrive([b.block for b in builder.add(windows.fresh(batch))])
            rows += windows.arrive([b.block for b in builder.finish()])
        rows += windows.end_batch(ends_run=ends_run, batch_follows=True)  # what waits runs in close() at the latest
        return rows

    def _answer(self, windows: Windows, rows: Iterable[pa.RecordBatch]) -> pa.Table:
        table = pa.Table.from_batches(list(rows), self._result_schema(windows.plan))
        if executed := windows.take_executions():
            self._store.processing_bytes_per_s = processing_bytes_per_s(executed)
            self._executions_s.extend(execution.seconds for execution in executed)
        self._store.flush()
        self._store.compact()
        due = windows.plan_next()
        self._store.plan(due)
        if due:
            self._store.prestage(due)
        self._pressure.tick([("local", self._store)], median(self._executions_s) if self._executions_s else None)
        return table

    def _result_schema(self, plan: Plan) -> pa.Schema:
        """Returns the columns of a result, which say in their metadata what they are."""
        return with_metadata(
            plan.result_schema, metadata_of(plan, self._spec.name, longest_bound_us(plan, self.policy))
        )

    def _let_go(self) -> None:
        self._stores.close()
        self._codec.close()
        self._io.close()
        self._folder.cleanup()


def normal_schema(schema: pa.Schema, time: str) -> pa.Schema:
    """The same columns with timestamps in microseconds, UTC or without zone, and with types that can be computed with.

    Raises SchemaError if two columns have the same name.
    """
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise SchemaError(f"the table has {schema.names.count(name)} columns {name!r}; give them different names")
    if time in schema.names and not pa.types.is_timestamp(schema.field(time).type):
        raise SchemaError(f"time: column {time!r} is of type {schema.field(time).type}; a timestamp is needed")
    return pa.schema([pa.field(f.name, _normal_type(f.type)) for f in schema])


def _normal_type(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(type_):
        return _normal_type(type_.value_type)
    # pyarrow has few functions for these three.
    if pa.types.is_string_view(type_):
        return pa.string()
    if pa.types.is_binary_view(type_):
        return pa.binary()
    if pa.types.is_float16(type_):
        return pa.float32()
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
        hint = " Times are in microseconds: cast nanoseconds to timestamp('us')." if "lose data" in str(error) else ""
        raise SchemaError(f"process: the table does not fit the first one's columns: {error}.{hint}") from error
