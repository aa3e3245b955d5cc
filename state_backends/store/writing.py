"""Blocks on their way from memory to the disk: an outbox of what is due, writes under way, and what is let go then.

A lock is never held across I/O: blocks are marked as being written, stay readable meanwhile, and leave memory only
when they are safely on disk. A write that fails loses nothing: its blocks are in memory, and due again.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from aion.core.ingest.block import Block
from state_backends.files.names import SstFile
from state_backends.store.io import Pending, Priority, Steps
from state_backends.store.ledger import Entry, Move, Place
from state_backends.store.merging import MergedFiles
from state_backends.store.protocol import StagingStats

T = TypeVar("T")
log = logging.getLogger(__name__)


def _timed(steps: Steps[T], spent: list[float], now: Callable[[], float]) -> Steps[T]:
    """The same steps; ``spent`` gets the seconds that each took by the clock ``now``, without what ran between them."""
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


class OutboxWrites(MergedFiles):
    """The part of a store that writes; blocks, places and lock are those of the parts that read and merge."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._outbox: dict[int, int] = {}  # seq -> bytes, waiting to be written and then let go
        self._outbox_bytes = 0
        self._write_at_bytes = self._outbox_limit  # more, as long as the disk fails
        self._leaving: set[int] = set()  # being written, to be let go afterwards
        self._write_numbers = itertools.count()
        self._writes: dict[int, Pending[SstFile]] = {}  # under way
        self.failed_writes = 0
        self.on_written: Callable[[int, float], None] | None = None  # told bytes of each file and seconds of its steps

    def flush(self) -> None:
        with self._lock:
            if self._outbox and not self._closed:
                self._write(list(self._outbox), Priority.DESTAGE, leave=True)

    def persist(self, skip: Collection[int] = ()) -> list[SstFile]:
        with self._lock:
            self._use_merged()
        while True:
            own: Pending[SstFile] | None = None
            with self._lock:
                pending = [e.seq for e in self._ledger if e.place is Place.MEMORY and e.slice_us not in skip]
                pending = [seq for seq in pending if seq not in self._superseded]
                if pending:
                    own = self._write(pending, Priority.WRITE, leave=False, leaving=set(self._outbox))
                writes = [write for write in self._awaited_writes() if not write.over()]
                if not writes:
                    files, self._new_files = self._new_files, []
                    return files
            self._io.wait(writes)
            if own is not None:
                own.result()
            # A write that was under way may have failed: what it left in memory is tried again, and then told.

    # -- writing ------------------------------------------------------------------------------------------

    def _awaited_writes(self) -> list[Pending[SstFile]]:
        """The writes under way, which a task waits for from now on. Holds the lock."""
        writes = list(self._writes.values())
        for write in writes:
            write.raise_to(Priority.WRITE)
        return writes

    def _write(
        self, seqs: list[int], priority: Priority, *, leave: bool, leaving: set[int] | None = None
    ) -> Pending[SstFile]:
        """Starts writing blocks as one file; those that leave are let go once it is on disk."""
        blocks = [(seq, self._memory[seq]) for seq in seqs]
        for seq in seqs:
            self._ledger.move(seq, Move.WRITE)
            self._unpost(seq)
        self._leaving |= set(seqs) if leave else leaving or set()
        write = self._io.submit(priority, self._write_steps(blocks))
        number = next(self._write_numbers)
        self._writes[number] = write
        write.when_over(lambda error: self._written(number, error))
        return write

    def _written(self, number: int, error: BaseException | None) -> None:
        del self._writes[number]
        if error is not None:
            # Whoever persists is told; a destage has nobody to tell but the log.
            log.error("a write failed; its blocks stay in memory: %s", error)

    def _write_steps(self, blocks: list[tuple[int, Block]]) -> Steps[SstFile]:
        spent: list[float] = []
        try:
            file = yield from _timed(self._p.write(blocks), spent, self._io.now)
        except BaseException:
            with self._lock:
                self.failed_writes += 1
                for seq, _ in blocks:
                    # A failed destage loses nothing: the blocks are in memory, and due again.
                    if seq in self._ledger:
                        entry = self._ledger.move(seq, Move.WRITE_FAILED)
                        if seq in self._leaving:
                            self._leaving.discard(seq)
                            self._post(entry)
                # Not with every block that comes: each time it is more that fails.
                self._write_at_bytes = self._outbox_bytes + self._outbox_limit
            raise
        with self._lock:
            self._write_at_bytes = self._outbox_limit
            self._new_files.append(file)
            self._files.add(file.file_no, [(block.header.slice_us, block.size_bytes) for _, block in blocks])
            block_slices = {seq: block.header.slice_us for seq, block in blocks}
            for seq, _ in blocks:
                if seq not in self._ledger:  # purged while it was being written, or others stand for it
                    self._files.bury(file.file_no, block_slices[seq], seq)
                    continue
                entry = self._ledger.move(seq, Move.WRITTEN, file_no=file.file_no)
                self._files.gain(file.file_no, entry.slice_us, entry.size_bytes)
                if seq in self._leaving:
                    self._leaving.discard(seq)
                    self._evict(entry)
            self._drop_dead(file.file_no)
        if self.on_written is not None:
            self.on_written(sum(block.size_bytes for _, block in blocks), sum(spent))
        return file

    # -- leaving memory -----------------------------------------------------------------------------------

    def _post(self, entry: Entry) -> None:
        if entry.seq not in self._outbox:
            self._outbox[entry.seq] = entry.size_bytes
            self._outbox_bytes += entry.size_bytes

    def _unpost(self, seq: int) -> None:
        self._outbox_bytes -= self._outbox.pop(seq, 0)

    def _evict(self, entry: Entry) -> None:
        # Only from BOTH, which the table enforces: a block leaves memory after it has reached the disk.
        self._ledger.move(entry.seq, Move.EVICT)
        self._memory.let_go(entry.seq)
        if entry.seq in self._unread:
            self._unread.discard(entry.seq)
            self._staging.setdefault(entry.slice_us, StagingStats()).vain_bytes += entry.size_bytes

    def _forget(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._superseded.discard(entry.seq)
            self._memory.let_go(entry.seq)
            self._unpost(entry.seq)
            self._leaving.discard(entry.seq)
            if entry.seq in self._unread:
                self._unread.discard(entry.seq)
                self._staging.setdefault(entry.slice_us, StagingStats()).vain_bytes += entry.size_bytes
            self._give_up_staging(entry.seq)
            self._ledger.move(entry.seq, Move.PURGE)
            if entry.file_no in self._files:
                self._files.lose(entry.file_no, entry.slice_us, entry.size_bytes)
        self._count_ledger()
        self._drop_dead(*{entry.file_no for entry in entries})
