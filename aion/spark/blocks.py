"""Blocks as rows of Spark's: what crosses every shuffle between child, merging levels and root."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext

from aion.builder import ShardBlock
from aion.topology import Tree
from state_backends.block import parse

# Rows of more than this go to Spark by themselves; smaller ones share a batch.
_BATCH_BYTES = 4 << 20
_TO_ROOT = pa.schema([("shard", pa.int32()), ("block", pa.binary())])
_TO_LEVEL = _TO_ROOT.append(pa.field("task", pa.int32()))


def row_type(tree: Tree, level: int) -> str:
    """The type of the rows that leave a level: the root takes them by shard, another level by task."""
    return "shard int, block binary" + (", task int" if level < tree.levels else "")


class BlockRows:
    """Makes the rows that leave one task of a level, 0 being the children's. Made in the task."""

    def __init__(self, tree: Tree, level: int) -> None:
        context = TaskContext.get()
        assert context is not None
        self._parents = tree.parents(level, context.partitionId()) if level < tree.levels else None

    def of(self, blocks: Iterator[ShardBlock]) -> Iterator[pa.RecordBatch]:
        """Blocks as batches of rows, as many in one as make a batch of some size."""
        waiting: list[ShardBlock] = []
        size = 0
        for block in blocks:
            waiting.append(block)
            size += block.block.size_bytes
            if size >= _BATCH_BYTES:
                yield self._batch(waiting)
                waiting, size = [], 0
        if waiting:
            yield self._batch(waiting)

    def _batch(self, blocks: list[ShardBlock]) -> pa.RecordBatch:
        columns = [
            pa.array([b.shard for b in blocks], pa.int32()),
            pa.array([bytes(b.block.data) for b in blocks], pa.binary()),
        ]
        if self._parents is None:
            return pa.RecordBatch.from_arrays(columns, schema=_TO_ROOT)
        tasks = pa.array([self._parents[b.shard] for b in blocks], pa.int32())
        return pa.RecordBatch.from_arrays([*columns, tasks], schema=_TO_LEVEL)


def blocks_of(batches: Iterator[pa.RecordBatch]) -> Iterator[ShardBlock]:
    """The blocks in rows that came through a shuffle; their bytes are not copied."""
    for batch in batches:
        shards, data = batch.column("shard").to_pylist(), batch.column("block")
        for i, shard in enumerate(shards):
            yield ShardBlock(shard, parse(data[i].as_buffer()))
