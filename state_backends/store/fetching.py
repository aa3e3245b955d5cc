"""Reads blocks from the files that hold them: several at once if they are neighbours and all are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from state_backends.format.block import Block
from state_backends.format.errors import CorruptBlock, StateError
from state_backends.store.blocks import Blocks
from state_backends.store.io import MOST_TOGETHER_BYTES, BlockFiles, Io, Pending, Priority, Steps
from state_backends.store.ledger import Entry, Place

T = TypeVar("T")


class Fetcher:
    """Finds the file of a block and reads the block from it, with the neighbours that others wait for.

    It owns the blocks whose requests are queued, and those of them that came with a neighbour.
    """

    def __init__(self, blocks: Blocks, files: BlockFiles, io: Io) -> None:
        self._blocks, self._files, self._io = blocks, files, io
        self._expected: dict[int, dict[tuple[int, int], Entry]] = {}  # file -> (slice, seq) -> block
        self._ready: dict[Entry, Block] = {}

    def start(self, entry: Entry) -> Pending[Block] | None:
        """Starts reading a block that is only on disk. Returns None if it is in memory, or is being prestaged."""
        with self._blocks.lock:
            if self._blocks.closed:
                raise StateError(f"block {entry.seq} of slice {entry.slice_us}: its store was closed while it was read")
            if entry.place is not Place.DISK:
                return None
            return self.submit(Priority.READ, entry, self._whole(entry))

    def start_body(self, entry: Entry) -> Pending[Block] | None:
        """Starts reading the body of a reference in memory. Returns None if it is staged, or is being prestaged."""
        with self._blocks.lock:
            block = self._blocks.memory.get(entry.seq)
            if block is None or self._blocks.memory.is_whole(entry.seq):
                return None
            self._blocks.staging.lacked(entry)
            return self.submit_body(Priority.READ, block, self._files.bodies.read(block))

    def submit(self, priority: Priority, entry: Entry, steps: Steps[T]) -> Pending[T]:
        """Queues a request that reads a block on disk. Hold the lock."""
        self._expected.setdefault(entry.file_no, {})[entry.slice_us, entry.seq] = entry
        file_no = entry.file_no
        request = self._io.submit(priority, steps)
        request.when_over(lambda error: self._forget(file_no, entry))
        return request

    def submit_body(self, priority: Priority, block: Block, steps: Steps[T]) -> Pending[T]:
        """Queues a request that reads the body of a reference in memory."""
        self._files.bodies.expect(block)
        request = self._io.submit(priority, steps)
        request.when_over(lambda error: self._files.bodies.forget(block))
        return request

    def _forget(self, file_no: int, entry: Entry) -> None:
        """A request for a block is over."""
        with self._blocks.lock:
            expected = self._expected.get(file_no, {})
            if expected.get((entry.slice_us, entry.seq)) is entry:
                del expected[entry.slice_us, entry.seq]
                if not expected:
                    del self._expected[file_no]
            block = self._ready.pop(entry, None)
        if block is not None:
            self._files.bodies.forget(block)

    def _whole(self, entry: Entry) -> Steps[Block]:
        """Reads a block, with its body, unless a worker can map that at once."""
        block = yield from self.steps(entry)
        try:
            if block.at is None or self._files.bodies.resident([block])[0]:
                return block
            return (yield from self._files.bodies.read(block))
        finally:
            self._files.bodies.forget(block)

    def steps(self, entry: Entry) -> Steps[Block]:
        """Reads a block as it is stored. Its file is looked up when the request runs: merging moves blocks."""
        while True:
            with self._blocks.lock:
                if (ready := self._ready.pop(entry, None)) is not None:
                    return ready
                file_no, together = entry.file_no, [entry, *self._behind(entry)]
            try:
                size = sum(e.size_bytes for e in together)
                found = yield from self._files.fetch(file_no, [(e.slice_us, e.seq) for e in together], size)
            except CorruptBlock:
                with self._blocks.lock:
                    if entry.place is Place.PURGED:
                        raise purged(entry) from None
                    if entry.file_no == file_no:
                        raise
            else:
                self._keep(file_no, list(zip(together[1:], found[1:], strict=False)))
                return found[0]

    def _behind(self, entry: Entry) -> list[Entry]:
        """Returns the blocks that others wait for and that may be read with this one: behind it in its file."""
        expected = self._expected.get(entry.file_no, {})
        if len(expected) < 2:
            return []
        here = entry.slice_us, entry.seq
        size, found = entry.size_bytes, []
        for _, other in sorted((at, other) for at, other in expected.items() if at > here):
            size += other.size_bytes
            if size > MOST_TOGETHER_BYTES:
                break
            if other not in self._ready and other.file_no == entry.file_no:
                found.append(other)
        return found

    def _keep(self, file_no: int, others: Sequence[tuple[Entry, Block]]) -> None:
        """Keeps what came with a block until the requests for it run."""
        with self._blocks.lock:
            expected = self._expected.get(file_no, {})
            kept = [(e, block) for e, block in others if expected.get((e.slice_us, e.seq)) is e]
            self._ready.update(kept)
        for _, block in kept:
            if block.at is not None:
                self._files.bodies.expect(block)

    def resident(self, references: Sequence[Block]) -> list[bool]:
        """Returns whether the body of each can be mapped at once."""
        return self._files.bodies.resident(references) if references else []

    def stage_body(self, block: Block) -> Steps[bool]:
        """See :meth:`state_backends.store.body_files.BodyFiles.stage`."""
        try:
            return (yield from self._files.bodies.stage(block))
        finally:
            self._files.bodies.forget(block)

    def unstage_body(self, block: Block) -> None:
        if block.at is not None:
            self._files.bodies.unstage(block.at)


def purged(entry: Entry) -> StateError:
    return StateError(f"block {entry.seq} of slice {entry.slice_us} was purged while it was read")
