"""The memory side of a store: its blocks in memory, and the memory budget that all stores of a host share."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from state_backends.format.block import Block, BodyAt


class PeriodicWindows(NamedTuple):
    """Windows ``[start, start + size)`` that start at ``offset + k * slide``, in µs."""

    size_us: int
    slide_us: int
    offset_us: int


class ValuesInMemory(Protocol):
    """Keyed values of one shard that can leave memory at any time."""

    size_bytes: int

    def shrink(self, size_bytes: int) -> None:
        """Frees at least this much, or all. Takes no lock that is held while the budget is asked for anything."""


class MemoryBudget:
    """How much memory the stores of one host may use for blocks, in total.

    ``used_bytes``: blocks in memory. ``reserved_bytes``: room for RocksDB's block cache, and for blocks that prestages
    and readers fetch. ``ledger_bytes``: what the stores' ledgers take. It counts up to half of the budget, so that
    many blocks on disk still leave room for reading. ``peak_bytes``: the largest ``used_bytes`` so far.

    ``cached_bytes``: keyed values that are also on disk. They take what the others leave, and make room for them.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        self.used_bytes = 0
        self.ledger_bytes = 0
        self.peak_bytes = 0
        self.cached_bytes = 0
        self._lock = threading.Lock()
        self._caches: list[ValuesInMemory] = []

    def raise_to(self, limit_bytes: int) -> None:
        """Raises the limit. Operators of one host share one budget: the largest that any of their policies sets."""
        with self._lock:
            self.limit_bytes = max(self.limit_bytes, limit_bytes)

    def add(self, size_bytes: int, *, reserved_bytes: int = 0) -> None:
        """Counts bytes that came into memory; negative: that left it.

        ``reserved_bytes``: the room that was reserved for them. It is given back in the same step.
        """
        with self._lock:
            self.used_bytes += size_bytes
            self.reserved_bytes -= reserved_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self.make_room()

    def ledger_grew(self, size_bytes: int) -> None:
        """Counts memory that a ledger takes; negative: less than before."""
        with self._lock:
            self.ledger_bytes += size_bytes
        self.make_room()

    def reserve(self, size_bytes: int) -> None:
        """Reserves room even if the budget is used up."""
        with self._lock:
            self.reserved_bytes += size_bytes
        self.make_room()

    def try_reserve(self, size_bytes: int, *, spare_bytes: int = 0, until_share: float = 1.0) -> bool:
        """Reserves room for a block before it is fetched, if there is :meth:`room` for it. Returns whether it did.

        The check and the reservation are one step, so that no two callers get the same room.
        """
        with self._lock:
            if self.room(spare_bytes=spare_bytes, until_share=until_share) < size_bytes:
                return False
            self.reserved_bytes += size_bytes
        self.make_room()
        return True

    def give_back(self, size_bytes: int) -> None:
        """Frees room that was reserved."""
        with self._lock:
            self.reserved_bytes -= size_bytes

    def left(self) -> int:
        """Returns bytes that are free, or that keyed values would free. Negative if the budget is exceeded."""
        ledger_bytes = min(self.ledger_bytes, self.limit_bytes // 2)
        return self.limit_bytes - ledger_bytes - self.reserved_bytes - self.used_bytes

    def room(self, *, spare_bytes: int = 0, until_share: float = 1.0) -> int:
        """Returns how many bytes may be added so that ``spare_bytes`` stay free, and at most this share of the budget,
        0 to 1, is in use or reserved. Negative if it is more now.
        """
        taken = self.used_bytes + self.reserved_bytes
        return min(self.left() - spare_bytes, int(until_share * self.limit_bytes) - taken)

    # -- keyed values that are also on disk ---------------------------------------------------------------

    def share(self) -> int:
        """Returns bytes that the values of each shard may take if all shards take the same."""
        return max(self.left(), 0) // max(len(self._caches), 1)

    def attach(self, cache: ValuesInMemory) -> None:
        """From now on, these values leave memory when others need the room."""
        with self._lock:
            self._caches.append(cache)

    def detach(self, cache: ValuesInMemory) -> None:
        with self._lock:
            if cache in self._caches:
                self._caches.remove(cache)

    def cached(self, size_bytes: int) -> None:
        """Counts values that came into memory; negative: that left it. Call :meth:`make_room` after it."""
        with self._lock:
            self.cached_bytes += size_bytes

    def make_room(self) -> None:
        """Frees values if memory is exceeded: those of the shard with the most bytes first. Hold no values' lock."""
        if not self.cached_bytes or self.left() >= self.cached_bytes:
            return
        with self._lock:
            caches = sorted(self._caches, key=lambda cache: cache.size_bytes, reverse=True)
        for cache in caches:
            excess = self.cached_bytes - max(self.left(), 0)
            if excess <= 0:
                return
            cache.shrink(excess)


class MBuckets:
    """The blocks of one store that are in memory, and the bodies of references that are staged.

    ``unstage`` frees a staged body. It has no lock: hold the store's lock around every call.
    """

    def __init__(self, budget: MemoryBudget, unstage: Callable[[BodyAt], None] = lambda at: None) -> None:
        self._budget = budget
        self._unstage = unstage
        self._blocks: dict[int, Block] = {}
        self._bodies: dict[int, BodyAt] = {}
        self.body_bytes = 0
        """Of all staged bodies."""
        self._slices: dict[int, int] = {}
        self._total = 0

    def __contains__(self, seq: int) -> bool:
        return seq in self._blocks

    def __getitem__(self, seq: int) -> Block:
        return self._blocks[seq]

    def get(self, seq: int) -> Block | None:
        return self._blocks.get(seq)

    def seqs(self) -> set[int]:
        return set(self._blocks)

    def size(self, slice_us: int) -> int:
        """Returns bytes that a slice has in memory."""
        return self._slices.get(slice_us, 0)

    def heaviest(self, slice_us: int, windows: Sequence[PeriodicWindows], enough: int) -> int:
        """Returns bytes of the largest m-bucket that includes this slice. A window's m-bucket is all slices that it
        spans.

        A slice that no known window spans is an m-bucket of its own. If all slices together have at most ``enough``
        bytes, this returns the bytes of the slice alone, without looking at the windows. The slice must be in memory.
        """
        heaviest = self.size(slice_us)
        if not windows or self._total <= enough:
            return heaviest
        reach = max(window.size_us for window in windows)
        near = sorted(s for s in self._slices if slice_us - reach < s < slice_us + reach)
        sums = [0, *accumulate(self._slices[s] for s in near)]
        for size_us, slide_us, offset_us in windows:
            # Several windows may have the same first slice in memory. The last of them spans all that the others span.
            for number, first_us in enumerate(near[: bisect_right(near, slice_us)]):
                start = first_us - (first_us - offset_us) % slide_us
                if start > slice_us - size_us:
                    heaviest = max(heaviest, sums[bisect_left(near, start + size_us)] - sums[number])
        return heaviest

    def sizes(self) -> dict[int, int]:
        """Returns bytes in memory, by slice. Slices without any are left out."""
        return dict(self._slices)

    @property
    def total_bytes(self) -> int:
        return self._total

    def add(self, seq: int, block: Block, *, reserved_bytes: int = 0) -> None:
        """Keeps a block in memory. ``reserved_bytes``: the room that was reserved for it in the budget."""
        self._blocks[seq] = block
        self._count(block.header.slice_us, block.size_bytes, reserved_bytes)

    def add_body(self, seq: int, *, reserved_bytes: int = 0) -> None:
        """The body of a reference in memory is staged. ``reserved_bytes``: the room that was reserved for it."""
        block = self._blocks[seq]
        assert block.at is not None and seq not in self._bodies
        self._bodies[seq] = block.at
        self.body_bytes += block.header.body_bytes
        self._count(block.header.slice_us, block.header.body_bytes, reserved_bytes)

    def is_whole(self, seq: int) -> bool:
        """Whether a block is in memory, with its body."""
        block = self._blocks.get(seq)
        return block is not None and (block.at is None or seq in self._bodies)

    def remove(self, seq: int) -> None:
        """Removes a block if it is in memory, and its body if that is staged."""
        block = self._blocks.pop(seq, None)
        if block is None:
            return
        size_bytes = block.size_bytes
        if (at := self._bodies.pop(seq, None)) is not None:
            size_bytes += block.header.body_bytes
            self.body_bytes -= block.header.body_bytes
            self._unstage(at)
        self._count(block.header.slice_us, -size_bytes)

    def _count(self, slice_us: int, size_bytes: int, reserved_bytes: int = 0) -> None:
        self._slices[slice_us] = self._slices.get(slice_us, 0) + size_bytes
        if not self._slices[slice_us]:
            del self._slices[slice_us]
        self._total += size_bytes
        self._budget.add(size_bytes, reserved_bytes=reserved_bytes)

    def clear(self) -> None:
        self._budget.add(-self.total_bytes)
        for at in self._bodies.values():
            self._unstage(at)
        self._bodies.clear()
        self.body_bytes = 0
        self._blocks.clear()
        self._slices.clear()
        self._total = 0
