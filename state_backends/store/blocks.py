"""All live blocks of one store: where each is, its bytes if it is in memory, and the file that has it.

It also counts how well staging serves the reads: hits, late prestages, misses, and bytes staged in vain.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from state_backends.files.names import SstFile
from state_backends.format.block import Block, BodyAt
from state_backends.store.file_index import Indexed
from state_backends.store.ledger import IN_MEMORY, NO_FILE, Entry, HandedBody, Ledger, Move, Place
from state_backends.store.live_files import LiveFiles
from state_backends.store.m_bucket import MBuckets, MemoryBudget
from state_backends.store.protocol import Alive, Only, Runs, StagingStats, StoreStats


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


class Blocks:
    """What the parts of a store share. Each method changes ledger, memory and files together, so that they agree.

    It owns the ledger, the m-buckets, the live files, the counts of staging, and the set of replaced blocks. Invariants
    (:meth:`validate`): a block is in memory if and only if the ledger says so, and the live blocks of a file are
    exactly those that the ledger finds in it. So every live block is in memory, on disk, or both.

    Hold ``lock`` around every call. Never hold it during I/O.
    """

    def __init__(
        self, budget: MemoryBudget, files: LiveFiles, unstage: Callable[[BodyAt], None] = lambda at: None
    ) -> None:
        self.lock = threading.RLock()
        self.ledger = Ledger()
        self.memory = MBuckets(budget, unstage)
        self.files = files
        self.staging = StagingCounts()
        self.closed = False
        self._budget = budget
        self._budgeted_bytes = 0  # of the ledger, in the budget
        # Replaced by others: out of sight, and alive until the version that says so is made.
        self._replaced: dict[int, int] = {}  # seq -> the first number of the blocks that replace it

    def visible(self, slices: Iterable[int], only: Only | None = None) -> list[Entry]:
        """Returns the blocks that a reader sees, sorted by slice, then by arrival."""
        entries = self.ledger.of_slices(slices, only)
        return [e for e in entries if e.seq not in self._replaced] if self._replaced else entries

    def unwritten(self, skip: Collection[int]) -> list[int]:
        """Returns the seqs of the blocks that a commit must write: only in memory, not replaced, not in slices of
        ``skip``.
        """
        pending = (e for e in self.ledger if e.place is Place.MEMORY and e.slice_us not in skip)
        return [e.seq for e in pending if e.seq not in self._replaced]

    # -- blocks come, move and go -------------------------------------------------------------------------

    def add(self, seq: int, block: Block) -> Entry:
        """Adds a new block, in memory."""
        header = block.header
        handed = None if block.at is None else HandedBody(sys.intern(block.at.file), header.body_bytes)
        entry = self.ledger.add(
            seq, header.slice_us, block.size_bytes, Place.MEMORY, compacted=header.compacted, handed=handed
        )
        self.memory.add(seq, block)
        self._budget_ledger()
        return entry

    def written(self, file: SstFile, blocks: Sequence[tuple[int, Block]]) -> list[Entry]:
        """Records that a new file has these blocks. Returns those that are still alive."""
        self.files.add(file, [(block.header.slice_us, seq, block.size_bytes) for seq, block in blocks], new=True)
        alive = []
        for seq, _ in blocks:
            if seq not in self.ledger:  # purged or replaced while it was being written
                continue
            entry = self.ledger.move(seq, Move.WRITTEN, file_no=file.file_no)
            self.files.gain(file.file_no, entry.slice_us, seq, entry.size_bytes)
            alive.append(entry)
        self.files.remove_dead([file.file_no])
        return alive

    def merged(self, file: SstFile, entries: Sequence[Entry], inputs: Sequence[int]) -> None:
        """Records that a new file has copies of these blocks, and replaces the files that they were copied from."""
        number = file.file_no
        self.files.add(file, [(e.slice_us, e.seq, e.size_bytes) for e in entries], new=True)
        for entry in entries:
            if entry.place is Place.PURGED:  # after it was copied, or before
                continue
            assert entry.file_no in inputs, f"{entry} was moved by somebody else"
            self.files.lose(entry.file_no, entry.slice_us, entry.seq, entry.size_bytes)
            self.ledger.move(entry.seq, Move.RELOCATE, file_no=number)
            self.files.gain(number, entry.slice_us, entry.seq, entry.size_bytes)
        self.files.remove_dead([number, *inputs])

    def staged(self, entry: Entry, block: Block, reserved_bytes: int) -> None:
        """Records that a prestaged block is in memory. ``reserved_bytes``: the room that was reserved for it."""
        self.ledger.move(entry.seq, Move.STAGED)
        self.memory.add(entry.seq, block, reserved_bytes=reserved_bytes)
        self.staging.staged(entry.seq, entry.size_bytes)

    def staged_body(self, entry: Entry, reserved_bytes: int) -> None:
        """Records that the body of a reference in memory is staged."""
        self.memory.add_body(entry.seq, reserved_bytes=reserved_bytes)
        self.staging.staged(entry.seq, entry.body_bytes)

    def without_bodies(self, entries: Iterable[Entry]) -> list[tuple[Entry, Block]]:
        """Returns the references among these that are in memory, and whose bodies are not staged."""
        handed = [e for e in entries if e.handed is not None and e.place in IN_MEMORY]
        return [(e, self.memory[e.seq]) for e in handed if not self.memory.is_whole(e.seq)]

    def evict(self, entry: Entry) -> None:
        """Removes a block from memory. It must be on disk."""
        # The table of moves allows this only from BOTH: a block leaves memory after it has reached the disk.
        self.ledger.move(entry.seq, Move.EVICT)
        self.memory.remove(entry.seq)
        self.staging.left_memory(entry)

    def forget(self, entries: Sequence[Entry]) -> None:
        """Records that these blocks are dead. Drops files in which no block is alive any more."""
        for entry in entries:
            self._replaced.pop(entry.seq, None)
            self.memory.remove(entry.seq)
            self.staging.left_memory(entry)
            self.ledger.move(entry.seq, Move.PURGE)
            if entry.file_no in self.files:
                self.files.lose(entry.file_no, entry.slice_us, entry.seq, entry.size_bytes)
        self._budget_ledger()
        self.files.remove_dead({entry.file_no for entry in entries})

    def restore(
        self,
        files: Sequence[SstFile],
        indexes: Sequence[Sequence[Indexed]],
        alive: Alive,
    ) -> None:
        """Adds the blocks of existing files. See :meth:`state_backends.store.protocol.BlockStore.restore`.

        ``indexes``: the blocks of each file.
        """
        for file, index in zip(files, indexes, strict=True):
            self.files.add(file, [(line.slice_us, line.seq, line.size_bytes) for line in index], new=False)
            flags = alive(file.file_no, [(line.slice_us, line.seq) for line in index])
            for line in itertools.compress(index, flags):
                self.files.gain(file.file_no, line.slice_us, line.seq, line.size_bytes)
                place = Place.DISK, file.file_no
                handed = line.handed and HandedBody(sys.intern(line.handed.file), line.handed.size_bytes)
                self.ledger.add(
                    line.seq, line.slice_us, line.size_bytes, *place, compacted=line.compacted, handed=handed
                )
        self._budget_ledger()

    def close(self) -> None:
        """Frees all memory, and forbids further I/O. Call it when no I/O is under way."""
        self.closed = True
        self.memory.clear()
        self._budget_ledger()

    # -- blocks that were replaced ------------------------------------------------------------------------

    def replace(self, spans: Mapping[int, tuple[int, int]], below: int) -> None:
        found = (e.seq for e in self.ledger.of_slices(spans, Only(spans, below=below)))
        # A block that is hidden already stays hidden if only these newer blocks are rolled back.
        self._replaced = dict.fromkeys(found, below) | self._replaced

    def restore_replaced(self, from_seq: int) -> None:
        """What blocks from this number on replaced is visible again."""
        self._replaced = {seq: below for seq, below in self._replaced.items() if below < from_seq}

    def replaced(self) -> list[Entry]:
        """Returns the blocks that are out of sight."""
        return [self.ledger[seq] for seq in sorted(self._replaced)]

    def handed(self, skip: Collection[int]) -> set[str]:
        """Returns the files of children with bodies of live blocks, without replaced blocks and slices of ``skip``."""
        live = (e for e in self.ledger if e.handed is not None and e.slice_us not in skip)
        return {e.handed.file for e in live if e.handed is not None and e.seq not in self._replaced}

    def live_runs(self, skip: Collection[int]) -> dict[int, Runs]:
        """See :meth:`state_backends.store.protocol.BlockStore.files`."""
        hidden: dict[int, list[tuple[int, int]]] = {}
        for entry in [*self.replaced(), *self.ledger.of_slices(skip)]:
            hidden.setdefault(entry.file_no, []).append((entry.slice_us, entry.seq))
        found = {
            no: self.files[no].runs_without(hidden[no]) if no in hidden else self.files[no].runs for no in self.files
        }
        return {no: runs for no, runs in found.items() if runs}

    # -- the whole ----------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        """Returns bytes by place, and how well staging served reads."""
        both = sum(e.size_bytes for e in self.ledger if e.place is Place.BOTH)
        on_disk = self.ledger.disk_bytes + self.ledger.handed_bytes
        staged = self.memory.body_bytes
        stats = StoreStats(len(self.ledger), self.ledger.memory_bytes + staged, on_disk, on_disk - both - staged)
        stats.staging.add(self.staging.stats)
        return stats

    def validate(self) -> None:
        """Raises AssertionError if ledger, memory and files disagree."""
        self.ledger.validate()
        assert self._budgeted_bytes == self.ledger.own_bytes
        in_memory = {e.seq for e in self.ledger if e.place in IN_MEMORY}
        assert in_memory == self.memory.seqs(), "a block is in memory exactly if the ledger says so"
        assert self.ledger.memory_bytes == self.memory.total_bytes - self.memory.body_bytes
        live: dict[int, set[tuple[int, int]]] = {no: set() for no in self.files}
        sizes = dict.fromkeys(self.files, 0)
        for entry in self.ledger:
            if entry.file_no != NO_FILE:
                live[entry.file_no].add((entry.slice_us, entry.seq))
                sizes[entry.file_no] += entry.size_bytes
        assert sizes == {no: self.files[no].live_bytes for no in self.files}
        assert all(live.values()), "no file is without a live block"
        for no, blocks in live.items():
            file = self.files[no]
            assert blocks == set(itertools.compress(zip(file.slices, file.seqs, strict=True), file.alive))

    def _budget_ledger(self) -> None:
        """Counts the memory of the ledger itself in the budget."""
        grown = (0 if self.closed else self.ledger.own_bytes) - self._budgeted_bytes
        if grown:
            self._budgeted_bytes += grown
            self._budget.ledger_grew(grown)
