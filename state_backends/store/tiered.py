"""Window state split between memory and RocksDB: m-buckets and p-buckets (paper section 3.1 and 3.2).

New blocks of a window stay in its m-bucket until that is full or the host's budget is used up; what does not
fit, and what is late, goes to the p-bucket. An expired window is destaged, but for its bootstrap part; before it is
executed again it is prestaged. All persistent I/O is done by the one I/O thread; a lock is never held across it:
blocks are marked as being moved, stay readable meanwhile, and leave memory only when they are safely on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aion.core.compaction.files import DEFAULTS, Limits
from aion.core.ingest.block import Block
from aion.errors import DiskError
from state_backends.files.names import SstFile
from state_backends.store.io import BlockFiles, Io, Pending, Priority, Steps
from state_backends.store.ledger import IN_MEMORY, NO_FILE, Entry, Move, Place
from state_backends.store.m_bucket import MemoryBudget, Stretches
from state_backends.store.protocol import Only, StagingStats, StoreStats
from state_backends.store.superseding import SupersededBlocks, covers

MIB = 1 << 20


class TieredStore(SupersededBlocks):
    """The standard policy. See :class:`state_backends.store.protocol.BlockStore` for the protocol."""

    def __init__(
        self,
        p_bucket: BlockFiles,
        io: Io,
        budget: MemoryBudget,
        *,
        bucket_limit_bytes: int,
        windows: Sequence[Stretches] = (),
        keep_fraction: float = 0.0,
        prestages: bool = True,
        blocking: bool = True,
        outbox_bytes: int = 32 * MIB,
        read_ahead: int = 4,
        limits: Limits = DEFAULTS,
    ) -> None:
        super().__init__(
            p_bucket,
            io,
            budget,
            prestages=prestages,
            blocking=blocking,
            outbox_bytes=outbox_bytes,
            read_ahead=read_ahead,
            limits=limits,
        )
        self._bucket_limit = bucket_limit_bytes
        self._windows = windows
        self._keep_fraction = keep_fraction
        self._expired: set[int] = set()  # live slices that were destaged because their windows expired
        self._touched: dict[int, float] = {}  # live slice -> when a watermark last concerned it, or a prestage
        self._appended: dict[int, tuple[float, float, int]] = {}  # slice -> first, last append, bytes

    # -- what differs between the stores ------------------------------------------------------------------

    _bounded = True
    """Whether memory is bounded by the budget."""

    def _keeps(self, entry: Entry, late: bool) -> bool:
        """Whether a new block belongs into its m-bucket; the budget is asked separately."""
        if late:
            return False
        return self._memory.heaviest(entry.slice_us, self._windows, self._bucket_limit) <= self._bucket_limit

    # -- the protocol -------------------------------------------------------------------------------------

    def append(self, seq: int, block: Block, *, late: bool) -> None:
        with self._lock:
            header = block.header
            entry = self._ledger.add(seq, header.slice_us, block.size_bytes, Place.MEMORY, folded=header.folded)
            self._memory.hold(seq, block)
            self._count_ledger()
            self._note_append(entry)
            left = self._budget.left() if self._bounded else self._outbox_limit
            # Room is kept for a whole outbox: the last blocks before the limit leave as one file.
            if left < self._outbox_limit or not self._keeps(entry, late):
                self._post(entry)
            exceeded = left < 0
            if self._outbox and (exceeded or self._outbox_bytes >= self._write_at_bytes):
                self._write(list(self._outbox), Priority.LATE_WRITE, leave=True)
            # Back-pressure: whoever fills memory waits for the disk, instead of growing.
            waiting = self._awaited_writes() if exceeded else []
        if waiting:
            self._io.wait(waiting)
            self._refuse_if_stuck(entry, waiting)
        self._io.wait_for_room()

    def _refuse_if_stuck(self, entry: Entry, writes: Sequence[Pending[SstFile]]) -> None:
        """Raises DiskError, and does not keep the block, if memory is full and the disk takes nothing."""
        failed = [error for write in writes if (error := write.error()) is not None]
        with self._lock:
            if not failed or entry.place is not Place.MEMORY or self._budget.left() >= 0:
                return
            self._forget([entry])
        if isinstance(failed[-1], DiskError):
            raise DiskError(f"memory is full, and no block can leave it: {failed[-1]}") from failed[-1]
        raise failed[-1]

    def prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        with self._lock:
            # What is fetched for an execution is not idle until that.
            self._touched.update((s, self._io.now()) for s in slices if self._ledger.has_slice(s))
        super().prestage(slices, only)

    def destage(self, slices: Sequence[int]) -> None:
        with self._lock:
            self._expired.update(slices)
            self._touched.update((s, self._io.now()) for s in slices if self._ledger.has_slice(s))
            for slice_us in slices:
                self._shrink(slice_us, None)

    def shrink(self, slice_us: int, keep_bytes: int) -> str | None:
        """Frees a slice's memory but for its first ``keep_bytes``; the reason if there is nothing to free."""
        with self._lock:
            if self._closed or not self._memory.size(slice_us):
                return "it has nothing in memory"
            if not self._shrink(slice_us, keep_bytes):
                return "it holds no more than its bootstrap part"
        self.flush()
        return None

    def views(self) -> list[dict[str, Any]]:
        """What a destage policy may know of each slice that has anything in memory."""
        with self._lock:
            on_disk: dict[int, int] = {}
            for entry in self._ledger:
                if entry.place not in IN_MEMORY:
                    on_disk[entry.slice_us] = on_disk.get(entry.slice_us, 0) + entry.size_bytes
            views = []
            for slice_us, m_bytes in self._memory.sizes().items():
                first_s, last_s, size = self._appended.get(slice_us, (0.0, 0.0, 0))
                p_bytes = on_disk.get(slice_us, 0)
                views.append(
                    {
                        "name": slice_us,
                        "m_bytes": m_bytes,
                        "p_bytes": p_bytes,
                        "keep_bytes": int(self._keep_fraction * (m_bytes + p_bytes)),
                        "expired": slice_us in self._expired,
                        "last_append_s": max(last_s, self._touched.get(slice_us, 0.0)),
                        "append_rate_bytes_per_s": size / max(last_s - first_s, 1.0),
                    }
                )
            return views

    def purge(self, slices: Sequence[int]) -> None:
        with self._lock:
            self._forget(self._ledger.of_slices(slices))
            for slice_us in slices:
                self._past_staging.add(self._staging.pop(slice_us, StagingStats()))
                self._appended.pop(slice_us, None)
                self._expired.discard(slice_us)
                self._touched.pop(slice_us, None)

    def rollback(self, from_seq: int) -> None:
        while True:
            with self._lock:
                # Memory pressure may begin to write meanwhile, but not while the lock is held.
                writes = [write for write in self._awaited_writes() if not write.over()]
                if not writes:
                    self._superseded.clear()
                    self._forget([e for e in self._ledger if e.seq >= from_seq])
                    unwanted = [f for f in self._new_files if f.file_no not in self._files]
                    self._new_files = [f for f in self._new_files if f.file_no in self._files]
                    break
            self._io.wait(writes)
        for file in unwanted:
            self._p.delete(file)

    def restore(
        self, files: Sequence[SstFile], purged: frozenset[int], superseded: Sequence[tuple[int, int]] = ()
    ) -> None:
        indexes = self._io.submit(Priority.READ, self._p.adopt(files)).result()
        with self._lock:
            for file, index in zip(files, indexes, strict=True):
                self._files.add(file.file_no, [(line.slice_us, line.size_bytes) for line in index])
                for line, dead in zip(index, covers(superseded, [line.seq for line in index]), strict=True):
                    if line.slice_us in purged:
                        continue
                    if dead:
                        self._files.bury(file.file_no, line.slice_us, line.seq)
                        continue
                    self._files.gain(file.file_no, line.slice_us, line.size_bytes)
                    where = Place.DISK, file.file_no
                    self._ledger.add(line.seq, line.slice_us, line.size_bytes, *where, folded=line.folded)
            self._count_ledger()

    def files(self) -> dict[int, dict[int, int]]:
        with self._lock:
            counts = self._files.counts()
            for seq in self._superseded:
                entry = self._ledger[seq]
                if entry.file_no in counts:
                    counts[entry.file_no][entry.slice_us] -= 1
            return counts

    def stats(self) -> StoreStats:
        with self._lock:
            m, p = self._ledger.memory_bytes, self._ledger.disk_bytes
            both = sum(e.size_bytes for e in self._ledger if e.place is Place.BOTH)
            stats = StoreStats(len(self._ledger), m, p, p - both)
            stats.failed_writes, stats.failed_merges = self.failed_writes, self.failed_merges
            stats.merges, stats.merged_bytes = self.merges, self.merged_bytes
            stats.staging.add(self._past_staging)
            for staging in self._staging.values():
                stats.staging.add(staging)
            return stats

    def close(self) -> None:
        self._stop_merging()
        with self._lock:
            self._closed = True  # nothing is asked of the p-bucket after this
            under_way: list[Pending[Any]] = [*self._writes.values(), *(s.request for s in self._stagings.values())]
        self._io.wait(under_way)
        with self._lock:
            for seq in list(self._stagings):
                self._give_up_staging(seq)
            self._memory.clear()
            self._count_ledger()
        self._io.submit(Priority.READ, _call(self._p.close)).result()

    def validate(self) -> None:
        """The invariants of docs/store.md; raises AssertionError."""
        with self._lock:
            self._ledger.validate()
            assert self._ledger_counted == self._ledger.own_bytes
            in_memory = {e.seq for e in self._ledger if e.place in IN_MEMORY}
            assert in_memory == self._memory.seqs(), "a block is in memory exactly if the ledger says so"
            assert self._ledger.memory_bytes == self._memory.total_bytes
            assert set(self._outbox) <= {e.seq for e in self._ledger if e.place is Place.MEMORY}
            assert self._outbox_bytes == sum(self._outbox.values())
            live = dict.fromkeys(self._files, 0)
            for entry in self._ledger:
                if entry.file_no != NO_FILE:
                    live[entry.file_no] += entry.size_bytes
            # No file without a live block, either.
            assert live == {no: self._files[no].live_bytes for no in self._files}
            assert all(live.values())

    # -- leaving memory -----------------------------------------------------------------------------------

    def _shrink(self, slice_us: int, keep_bytes: int | None) -> bool:
        """Sends a slice's blocks to disk, but for the first ones (rho_min); whether any had to go."""
        entries = self._ledger.of_slices([slice_us])
        if keep_bytes is None:
            keep_bytes = int(self._keep_fraction * sum(e.size_bytes for e in entries))
        went = False
        for entry in entries:
            if entry.place is Place.STAGING:
                self._ledger.move(entry.seq, Move.CANCEL)
                self._give_up_staging(entry.seq)
            if entry.place not in IN_MEMORY:
                continue
            keep_bytes -= entry.size_bytes
            if keep_bytes >= 0:
                continue
            went = True
            if entry.place is Place.MEMORY:
                self._post(entry)
            elif entry.place is Place.DESTAGING:
                self._leaving.add(entry.seq)
            else:
                self._evict(entry)
        return went

    def _note_append(self, entry: Entry) -> None:
        now = self._io.now()
        first, _, size = self._appended.get(entry.slice_us, (now, now, 0))
        self._appended[entry.slice_us] = (first, now, size + entry.size_bytes)


def _call(function: object) -> Steps[None]:
    function()  # type: ignore[operator]
    return
    yield 0


__all__ = ["MemoryBudget", "TieredStore"]
