"""What a node between child and root does: blocks in, fewer out (Disco's window merger, Disco section 3). Pure.

Parts of a window have equal bounds where they are made of equal slices, so blocks are merged by (shard, slice):
partials are combined, kept events put together. A slice is sent once, however many windows it is in.
"""

from __future__ import annotations

from collections.abc import Iterator

from aion.core.ingest.block import Block
from aion.core.ingest.builder import BlockBuilder, ShardBlock

# Of small blocks, what is read at once: one by one they would cost more than what is in them.
_AT_ONCE_BYTES = 4 << 20


class BlockMerger:
    """Merges the blocks of one task by (shard, slice); any tree of mergers gives the same panes.

    ``add`` takes a block and yields those that need not wait for others; ``finish`` yields the rest. ``builder`` says
    how large blocks become and how they are encoded, and must be a fresh one.
    """

    def __init__(self, builder: BlockBuilder) -> None:
        self._builder = builder
        self._waiting: list[ShardBlock] = []
        self._waiting_bytes = 0
        layout = builder.plan.layout
        self._grows = layout is None or layout.holistic

    def add(self, shard: int, block: Block) -> Iterator[ShardBlock]:
        # Of what keeps values, nothing gets smaller by merging: a block that is large enough is handed on unread.
        if self._grows and 2 * block.size_bytes >= self._builder.target_bytes:
            yield ShardBlock(shard, block)
            return
        self._waiting.append(ShardBlock(shard, block))
        self._waiting_bytes += block.size_bytes
        if self._waiting_bytes >= _AT_ONCE_BYTES:
            yield from self._read()

    def finish(self) -> Iterator[ShardBlock]:
        yield from self._read()
        yield from self._builder.finish()

    def _read(self) -> Iterator[ShardBlock]:
        blocks, self._waiting, self._waiting_bytes = self._waiting, [], 0
        yield from self._builder.add_blocks(blocks)
