"""The levels between child and root: Spark stages without state that merge blocks (Disco's tree)."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame

from aion.core.ingest.builder import BlockBuilder
from aion.core.ingest.levels import BlockMerger
from aion.spark.session.workers import in_arrow
from aion.spark.tasks.blocks import BlockRows, blocks_of, row_type
from aion.spark.tasks.child import ChildWork
from aion.spark.tasks.worker import begin_task
from state_backends.store.codec_pool import CodecPool


class Merging:
    """The function for ``mapInArrow`` of one level. Takes and returns rows of :mod:`aion.spark.tasks.blocks`."""

    def __init__(self, work: ChildWork, level: int) -> None:
        self._work = work
        self._level = level

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        begin_task()
        work = self._work
        rows = BlockRows(work.tree, self._level, work.limit_bytes, work.shards)
        with CodecPool(work.settings.threads) as pool:
            merger = BlockMerger(BlockBuilder(work.task_plan, work.settings, pool))
            for shard, block, _ in blocks_of(batches):
                yield from rows.of(merger.add(shard, block))
            yield from rows.of(merger.finish())
        yield from rows.asking()


def merged(blocks: DataFrame, work: ChildWork) -> DataFrame:
    """Returns the children's rows after every level of the tree has merged them."""
    tree = work.tree
    for level in range(1, tree.levels + 1):
        by_task = blocks.repartitionById(tree.tasks(level), "task")
        blocks = in_arrow(by_task, Merging(work, level), row_type(tree, level))
    return blocks
