"""The levels between child and root: Spark stages without state that merge blocks (Disco's tree)."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import DataFrame

from aion.config import policy_from_text
from aion.core.ingest.levels import BlockMerger
from aion.core.plan import Plan
from aion.core.topology import Tree
from aion.execute.assembly import make_builder
from aion.spark.blocks import BlockRows, blocks_of, row_type
from state_backends.store.codec_pool import CodecPool


class Merging:
    """The function for ``mapInArrow`` of one level. Takes and returns rows of :mod:`aion.spark.blocks`."""

    def __init__(self, plan: Plan, policy: str, tree: Tree, level: int, limit_bytes: int) -> None:
        self._plan = plan
        self._policy = policy
        self._tree = tree
        self._level = level
        self._limit_bytes = limit_bytes

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        policy = policy_from_text(self._policy)
        rows = BlockRows(self._tree, self._level, self._limit_bytes)
        with CodecPool(policy.io.codec_threads) as pool:
            merger = BlockMerger(make_builder(self._plan, policy, pool, None))
            for shard, block, _ in blocks_of(batches):
                yield from rows.of(merger.add(shard, block))
            yield from rows.of(merger.finish())


def merged(blocks: DataFrame, plan: Plan, policy: str, tree: Tree, limit_bytes: int) -> DataFrame:
    """The children's rows after every level of the tree has merged them."""
    for level in range(1, tree.levels + 1):
        by_task = blocks.repartitionById(tree.tasks(level), "task")
        blocks = by_task.mapInArrow(Merging(plan, policy, tree, level, limit_bytes), row_type(tree, level))
    return blocks
