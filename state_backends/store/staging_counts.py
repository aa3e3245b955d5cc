"""How staging serves the reads of a store: hits, late prestages, misses, and bytes that were staged in vain."""

from __future__ import annotations

from collections.abc import Iterable

from state_backends.store.ledger import Entry
from state_backends.store.protocol import StagingStats


class StagingCounts:
    """Counts by live slice, and a total of the slices that are purged.

    It owns the counts and the set of blocks that were prestaged and not read since. Not locked: the store's lock is
    held around every call.
    """

    def __init__(self) -> None:
        self._live: dict[int, StagingStats] = {}
        self._purged = StagingStats()
        self._unread: set[int] = set()

    def staged(self, entry: Entry) -> None:
        """A prestage has brought this block into memory."""
        self._unread.add(entry.seq)
        self._of(entry).staged_bytes += entry.size_bytes

    def read(self, entry: Entry, *, late: bool, blocked_s: float) -> None:
        """A reader found this block in memory. It counts once for each time that it was staged."""
        if entry.seq not in self._unread:
            return
        self._unread.discard(entry.seq)
        stats = self._of(entry)
        if late:
            stats.late += 1
            stats.blocked_s += blocked_s
        else:
            stats.hits += 1

    def missed(self, entry: Entry, blocked_s: float) -> None:
        """A reader waited for the disk."""
        stats = self._of(entry)
        stats.misses += 1
        stats.blocked_s += blocked_s

    def left_memory(self, entry: Entry) -> None:
        """The block is no longer in memory. Nobody read it since it was staged: that was in vain."""
        if entry.seq in self._unread:
            self._unread.discard(entry.seq)
            self._of(entry).vain_bytes += entry.size_bytes

    def purge(self, slices: Iterable[int]) -> None:
        """These slices never come back: their counts become part of the total."""
        for slice_us in slices:
            self._purged.add(self._live.pop(slice_us, StagingStats()))

    def of_slice(self, slice_us: int) -> StagingStats:
        copy = StagingStats()
        copy.add(self._live.get(slice_us, StagingStats()))
        return copy

    def total(self) -> StagingStats:
        total = StagingStats()
        for stats in (self._purged, *self._live.values()):
            total.add(stats)
        return total

    def _of(self, entry: Entry) -> StagingStats:
        return self._live.setdefault(entry.slice_us, StagingStats())
