"""Reads single blocks from the files that hold them."""

from __future__ import annotations

from collections.abc import Sequence

from state_backends.format.block import Block
from state_backends.format.errors import CorruptBlock, StateError
from state_backends.store.blocks import Blocks
from state_backends.store.io import BlockFiles, Io, Pending, Priority, Steps
from state_backends.store.ledger import Entry, Place


class Fetcher:
    """Finds the file of a block and reads the block from it. It has no state of its own."""

    def __init__(self, blocks: Blocks, files: BlockFiles, io: Io) -> None:
        self._blocks, self._files, self._io = blocks, files, io

    def start(self, entry: Entry) -> Pending[Block] | None:
        """Starts reading a block that is only on disk. Returns None if it is in memory, or is being prestaged."""
        with self._blocks.lock:
            if self._blocks.closed:
                raise StateError(f"block {entry.seq} of slice {entry.slice_us}: its store was closed while it was read")
            if entry.place is not Place.DISK:
                return None
            return self._io.submit(Priority.READ, self._whole(entry))

    def start_body(self, entry: Entry) -> Pending[Block] | None:
        """Starts reading the body of a reference in memory. Returns None if it is staged, or is being prestaged."""
        with self._blocks.lock:
            block = self._blocks.memory.get(entry.seq)
            if block is None or self._blocks.memory.is_whole(entry.seq):
                return None
            self._blocks.staging.lacked(entry)
            return self._io.submit(Priority.READ, self._files.bodies.read(block))

    def _whole(self, entry: Entry) -> Steps[Block]:
        """Reads a block, with its body, unless a worker can map that at once."""
        block = yield from self.steps(entry)
        if block.at is not None and not self._files.bodies.resident([block])[0]:
            block = yield from self._files.bodies.read(block)
        return block

    def steps(self, entry: Entry) -> Steps[Block]:
        """Reads a block as it is stored. Its file is looked up when the request runs: merging moves blocks."""
        while True:
            file_no = entry.file_no
            try:
                block = yield from self._files.fetch(file_no, entry.slice_us, entry.seq)
            except CorruptBlock:
                with self._blocks.lock:
                    if entry.place is Place.PURGED:
                        raise purged(entry) from None
                    if entry.file_no == file_no:
                        raise
            else:
                return block

    def resident(self, references: Sequence[Block]) -> list[bool]:
        """Returns whether the body of each can be mapped at once."""
        return self._files.bodies.resident(references) if references else []

    def stage_body(self, block: Block) -> Steps[bool]:
        """See :meth:`state_backends.store.body_files.BodyFiles.stage`."""
        return self._files.bodies.stage(block)

    def unstage_body(self, block: Block) -> None:
        if block.at is not None:
            self._files.bodies.unstage(block.at)


def purged(entry: Entry) -> StateError:
    return StateError(f"block {entry.seq} of slice {entry.slice_us} was purged while it was read")
