"""Writes blocks from memory to disk.

No lock is held during I/O. Blocks are marked as being written, stay readable meanwhile, and leave memory only when they
are safely on disk. A write that fails loses nothing: its blocks are still in memory, and are written again later.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection
from typing import TypeVar

from state_backends.files.names import SstFile
from state_backends.format.block import Block
from state_backends.store.blocks import Blocks
from state_backends.store.io import BlockFiles, Io, Pending, Priority, Steps
from state_backends.store.ledger import Entry, Move, Place

T = TypeVar("T")
log = logging.getLogger(__name__)


def _timed(steps: Steps[T], spent: list[float], now: Callable[[], float]) -> Steps[T]:
    """Runs the steps and appends the seconds of each to ``spent``. The time between two steps does not count."""
    try:
        while True:
            begin = now()
            try:
                moved = next(steps)
            except StopIteration as stop:
                result: T = stop.value
                return result
            finally:
                spent.append(now() - begin)
            yield moved
    finally:
        steps.close()


class Writer:
    """It owns the outbox, the writes under way, and the set of blocks that leave memory when they are written.

    The outbox is the set of blocks that wait to be written. Invariant (:meth:`validate`): a block in the outbox is only
    in memory, and not being written. ``outbox_bytes``: when the outbox has this many bytes, they are written as one
    file.
    """

    def __init__(self, blocks: Blocks, files: BlockFiles, io: Io, *, outbox_bytes: int) -> None:
        self._blocks, self._files, self._io = blocks, files, io
        self._limit_bytes = outbox_bytes
        self._write_at_bytes = outbox_bytes  # more while writes fail
        self._outbox: dict[int, int] = {}  # seq -> bytes
        self._outbox_bytes = 0
        self._leaving: set[int] = set()
        self._numbers = itertools.count()
        self._under_way: dict[int, Pending[SstFile]] = {}
        self.failed_writes = 0
        self.on_written: Callable[[int, float], None] | None = None  # gets the bytes and seconds of each file

    # -- leaving memory; hold the lock --------------------------------------------------------------------

    def evict_when_written(self, entry: Entry) -> None:
        """Removes a block from memory when it is on disk: now, after its write, or after the outbox is written."""
        if entry.place is Place.BOTH:
            self._blocks.evict(entry)
        elif entry.place is Place.DESTAGING:
            self._leaving.add(entry.seq)
        elif entry.seq not in self._outbox:
            self._outbox[entry.seq] = entry.size_bytes
            self._outbox_bytes += entry.size_bytes

    def keep(self, entry: Entry) -> bool:
        """Keeps a block in memory that was to leave when it is on disk. Returns whether it was."""
        was_leaving = entry.seq in self._outbox or entry.seq in self._leaving
        self._take_out(entry.seq)
        self._leaving.discard(entry.seq)
        return was_leaving

    def forget(self, entry: Entry) -> None:
        """Forgets a block that is about to be deleted."""
        self._take_out(entry.seq)
        self._leaving.discard(entry.seq)

    def write_outbox(self, priority: Priority, *, if_due: bool = False) -> None:
        """Starts writing the blocks in the outbox. With ``if_due`` only if they are enough for a file."""
        if self._outbox and not (if_due and self._outbox_bytes < self._write_at_bytes):
            self._write(list(self._outbox), priority, leaving=set(self._outbox))

    def raise_all(self) -> list[Pending[SstFile]]:
        """Raises the priority of the writes under way, because a task waits for them. Returns these writes."""
        writes = list(self._under_way.values())
        for write in writes:
            write.raise_to(Priority.WRITE)
        return writes

    def requests(self) -> list[Pending[SstFile]]:
        return list(self._under_way.values())

    # -- without the lock ---------------------------------------------------------------------------------

    def persist(self, skip: Collection[int]) -> list[SstFile]:
        """See :meth:`state_backends.store.protocol.BlockStore.persist`."""
        while True:
            own: Pending[SstFile] | None = None
            with self._blocks.lock:
                if pending := self._blocks.unwritten(skip):
                    own = self._write(pending, Priority.WRITE, leaving=set(self._outbox))
                writes = [write for write in self.raise_all() if not write.over()]
                if not writes:
                    return self._blocks.files.take_new()
            self._io.wait(writes)
            if own is not None:
                own.result()
            # Another write may have failed. Then its blocks are written again, and a second failure is raised.

    def validate(self) -> None:
        """Raises AssertionError if the outbox has a block that is not only in memory."""
        assert set(self._outbox) <= {e.seq for e in self._blocks.ledger if e.place is Place.MEMORY}
        assert self._outbox_bytes == sum(self._outbox.values())

    def _take_out(self, seq: int) -> None:
        self._outbox_bytes -= self._outbox.pop(seq, 0)

    def _write(self, seqs: list[int], priority: Priority, *, leaving: set[int]) -> Pending[SstFile]:
        """Starts writing blocks as one file. Those in ``leaving`` leave memory when it is on disk."""
        blocks = [(seq, self._blocks.memory[seq]) for seq in seqs]
        self._leaving |= leaving
        for seq in seqs:
            self._blocks.ledger.move(seq, Move.WRITE)
            self._take_out(seq)
        write = self._io.submit(priority, self._steps(blocks))
        number = next(self._numbers)
        self._under_way[number] = write
        write.when_over(lambda error: self._over(number, error))
        return write

    def _over(self, number: int, error: BaseException | None) -> None:
        del self._under_way[number]
        if error is not None:
            # A commit also raises the error. For a destage, for which nobody waits, there is only the log.
            log.error("a write failed; its blocks stay in memory: %s", error)

    def _steps(self, blocks: list[tuple[int, Block]]) -> Steps[SstFile]:
        spent: list[float] = []
        try:
            file = yield from _timed(self._files.write(blocks), spent, self._io.now)
        except BaseException:
            with self._blocks.lock:
                self._failed(blocks)
            raise
        with self._blocks.lock:
            self._write_at_bytes = self._limit_bytes
            for entry in self._blocks.written(file, blocks):
                if entry.seq in self._leaving:
                    self._leaving.discard(entry.seq)
                    self._blocks.evict(entry)
        if self.on_written is not None:
            self.on_written(sum(block.size_bytes for _, block in blocks), sum(spent))
        return file

    def _failed(self, blocks: list[tuple[int, Block]]) -> None:
        self.failed_writes += 1
        for seq, _ in blocks:
            if seq in self._blocks.ledger:
                entry = self._blocks.ledger.move(seq, Move.WRITE_FAILED)
                if seq in self._leaving:
                    self._leaving.discard(seq)
                    self.evict_when_written(entry)
        # The next try waits until the outbox has grown by another file's worth.
        self._write_at_bytes = self._outbox_bytes + self._limit_bytes
