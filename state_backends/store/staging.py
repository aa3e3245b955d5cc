"""Reading a store's blocks, and bringing them into memory before they are read (paper section 3.2 and 3.3).

What is on disk is staged behind what memory yields meanwhile. Prestaging brings as much as an execution needs so that
it never waits, and as memory has room for; how it served the reads is counted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from aion.core.ingest.block import Block
from aion.errors import CorruptBlock, StateError
from policies.sizing import m_bucket_bytes
from state_backends.store.io import BlockFiles, Io, Pending, Priority, Steps
from state_backends.store.ledger import IN_MEMORY, Entry, Ledger, Move, Place
from state_backends.store.m_bucket import MBuckets, MemoryBudget
from state_backends.store.protocol import Only, StagingStats, StoredBlock


@dataclass(slots=True, eq=False)
class _Staging:
    """A prestage of one block. ``reserved_bytes`` of the budget are its own until it is over.

    A block can be staged, given up and staged again before the first attempt has tidied up: each knows itself.
    """

    entry: Entry
    reserved_bytes: int
    request: Pending[None] = field(init=False)


class _Ahead:
    """What a reader has fetched, or is fetching, and has not handed on yet, each block with what is reserved for it.

    The block that is due next may be fetched without room for it, so that every reader gets on; all others have room
    first. What was handed on last keeps its room until the stream that sends it asks for more.
    """

    def __init__(self, budget: MemoryBudget, spare_bytes: int) -> None:
        self._budget, self._spare_bytes = budget, spare_bytes
        self._fetched: dict[int, tuple[Pending[Block], int]] = {}
        self._handed_on = 0

    def __len__(self) -> int:
        return len(self._fetched)

    def pending(self) -> list[Pending[Block]]:
        return [request for request, _ in self._fetched.values()]

    def room_for(self, size_bytes: int) -> bool:
        return self._budget.try_reserve(size_bytes, spare_bytes=self._spare_bytes)

    def add(self, seq: int, request: Pending[Block], reserved_bytes: int) -> None:
        self._fetched[seq] = request, reserved_bytes

    def hand_on(self, seq: int) -> Pending[Block] | None:
        """The request for a block, if there is one; its room is kept until the next call of this or of asked_on."""
        request, self._handed_on = self._fetched.pop(seq, (None, 0))
        return request

    def asked_on(self) -> None:
        """Whoever took the last block wants another one: what it held of it is gone."""
        handed_on, self._handed_on = self._handed_on, 0
        self._budget.give_back(handed_on)

    def close(self) -> None:
        self.asked_on()
        for request, reserved_bytes in self._fetched.values():
            request.cancel()
            self._budget.give_back(reserved_bytes)
        self._fetched.clear()


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
        self._ledger_counted = 0  # bytes, in the budget
        self._memory = MBuckets(budget)
        self._stagings: dict[int, _Staging] = {}  # seq -> the prestage under way
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
        ahead = _Ahead(self._budget, self._outbox_limit)
        most = len(entries) if blocking else self._read_ahead
        try:
            while entries:
                while to_stage and len(ahead) < most and self._fetch_ahead(to_stage[0], ahead):
                    to_stage.popleft()
                if blocking:
                    self._io.wait(ahead.pending())
                    blocking = False
                entry = entries.popleft()
                if to_stage and to_stage[0] is entry:
                    to_stage.popleft()
                yield StoredBlock(entry.seq, self._take(entry, ahead.hand_on(entry.seq)))
                ahead.asked_on()
        finally:
            ahead.close()

    def size_on_disk(self, slices: Sequence[int]) -> int:
        """Encoded bytes of these slices that staging would have to bring."""
        with self._lock:
            return sum(e.size_bytes for e in self._in_sight(slices) if e.place is Place.DISK)

    def prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        if not self._prestages or self._closed:
            return
        begin = self._io.now()
        last: _Staging | None = None
        size, begun = 0, [begin]
        busy = self._io.busy()
        with self._lock:
            # Never more than memory has room for, nor than a function needs that can begin before all is there.
            entries = [e for s in dict.fromkeys(slices) for e in self._in_sight([s], only)]
            wanted = self._wanted(entries)
            for entry in entries:
                if entry.place is not Place.DISK:
                    continue
                # What is under way has its room already: neither appends nor others who read take it too.
                if size >= wanted or not self._budget.try_reserve(entry.size_bytes, spare_bytes=self._outbox_limit):
                    break
                last = self._stage(entry, Priority.PRESTAGE, entry.size_bytes, begun)
                size += entry.size_bytes
        if last is not None:
            last.request.when_over(
                lambda error: self._staged_in(error, size, self._io.now() - begin, begun[-1] - begin if busy else 0.0)
            )

    def staging(self, slice_us: int) -> StagingStats:
        with self._lock:
            copy = StagingStats()
            copy.add(self._staging.get(slice_us, StagingStats()))
            return copy

    def _count_ledger(self) -> None:
        """Has the budget know how large the ledger is. Holds the lock."""
        grown = (0 if self._closed else self._ledger.own_bytes) - self._ledger_counted
        if grown:
            self._ledger_counted += grown
            self._budget.ledger_grew(grown)

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

    def _fetch_ahead(self, entry: Entry, ahead: _Ahead) -> bool:
        """Starts reading a block before it is due, if only the disk has it; False if there is no room for it."""
        if entry.place is not Place.DISK:
            return True
        if not ahead.room_for(entry.size_bytes):
            return False
        request: Pending[Block] | None = None
        try:
            request = self._fetch(entry)
        finally:
            if request is None:
                self._budget.give_back(entry.size_bytes)
        if request is not None:
            ahead.add(entry.seq, request, entry.size_bytes)
        return True

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
                staging.request.raise_to(Priority.READ)
                self._io.wait([staging.request])
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

    def _stage(
        self, entry: Entry, priority: Priority, reserved_bytes: int, begun: list[float] | None = None
    ) -> _Staging:
        """Starts bringing a block back into memory. Holds the lock."""
        self._ledger.move(entry.seq, Move.STAGE)
        staging = self._stagings[entry.seq] = _Staging(entry, reserved_bytes)
        staging.request = self._io.submit(priority, self._stage_steps(staging, begun))
        return staging

    def _stage_steps(self, staging: _Staging, begun: list[float] | None = None) -> Steps[None]:
        """Brings one block back into memory, unless it is not wanted any more.

        ``begun``: of those that are staged together, the instant of the order; that of the first turn is added.
        """
        entry = staging.entry
        if begun is not None and len(begun) == 1:
            begun.append(self._io.now())
        try:
            if self._stagings.get(entry.seq) is not staging:
                return
            block = yield from self._read_steps(entry)
        except BaseException:
            with self._lock:
                if self._stagings.get(entry.seq) is staging:
                    del self._stagings[entry.seq]
                    self._budget.give_back(staging.reserved_bytes)
                    self._ledger.move(entry.seq, Move.STAGE_FAILED)
            raise
        with self._lock:
            if self._stagings.get(entry.seq) is staging:
                del self._stagings[entry.seq]
                self._ledger.move(entry.seq, Move.STAGED)
                self._memory.hold(entry.seq, block, reserved_bytes=staging.reserved_bytes)
                self._unread.add(entry.seq)
                self._staging.setdefault(entry.slice_us, StagingStats()).staged_bytes += entry.size_bytes

    def _give_up_staging(self, seq: int) -> None:
        """The prestage of a block, if there is one, is given up, and so is the room that was kept for it."""
        staging = self._stagings.pop(seq, None)
        if staging is not None:
            self._budget.give_back(staging.reserved_bytes)
            staging.request.cancel()

    def _load_all(self) -> None:
        """Stages every block that is only on disk, and waits for it."""
        with self._lock:
            entries = [e for e in self._ledger if e.place is Place.DISK]
        for entry in entries:
            with self._lock:
                staging = self._stage(entry, Priority.READ, 0)
            staging.request.result()


def _purged(entry: Entry) -> StateError:
    return StateError(f"block {entry.seq} of slice {entry.slice_us} was purged while it was read")
