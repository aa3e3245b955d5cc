"""Merging a store's files in the background (docs/state-format.md): the shell around :mod:`aion.core.compaction.files`.

The I/O thread copies live blocks into a new file, step by step and after everything else. Once the file is whole,
the next call of who writes makes the blocks' entries point to it, all at once under the store's lock; only then
RocksDB forgets the old files. What is kept for good of those is deleted by retention, when no version names them.
Until a version names the new file nothing durable does, and nothing is lost with it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, NamedTuple

from aion.core.compaction.files import Choice, FileView, Limits, choose
from aion.core.ingest.block import check
from aion.errors import CorruptBlock
from state_backends.files.names import MERGED, SstFile
from state_backends.store.io import Pending, Priority, Steps
from state_backends.store.ledger import Entry, Move, Place
from state_backends.store.live_files import LiveFiles
from state_backends.store.sst_file import Indexed
from state_backends.store.staging import StagedReads

OVERDUE_COMMITS = 16
"""A merge that did not end within so many commits takes its turn among their writes."""
log = logging.getLogger(__name__)


class _Merged(NamedTuple):
    """A merged file, and the entries of the blocks that were copied into it."""

    file: SstFile
    entries: list[Entry]
    inputs: tuple[int, ...]


class MergedFiles(StagedReads):
    """The part of a store that keeps its files few; blocks, places and lock are those of the parts that read and write.

    Blocks are told by their entries, not by their numbers: a rollback gives numbers anew.
    """

    def __init__(self, *args: Any, limits: Limits, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._files = LiveFiles()
        self._new_files: list[SstFile] = []  # since the last persist
        self._merge: Pending[None] | None = None
        self._merged: _Merged | None = None  # whole, and not in use yet
        self._merge_age = self._merge_pause = self._merge_failures = 0  # in calls of compact
        self._unmergeable: set[int] = set()  # files with a damaged block: it stays where it is
        self._closing = False
        self.merges = self.merged_bytes = self.failed_merges = 0

    def compact(self, among: Collection[int] | None = None, *, held_bytes: int = 0, disk_bytes: int = 0) -> None:
        with self._lock:
            self._use_merged()
            if self._merge is not None and not self._merge.over():
                self._merge_age += 1
                if self._merge_age >= OVERDUE_COMMITS:
                    self._merge.raise_to(Priority.LATE_WRITE)
                return
            if self._merge_pause:
                self._merge_pause -= 1
                return
            self._merge_age = 0
            if among is None:
                among = frozenset(self._files)
                disk_bytes = sum(self._files[no].size_bytes for no in among)
                self._new_files = [f for f in self._new_files if f.file_no in among]
            # What merges made is named by no version yet.
            unnamed = sum(f.size_bytes for f in self._new_files if f.file_no not in among)
            steps = self._merge_steps(frozenset(among), held_bytes + unnamed, disk_bytes + unnamed)
            self._merge = self._io.submit(Priority.MAINTENANCE, steps)

    def _merge_steps(self, among: Collection[int], held_bytes: int, disk_bytes: int) -> Steps[None]:
        with self._lock:
            choice = self._choose(among, held_bytes, disk_bytes)
            if choice is None:
                return
            slices = {s for no in choice.files for s in self._files[no].slices}
            entries = self._ledger.of_files(choice.files, slices)
        log.debug("merging files %s: %s", choice.files, choice.reason)
        try:
            file = yield from self._copy(entries)
        except Exception as error:
            # Nothing was replaced. What failed once may fail again: it is tried ever more seldom.
            self.failed_merges += 1
            self._merge_failures += 1
            self._merge_pause = min(2**self._merge_failures, 64)
            log.error("merging files %s failed; they stay as they are: %s", choice.files, error)
            return
        with self._lock:
            self._merge_failures = 0
            self.merges += 1
            self.merged_bytes += sum(e.size_bytes for e in entries)
            if not self._closing:
                self._merged = _Merged(file, entries, choice.files)
                return
        self._p.delete(file)

    def _choose(self, among: Collection[int], held_bytes: int, disk_bytes: int) -> Choice | None:
        views = [
            FileView(no, file.size_bytes, file.live_bytes, file.newest_us)
            for no in among
            if no in self._files and no not in self._unmergeable
            for file in [self._files[no]]
        ]
        return choose(views, held_bytes=held_bytes, disk_bytes=disk_bytes, limits=self._limits)

    def _copy(self, entries: list[Entry]) -> Steps[SstFile]:
        """Copies live blocks as they are, each checked: damage must not get a new checksum around it."""
        index = [Indexed(e.slice_us, e.seq, e.size_bytes, e.folded) for e in entries]
        with self._p.writing(index, MERGED) as out:
            for entry in entries:
                file_no = entry.file_no
                if entry.place is Place.PURGED:
                    continue
                try:
                    block = yield from self._p.fetch(file_no, entry.slice_us, entry.seq)
                    check(block, f"block {entry.seq} of slice {entry.slice_us} in file {file_no}")
                except CorruptBlock:
                    if self._is_gone(entry):
                        continue
                    self._unmergeable.add(file_no)
                    raise
                out.put(entry.slice_us, entry.seq, bytes(block.data))
                yield block.size_bytes
                if out.sync_due():
                    out.sync()
                    yield 0
            yield from out.seal()
        return out.file

    def _is_gone(self, entry: Entry) -> bool:
        with self._lock:
            return entry.place is Place.PURGED

    def _use_merged(self) -> None:
        """Makes the merged file take the place of its inputs. By who writes: never in the middle of a commit."""
        merged, self._merged = self._merged, None
        if merged is None:
            return
        number = merged.file.file_no
        self._files.add(number, [(e.slice_us, e.size_bytes) for e in merged.entries])
        for entry in merged.entries:
            if entry.place is Place.PURGED:  # since it was copied, or even before
                self._files.bury(number, entry.slice_us, entry.seq)
                continue
            assert entry.file_no in merged.inputs, f"{entry} was moved by somebody else"
            self._files.lose(entry.file_no, entry.slice_us, entry.size_bytes)
            self._ledger.move(entry.seq, Move.RELOCATE, file_no=number)
            self._files.gain(number, entry.slice_us, entry.size_bytes)
        self._new_files.append(merged.file)
        self._drop_dead(number, *merged.inputs)

    def _drop_dead(self, *file_nos: int) -> None:
        dead = [no for no in file_nos if no in self._files and self._files.remove_if_dead(no)]
        if dead:
            self._unmergeable.difference_update(dead)
            # After every read that is queued: those who read later look up where a block is by then.
            self._io.submit(Priority.MAINTENANCE, self._p.drop(*dead))

    def _stop_merging(self) -> None:
        """Gives up the merge under way, and what one made that nobody has seen."""
        with self._lock:
            self._closing = True
            if self._merge is not None:
                self._merge.cancel()
            merged, self._merged = self._merged, None
        if merged is not None:
            self._p.delete(merged.file)
