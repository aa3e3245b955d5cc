"""How staging serves the reads of a store: hits, late prestages, misses, and bytes that were staged in vain."""

from __future__ import annotations

from state_backends.store.ledger import Entry
from state_backends.store.protocol import StagingStats


class StagingCounts:
    """It owns the counts, and the set of blocks that were prestaged and not read since.

    Not locked: the store's lock is held around every call.
    """

    def __init__(self) -> None:
        self.stats = StagingStats()
        self._unread: set[int] = set()

    def staged(self, entry: Entry) -> None:
        """A prestage has brought this block into memory."""
        self._unread.add(entry.seq)
        self.stats.staged_bytes += entry.size_bytes

    def read(self, entry: Entry, *, late: bool, blocked_s: float) -> None:
        """A reader found this block in memory. It counts once for each time that it was staged."""
        if entry.seq not in self._unread:
            return
        self._unread.discard(entry.seq)
        if late:
            self.stats.late += 1
            self.stats.blocked_s += blocked_s
        else:
            self.stats.hits += 1

    def missed(self, blocked_s: float) -> None:
        """A reader waited for the disk."""
        self.stats.misses += 1
        self.stats.blocked_s += blocked_s

    def left_memory(self, entry: Entry) -> None:
        """The block is no longer in memory. If nobody read it since it was staged, that was in vain."""
        if entry.seq in self._unread:
            self._unread.discard(entry.seq)
            self.stats.vain_bytes += entry.size_bytes
