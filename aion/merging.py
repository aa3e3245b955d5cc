"""What a node between child and root does: blocks in, fewer out (Disco's window merger, seed 001 section 3). Pure.

Parts of a window have equal bounds where they are made of equal slices, so blocks are merged by (shard, slice):
partials are combined, kept events put together. A slice is sent once, however many windows it is in.
"""

from __future__ import annotations

from collections.abc import Iterator

from aion.builder import BlockBuilder, ShardBlock
from state_backends.block import Block


class BlockMerger:
    """Merges the blocks of one task by (shard, slice); any tree of mergers gives the same panes.

    ``add`` takes a block and yields those that need not wait for others; ``finish`` yields the rest. ``builder`` says
    how large blocks become and how they are encoded, and must be a fresh one.
    """

    def __init__(self, builder: BlockBuilder) -> None:
        self._builder = builder
        layout = builder.plan.layout
        self._grows = layout is None or layout.holistic

    def add(self, shard: int, block: Block) -> Iterator[ShardBlock]:
        # Of what keeps values, nothing gets smaller by merging: a block that is large enough is handed on unread.
        if self._grows and 2 * block.size_bytes >= self._builder.target_bytes:
            yield ShardBlock(shard, block)
        else:
            yield from self._builder.add_block(shard, block)

    def finish(self) -> Iterator[ShardBlock]:
        yield from self._builder.finish()
