"""Blocks that others stand for: not read any more, and kept until the version that says so is made.

An attempt that folds blocks may fail, so what it folded stays where it is, out of sight, until the commit; a rollback
shows it again. Files hold such blocks until they are merged: versions name them, as runs of numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from state_backends.store.protocol import Only
from state_backends.store.writing import OutboxWrites


class SupersededBlocks(OutboxWrites):
    """The part of a store that lets blocks take the place of others."""

    def supersede(self, spans: Mapping[int, tuple[int, int]], below: int) -> None:
        with self._lock:
            self._superseded.update(e.seq for e in self._ledger.of_slices(spans, Only(spans, below=below)))

    def drop_superseded(self) -> None:
        with self._lock:
            entries = [self._ledger[seq] for seq in sorted(self._superseded)]
            for entry in entries:
                if entry.file_no in self._files:
                    self._files.bury(entry.file_no, entry.slice_us, entry.seq)
            self._forget(entries)

    def superseded(self, skip: Collection[int] = ()) -> list[tuple[int, int]]:
        with self._lock:
            dead = {seq for slice_us, seq in self._files.buried() if slice_us not in skip}
            dead |= {seq for seq in self._superseded if self._ledger[seq].file_no in self._files}
            live = np.array(sorted(e.seq for e in self._ledger if e.seq not in self._superseded), np.int64)
        if not dead:
            return []
        seqs = np.array(sorted(dead), np.int64)
        # Dead blocks between which none is alive make a run.
        firsts = np.flatnonzero(np.diff(np.searchsorted(live, seqs), prepend=-1))
        lasts = np.append(firsts[1:], len(seqs)) - 1
        return list(zip(seqs[firsts].tolist(), seqs[lasts].tolist(), strict=True))


def covers(runs: Sequence[tuple[int, int]], seqs: Sequence[int]) -> list[bool]:
    """Whether each number lies in one of the sorted, disjoint runs."""
    if not runs or not seqs:
        return [False] * len(seqs)
    firsts, lasts = np.array(runs, np.int64).T
    numbers = np.array(seqs, np.int64)
    at = np.searchsorted(firsts, numbers, side="right") - 1
    found: list[bool] = ((at >= 0) & (numbers <= lasts[at])).tolist()
    return found
