"""Brings blocks into memory before they are read (paper section 3.2 and 3.3).

A prestage fetches as much as an execution needs in order not to wait, and at most what memory has room for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from policies.prestage import StagingSpeed
from policies.sizing import m_bucket_bytes
from state_backends.store.blocks import Blocks
from state_backends.store.fetching import Fetcher
from state_backends.store.io import Io, Pending, Priority, Steps
from state_backends.store.ledger import IN_MEMORY, Entry, Move, Place
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.protocol import Only

_MARGIN = 2.0
"""How many mean deviations slower than usual the disk may be without an execution that waits for it."""


@dataclass(slots=True, eq=False)
class _Staging:
    """One block on its way into memory. ``reserved_bytes`` of the budget are reserved for it until it is over.

    A block can be staged, cancelled and staged again before the first request has cleaned up. So each request checks
    whether it is still the current one of its block.
    """

    entry: Entry
    reserved_bytes: int
    request: Pending[None] = field(init=False)


class Prestager:
    """It owns the prestages under way, and an estimate of the disk's speed.

    Invariant: a block is in place STAGING if and only if its prestage is under way here. ``blocking``: functions need
    their whole window before they begin. ``spare_bytes``: room in the budget that prestages leave free.
    """

    def __init__(
        self, blocks: Blocks, fetcher: Fetcher, io: Io, budget: MemoryBudget, *, blocking: bool, spare_bytes: int
    ) -> None:
        self._blocks, self._fetcher, self._io, self._budget = blocks, fetcher, io, budget
        self._blocking = blocking
        self._spare_bytes = spare_bytes
        self._under_way: dict[int, _Staging] = {}
        self._speed = StagingSpeed()
        self.processing_bytes_per_s: float | None = None
        # Called after each prestage with its bytes, its seconds, and how many of these it waited for other I/O.
        self.on_staged: Callable[[int, float, float], None] | None = None

    def prestage(self, slices: Sequence[int], only: Only | None) -> None:
        """Starts fetching the visible blocks of these slices, in this order. Does not wait.

        The body of a reference is fetched even if the reference is in memory: it is on a disk, or on another host.
        """
        begin = self._io.now()
        last: Pending[None] | None = None
        size, times = 0, [begin]
        moved: list[int] = []
        busy = self._io.busy()
        with self._blocks.lock:
            # At most what memory has room for, and what a function needs: it may begin before everything is there.
            handed: list[Entry] = []
            has_room = True
            for slice_us in dict.fromkeys(slices):
                entries = self._blocks.visible([slice_us], only)
                handed += [e for e in entries if e.handed is not None and e.place in IN_MEMORY]
                wanted = size + self._wanted_bytes(entries)
                for entry in entries:
                    if not has_room or size >= wanted:
                        break
                    if entry.place is not Place.DISK:
                        continue
                    # The room is reserved now, so that neither appends nor other readers take it.
                    has_room = self._budget.try_reserve(entry.size_bytes, spare_bytes=self._spare_bytes)
                    if has_room:
                        last = self._start(entry, Priority.PRESTAGE, entry.size_bytes, times).request
                        size += entry.size_bytes
                        handed += [entry] if entry.handed is not None else []
        if handed:
            last = self._io.submit(Priority.PRESTAGE, self._bodies(handed, moved))
        if last is not None:
            last.when_over(
                lambda error: self._learn(
                    error, size + sum(moved), self._io.now() - begin, times[-1] - begin if busy else 0.0
                )
            )

    def _bodies(self, entries: Sequence[Entry], moved: list[int]) -> Steps[None]:
        """Fetches the bodies of references that are in memory by then. ``moved`` gets the bytes that it waited for."""
        with self._blocks.lock:
            found = [self._blocks.memory.get(entry.seq) for entry in entries]
        there = [block for block in found if block is not None and block.at is not None]
        moved.append((yield from self._fetcher.ahead(there)))

    def load_all(self) -> None:
        """Fetches every block that is only on disk into memory, and waits for it."""
        with self._blocks.lock:
            entries = [e for e in self._blocks.ledger if e.place is Place.DISK]
            requests = [self._start(entry, Priority.READ, 0).request for entry in entries]
        for request in requests:
            request.result()

    def find(self, seq: int) -> Pending[None] | None:
        """Returns the request that is fetching a block, if there is one. Hold the lock."""
        prestage = self._under_way.get(seq)
        return None if prestage is None else prestage.request

    def cancel(self, entry: Entry) -> None:
        """Cancels the prestage of a block, if there is one: the block stays on disk. Hold the lock."""
        if self._stop(entry.seq):
            self._blocks.ledger.move(entry.seq, Move.CANCEL)

    def forget(self, entry: Entry) -> None:
        """Cancels the prestage of a block that is about to be deleted. Hold the lock."""
        self._stop(entry.seq)

    def requests(self) -> list[Pending[None]]:
        """Returns the requests that are under way. Hold the lock."""
        return [prestage.request for prestage in self._under_way.values()]

    def close(self) -> None:
        """Stops all prestages, and gives back their room. Hold the lock."""
        for seq in list(self._under_way):
            self._stop(seq)

    def _stop(self, seq: int) -> bool:
        """Cancels the prestage of a block, and gives back its room. Returns whether there was one."""
        prestage = self._under_way.pop(seq, None)
        if prestage is not None:
            self._budget.give_back(prestage.reserved_bytes)
            prestage.request.cancel()
        return prestage is not None

    def _wanted_bytes(self, entries: Sequence[Entry]) -> int:
        """Returns how many bytes of a slice to prestage so that an execution over it never waits (paper 3.3).

        An execution fetches the rest of each slice while it works on it.
        """
        window = sum(e.size_bytes for e in entries)
        in_memory = sum(e.size_bytes for e in entries if e.place in IN_MEMORY)
        size = m_bucket_bytes(
            window,
            self._speed.bytes_per_s(window, _MARGIN),
            self.processing_bytes_per_s,
            blocking=self._blocking,
            block_bytes=max((e.size_bytes for e in entries), default=1),
        )
        return size - in_memory

    def _learn(self, error: BaseException | None, size_bytes: int, seconds: float, waited_s: float) -> None:
        """Learns the disk's speed from a prestage that is over, unless it failed."""
        if error is not None:
            return
        self._speed.observe(size_bytes, seconds)
        if self.on_staged is not None:
            self.on_staged(size_bytes, seconds, waited_s)

    def _start(
        self, entry: Entry, priority: Priority, reserved_bytes: int, times: list[float] | None = None
    ) -> _Staging:
        """Starts fetching one block. Hold the lock. ``times``: see :meth:`_steps`."""
        self._blocks.ledger.move(entry.seq, Move.STAGE)
        prestage = self._under_way[entry.seq] = _Staging(entry, reserved_bytes)
        prestage.request = self._io.submit(priority, self._steps(prestage, times))
        return prestage

    def _steps(self, prestage: _Staging, times: list[float] | None) -> Steps[None]:
        """Fetches one block, unless it has been cancelled.

        ``times``: one list for all blocks that are prestaged together. It has the time when they were requested. The
        first request that runs adds the time when it began.
        """
        entry = prestage.entry
        if times is not None and len(times) == 1:
            times.append(self._io.now())
        try:
            if self._under_way.get(entry.seq) is not prestage:
                return
            block = yield from self._fetcher.steps(entry)
        except BaseException:
            with self._blocks.lock:
                if self._under_way.get(entry.seq) is prestage:
                    del self._under_way[entry.seq]
                    self._budget.give_back(prestage.reserved_bytes)
                    self._blocks.ledger.move(entry.seq, Move.STAGE_FAILED)
            raise
        with self._blocks.lock:
            if self._under_way.get(entry.seq) is prestage:
                del self._under_way[entry.seq]
                self._blocks.staged(entry, block, prestage.reserved_bytes)
