"""Which slices the windows of single keys need: where their rows are, what may go, and what is to be swept. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace

import numpy as np

from aion.core.compaction.blocks import BlockCompaction
from aion.core.operator.keyed.orders import ExecuteKeyed, Order
from aion.core.operator.keyed.shard import KeyedShard
from aion.core.operator.keyed.table import Ints
from aion.core.operator.keyed.windows import Orders
from aion.core.slicing.grid import LiveSegments, SliceGrid


class KeyedSlices:
    """The live segments of an operator as windows of single keys see them.

    ``are_for_keys_only``: which segments no other window needs.
    """

    def __init__(
        self,
        grid: SliceGrid,
        segments: LiveSegments,
        keyed: KeyedShard,
        are_for_keys_only: Callable[[Sequence[int]], list[bool]],
    ) -> None:
        self._grid, self._segments, self._keyed = grid, segments, keyed
        self._are_for_keys_only = are_for_keys_only

    def between(self, first_us: int, last_us: int, but: Container[int] = ()) -> list[int]:
        """Those that may hold an event of the stretch, both ends of which belong to it."""
        if not self._keyed:
            return []
        return [s for s in self._segments.between(first_us, last_us + 1) if s not in but]

    def placed(self, orders: Orders) -> list[Order]:
        """Orders with the slices that their rows are in."""
        placed: list[Order] = []
        for order in orders:
            if isinstance(order, ExecuteKeyed):
                low, high = int(order.windows["start"].min()), int(order.windows["last"].max())
                order = replace(order, slices=tuple(self.between(low, high)))
            placed.append(order)
        return placed

    def unneeded(self, slices: Iterable[int]) -> list[int]:
        """Of these, the ones that no window needs any more."""
        old = self._old(slices)
        if not old or not self._keyed:
            return old
        needed = self._keyed.needed_in(*self._bounds(old)).tolist()
        return [s for s, rows in zip(old, needed, strict=True) if not rows]

    def swept(self, compaction: BlockCompaction | None) -> list[int]:
        """Those that are kept for few of the sessions whose rows they have: the others' rows are to go."""
        if compaction is None or not self._keyed:
            return []
        gone = self.between(*self._keyed.gone_between())
        for s, rows in zip(gone, self._keyed.gone_in(*self._bounds(gone)).tolist(), strict=True):
            if rows:
                compaction.wasted(s, rows)
        old = self._old(compaction.wasteful)
        needed = self._keyed.needed_in(*self._bounds(old)).tolist() if old else []
        return [s for s, rows in zip(old, needed, strict=True) if compaction.sweep(s, rows)]

    def _old(self, slices: Iterable[int]) -> list[int]:
        """Those of which only what is in the index may be needed."""
        settled_us = self._keyed.settled_us()
        settled = [s for s in slices if self._grid.end(s) <= settled_us]
        return [s for s, alone in zip(settled, self._are_for_keys_only(settled), strict=True) if alone]

    def _bounds(self, slices: Sequence[int]) -> tuple[Ints, Ints]:
        """Starts and ends."""
        return np.array(slices, np.int64), np.array([self._grid.end(s) for s in slices], np.int64)
