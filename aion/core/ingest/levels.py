"""Merges blocks in a node between child and root, so that fewer go on (Disco's window merger, section 3). Pure.

All nodes use the same slices, so blocks are merged by (shard, slice): partials are combined, and kept events are
concatenated. A slice is sent once, however many windows it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterator

from aion.core.ingest.builder import BlockBuilder, ShardBlock
from state_backends.format.block import Block
from state_backends.thresholds import threshold

# Small blocks wait until this many bytes can be decoded together. Decoding them one by one would cost much more.
_AT_ONCE_BYTES = threshold(4 << 20, 256)


class BlockMerger:
    """Merges the blocks of one task by (shard, slice). Any tree of mergers gives the same panes.

    ``add`` takes a block and yields the blocks that are ready. ``finish`` yields the rest. ``builder``: a new builder.
    It decides how large blocks become and how they are encoded.
    """

    def __init__(self, builder: BlockBuilder) -> None:
        self._builder = builder
        self._waiting: list[ShardBlock] = []
        self._waiting_bytes = 0
        layout = builder.plan.layout
        self._grows = layout is None or layout.holistic

    def add(self, shard: int, block: Block) -> Iterator[ShardBlock]:
        # Merging does not make kept values smaller, so a block that is large enough is passed on without decoding.
        if block.at is not None or (self._grows and 2 * block.size_bytes >= self._builder.target_bytes):
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
