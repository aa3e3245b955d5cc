"""The child: on every source partition, events in and blocks out, in front of the shuffle (Disco's child)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from aion.config import policy_from_json
from aion.hashing import ShardOfKeys
from aion.plan import Plan
from aion.runtime import make_builder
from aion.spark.blocks import BlockRows
from aion.topology import Tree
from state_backends.codec_pool import CodecPool


class Child:
    """The function for ``mapInArrow``; its input are the plan's columns and, if not ``shard_of``, the shard id."""

    def __init__(self, plan: Plan, policy: dict[str, Any], shard_of: ShardOfKeys | None, tree: Tree) -> None:
        self._plan = plan
        self._policy = policy
        self._shard_of = shard_of
        self._tree = tree

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        policy = policy_from_json(self._policy)
        rows = BlockRows(self._tree, level=0)
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
                yield from rows.of(builder.add(events, shards))
            yield from rows.of(builder.finish())
