"""Decides which blocks stay in memory (paper section 3.2).

M-buckets stay up to their limit, expired windows keep their bootstrap parts, and late blocks leave. Under memory
pressure the destage policy chooses which windows leave; :meth:`Eviction.views` is what it sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from state_backends.store.blocks import Blocks
from state_backends.store.io import Io
from state_backends.store.ledger import IN_MEMORY, Entry, Place
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.store.prestaging import Prestager
from state_backends.store.protocol import Only
from state_backends.store.writing import Writer


class Eviction:
    """It owns what a destage policy wants to know about slices: when they last grew, how fast, and which have expired.

    Hold the store's lock around every call.
    """

    def __init__(
        self, blocks: Blocks, writer: Writer, prestager: Prestager, io: Io, budget: MemoryBudget, options: StoreOptions
    ) -> None:
        self._blocks, self._writer, self._prestager, self._io, self._budget = blocks, writer, prestager, io, budget
        self._options = options
        self._spare_bytes = options.spare_bytes(budget)
        self._expired: set[int] = set()  # live slices that were destaged because their windows expired
        self._touched: dict[int, float] = {}  # live slice -> when it last expired or was prestaged
        self._appended: dict[int, tuple[float, float, int]] = {}  # slice -> first and last append, bytes
        self._due: dict[int, int] = {}  # slice -> its place in the order in which the next batches read slices
        self._next = 0  # how many of them the very next batch reads

    def appended(self, entry: Entry, *, late: bool) -> bool:
        """Handles a new block. It leaves memory if it is late, or if its m-bucket or the budget is full.

        Returns whether the budget is exceeded, so that the caller has to wait until memory is free.
        """
        now = self._io.now()
        first, _, size = self._appended.get(entry.slice_us, (now, now, 0))
        self._appended[entry.slice_us] = (first, now, size + entry.size_bytes)
        if self._options.keeps_all:
            return False
        # Room is left for a whole outbox, so that the last blocks before the limit are written as one file.
        left = self._budget.left()
        if late or left < self._spare_bytes or self._bucket_is_full(entry.slice_us):
            self._writer.evict_when_written(entry)
        return left < 0

    def hold(self, slices: Sequence[int], only: Only | None) -> None:
        """Keeps blocks that are about to leave memory, as late ones are, because an execution will read them.

        They leave after all if there is no room for them.
        """
        for entry in self._blocks.visible(slices, only):
            if entry.place in (Place.MEMORY, Place.DESTAGING):
                room = self._budget.room(spare_bytes=self._spare_bytes, until_share=self._options.staging_share)
                if room < 0 or self._bucket_is_full(entry.slice_us):
                    return
                if self._writer.keep(entry):
                    self._blocks.staging.held(entry)

    def plan(self, slices: Sequence[int], later: Sequence[int]) -> None:
        """Records which slices the next batch will read, and those after it. Those of an earlier plan do not count."""
        self._due = {slice_us: place for place, slice_us in enumerate(dict.fromkeys((*slices, *later)))}
        self._next = len({*slices})

    def let_go(self, size_bytes: int, first: int | None = None) -> None:
        """Frees at least this much memory, or all, of planned slices, the last of them first.

        ``first``: those before this place stay. If it is None, all stay that the next batch reads.
        """
        enough = self._budget.room() + size_bytes
        for slice_us in reversed(list(self._due)[self._next if first is None else first :]):
            missing = enough - self._budget.room()
            if self._options.keeps_all or missing <= 0:
                return
            self._shrink(slice_us, max(self._blocks.memory.size(slice_us) - missing, 0))

    def make_room(self, room_bytes: int) -> None:
        """Lets planned slices go for those that are read before them in the next batch. Memory has ``room_bytes``."""
        missing = -room_bytes
        for place, slice_us in enumerate(list(self._due)[: self._next]):
            far = (e for e in self._blocks.visible([slice_us]) if not self._blocks.memory.is_whole(e.seq))
            coming = (e for e in far if self._prestager.find(e.seq) is None)
            missing += sum(e.body_bytes if e.place in IN_MEMORY else e.whole_bytes for e in coming)
            if missing > 0:
                before = self._budget.room()
                self.let_go(missing, place + 1)
                if (freed := self._budget.room() - before) <= 0:
                    return
                missing -= freed

    def touch(self, slices: Iterable[int]) -> None:
        """Records that these slices are not idle."""
        now = self._io.now()
        self._touched.update((s, now) for s in slices if self._blocks.ledger.has_slice(s))

    def expire(self, slices: Sequence[int]) -> None:
        """Removes these slices from memory, except for their bootstrap parts, because their windows have expired."""
        if self._options.keeps_all:
            return
        self._expired.update(slices)
        self.touch(slices)
        for slice_us in slices:
            size = sum(e.whole_bytes for e in self._blocks.ledger.of_slices([slice_us]))
            self._shrink(slice_us, int(self._options.keep_fraction * size))

    def shrink(self, slice_us: int, keep_bytes: int) -> str | None:
        """Frees a slice's memory except for its first ``keep_bytes``. Returns the reason if there is nothing to free.

        Blocks that are not on disk yet wait in the outbox.
        """
        if self._options.keeps_all:
            return "this store keeps all of its blocks in memory"
        if not self._blocks.memory.size(slice_us):
            return "it has nothing in memory"
        if not self._shrink(slice_us, keep_bytes):
            return "it has no more than its bootstrap part in memory"
        return None

    def purge(self, slices: Iterable[int]) -> None:
        """Forgets slices. They never come back."""
        for slice_us in slices:
            self._appended.pop(slice_us, None)
            self._expired.discard(slice_us)
            self._touched.pop(slice_us, None)
            self._due.pop(slice_us, None)

    def views(self) -> list[dict[str, Any]]:
        """Returns what a destage policy sees: the fields of a WindowView for each slice that has anything in memory."""
        on_disk: dict[int, int] = {}
        for entry in self._blocks.ledger:
            is_here = entry.place in IN_MEMORY
            if is_here and (entry.handed is None or self._blocks.memory.is_whole(entry.seq)):
                continue
            far = entry.body_bytes if is_here else entry.whole_bytes
            on_disk[entry.slice_us] = on_disk.get(entry.slice_us, 0) + far
        views = []
        for slice_us, m_bytes in self._blocks.memory.sizes().items():
            first_s, last_s, size = self._appended.get(slice_us, (0.0, 0.0, 0))
            p_bytes = on_disk.get(slice_us, 0)
            views.append(
                {
                    "name": slice_us,
                    "m_bytes": m_bytes,
                    "p_bytes": p_bytes,
                    "keep_bytes": int(self._options.keep_fraction * (m_bytes + p_bytes)),
                    "expired": slice_us in self._expired,
                    "last_append_s": max(last_s, self._touched.get(slice_us, 0.0)),
                    "append_rate_bytes_per_s": size / max(last_s - first_s, 1.0),
                    "due": self._due.get(slice_us),
                }
            )
        return views

    def _bucket_is_full(self, slice_us: int) -> bool:
        limit = self._options.bucket_limit_bytes
        return self._blocks.memory.heaviest(slice_us, self._options.windows, limit) > limit

    def _shrink(self, slice_us: int, keep_bytes: int) -> bool:
        """Removes a slice's blocks from memory, except for the first ``keep_bytes``. Returns whether there were any."""
        found_any = False
        for entry in self._blocks.ledger.of_slices([slice_us]):
            if entry.place is Place.STAGING:
                self._prestager.cancel(entry)
            if entry.place not in IN_MEMORY:
                continue
            keep_bytes -= entry.whole_bytes
            if keep_bytes < 0:
                found_any = True
                self._prestager.cancel(entry)
                self._writer.evict_when_written(entry)
        return found_any
