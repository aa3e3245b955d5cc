"""Blocks as Spark rows, the form in which they cross every shuffle between child, merging levels and root.

In the first batch of a run and in its last one, each shard also gets a row without a block, which only says that the
batch has come.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from aion.core.ingest.builder import ShardBlock
from aion.core.ingest.fragments import Defragmenter, Fragmenter
from aion.core.topology import Tree
from aion.spark.tasks.running import Running, is_first, shows_all
from state_backends.thresholds import threshold

# A batch of rows is sent to Spark when it has at least this size.
_BATCH_BYTES = threshold(4 << 20, 256)
_TO_ROOT = pa.schema([("shard", pa.int32()), ("block", pa.binary())])
_TO_LEVEL = _TO_ROOT.append(pa.field("task", pa.int32()))


def row_type(tree: Tree, level: int) -> StructType:
    """Returns the schema of the rows that leave a level. Rows go to the root by shard, and to another level by task."""
    return from_arrow_schema(_TO_LEVEL if level < tree.levels else _TO_ROOT)


class BlockRows:
    """Makes the rows that leave one task of a level. Level 0 is the children. Must be created inside the task.

    A row holds at most ``limit_bytes`` of a block: see :mod:`aion.core.ingest.fragments`. ``shards``: the ids.
    """

    def __init__(self, tree: Tree, level: int, limit_bytes: int, shards: Sequence[int]) -> None:
        context = TaskContext.get()
        assert context is not None
        self._parents = tree.parents(level, context.partitionId(), shards) if level < tree.levels else None
        self.schema = _TO_ROOT if self._parents is None else _TO_LEVEL
        # One task asks all shards.
        asks = self._parents is None and context.partitionId() == 0
        asks = asks and (is_first(context) or shows_all(context, Running.of(context).batch))
        self._asked = list(shards) if asks else []
        # No other attempt of any task of this application has the same number.
        self._fragmenter = Fragmenter(context.taskAttemptId(), limit_bytes)

    def of(self, blocks: Iterator[ShardBlock]) -> Iterator[pa.RecordBatch]:
        """Yields the blocks as batches of rows, each of about ``_BATCH_BYTES``."""
        shards: list[int] = []
        rows: list[bytes] = []
        size = 0
        for shard, block, _ in blocks:
            for row in self._fragmenter.rows(block):
                shards.append(shard)
                rows.append(row)
                size += len(row)
                if size >= _BATCH_BYTES:
                    yield self._batch(shards, rows)
                    shards, rows, size = [], [], 0
        if rows:
            yield self._batch(shards, rows)

    def asking(self) -> Iterator[pa.RecordBatch]:
        """Yields a row without a block for each shard, if this task says that the batch has come."""
        if self._asked:
            yield self._batch(self._asked, [b""] * len(self._asked))

    def _batch(self, shards: list[int], rows: list[bytes]) -> pa.RecordBatch:
        columns = [pa.array(shards, pa.int32()), pa.array(rows, pa.binary())]
        if self._parents is not None:
            columns.append(pa.array([self._parents[shard] for shard in shards], pa.int32()))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def blocks_of(batches: Iterator[pa.RecordBatch]) -> Iterator[ShardBlock]:
    """Yields the blocks in rows that came through a shuffle. A block that fits in one row is not copied.

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
