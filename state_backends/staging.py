"""Reading a store's blocks, and bringing them into memory before they are read (paper section 3.2 and 3.3).

What is on disk is staged behind what memory yields meanwhile. Prestaging brings as much as an execution needs so that
it never waits, and as memory has room for; how it served the reads is counted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence

from aion.errors import CorruptBlock, StateError
from policies.sizing import m_bucket_bytes
from state_backends.block import Block
from state_backends.io import BlockFiles, Io, Pending, Priority, Steps
from state_backends.ledger import IN_MEMORY, Entry, Ledger, Move, Place
from state_backends.m_bucket import MBuckets, MemoryBudget
from state_backends.store import Only, StagingStats, StoredBlock


class StagedReads:
    """The part of a store that reads. Blocks, their places and their lock are shared with the part that writes."""

    def __init__(
        self,
        p_bucket: BlockFiles,
        io: Io,
        budget: MemoryBudget,
        *,
        prestages: bool,
        blocking: bool,
        outbox_bytes: int,
        read_ahead: int,
    ) -> None:
        self._p = p_bucket
        self._io = io
        self._budget = budget
        self._prestages = prestages
        self._blocking = blocking
        # What waits to be written counts in the budget too, so it gets a share of it at most.
        self._outbox_limit = min(outbox_bytes, budget.limit_bytes // 8)
        self._read_ahead = read_ahead
        self._lock = threading.RLock()
        self._closed = False
        self._ledger = Ledger()
        self._memory = MBuckets(budget)
        self._stagings: dict[int, Pending[None]] = {}  # seq -> the prestage under way
        self._reserved: dict[int, int] = {}  # seq -> bytes of the budget that its prestage will need
        self._unread: set[int] = set()  # prestaged and not read since
        self._superseded: set[int] = set()  # live, and read no more: others stand for them
        self._staging: dict[int, StagingStats] = {}  # by live slice
        self._past_staging = StagingStats()  # of purged slices
        self._staging_bytes_per_s: float | None = None
        self.processing_bytes_per_s: float | None = None  # told by who executes
        # Told bytes and seconds of each prestage, and how many of the seconds it waited for other I/O.
        self.on_staged: Callable[[int, float, float], None] | None = None

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        with self._lock:
            entries = deque(self._in_sight(slices, only))
        # Reads of what is on disk begin at once, behind the blocks that memory yields meanwhile.
        to_stage = deque(entries)
        ahead: dict[int, Pending[Block]] = {}
        limit = max(self._read_ahead, self._fitting(entries) if blocking else 0)
        try:
            while entries:
                while to_stage and len(ahead) < limit:
                    candidate = to_stage.popleft()
                    request = self._fetch(candidate)
                    if request is not None:
                        ahead[candidate.seq] = request
                if blocking:
                    self._io.wait(ahead.values())
                    blocking = False
                entry = entries.popleft()
                if to_stage and to_stage[0] is entry:
                    to_stage.popleft()
                yield StoredBlock(entry.seq, self._take(entry, ahead.pop(entry.seq, None)))
        finally:
            for unread in ahead.values():
                unread.cancel()

    def size_on_disk(self, slices: Sequence[int]) -> int:
        """Encoded bytes of these slices that staging would have to bring."""
        with self._lock:
            return sum(e.size_bytes for e in self._in_sight(slices) if e.place is Place.DISK)

    def prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        if not self._prestages or self._closed:
            return
        begin = self._io.now()
        last: Pending[None] | None = None
        size, begun = 0, [begin]
        busy = self._io.busy()
        with self._lock:
            # Never more than memory has room for, nor than a function needs that can begin before all is there.
            entries = [e for s in dict.fromkeys(slices) for e in self._in_sight([s], only)]
            room, wanted = self._budget.left() - self._outbox_limit, self._wanted(entries)
            for entry in entries:
                if entry.place is not Place.DISK:
                    continue
                if size >= wanted or size + entry.size_bytes > room:
                    break
                self._ledger.move(entry.seq, Move.STAGE)
                # What is under way has its room already: appends must not take it too.
                self._reserved[entry.seq] = entry.size_bytes
                self._budget.reserve(entry.size_bytes)
                last = self._stagings[entry.seq] = self._io.submit(Priority.PRESTAGE, self._stage_steps(entry, begun))
                size += entry.size_bytes
        if last is not None:
            last.when_over(
                lambda error: self._staged_in(error, size, self._io.now() - begin, begun[-1] - begin if busy else 0.0)
            )

    def staging(self, slice_us: int) -> StagingStats:
        with self._lock:
            copy = StagingStats()
            copy.add(self._staging.get(slice_us, StagingStats()))
            return copy

    def _in_sight(self, slices: Sequence[int], only: Only | None = None) -> list[Entry]:
        """The blocks that a reader sees, by slice and in the order of arrival."""
        entries = self._ledger.of_slices(slices, only)
        return [e for e in entries if e.seq not in self._superseded] if self._superseded else entries

    def _wanted(self, entries: Sequence[Entry]) -> int:
        """Bytes to prestage so that an execution over these blocks never waits (paper 3.3)."""
        window = sum(e.size_bytes for e in entries)
        in_memory = sum(e.size_bytes for e in entries if e.place in IN_MEMORY)
        size = m_bucket_bytes(
            window,
            self._staging_bytes_per_s,
            self.processing_bytes_per_s,
            blocking=self._blocking,
            block_bytes=max((e.size_bytes for e in entries), default=1),
        )
        return size - in_memory

    def _staged_in(self, error: BaseException | None, size_bytes: int, seconds: float, waited_s: float) -> None:
        if error is not None:
            return  # it tells nothing of how fast staging is
        speed = size_bytes / max(seconds, 1e-6)
        known = self._staging_bytes_per_s
        self._staging_bytes_per_s = speed if known is None else 0.7 * known + 0.3 * speed
        if self.on_staged is not None:
            self.on_staged(size_bytes, seconds, waited_s)

    def _fitting(self, entries: Collection[Entry]) -> int:
        """How many of these blocks the budget has room for."""
        room, count = self._budget.left(), 0
        for entry in entries:
            if entry.place is Place.DISK:
                room -= entry.size_bytes
                if room < 0:
                    break
            count += 1
        return count

    def _fetch(self, entry: Entry) -> Pending[Block] | None:
        """Starts reading a block that only the disk has; None where memory has it, or a prestage will."""
        with self._lock:
            if self._closed:
                raise StateError(f"block {entry.seq} of slice {entry.slice_us}: its store was closed while it was read")
            if entry.place is not Place.DISK:
                return None
            return self._io.submit(Priority.READ, self._read_steps(entry))

    def _read_steps(self, entry: Entry) -> Steps[Block]:
        """Reads a block from the file that holds it when its turn comes: merging moves blocks."""
        while True:
            file_no = entry.file_no
            try:
                return (yield from self._p.fetch(file_no, entry.slice_us, entry.seq))
            except CorruptBlock:
                with self._lock:
                    if entry.place is Place.PURGED:
                        raise _purged(entry) from None
                    if entry.file_no == file_no:
                        raise

    def _take(self, entry: Entry, fetched: Pending[Block] | None) -> Block:
        """The block, from where it is now; counts how staging did."""
        begin = self._io.now()
        late = False
        while fetched is None:
            with self._lock:
                # First: after a rollback, its number may be another block's by now.
                if entry.place is Place.PURGED:
                    raise _purged(entry)
                block = self._memory.get(entry.seq)
                if block is not None:
                    if entry.seq in self._unread:
                        self._unread.discard(entry.seq)
                        self._count(entry, late=late, blocked_s=self._io.now() - begin)
                    return block
                staging = self._stagings.get(entry.seq)
                # Let go since it was looked at: it is on disk then.
                fetched = self._fetch(entry)
            if staging is not None:
                late = True
                staging.raise_to(Priority.READ)
                self._io.wait([staging])
        block = fetched.result()
        with self._lock:
            self._count(entry, miss=True, blocked_s=self._io.now() - begin)
        return block

    def _count(self, entry: Entry, *, miss: bool = False, late: bool = False, blocked_s: float) -> None:
        stats = self._staging.setdefault(entry.slice_us, StagingStats())
        if miss:
            stats.misses += 1
        elif late:
            stats.late += 1
        else:
            stats.hits += 1
        if miss or late:
            stats.blocked_s += blocked_s

    def _stage_steps(self, entry: Entry, begun: list[float] | None = None) -> Steps[None]:
        """Brings one block back into memory, unless it is not wanted any more.

        ``begun``: of those that are staged together, the instant of the order; that of the first turn is added.
        """
        if begun is not None and len(begun) == 1:
            begun.append(self._io.now())
        try:
            if entry.place is not Place.STAGING:
                return
            block = yield from self._read_steps(entry)
        except BaseException:
            with self._lock:
                self._staging_over(entry.seq)
                if entry.place is Place.STAGING:
                    self._ledger.move(entry.seq, Move.STAGE_FAILED)
            raise
        with self._lock:
            self._staging_over(entry.seq)
            if entry.place is Place.STAGING:
                self._ledger.move(entry.seq, Move.STAGED)
                self._memory.hold(entry.seq, block)
                self._unread.add(entry.seq)
                self._staging.setdefault(entry.slice_us, StagingStats()).staged_bytes += entry.size_bytes

    def _staging_over(self, seq: int) -> Pending[None] | None:
        """The prestage of a block came to an end, this or that; gives back the room that was kept for it."""
        self._budget.reserve(-self._reserved.pop(seq, 0))
        return self._stagings.pop(seq, None)

    def _load_all(self) -> None:
        """Stages every block that is only on disk, and waits for it."""
        with self._lock:
            entries = [self._ledger.move(e.seq, Move.STAGE) for e in list(self._ledger) if e.place is Place.DISK]
        for entry in entries:
            self._io.submit(Priority.READ, self._stage_steps(entry)).result()


def _purged(entry: Entry) -> StateError:
    return StateError(f"block {entry.seq} of slice {entry.slice_us} was purged while it was read")
