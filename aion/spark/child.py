"""The child: on every source partition, events in and blocks out, in front of the shuffle (Disco's child)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from aion.builder import ShardBlock
from aion.config import policy_from_json
from aion.hashing import ShardOfKeys
from aion.plan import Plan
from aion.runtime import make_builder
from state_backends.codec_pool import CodecPool

BLOCK_ROWS = "shard int, block binary"
_SCHEMA = pa.schema([("shard", pa.int32()), ("block", pa.binary())])
# Rows of more than this go to Spark by themselves; smaller ones share a batch.
_BATCH_BYTES = 4 << 20


class Child:
    """The function for ``mapInArrow``; its input are the plan's columns and, if not ``shard_of``, the shard id."""

    def __init__(self, plan: Plan, policy: dict[str, Any], shard_of: ShardOfKeys | None) -> None:
        self._plan = plan
        self._policy = policy
        self._shard_of = shard_of

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        policy = policy_from_json(self._policy)
        with CodecPool(policy.io.codec_threads) as pool:
            builder = make_builder(self._plan, policy, pool, self._shard_of)
            for batch in batches:
                events = pa.RecordBatch.from_arrays(
                    [
                        column if column.type == field.type else column.cast(field.type)
                        for column, field in zip(batch.columns, self._plan.schema, strict=False)
                    ],
                    schema=self._plan.schema,
                )
                shards = batch.column(len(self._plan.schema)) if self._shard_of is None else None
                yield from _rows(builder.add(events, shards))
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
