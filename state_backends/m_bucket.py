"""The memory side of a store: blocks by number, bytes by slice, and the budget that all stores of a host share."""

from __future__ import annotations

import threading

from state_backends.block import Block


class MemoryBudget:
    """Bytes of blocks in memory that the stores of one host may hold together.

    ``reserved_bytes`` are taken off it: for RocksDB's block cache, and for blocks that prestages and readers fetch.
    ``peak_bytes``: the most that was used; ``fullest_bytes``: used and reserved together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = 0
        self.used_bytes = 0
        self.peak_bytes = 0
        self.fullest_bytes = 0
        self._lock = threading.Lock()

    def raise_to(self, limit_bytes: int) -> None:
        """Operators of one host share one budget: the largest that any of their policies gives."""
        with self._lock:
            self.limit_bytes = max(self.limit_bytes, limit_bytes)

    def add(self, size_bytes: int, *, reserved_bytes: int = 0) -> None:
        """Accounts for bytes already held, or, if negative, let go.

        ``reserved_bytes``: what was reserved for them, which is given back in the same instant.
        """
        with self._lock:
            self.used_bytes += size_bytes
            self.reserved_bytes -= reserved_bytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            self._note()

    def reserve(self, size_bytes: int) -> None:
        """Takes room off the budget, whether it is there or not."""
        with self._lock:
            self.reserved_bytes += size_bytes
            self._note()

    def try_reserve(self, size_bytes: int, *, spare_bytes: int = 0) -> bool:
        """Reserves room for a block before it is fetched, if ``spare_bytes`` are left besides; says whether it did.

        To look and to take are one step, so that no two who ask get the same room.
        """
        with self._lock:
            if self.left() < size_bytes + spare_bytes:
                return False
            self.reserved_bytes += size_bytes
            self._note()
            return True

    def give_back(self, size_bytes: int) -> None:
        """What was reserved is free again."""
        with self._lock:
            self.reserved_bytes -= size_bytes

    def left(self) -> int:
        """Bytes that may still be held; negative when the budget is exceeded."""
        return self.limit_bytes - self.reserved_bytes - self.used_bytes

    def _note(self) -> None:
        self.fullest_bytes = max(self.fullest_bytes, self.used_bytes + self.reserved_bytes)


class MBuckets:
    """The blocks of one store that are in memory. Not locked: the store's lock is held around every call."""

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._blocks: dict[int, Block] = {}
        self._slices: dict[int, int] = {}

    def __contains__(self, seq: int) -> bool:
        return seq in self._blocks

    def __getitem__(self, seq: int) -> Block:
        return self._blocks[seq]

    def get(self, seq: int) -> Block | None:
        return self._blocks.get(seq)

    def seqs(self) -> set[int]:
        return set(self._blocks)

    def size(self, slice_us: int) -> int:
        """Bytes of a slice's m-bucket."""
        return self._slices.get(slice_us, 0)

    def sizes(self) -> dict[int, int]:
        """Bytes of every m-bucket that is not empty."""
        return dict(self._slices)

    @property
    def total_bytes(self) -> int:
        return sum(self._slices.values())

    def hold(self, seq: int, block: Block, *, reserved_bytes: int = 0) -> None:
        """``reserved_bytes``: what was reserved in the budget for this block."""
        slice_us = block.header.slice_us
        self._blocks[seq] = block
        self._slices[slice_us] = self._slices.get(slice_us, 0) + block.size_bytes
        self._budget.add(block.size_bytes, reserved_bytes=reserved_bytes)

    def let_go(self, seq: int) -> None:
        block = self._blocks.pop(seq, None)
        if block is None:
            return
        slice_us = block.header.slice_us
        self._slices[slice_us] -= block.size_bytes
        if not self._slices[slice_us]:
            del self._slices[slice_us]
        self._budget.add(-block.size_bytes)

    def clear(self) -> None:
        self._budget.add(-self.total_bytes)
        self._blocks.clear()
        self._slices.clear()
