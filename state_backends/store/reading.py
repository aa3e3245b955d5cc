"""Reads the blocks of slices in the order of arrival, from memory and from disk (paper section 3.3).

Blocks on disk are fetched while the caller works on blocks in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence

from state_backends.format.block import Block
from state_backends.store.blocks import Blocks
from state_backends.store.fetching import Fetcher, purged
from state_backends.store.io import Io, Pending, Priority
from state_backends.store.ledger import Entry, Place
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.store.prestaging import Prestager
from state_backends.store.protocol import Only, StoredBlock


class _ReadAhead:
    """The blocks that one reader fetches ahead, with the room that is reserved for each.

    The next block may be fetched without a reservation, so that every reader makes progress. All others need room
    first. The block that was yielded last keeps its room until the caller asks for the next one.
    """

    def __init__(self, budget: MemoryBudget, spare_bytes: int) -> None:
        self._budget, self._spare_bytes = budget, spare_bytes
        self._fetched: dict[int, tuple[Pending[Block], int]] = {}
        self._yielded_bytes = 0

    def __len__(self) -> int:
        return len(self._fetched)

    def numbers(self) -> frozenset[int]:
        return frozenset(self._fetched)

    def pending(self) -> list[Pending[Block]]:
        return [request for request, _ in self._fetched.values()]

    def room_for(self, size_bytes: int) -> bool:
        return self._budget.try_reserve(size_bytes, spare_bytes=self._spare_bytes)

    def add(self, seq: int, request: Pending[Block], reserved_bytes: int) -> None:
        self._fetched[seq] = request, reserved_bytes

    def take(self, seq: int) -> Pending[Block] | None:
        """Returns the request for the block that is yielded next, if any. Its room stays reserved until
        :meth:`free`.
        """
        request, self._yielded_bytes = self._fetched.pop(seq, (None, 0))
        return request

    def free(self) -> None:
        """Gives back the room of the block that was yielded last."""
        size_bytes, self._yielded_bytes = self._yielded_bytes, 0
        self._budget.give_back(size_bytes)

    def close(self) -> None:
        self.free()
        for request, reserved_bytes in self._fetched.values():
            request.cancel()
            self._budget.give_back(reserved_bytes)
        self._fetched.clear()


class Reader:
    """Serves reads. It has no state of its own; each read has its own read-ahead."""

    def __init__(
        self,
        blocks: Blocks,
        fetcher: Fetcher,
        prestager: Prestager,
        io: Io,
        budget: MemoryBudget,
        options: StoreOptions,
    ) -> None:
        self._blocks, self._fetcher, self._prestager, self._io, self._budget = blocks, fetcher, prestager, io, budget
        self._read_ahead = options.read_ahead
        self._spare_bytes = options.spare_bytes(budget)

    def read(self, slices: Sequence[int], *, blocking: bool, only: Only | None) -> Iterator[StoredBlock]:
        """See :meth:`state_backends.store.protocol.BlockStore.read`."""
        with self._blocks.lock:
            entries = deque(self._blocks.visible(slices, only))
            lacking = self._blocks.without_bodies(entries)
        resident = self._fetcher.resident([block for _, block in lacking])
        near = {entry for (entry, _), is_there in zip(lacking, resident, strict=True) if is_there}
        cold = {entry for entry, _ in lacking} - near
        to_fetch = deque(entries)
        ahead = _ReadAhead(self._budget, self._spare_bytes)
        most = len(entries) if blocking else self._read_ahead
        waited: frozenset[int] = frozenset()
        try:
            while entries:
                begin = self._io.now()
                while to_fetch and len(ahead) < most and self._fetch_ahead(to_fetch[0], ahead, cold):
                    to_fetch.popleft()
                if blocking:
                    blocking, waited = False, ahead.numbers()
                    self._io.wait(ahead.pending())
                    with self._blocks.lock:
                        self._blocks.staging.missed(self._io.now() - begin, len(waited))
                entry = entries.popleft()
                if to_fetch and to_fetch[0] is entry:
                    to_fetch.popleft()
                block = self._take(entry, ahead.take(entry.seq), near, is_counted=entry.seq in waited)
                yield StoredBlock(entry.seq, block)
                ahead.free()
        finally:
            ahead.close()

    def _fetch_ahead(self, entry: Entry, ahead: _ReadAhead, cold: Collection[Entry]) -> bool:
        """Starts fetching a block ahead, if it, or its body, is far. Returns False if there is no room for it."""
        if entry.place is not Place.DISK and entry not in cold:
            return True
        needed = entry.whole_bytes if entry.place is Place.DISK else entry.body_bytes
        if not ahead.room_for(needed):
            return False
        request: Pending[Block] | None = None
        try:
            request = self._fetcher.start(entry) if entry.place is Place.DISK else self._start_body(entry)
        finally:
            if request is None:
                self._budget.give_back(needed)
        if request is not None:
            ahead.add(entry.seq, request, needed)
        return True

    def _start_body(self, entry: Entry) -> Pending[Block] | None:
        """Starts reading the body of a reference in memory, unless it is there, or is being prestaged."""
        with self._blocks.lock:
            return None if self._prestager.find(entry.seq) else self._fetcher.start_body(entry)

    def _take(
        self, entry: Entry, fetched: Pending[Block] | None, near: Collection[Entry], *, is_counted: bool
    ) -> Block:
        """Gets the block from where it is now. Counts how staging served this read, unless that was done.

        ``near``: references in memory whose bodies a worker can map at once although they are not staged.
        """
        begin = self._io.now()
        late = False
        is_ready = fetched is not None and fetched.over()
        while fetched is None:
            with self._blocks.lock:
                # Check this first: after a rollback, another block may have this number.
                if entry.place is Place.PURGED:
                    raise purged(entry)
                block = self._blocks.memory.get(entry.seq)
                if block is not None and (entry in near or self._blocks.memory.is_whole(entry.seq)):
                    self._blocks.staging.read(entry, late=late, blocked_s=self._io.now() - begin)
                    return block
                prestage = self._prestager.find(entry.seq)
                # If it has left memory since the read began, it is on disk.
                fetched = self._fetcher.start(entry) if block is None else self._start_body(entry)
            if prestage is not None:
                late = True
                prestage.raise_to(Priority.READ)
                self._io.wait([prestage])
        block = fetched.result()
        if not is_counted:
            with self._blocks.lock:
                if is_ready:
                    self._blocks.staging.fetched_ahead()
                else:
                    self._blocks.staging.missed(self._io.now() - begin)
        return block
