"""Window state split between memory and RocksDB: m-buckets and p-buckets (paper section 3.1 and 3.2).

New blocks of a window stay in its m-bucket until that is full or the host's budget is used up. Blocks that do not fit,
and late blocks, go to the p-bucket. An expired window is destaged, except for its bootstrap part. Before it is executed
again, it is prestaged. One I/O thread does all persistent I/O, and no lock is held during I/O.

A store is made of parts, and each has one job:

    blocks.py         knows where each block is: ledger, m-buckets, live files, under one lock
    reading.py        yields blocks in the order of arrival, reading ahead
    fetching.py       reads one block from its file
    prestaging.py     fetches blocks into memory before they are read
    eviction.py       decides which blocks stay in memory
    writing.py        writes blocks to disk, and then removes them from memory
    merging.py        keeps the number of files low

They use an :class:`state_backends.store.io.Io`, which runs requests by priority, and
:class:`state_backends.store.io.BlockFiles`, which stores the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from state_backends.files.names import SstFile
from state_backends.format.block import Block
from state_backends.format.errors import DiskError
from state_backends.store.blocks import Blocks
from state_backends.store.eviction import Eviction
from state_backends.store.fetching import Fetcher
from state_backends.store.io import BlockFiles, Io, Pending, Priority, Steps
from state_backends.store.ledger import IN_MEMORY, Entry, Place
from state_backends.store.live_files import LiveFiles
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.merging import Merger
from state_backends.store.options import StoreOptions
from state_backends.store.prestaging import Prestager
from state_backends.store.protocol import Alive, Only, Runs, StoredBlock, StoreStats, all_alive
from state_backends.store.reading import Reader
from state_backends.store.writing import Writer


class TieredStore:
    """Connects the parts. See :class:`state_backends.store.protocol.BlockStore` for its methods."""

    def __init__(self, p_bucket: BlockFiles, io: Io, budget: MemoryBudget, options: StoreOptions) -> None:
        self._files = p_bucket
        self._io = io
        self._budget = budget
        self._options = options

        def drop(dead: Sequence[int]) -> None:
            # This runs after all reads that are queued now. Later reads look up the new file of a block.
            io.submit(Priority.MAINTENANCE, p_bucket.drop(*dead))

        self.blocks = Blocks(budget, LiveFiles(drop), p_bucket.bodies.unstage)
        fetcher = Fetcher(self.blocks, p_bucket, io)
        self._prestager = Prestager(self.blocks, fetcher, io, budget, options)
        self._reader = Reader(self.blocks, fetcher, self._prestager, io, budget, options)
        self._writer = Writer(self.blocks, p_bucket, io, outbox_bytes=options.spare_bytes(budget))
        self._merger = Merger(self.blocks, p_bucket, io, options.limits)
        self._completing: Pending[None] | None = None  # fetches what the local copies of restored files lack
        self._trimming: Pending[None] | None = None  # makes room on the disk for local copies
        self._eviction = Eviction(self.blocks, self._writer, self._prestager, io, budget, options)

    # -- measurements -------------------------------------------------------------------------------------

    def listen(
        self,
        staged: Callable[[int, float, float], None] | None = None,
        written: Callable[[int, float], None] | None = None,
    ) -> None:
        """Sets callbacks. ``staged`` gets the bytes, seconds, and seconds of waiting of each prestage.

        ``written`` gets the bytes and seconds of each file.
        """
        self._prestager.on_staged = staged
        self._writer.on_written = written

    @property
    def processing_bytes_per_s(self) -> float | None:
        return self._prestager.processing_bytes_per_s

    @processing_bytes_per_s.setter
    def processing_bytes_per_s(self, speed: float | None) -> None:
        self._prestager.processing_bytes_per_s = speed

    # -- appends and reads --------------------------------------------------------------------------------

    def append(self, seq: int, block: Block, *, late: bool) -> None:
        with self.blocks.lock:
            entry = self.blocks.add(seq, block)
            exceeded = self._eviction.appended(entry, late=late)
            self._writer.write_outbox(Priority.LATE_WRITE, if_due=not exceeded)
            # Back-pressure: a caller that fills memory waits for the disk.
            waiting = self._writer.raise_all() if exceeded else []
        if waiting:
            self._io.wait(waiting)
            self._refuse_if_stuck(entry, waiting)
        self._io.wait_for_room()

    def _refuse_if_stuck(self, entry: Entry, writes: Sequence[Pending[SstFile]]) -> None:
        """Removes the block and raises DiskError if memory is full and the disk cannot be written."""
        failed = [error for write in writes if (error := write.error()) is not None]
        with self.blocks.lock:
            if not failed or entry.place is not Place.MEMORY or self._budget.left() >= 0:
                return
            self._forget([entry])
        if isinstance(failed[-1], DiskError):
            raise DiskError(f"memory is full, and no block can leave it: {failed[-1]}") from failed[-1]
        raise failed[-1]

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        return self._reader.read(slices, blocking=blocking, only=only)

    def size_on_disk(self, slices: Sequence[int]) -> int:
        with self.blocks.lock:
            far = [e for e in self.blocks.visible(slices) if not self.blocks.memory.is_whole(e.seq)]
            return sum(e.body_bytes if e.place in IN_MEMORY else e.whole_bytes for e in far)

    def tiers(self, below: int) -> dict[int, tuple[int, int]]:
        bodies = self._files.bodies
        with self.blocks.lock:
            entries = [] if self.blocks.closed else [e for e in self.blocks.ledger if e.seq < below]
            here = {e for e in entries if e.place in IN_MEMORY}
            lacking = self.blocks.without_bodies(here)
        mapped = bodies.resident([block for _, block in lacking]) if lacking else []
        bodiless = {e for (e, _), is_mapped in zip(lacking, mapped, strict=True) if not is_mapped}
        near = {name: bodies.is_near(name) for name in {e.handed.file for e in entries if e.handed is not None}}
        found: dict[int, tuple[int, int]] = {}
        for e in entries:
            memory, disk = found.get(e.slice_us, (0, 0))
            if e in here:
                memory += e.size_bytes
            elif self._files.is_near(e.file_no, e.slice_us, e.seq):
                disk += e.size_bytes
            if e in here and e not in bodiless:
                memory += e.body_bytes
            elif e.handed is not None and near[e.handed.file]:
                disk += e.body_bytes
            found[e.slice_us] = memory, disk
        return found

    # -- moves between memory and disk --------------------------------------------------------------------

    def plan(self, slices: Sequence[int], later: Sequence[int] = ()) -> None:
        with self.blocks.lock:
            self._eviction.plan(slices, later)

    def let_go(self, size_bytes: int) -> None:
        with self.blocks.lock:
            if not self.blocks.closed:
                self._eviction.let_go(size_bytes)

    def make_room(self, room_bytes: int) -> None:
        with self.blocks.lock:
            if not self.blocks.closed:
                self._eviction.make_room(room_bytes)

    def prestage(self, slices: Sequence[int], only: Only | None = None, later: Sequence[int] = ()) -> None:
        with self.blocks.lock:
            # A window that is fetched for an execution is not idle.
            self._eviction.touch((*slices, *later))
            if self._options.prestages and not self.blocks.closed:
                self._eviction.hold((*slices, *later), only)
        if self._options.prestages and not self.blocks.closed:
            self._prestager.prestage(slices, only, later)

    def destage(self, slices: Sequence[int]) -> None:
        with self.blocks.lock:
            self._eviction.expire(slices)

    def views(self) -> list[dict[str, Any]]:
        with self.blocks.lock:
            return self._eviction.views()

    def shrink(self, slice_us: int, keep_bytes: int) -> str | None:
        with self.blocks.lock:
            refusal = "its store is closed" if self.blocks.closed else self._eviction.shrink(slice_us, keep_bytes)
        if refusal is None:
            self.flush()
        return refusal

    def flush(self) -> None:
        with self.blocks.lock:
            if not self.blocks.closed:
                self._writer.write_outbox(Priority.DESTAGE)

    def compact(self, among: Collection[int] | None = None, *, held_bytes: int = 0, disk_bytes: int = 0) -> None:
        self._merger.compact(among, held_bytes=held_bytes, disk_bytes=disk_bytes)

    # -- deletions ----------------------------------------------------------------------------------------

    def purge(self, slices: Sequence[int]) -> None:
        with self.blocks.lock:
            self._forget(self.blocks.ledger.of_slices(slices))
            self._eviction.purge(slices)

    def replace(self, spans: Mapping[int, tuple[int, int]], below: int) -> None:
        with self.blocks.lock:
            self.blocks.replace(spans, below)

    def drop_replaced(self) -> None:
        with self.blocks.lock:
            self._forget(self.blocks.replaced())

    def _forget(self, entries: Sequence[Entry]) -> None:
        """Deletes blocks, and stops writing and prestaging them. Hold the lock."""
        for entry in entries:
            self._writer.forget(entry)
            self._prestager.forget(entry)
        self.blocks.forget(entries)

    # -- versions -----------------------------------------------------------------------------------------

    def persist(self, skip: Collection[int] = ()) -> list[SstFile]:
        with self.blocks.lock:
            self._merger.use_merged()
        return self._writer.persist(skip)

    def rollback(self, from_seq: int) -> None:
        while True:
            with self.blocks.lock:
                # Memory pressure may start new writes, but not while the lock is held.
                writes = [write for write in self._writer.raise_all() if not write.over()]
                if not writes:
                    self.blocks.restore_replaced(from_seq)
                    self._forget([e for e in self.blocks.ledger if e.seq >= from_seq])
                    unwanted = self.blocks.files.take_new_dead()
                    break
            self._io.wait(writes)
        for file in unwanted:
            self._files.delete(file)

    def restore(self, files: Sequence[SstFile], alive: Alive = all_alive) -> None:
        indexes = self._io.submit(Priority.READ, self._files.adopt(files)).result()
        with self.blocks.lock:
            self.blocks.restore(files, indexes, alive)
        self._completing = self._io.submit(Priority.MAINTENANCE, self._files.complete(files))
        if self._options.keeps_all:
            self._prestager.load_all()

    def trim(self) -> None:
        """See :meth:`state_backends.store.protocol.BlockStore.trim`."""
        if self._trimming is None or self._trimming.over():
            self._trimming = self._io.submit(Priority.MAINTENANCE, self._files.trim())

    def handed(self, skip: Collection[int] = ()) -> set[str]:
        with self.blocks.lock:
            return self.blocks.handed(skip)

    def files(self, skip: Collection[int] = ()) -> dict[int, Runs]:
        with self.blocks.lock:
            return self.blocks.live_runs(skip)

    # -- the whole ----------------------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        with self.blocks.lock:
            stats = self.blocks.stats()
            stats.failed_writes = self._writer.failed_writes
            stats.merges, stats.merged_bytes = self._merger.merges, self._merger.merged_bytes
            stats.failed_merges = self._merger.failed_merges
            return stats

    def close(self) -> None:
        self._merger.stop()
        for request in (self._completing, self._trimming):
            if request is not None:
                request.cancel()
        with self.blocks.lock:
            self.blocks.closed = True
            under_way: list[Pending[Any]] = [*self._writer.requests(), *self._prestager.requests()]
        self._io.wait(under_way)
        with self.blocks.lock:
            self._prestager.close()
            self.blocks.close()
        self._io.submit(Priority.READ, _call(self._files.close)).result()

    def validate(self) -> None:
        """Raises AssertionError if an invariant of docs/inside/store.md is violated."""
        with self.blocks.lock:
            self.blocks.validate()
            self._writer.validate()


def _call(function: Callable[[], None]) -> Steps[None]:
    function()
    return
    yield 0
