"""The child: turns the events of a source partition into blocks, before the shuffle (Disco's child)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import pyarrow as pa

from aion.base.hashing import ShardOfKeys
from aion.core.ingest.builder import BlockBuilder, Flagged
from aion.core.ingest.encoding import BlockSettings
from aion.core.ingest.grouped import GROUP, Grouped
from aion.core.query.plan import Plan
from aion.core.slicing.grid import AHEAD_SLICE, DROPPED_SLICE
from aion.core.topology import Tree
from aion.spark.session.group_counter import GroupCounter
from aion.spark.tasks.blocks import BlockRows
from aion.spark.tasks.hand_over import HandOverConfig, Sending
from aion.spark.tasks.shards import ids_here
from aion.spark.tasks.worker import begin_task
from aion.spark.tasks.zones import slicing_plan
from state_backends.store.codec_pool import CodecPool
from state_backends.thresholds import threshold

AHEAD, NO_EVENT, DROPPED_BEFORE = 1, 2, 3
"""Flags of rows: the time is ahead of the clock; it is no event; earlier windows dropped it. 0: none of these."""
FLAGGED = {AHEAD: AHEAD_SLICE, DROPPED_BEFORE: DROPPED_SLICE}
"""The slices of rows that no window takes, by their flags."""

# Each pass over a batch has a fixed cost, and Spark's batches are small because their rows may be wide.
_ROWS_AT_ONCE = threshold(1 << 16)
_BYTES_AT_ONCE = threshold(8 << 20, 256)


@dataclass(frozen=True)
class ChildWork:
    """What the tasks of all levels need to make blocks: plain values.

    A worker that receives it loads neither pydantic nor RocksDB. ``name``: the operator's. ``hand_over``: None if
    children send all blocks as rows.
    """

    plan: Plan
    settings: BlockSettings
    tree: Tree
    limit_bytes: int
    name: str
    hand_over: HandOverConfig | None

    @property
    def key_types(self) -> list[pa.DataType]:
        return [self.plan.schema.field(name).type for name in self.plan.key]

    @property
    def shards(self) -> tuple[int, ...]:
        """The ids of the shards. Call it inside a task."""
        return ids_here(self.name, self.tree.shards)

    @contextmanager
    def begun(self) -> Iterator[tuple[BlockBuilder, Sending]]:
        """Begins a task. The builder needs the shards of the events if they cannot be computed here."""
        begin_task()
        rows = BlockRows(self.tree, 0, self.limit_bytes, self.shards)
        shard_of = ShardOfKeys(self.shards) if ShardOfKeys.covers(self.key_types) else None
        with CodecPool(self.settings.threads) as pool, closing(Sending(rows, self.hand_over)) as sending:
            yield BlockBuilder(self.task_plan, self.settings, pool, shard_of), sending

    @property
    def task_plan(self) -> Plan:
        """The plan as tasks need it. Call it inside a task."""
        return slicing_plan(self.plan, self.name)


class Child:
    """The function for ``mapInArrow``. Its input is the columns of the plan; then the hash of the key, if that cannot
    be computed here; and further columns, which it does not need. Or Spark has grouped the events
    (:mod:`aion.core.ingest.grouped`).

    ``has_flags``: the column after those says which rows no window takes, and which are no events. ``counter``: counts
    the blocks, if Spark may group the events.
    """

    def __init__(self, work: ChildWork, *, has_flags: bool = False, counter: GroupCounter | None = None) -> None:
        self._work = work
        self._has_flags = has_flags
        self._count = iter if counter is None else counter.of

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        plan = self._work.plan
        schema, sent = plan.schema, len(plan.schema)
        hashed = None if ShardOfKeys.covers(self._work.key_types) else ShardOfKeys(self._work.shards)
        with self._work.begun() as (builder, sending):
            for batch in together(batches):
                if batch.schema.names[0].startswith(GROUP):
                    yield from sending.of(self._count(Grouped(plan).blocks(batch, builder)))
                    continue
                flagged = None
                if self._has_flags:
                    batch, flagged = _without_flags(batch, sent if hashed is None else sent + 1)
                events = pa.RecordBatch.from_arrays(
                    [
                        column if column.type == field.type else column.cast(field.type)
                        for column, field in zip(batch.columns[:sent], schema, strict=True)
                    ],
                    schema=schema,
                )
                shards = None if hashed is None else pa.array(hashed.of_hashes(batch.column(sent).to_numpy()))
                yield from sending.of(self._count(builder.add(events, shards, flagged)))
            yield from sending.finish(self._count(builder.finish()))


def together(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Joins batches until they have ``_ROWS_AT_ONCE`` rows or ``_BYTES_AT_ONCE`` bytes. The last may have less."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        size_of = batch.get_total_buffer_size()  # nbytes takes as long as a copy
        if waiting and size_of >= _BYTES_AT_ONCE:
            # It is large enough alone. Together, the texts might be more than an array holds.
            yield _joined(waiting)
            waiting, rows, size = [], 0, 0
        waiting.append(batch)
        rows += batch.num_rows
        size += size_of
        if rows >= _ROWS_AT_ONCE or size >= _BYTES_AT_ONCE:
            yield _joined(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield _joined(waiting)


def _without_flags(batch: pa.RecordBatch, column: int) -> tuple[pa.RecordBatch, Flagged | None]:
    """Returns the rows that are events, and a mask of those that no window takes, for one reason. It is None without
    such rows.
    """
    flags = batch.column(column).to_numpy()
    if not flags.any():
        return batch, None
    if not (is_event := flags != NO_EVENT).all():
        batch, flags = batch.filter(pa.array(is_event)), flags[is_event]
    return batch, Flagged(flags > 0, FLAGGED[int(flags.max())]) if flags.any() else None


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)  # which copies even a single one
