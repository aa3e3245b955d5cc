"""Merges files in the background (docs/inside/store.md). :mod:`state_backends.store.merge_choice` chooses them.

The I/O thread copies live blocks into a new file, step by step, when nothing else waits. When the file is complete,
the next call of the writing thread makes the blocks' entries point to it, all at once under the store's lock. Only then
does RocksDB forget the old files. Retention deletes published files when no version names them any more. Until a
version names the new file, nothing durable depends on it, so losing it loses nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import NamedTuple

from state_backends.files.names import MERGED, SstFile
from state_backends.format.block import check
from state_backends.format.errors import CorruptBlock
from state_backends.store.blocks import Blocks
from state_backends.store.file_index import Indexed
from state_backends.store.io import BlockFiles, Io, Steps
from state_backends.store.ledger import Entry, Place
from state_backends.store.merge_choice import Choice, FileView, Limits, choose
from state_backends.store.merge_turns import MergeTurns

log = logging.getLogger(__name__)


class _Merged(NamedTuple):
    """A merged file, the entries of the blocks that were copied into it, and the files that they came from."""

    file: SstFile
    entries: list[Entry]
    inputs: tuple[int, ...]


class Merger:
    """Keeps the number of files low. It owns the merged file that is not in use yet.

    Invariant: a merged file is either put to use by the writing thread, between two commits, or deleted. It refers to
    blocks by their entries, not by their numbers: after a rollback another block may have the same number.
    """

    def __init__(self, blocks: Blocks, files: BlockFiles, io: Io, limits: Limits) -> None:
        self._blocks, self._files = blocks, files
        self._limits = limits
        self._turns = MergeTurns(io)
        self._merged: _Merged | None = None
        self.merges = self.merged_bytes = self.failed_merges = 0

    def compact(self, among: Collection[int] | None, *, held_bytes: int, disk_bytes: int) -> None:
        """See :meth:`state_backends.store.protocol.BlockStore.compact`."""
        with self._blocks.lock:
            self.use_merged()
            if not self._turns.due():
                return
            files = self._blocks.files
            if among is None:
                among = frozenset(files)
                disk_bytes = sum(files[no].size_bytes for no in among)
                files.take_new_dead()  # without versions, nobody asks for new files
            # Files that merges made and that no version names yet.
            unnamed = files.new_bytes(skip=among)
            steps = self._steps(frozenset(among), held_bytes + unnamed, disk_bytes + unnamed)
            self._turns.begin(steps)

    def use_merged(self) -> None:
        """Replaces files by the file that they were merged into. Hold the lock.

        The writing thread calls it, never in the middle of a commit.
        """
        merged, self._merged = self._merged, None
        if merged is not None:
            self._blocks.merged(*merged)

    def stop(self) -> None:
        """Cancels the merge under way, and deletes a merged file that is not in use yet."""
        with self._blocks.lock:
            self._turns.stop()
            merged, self._merged = self._merged, None
        if merged is not None:
            self._files.delete(merged.file)

    def _steps(self, among: Collection[int], held_bytes: int, disk_bytes: int) -> Steps[None]:
        with self._blocks.lock:
            choice = self._choose(among, held_bytes, disk_bytes)
            if choice is None:
                return
            slices = {s for no in choice.files for s in self._blocks.files[no].live_slices}
            entries = self._blocks.ledger.of_files(choice.files, slices)
        log.debug("merging files %s: %s", choice.files, choice.reason)
        try:
            file = yield from self._copy(entries)
        except Exception as error:
            # Nothing was replaced.
            self.failed_merges += 1
            self._turns.failed()
            log.error("cannot merge files %s; they stay as they are: %s", choice.files, error)
            return
        with self._blocks.lock:
            self._turns.succeeded()
            self.merges += 1
            self.merged_bytes += sum(e.size_bytes for e in entries)
            if not self._turns.closing:
                self._merged = _Merged(file, entries, choice.files)
                return
        self._files.delete(file)

    def _choose(self, among: Collection[int], held_bytes: int, disk_bytes: int) -> Choice | None:
        files = self._blocks.files
        views = [
            FileView(no, file.size_bytes, file.live_bytes, file.newest_us)
            for no in among
            if no in files
            for file in [files[no]]
            if not file.damaged
        ]
        return choose(views, held_bytes=held_bytes, disk_bytes=disk_bytes, limits=self._limits)

    def _copy(self, entries: list[Entry]) -> Steps[SstFile]:
        """Copies live blocks unchanged. Checks each first: a damaged block must not get a new checksum."""
        index = [Indexed(e.slice_us, e.seq, e.size_bytes, e.compacted, e.handed) for e in entries]
        with self._files.writing(index, MERGED) as out:
            for entry in entries:
                file_no = entry.file_no
                if entry.place is Place.PURGED:
                    continue
                try:
                    (block,) = yield from self._files.fetch(file_no, [(entry.slice_us, entry.seq)])
                    if block.at is None:  # the body of another block is elsewhere, and is not copied
                        check(block, f"block {entry.seq} of slice {entry.slice_us} in file {file_no}")
                except CorruptBlock:
                    if self._is_dead(entry, file_no):
                        continue
                    raise
                out.put(entry.slice_us, entry.seq, bytes(block.stored))
                yield block.size_bytes
                if out.sync_due():
                    out.sync()
                    yield 0
            yield from out.seal()
        return out.file

    def _is_dead(self, entry: Entry, file_no: int) -> bool:
        """Returns whether a block that could not be read has died meanwhile. If not, marks its file as damaged."""
        with self._blocks.lock:
            if entry.place is Place.PURGED:
                return True
            self._blocks.files[file_no].damaged = True
            return False
