"""The child: turns the events of a source partition into blocks, before the shuffle (Disco's child)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pyarrow as pa

from aion.config import policy_from_text
from aion.core.ingest.hashing import ShardOfKeys
from aion.core.plan import Plan
from aion.core.topology import Tree
from aion.execute.assembly import make_builder
from aion.spark.blocks import BlockRows
from aion.spark.hand_over import HandOverConfig, Sending
from state_backends.store.codec_pool import CodecPool

# Each pass over a batch has a fixed cost, and Spark's batches are small because their rows may be wide.
_ROWS_AT_ONCE = 1 << 16
_BYTES_AT_ONCE = 8 << 20


class Child:
    """The function for ``mapInArrow``. Its input is the plan's columns; without ``shard_of``, also the shard id.

    ``policy``: as JSON text, which a worker parses once. ``hand_over``: None if all blocks are sent as rows.
    """

    def __init__(
        self,
        plan: Plan,
        policy: str,
        shard_of: ShardOfKeys | None,
        tree: Tree,
        limit_bytes: int,
        hand_over: HandOverConfig | None = None,
    ) -> None:
        self._plan = plan
        self._hand_over = hand_over
        self._policy = policy
        self._shard_of = shard_of
        self._tree = tree
        self._limit_bytes = limit_bytes

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        policy = policy_from_text(self._policy)
        rows = BlockRows(self._tree, level=0, limit_bytes=self._limit_bytes)
        with CodecPool(policy.io.codec_threads) as pool, closing(Sending(rows, self._hand_over)) as sending:
            builder = make_builder(self._plan, policy, pool, self._shard_of)
            for batch in together(batches):
                events = pa.RecordBatch.from_arrays(
                    [
                        column if column.type == field.type else column.cast(field.type)
                        for column, field in zip(batch.columns, self._plan.schema, strict=False)
                    ],
                    schema=self._plan.schema,
                )
                shards = batch.column(len(self._plan.schema)) if self._shard_of is None else None
                yield from sending.of(builder.add(events, shards))
            yield from sending.finish(builder.finish())


def together(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Joins batches until they have ``_ROWS_AT_ONCE`` rows or ``_BYTES_AT_ONCE`` bytes. The last may have less."""
    waiting: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        size += batch.get_total_buffer_size()  # nbytes takes as long as a copy
        if rows >= _ROWS_AT_ONCE or size >= _BYTES_AT_ONCE:
            yield _joined(waiting)
            waiting, rows, size = [], 0, 0
    if waiting:
        yield _joined(waiting)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)  # which copies even a single one
