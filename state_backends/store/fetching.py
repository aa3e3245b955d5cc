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
            return self._io.submit(Priority.READ, self.steps(entry))

    def steps(self, entry: Entry) -> Steps[Block]:
        """Reads a block. Its file is looked up when the request runs, because merging moves blocks to other files."""
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
                if block.at is not None:  # its reader maps the body
                    self._files.read_ahead([block])
                return block

    def ahead(self, references: Sequence[Block]) -> Steps[int]:
        """Brings the bodies of references to memory. Waits for those on this host, and returns their bytes."""
        yield 0
        self._files.read_ahead(references)
        return (yield from self._files.arriving(references))


def purged(entry: Entry) -> StateError:
    return StateError(f"block {entry.seq} of slice {entry.slice_us} was purged while it was read")
