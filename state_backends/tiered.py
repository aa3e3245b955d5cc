"""Window state split between memory and RocksDB: m-buckets and p-buckets (paper section 3.1 and 3.2).

New blocks of a window stay in its m-bucket until that is full or the host's budget is used up; what does not
fit, and what is late, goes to the p-bucket. An expired window is destaged, but for its bootstrap part; before it is
executed again it is prestaged. All persistent I/O is done by the one I/O thread; a lock is never held across it:
blocks are marked as being moved, stay readable meanwhile, and leave memory only when they are safely on disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from state_backends.block import Block
from state_backends.io_thread import IoThread, Priority, Steps
from state_backends.ledger import IN_MEMORY, Entry, Move, Place
from state_backends.m_bucket import MemoryBudget
from state_backends.p_bucket import PBucket
from state_backends.staging import StagedReads
from state_backends.store import SstFile, StagingStats, StoreStats

MIB = 1 << 20
log = logging.getLogger(__name__)


class TieredStore(StagedReads):
    """The standard policy. See :class:`state_backends.store.BlockStore` for the protocol."""

    def __init__(
        self,
        p_bucket: PBucket,
        io: IoThread,
        budget: MemoryBudget,
        *,
        bucket_limit_bytes: int,
        keep_fraction: float = 0.0,
        prestages: bool = True,
        blocking: bool = True,
        outbox_bytes: int = 32 * MIB,
        read_ahead: int = 4,
    ) -> None:
        super().__init__(
            p_bucket,
            io,
            budget,
            prestages=prestages,
            blocking=blocking,
            outbox_bytes=outbox_bytes,
            read_ahead=read_ahead,
        )
        self._bucket_limit = bucket_limit_bytes
        self._keep_fraction = keep_fraction
        self._outbox: dict[int, int] = {}  # seq -> bytes, waiting to be written and then let go
        self._outbox_bytes = 0
        self._leaving: set[int] = set()  # being written, to be let go afterwards
        self._writes: set[Future[SstFile]] = set()
        self._new_files: list[SstFile] = []
        self._files: dict[int, dict[int, int]] = {}  # file -> slice -> live blocks of it in that file
        self._expired: set[int] = set()  # live slices that were destaged because their windows expired
        self._touched: dict[int, float] = {}  # slice -> when a watermark last concerned it
        self._appended: dict[int, tuple[float, float, int]] = {}  # slice -> first, last append, bytes

    # -- what differs between the stores ------------------------------------------------------------------

    _bounded = True
    """Whether memory is bounded by the budget."""

    def _keeps(self, entry: Entry, late: bool) -> bool:
        """Whether a new block belongs into its m-bucket; the budget is asked separately."""
        return not late and self._memory.size(entry.slice_us) <= self._bucket_limit

    # -- the protocol -------------------------------------------------------------------------------------

    def append(self, seq: int, block: Block, *, late: bool) -> None:
        with self._lock:
            entry = self._ledger.add(seq, block.header.slice_us, block.size_bytes, Place.MEMORY)
            self._memory.hold(seq, block)
            self._note_append(entry)
            left = self._budget.left() if self._bounded else self._outbox_limit
            # Room is kept for a whole outbox: the last blocks before the limit leave as one file.
            if left < self._outbox_limit or not self._keeps(entry, late):
                self._post(entry)
            exceeded = left < 0
            if self._outbox and (exceeded or self._outbox_bytes >= self._outbox_limit):
                self._write(list(self._outbox), Priority.LATE_WRITE, leave=True)
            # Back-pressure: whoever fills memory waits for the disk, instead of growing.
            waiting = list(self._writes) if exceeded else []
        if waiting:
            wait(waiting)
        self._io.wait_for_room()

    def destage(self, slices: Sequence[int]) -> None:
        with self._lock:
            self._expired.update(slices)
            self._touched.update(dict.fromkeys(slices, time.monotonic()))
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
            for entry in self._ledger.of_slices(slices):
                self._forget(entry)
            for slice_us in slices:
                self._past_staging.add(self._staging.pop(slice_us, StagingStats()))
                self._appended.pop(slice_us, None)
                self._expired.discard(slice_us)
                self._touched.pop(slice_us, None)

    def flush(self) -> None:
        with self._lock:
            if self._outbox and not self._closed:
                self._write(list(self._outbox), Priority.DESTAGE, leave=True)

    def persist(self, skip: Collection[int] = ()) -> list[SstFile]:
        with self._lock:
            leaving = set(self._outbox)
            pending = [e.seq for e in self._ledger if e.place is Place.MEMORY and e.slice_us not in skip]
            if pending:
                self._write(pending, Priority.LATE_WRITE, leave=False, leaving=leaving)
            writes = list(self._writes)
        wait(writes)  # all of them: if one failed, nothing else is under way when that is told
        for write in writes:
            write.result()
        with self._lock:
            files, self._new_files = self._new_files, []
        return files

    def rollback(self, from_seq: int) -> None:
        while True:
            with self._lock:
                # Memory pressure may begin to write meanwhile, but not while the lock is held.
                writes = [write for write in tuple(self._writes) if not write.done()]
                if not writes:
                    for entry in [e for e in self._ledger if e.seq >= from_seq]:
                        self._forget(entry)
                    unwanted = [f for f in self._new_files if f.file_no not in self._files]
                    self._new_files = [f for f in self._new_files if f.file_no in self._files]
                    break
            wait(writes)
        for file in unwanted:
            Path(file.path).unlink(missing_ok=True)

    def restore(self, files: Sequence[SstFile], purged: frozenset[int]) -> None:
        for file in files:
            index = self._io.submit(Priority.READ, self._p.adopt(file)).result()
            with self._lock:
                slices = self._files[file.file_no] = {line.slice_us: 0 for line in index}
                for line in index:
                    if line.slice_us not in purged:
                        slices[line.slice_us] += 1
                        self._ledger.add(line.seq, line.slice_us, line.size_bytes, Place.DISK, file.file_no)

    def files(self) -> dict[int, dict[int, int]]:
        with self._lock:
            return {no: dict(slices) for no, slices in self._files.items()}

    def stats(self) -> StoreStats:
        with self._lock:
            m, p = self._ledger.memory_bytes, self._ledger.disk_bytes
            both = sum(e.size_bytes for e in self._ledger if e.place is Place.BOTH)
            stats = StoreStats(len(self._ledger), m, p, p - both)
            stats.staging.add(self._past_staging)
            for staging in self._staging.values():
                stats.staging.add(staging)
            return stats

    def close(self) -> None:
        with self._lock:
            self._closed = True  # nothing is asked of the p-bucket after this
            under_way: list[Future[Any]] = [*self._writes, *(r.future for r in self._stagings.values())]
        wait(under_way)
        with self._lock:
            for seq in list(self._reserved):
                self._staging_over(seq)
            self._memory.clear()
        self._io.submit(Priority.READ, _call(self._p.close)).result()

    def validate(self) -> None:
        """The invariants of DESIGN section 5; raises AssertionError."""
        with self._lock:
            self._ledger.validate()
            in_memory = {e.seq for e in self._ledger if e.place in IN_MEMORY}
            assert in_memory == self._memory.seqs(), "a block is in memory exactly if the ledger says so"
            assert self._ledger.memory_bytes == self._memory.total_bytes
            assert set(self._outbox) <= {e.seq for e in self._ledger if e.place is Place.MEMORY}
            assert self._outbox_bytes == sum(self._outbox.values())

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
                request = self._staging_over(entry.seq)
                if request is not None:
                    request.cancel()
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

    def _forget(self, entry: Entry) -> None:
        self._memory.let_go(entry.seq)
        self._unpost(entry.seq)
        self._leaving.discard(entry.seq)
        if entry.seq in self._unread:
            self._unread.discard(entry.seq)
            self._staging.setdefault(entry.slice_us, StagingStats()).vain_bytes += entry.size_bytes
        request = self._staging_over(entry.seq)
        if request is not None:
            request.cancel()
        self._ledger.move(entry.seq, Move.PURGE)
        if entry.file_no in self._files:
            self._files[entry.file_no][entry.slice_us] -= 1
            self._drop_if_dead(entry.file_no)

    def _drop_if_dead(self, file_no: int) -> None:
        if not any(self._files[file_no].values()):
            del self._files[file_no]
            self._io.submit(Priority.MAINTENANCE, self._p.drop(file_no))

    # -- writing ------------------------------------------------------------------------------------------

    def _note_append(self, entry: Entry) -> None:
        now = time.monotonic()
        first, _, size = self._appended.get(entry.slice_us, (now, now, 0))
        self._appended[entry.slice_us] = (first, now, size + entry.size_bytes)

    def _write(self, seqs: list[int], priority: Priority, *, leave: bool, leaving: set[int] | None = None) -> None:
        """Starts writing blocks as one file; those that leave are let go once it is on disk."""
        blocks = [(seq, self._memory[seq]) for seq in seqs]
        for seq in seqs:
            self._ledger.move(seq, Move.WRITE)
            self._unpost(seq)
        self._leaving |= set(seqs) if leave else leaving or set()
        future = self._io.submit(priority, self._write_steps(blocks)).future
        self._writes.add(future)
        future.add_done_callback(self._written)

    def _written(self, future: Future[SstFile]) -> None:
        self._writes.discard(future)
        if not future.cancelled() and future.exception() is not None:
            # Whoever persists is told; a destage has nobody to tell but the log.
            log.error("a write failed; its blocks stay in memory: %s", future.exception())

    def _write_steps(self, blocks: list[tuple[int, Block]]) -> Steps[SstFile]:
        try:
            file = yield from self._p.write(blocks)
        except BaseException:
            with self._lock:
                for seq, _ in blocks:
                    # A failed destage loses nothing: the blocks are in memory, and due again.
                    if seq in self._ledger:
                        entry = self._ledger.move(seq, Move.WRITE_FAILED)
                        if seq in self._leaving:
                            self._leaving.discard(seq)
                            self._post(entry)
            raise
        with self._lock:
            self._new_files.append(file)
            slices = self._files[file.file_no] = {block.header.slice_us: 0 for _, block in blocks}
            for seq, block in blocks:
                if seq not in self._ledger:
                    continue  # purged while it was being written
                entry = self._ledger.move(seq, Move.WRITTEN, file_no=file.file_no)
                slices[block.header.slice_us] += 1
                if seq in self._leaving:
                    self._leaving.discard(seq)
                    self._evict(entry)
            self._drop_if_dead(file.file_no)
        return file


def _call(function: object) -> Steps[None]:
    function()  # type: ignore[operator]
    return
    yield 0


__all__ = ["MemoryBudget", "TieredStore"]
