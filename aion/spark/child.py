"""The child: on every source partition, events in and blocks out, in front of the shuffle (Disco's child)."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from aion.builder import BlockBuilder, ShardBlock
from aion.plan import Plan
from state_backends.block import Compression

BLOCK_ROWS = "shard int, block binary"
_SCHEMA = pa.schema([("shard", pa.int32()), ("block", pa.binary())])
# Rows of more than this go to Spark by themselves; smaller ones share a batch.
_BATCH_BYTES = 4 << 20


class Child:
    """The function for ``mapInArrow``; its input is the shard id followed by the plan's columns."""

    def __init__(self, plan: Plan, target_bytes: int, compression: str) -> None:
        self._plan = plan
        self._target_bytes = target_bytes
        self._compression = compression

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        builder = BlockBuilder(
            self._plan,
            target_bytes=self._target_bytes,
            compression=Compression[self._compression.upper()],
        )
        for batch in batches:
            events = pa.RecordBatch.from_arrays(
                [
                    column if column.type == field.type else column.cast(field.type)
                    for column, field in zip(batch.columns[1:], self._plan.schema, strict=True)
                ],
                schema=self._plan.schema,
            )
            yield from _rows(builder.add(events, batch.column(0)))
        yield from _rows(builder.finish())


def _rows(blocks: Iterator[ShardBlock]) -> Iterator[pa.RecordBatch]:
    waiting: list[ShardBlock] = []
    size = 0
    for block in blocks:
        waiting.append(block)
        size += block.block.size_bytes
        if size >= _BATCH_BYTES:
            yield _batch(waiting)
            waiting, size = [], 0
    if waiting:
        yield _batch(waiting)


def _batch(blocks: list[ShardBlock]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [
            pa.array([b.shard for b in blocks], pa.int32()),
            pa.array([b.block.data for b in blocks], pa.binary()),
        ],
        schema=_SCHEMA,
    )
