"""Brings blocks into memory before they are read (paper section 3.2 and 3.3).

A prestage fetches as much as an execution needs in order not to wait, and at most what memory has room for. Of a
handed-over block that is its body, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.prestage import StagingSpeed
from policies.sizing import m_bucket_bytes
from state_backends.format.block import Block
from state_backends.store.blocks import Blocks
from state_backends.store.fetching import Fetcher
from state_backends.store.io import Io, Pending, Priority, Steps
from state_backends.store.ledger import IN_MEMORY, Entry, Move, Place
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.store.protocol import Only

_MARGIN = 2.0
"""How many mean deviations slower than usual the disk may be without an execution that waits for it."""


@dataclass(slots=True, eq=False)
class _Staging:
    """One block, or the body of one, on its way into memory.

    ``reserved_bytes`` of the budget are reserved for it until it is over. A block can be staged, cancelled and staged
    again before the first request has cleaned up. So each request checks whether it is still the current one of its
    block. ``body_only``: the reference is in memory already.
    """

    entry: Entry
    reserved_bytes: int
    body_only: bool = False
    request: Pending[None] = field(init=False)


@dataclass(slots=True, eq=False)
class _Run:
    """What one call prestages together: when it was asked for and when the first request ran, and the bytes moved."""

    asked_s: float
    began_s: float | None = None
    moved_bytes: int = 0
    under_way: int = 0
    has_failed: bool = False


class Prestager:
    """It owns the prestages under way, and an estimate of the disk's speed.

    Invariant: a block is in place STAGING if and only if its prestage is under way here. ``blocking``: functions need
    their whole window before they begin. ``spare_bytes``: room in the budget that prestages leave free.
    ``until_share``: the share of the budget, 0 to 1, that they fill at most. If they filled more, the destage policy
    would take windows out of memory again.
    """

    def __init__(self, blocks: Blocks, fetcher: Fetcher, io: Io, budget: MemoryBudget, options: StoreOptions) -> None:
        self._blocks, self._fetcher, self._io, self._budget = blocks, fetcher, io, budget
        self._blocking = options.blocking
        self._leaves: dict[str, Any] = {
            "spare_bytes": options.spare_bytes(budget),
            "until_share": options.staging_share,
        }
        self._under_way: dict[int, _Staging] = {}
        self._speed = StagingSpeed()
        self.processing_bytes_per_s: float | None = None
        # Called after each prestage with its bytes, its seconds, and how many of these it waited for other I/O.
        self.on_staged: Callable[[int, float, float], None] | None = None

    def prestage(self, slices: Sequence[int], only: Only | None, later: Sequence[int] = ()) -> None:
        """Starts fetching the visible blocks of these slices, in this order, and then of those ``later``.

        It does not wait. What only later batches read comes after what any shard's next batch reads.
        The body of a reference in memory is fetched too, unless a worker can map it at once.
        """
        run = _Run(self._io.now())
        requests: list[Pending[None]] = []
        size = 0
        busy = self._io.busy()
        urgent = frozenset(slices)
        slices = list(dict.fromkeys((*slices, *later)))
        with self._blocks.lock:
            lacking = self._blocks.without_bodies(self._blocks.visible(slices, only))
        resident = self._fetcher.resident([block for _, block in lacking])
        cold = {entry for (entry, _), is_there in zip(lacking, resident, strict=True) if not is_there}
        with self._blocks.lock:
            # An earlier prestage may have brought a body since it was looked for.
            cold = {entry for entry in cold if not self._blocks.memory.is_whole(entry.seq)}
            for entry in self._blocks.visible(urgent, only):
                if (under_way := self.find(entry.seq)) is not None:
                    under_way.raise_to(Priority.PRESTAGE)
            # At most what memory has room for, and what a function needs: it may begin before everything is there.
            for slice_us in slices:
                entries = self._blocks.visible([slice_us], only)
                priority = Priority.PRESTAGE if slice_us in urgent else Priority.PRESTAGE_LATER
                wanted = size + self._wanted_bytes(entries, cold)
                for entry in entries:
                    if size >= wanted:
                        break
                    body_only = entry in cold and entry.place in IN_MEMORY and entry.seq not in self._under_way
                    if not body_only and entry.place is not Place.DISK:
                        continue
                    # The room is reserved now, so that neither appends nor other readers take it.
                    needed = entry.body_bytes if body_only else entry.whole_bytes
                    if not self._budget.try_reserve(needed, **self._leaves):
                        break
                    requests.append(self._start(entry, priority, needed, run, body_only=body_only).request)
                    size += needed
                else:
                    continue
                if size < wanted:
                    break  # memory is full
            run.under_way = len(requests)
        for request in requests:
            request.when_over(lambda error: self._over(error, run, busy=busy))

    def load_all(self) -> None:
        """Fetches every block that is only on disk into memory, and waits for it."""
        with self._blocks.lock:
            entries = [e for e in self._blocks.ledger if e.place is Place.DISK]
            requests = [self._start(entry, Priority.READ, 0).request for entry in entries]
        for request in requests:
            request.result()

    def find(self, seq: int) -> Pending[None] | None:
        """Returns the request that is fetching a block or its body, if there is one. Hold the lock."""
        prestage = self._under_way.get(seq)
        return None if prestage is None else prestage.request

    def cancel(self, entry: Entry) -> None:
        """Cancels the prestage of a block, if there is one: what is on disk stays there. Hold the lock."""
        prestage = self._stop(entry.seq)
        if prestage is not None and not prestage.body_only:
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

    def _stop(self, seq: int) -> _Staging | None:
        """Cancels the prestage of a block, and gives back its room. Returns it if there was one."""
        prestage = self._under_way.pop(seq, None)
        if prestage is not None:
            self._budget.give_back(prestage.reserved_bytes)
            prestage.request.cancel()
        return prestage

    def _wanted_bytes(self, entries: Sequence[Entry], cold: Collection[Entry]) -> int:
        """Returns how many bytes of a slice to prestage so that an execution over it never waits (paper 3.3).

        An execution fetches the rest of each slice while it works on it. ``cold``: references whose bodies are far.
        """
        window = sum(e.whole_bytes for e in entries)
        near = sum(e.size_bytes if e in cold else e.whole_bytes for e in entries if e.place in IN_MEMORY)
        size = m_bucket_bytes(
            window,
            self._speed.bytes_per_s(window, _MARGIN),
            self.processing_bytes_per_s,
            blocking=self._blocking,
            block_bytes=max((e.whole_bytes for e in entries), default=1),
        )
        return size - near

    def _over(self, error: BaseException | None, run: _Run, *, busy: bool) -> None:
        """One request of a prestage is over. After the last, learns the disk's speed, unless one failed."""
        with self._blocks.lock:
            run.under_way -= 1
            run.has_failed |= error is not None
            if run.under_way or run.has_failed or not run.moved_bytes:
                return
        seconds = self._io.now() - run.asked_s
        self._speed.observe(run.moved_bytes, seconds)
        if self.on_staged is not None:
            waited_s = run.began_s - run.asked_s if busy and run.began_s is not None else 0.0
            self.on_staged(run.moved_bytes, seconds, waited_s)

    def _start(
        self, entry: Entry, priority: Priority, reserved_bytes: int, run: _Run | None = None, *, body_only: bool = False
    ) -> _Staging:
        """Starts fetching one block, or its body. Hold the lock."""
        self._stop(entry.seq)  # its body may be on its way, and the reference has left memory since
        if not body_only:
            self._blocks.ledger.move(entry.seq, Move.STAGE)
        prestage = self._under_way[entry.seq] = _Staging(entry, reserved_bytes, body_only)
        steps = self._steps(prestage, run)
        if body_only:
            prestage.request = self._fetcher.submit_body(priority, self._blocks.memory[entry.seq], steps)
        else:
            prestage.request = self._fetcher.submit(priority, entry, steps)
        return prestage

    def _steps(self, prestage: _Staging, run: _Run | None) -> Steps[None]:
        """Fetches one block, unless it has been cancelled."""
        entry = prestage.entry
        if run is not None and run.began_s is None:
            run.began_s = self._io.now()
        block: Block | None = None
        has_body = False
        try:
            with self._blocks.lock:
                if self._under_way.get(entry.seq) is not prestage:
                    return
                block = self._blocks.memory.get(entry.seq)
            if block is None and not prestage.body_only:
                block = yield from self._fetcher.steps(entry)
            if block is not None and block.at is not None:
                has_body = yield from self._fetcher.stage_body(block)
        except BaseException:
            with self._blocks.lock:
                if self._under_way.get(entry.seq) is prestage:
                    del self._under_way[entry.seq]
                    self._budget.give_back(prestage.reserved_bytes)
                    if not prestage.body_only:
                        self._blocks.ledger.move(entry.seq, Move.STAGE_FAILED)
            raise
        with self._blocks.lock:
            if self._under_way.get(entry.seq) is prestage:
                del self._under_way[entry.seq]
                self._staged(prestage, block, has_body=has_body, run=run)
            # The next prestage of the block, if there is one, has the same place for its body.
            is_wanted = entry.seq in self._under_way or self._blocks.memory.is_whole(entry.seq)
            if has_body and block is not None and not is_wanted:
                self._fetcher.unstage_body(block)

    def _staged(self, prestage: _Staging, block: Block | None, *, has_body: bool, run: _Run | None) -> None:
        """Records what has come. Hold the lock."""
        entry, left, moved = prestage.entry, prestage.reserved_bytes, 0
        if not prestage.body_only:
            assert block is not None
            size = min(entry.size_bytes, left)
            self._blocks.staged(entry, block, size)
            left, moved = left - size, entry.size_bytes
        if has_body and entry.place in IN_MEMORY:  # a reference may have left memory meanwhile
            size = min(entry.body_bytes, left)
            self._blocks.staged_body(entry, size)
            left, moved = left - size, moved + entry.body_bytes
        self._budget.give_back(left)
        if run is not None:
            run.moved_bytes += moved
