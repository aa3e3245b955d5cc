"""Blocks as rows of Spark's: what crosses every shuffle between child, merging levels and root."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext

from aion.core.ingest.builder import ShardBlock
from aion.core.ingest.fragments import Defragmenter, Fragmenter
from aion.core.topology import Tree

# Rows of more than this go to Spark by themselves; smaller ones share a batch.
_BATCH_BYTES = 4 << 20
_TO_ROOT = pa.schema([("shard", pa.int32()), ("block", pa.binary())])
_TO_LEVEL = _TO_ROOT.append(pa.field("task", pa.int32()))


def row_type(tree: Tree, level: int) -> str:
    """The type of the rows that leave a level: the root takes them by shard, another level by task."""
    return "shard int, block binary" + (", task int" if level < tree.levels else "")


class BlockRows:
    """Makes the rows that leave one task of a level, 0 being the children's. Made in the task.

    A row has at most ``limit_bytes`` of a block: see :mod:`aion.core.ingest.fragments`.
    """

    def __init__(self, tree: Tree, level: int, limit_bytes: int) -> None:
        context = TaskContext.get()
        assert context is not None
        self._parents = tree.parents(level, context.partitionId()) if level < tree.levels else None
        # The one number that no other attempt of any task of this application has.
        self._fragmenter = Fragmenter(context.taskAttemptId(), limit_bytes)

    def of(self, blocks: Iterator[ShardBlock]) -> Iterator[pa.RecordBatch]:
        """Blocks as batches of rows, as many in one as make a batch of some size."""
        shards: list[int] = []
        rows: list[bytes] = []
        size = 0
        for shard, block in blocks:
            for row in self._fragmenter.rows(block):
                shards.append(shard)
                rows.append(row)
                size += len(row)
                if size >= _BATCH_BYTES:
                    yield self._batch(shards, rows)
                    shards, rows, size = [], [], 0
        if rows:
            yield self._batch(shards, rows)

    def _batch(self, shards: list[int], rows: list[bytes]) -> pa.RecordBatch:
        columns = [pa.array(shards, pa.int32()), pa.array(rows, pa.binary())]
        if self._parents is None:
            return pa.RecordBatch.from_arrays(columns, schema=_TO_ROOT)
        tasks = pa.array([self._parents[shard] for shard in shards], pa.int32())
        return pa.RecordBatch.from_arrays([*columns, tasks], schema=_TO_LEVEL)


def blocks_of(batches: Iterator[pa.RecordBatch]) -> Iterator[ShardBlock]:
    """The blocks in rows that came through a shuffle; the bytes of those that came whole are not copied.

    Raises CorruptBlock, FormatError.
    """
    parts: dict[int, Defragmenter] = {}
    for batch in batches:
        shards, data = batch.column("shard").to_pylist(), batch.column("block")
        for i, shard in enumerate(shards):
            for block in parts.setdefault(shard, Defragmenter()).blocks([data[i].as_buffer()]):
                yield ShardBlock(shard, block)
    for part in parts.values():
        part.end()
