"""Window state split between memory and RocksDB: m-buckets and p-buckets (paper section 3.1 and 3.2).

New blocks of a window stay in its m-bucket until that is full or the host's budget is used up; what does not
fit, and what is late, goes to the p-bucket. An expired window is destaged. All persistent I/O is done by the
one I/O thread; a lock is never held across it: blocks are marked as being written, stay readable in memory
meanwhile, and are let go only when they are safely on disk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

from state_backends.block import Block
from state_backends.io_thread import IoThread, Priority
from state_backends.ledger import IN_MEMORY, Entry, Ledger, Move, Place
from state_backends.p_bucket import PBucket
from state_backends.store import SstFile, StoredBlock, StoreStats

MIB = 1 << 20


class MemoryBudget:
    """Bytes of blocks in memory that the stores of one host may hold together."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._lock = threading.Lock()

    def raise_to(self, limit_bytes: int) -> None:
        """Operators of one host share one budget: the largest that any of their policies gives."""
        with self._lock:
            self.limit_bytes = max(self.limit_bytes, limit_bytes)

    def add(self, size_bytes: int) -> None:
        """Accounts for bytes already held, or, if negative, let go."""
        with self._lock:
            self.used_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def left(self) -> int:
        """Bytes that may still be held; negative when the budget is exceeded."""
        return self.limit_bytes - self.used_bytes


class TieredStore:
    """The standard policy. See :class:`state_backends.store.BlockStore` for the protocol."""

    def __init__(
        self,
        p_bucket: PBucket,
        io: IoThread,
        budget: MemoryBudget,
        *,
        bucket_limit_bytes: int,
        outbox_bytes: int = 8 * MIB,
        read_ahead: int = 4,
    ) -> None:
        self._p = p_bucket
        self._io = io
        self._budget = budget
        self._bucket_limit = bucket_limit_bytes
        # What waits to be written counts in the budget too, so it gets a share of it at most.
        self._outbox_limit = min(outbox_bytes, budget.limit_bytes // 8)
        self._read_ahead = read_ahead
        self._lock = threading.RLock()
        self._ledger = Ledger()
        self._memory: dict[int, Block] = {}
        self._buckets: dict[int, int] = {}  # slice -> bytes in memory
        self._outbox: dict[int, int] = {}  # seq -> bytes, waiting to be written and then let go
        self._outbox_bytes = 0
        self._leaving: set[int] = set()  # being written, to be let go afterwards
        self._writes: set[Future[SstFile]] = set()
        self._new_files: list[SstFile] = []
        self._files: dict[int, dict[int, int]] = {}  # file -> slice -> live blocks of it in that file

    # -- what differs between the stores ------------------------------------------------------------------

    def _keeps(self, entry: Entry, late: bool) -> bool:
        """Whether a new block belongs into its m-bucket; the budget is asked separately."""
        return not late and self._buckets.get(entry.slice_us, 0) <= self._bucket_limit

    _bounded = True
    """Whether memory is bounded by the budget."""

    # -- the protocol -------------------------------------------------------------------------------------

    def append(self, seq: int, block: Block, *, late: bool) -> None:
        with self._lock:
            entry = self._ledger.add(seq, block.header.slice_us, block.size_bytes, Place.MEMORY)
            self._hold(entry, block)
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

    def read(self, slices: Sequence[int]) -> Iterator[StoredBlock]:
        with self._lock:
            entries = deque(self._ledger.of_slices(slices))
        ahead: deque[tuple[Entry, Future[Block] | None]] = deque()
        try:
            while entries or ahead:
                while entries and len(ahead) < self._read_ahead:
                    entry = entries.popleft()
                    ahead.append((entry, self._stage(entry)))
                entry, staged = ahead.popleft()
                block = staged.result() if staged is not None else self._memory.get(entry.seq)
                if block is None:  # let go since it was looked at; it is on disk then
                    late_staged = self._stage(entry)
                    assert late_staged is not None, entry
                    block = late_staged.result()
                yield StoredBlock(entry.seq, block)
        finally:
            for _, staged in ahead:
                if staged is not None:
                    staged.cancel()

    def destage(self, slices: Sequence[int]) -> None:
        with self._lock:
            for entry in self._ledger.of_slices(slices):
                match entry.place:
                    case Place.MEMORY:
                        self._post(entry)
                    case Place.DESTAGING:
                        self._leaving.add(entry.seq)
                    case Place.BOTH:
                        self._evict(entry)

    def purge(self, slices: Sequence[int]) -> None:
        with self._lock:
            for entry in self._ledger.of_slices(slices):
                self._forget(entry)

    def flush(self) -> None:
        with self._lock:
            if self._outbox:
                self._write(list(self._outbox), Priority.DESTAGE, leave=True)

    def persist(self, skip: Collection[int] = ()) -> list[SstFile]:
        with self._lock:
            leaving = set(self._outbox)
            pending = [e.seq for e in self._ledger if e.place is Place.MEMORY and e.slice_us not in skip]
            if pending:
                self._write(pending, Priority.LATE_WRITE, leave=False, leaving=leaving)
            writes = list(self._writes)
        for write in writes:
            write.result()
        with self._lock:
            files, self._new_files = self._new_files, []
        return files

    def rollback(self, from_seq: int) -> None:
        with self._lock:
            writes = list(self._writes)
        wait(writes)
        with self._lock:
            for entry in [e for e in self._ledger if e.seq >= from_seq]:
                self._forget(entry)
            unwanted, self._new_files = self._new_files, []
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
            return StoreStats(len(self._ledger), m, p, p - both)

    def close(self) -> None:
        with self._lock:
            writes = list(self._writes)
        wait(writes)
        with self._lock:
            self._budget.add(-sum(b.size_bytes for b in self._memory.values()))
            self._memory.clear()
        self._io.submit(Priority.READ, _call(self._p.close)).result()

    def validate(self) -> None:
        """The invariants of DESIGN section 5; raises AssertionError."""
        with self._lock:
            self._ledger.validate()
            in_memory = {e.seq for e in self._ledger if e.place in IN_MEMORY}
            assert in_memory == set(self._memory), "a block is in memory exactly if the ledger says so"
            assert self._ledger.memory_bytes == sum(self._buckets.values())
            assert set(self._outbox) <= {e.seq for e in self._ledger if e.place is Place.MEMORY}

    # -- moves --------------------------------------------------------------------------------------------

    def _hold(self, entry: Entry, block: Block) -> None:
        self._memory[entry.seq] = block
        self._buckets[entry.slice_us] = self._buckets.get(entry.slice_us, 0) + entry.size_bytes
        self._budget.add(entry.size_bytes)

    def _let_go(self, entry: Entry) -> None:
        if self._memory.pop(entry.seq, None) is not None:
            left = self._buckets[entry.slice_us] - entry.size_bytes
            if left:
                self._buckets[entry.slice_us] = left
            else:
                del self._buckets[entry.slice_us]
            self._budget.add(-entry.size_bytes)

    def _post(self, entry: Entry) -> None:
        if entry.seq not in self._outbox:
            self._outbox[entry.seq] = entry.size_bytes
            self._outbox_bytes += entry.size_bytes

    def _unpost(self, seq: int) -> None:
        self._outbox_bytes -= self._outbox.pop(seq, 0)

    def _evict(self, entry: Entry) -> None:
        # Only from BOTH, which the table enforces: a block leaves memory after it has reached the disk.
        self._ledger.move(entry.seq, Move.EVICT)
        self._let_go(entry)

    def _forget(self, entry: Entry) -> None:
        self._let_go(entry)
        self._unpost(entry.seq)
        self._leaving.discard(entry.seq)
        self._ledger.move(entry.seq, Move.PURGE)
        if entry.file_no in self._files:
            self._files[entry.file_no][entry.slice_us] -= 1
            self._drop_if_dead(entry.file_no)

    def _drop_if_dead(self, file_no: int) -> None:
        if not any(self._files[file_no].values()):
            del self._files[file_no]
            self._io.submit(Priority.MAINTENANCE, self._p.drop(file_no))

    def _load_all(self) -> None:
        """Stages every block that is only on disk, and keeps it."""
        with self._lock:
            entries = [self._ledger.move(e.seq, Move.STAGE) for e in list(self._ledger) if e.place is Place.DISK]
        for entry in entries:
            steps = self._p.fetch(entry.file_no, entry.slice_us, entry.seq)
            block = self._io.submit(Priority.READ, steps).result()
            with self._lock:
                self._ledger.move(entry.seq, Move.STAGED)
                self._hold(entry, block)

    def _stage(self, entry: Entry) -> Future[Block] | None:
        """A read of a block that is only on disk; None where memory has it."""
        with self._lock:
            if entry.seq in self._memory:
                return None
            return self._io.submit(Priority.READ, self._p.fetch(entry.file_no, entry.slice_us, entry.seq))

    def _write(self, seqs: list[int], priority: Priority, *, leave: bool, leaving: set[int] | None = None) -> None:
        """Starts writing blocks as one file; those that leave are let go once it is on disk."""
        blocks = [(seq, self._memory[seq]) for seq in seqs]
        for seq in seqs:
            self._ledger.move(seq, Move.WRITE)
            self._unpost(seq)
        self._leaving |= set(seqs) if leave else leaving or set()
        future = self._io.submit(priority, self._write_steps(blocks))
        self._writes.add(future)
        future.add_done_callback(self._writes.discard)

    def _write_steps(self, blocks: list[tuple[int, Block]]) -> Generator[None, None, SstFile]:
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


def _call(function: object) -> Generator[None, None, None]:
    function()  # type: ignore[operator]
    return
    yield
