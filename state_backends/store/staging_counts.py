"""Counts how well staging serves the reads of a store: hits, late prestages, misses, and bytes staged in vain."""

from __future__ import annotations

from state_backends.store.ledger import Entry
from state_backends.store.protocol import StagingStats


class StagingCounts:
    """It owns the counts, and the blocks that were prestaged, or held for an execution, and have not been read since.

    It has no lock: hold the store's lock around every call.
    """

    def __init__(self) -> None:
        self.stats = StagingStats()
        self._unread: dict[int, int] = {}  # the bytes of each that were fetched

    def staged(self, seq: int, size_bytes: int) -> None:
        """Counts a block that was prestaged, or its body."""
        self._unread[seq] = self._unread.get(seq, 0) + size_bytes
        self.stats.staged_bytes += size_bytes

    def held(self, entry: Entry) -> None:
        """Records that a block stays in memory for an execution. Reading it is a hit, as if it had come back."""
        self._unread.setdefault(entry.seq, 0)

    def lacked(self, entry: Entry) -> None:
        """Records that a reference in memory is of no use: its body has to be read. What was fetched was in vain."""
        self.stats.vain_bytes += self._unread.pop(entry.seq, 0)

    def read(self, entry: Entry, *, late: bool, blocked_s: float) -> None:
        """Counts a read of a block in memory, if it is the first since the block was prestaged."""
        if self._unread.pop(entry.seq, None) is None:
            return
        if late:
            self.stats.late += 1
            self.stats.blocked_s += blocked_s
        else:
            self.stats.hits += 1

    def fetched_ahead(self) -> None:
        """Counts a read of a block that the reader had fetched before it was wanted."""
        self.stats.ahead += 1

    def missed(self, blocked_s: float, blocks: int = 1) -> None:
        """Counts reads of blocks that waited for the disk together."""
        self.stats.misses += blocks
        self.stats.blocked_s += blocked_s

    def left_memory(self, entry: Entry) -> None:
        """Records that a block left memory. If nobody read it since it was prestaged, that was in vain."""
        self.stats.vain_bytes += self._unread.pop(entry.seq, 0)
