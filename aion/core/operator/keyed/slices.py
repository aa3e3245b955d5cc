"""The live segments of one part of a plan, and which of them the windows of single keys need. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aion.core.compaction.blocks import BlockCompaction
from aion.core.operator.keyed.orders import ExecuteKeyed
from aion.core.operator.keyed.shard import KeyedPart
from aion.core.operator.keyed.table import Ints
from aion.core.operator.lifecycle import NEVER
from aion.core.slicing.grid import EVENT_ROWS_US, LiveSegments, SliceGrid, has_event_rows, slices_from_json

Needed = Callable[[Sequence[int], int], list[bool]]


def parts_of(
    grids: Sequence[SliceGrid], keyed: Sequence[KeyedPart], needed: Needed, snapshot: Mapping[str, Any] | None
) -> list[PartSegments]:
    """The segments of each part of a plan, new or as an operator's snapshot has them. ``needed``: of the first part."""
    names = [] if snapshot is None else slices_from_json(snapshot["slices"])
    parts = []
    for number, (grid, part) in enumerate(zip(grids, keyed, strict=True)):
        own = [name for name in names if has_event_rows(name) == bool(number)]
        settled_us = -NEVER if snapshot is None else snapshot["settled_us"][number]
        needs = _no_other if number else needed
        shelf_us = EVENT_ROWS_US if number else 0
        parts.append(PartSegments(grid, part, needs, shelf_us=shelf_us, names=own, settled_us=settled_us))
    return parts


def _no_other(names: Sequence[int], first: int) -> list[bool]:
    return [False] * len(names)


class PartSegments:
    """The segments that hold blocks of a part.

    ``keyed``: the part's windows of single keys. ``needed``: which of some segments another window of the part has a
    share in, given the first such window to look at. ``shelf_us``: how much later than they begin segments are named
    (:data:`aion.core.slicing.grid.EVENT_ROWS_US`); all segments that come and go here are names.
    """

    def __init__(
        self,
        grid: SliceGrid,
        keyed: KeyedPart,
        needed: Needed,
        *,
        shelf_us: int = 0,
        names: Iterable[int] = (),
        settled_us: int = -NEVER,
    ) -> None:
        self.grid, self.keyed, self.shelf_us = grid, keyed, shelf_us
        self.live = LiveSegments(grid, [name - shelf_us for name in names])
        # Segments that end by then were let go from memory, as far as the windows of single keys are concerned.
        self.settled_us = settled_us
        self._needed = needed

    def __iter__(self) -> Iterator[int]:
        return (start_us + self.shelf_us for start_us in self.live)

    def add(self, name: int) -> int:
        """Returns where the segment begins."""
        self.live.add(name - self.shelf_us)
        return name - self.shelf_us

    def drop(self, names: Iterable[int]) -> None:
        self.live.drop([name - self.shelf_us for name in names])

    def is_past(self, name: int) -> bool:
        """Whether no keyed window that is still open may need the segment."""
        return self.grid.end(name - self.shelf_us) <= self.settled_us

    def is_settled(self, name: int) -> bool:
        """The same; always where there are no keyed windows."""
        return not self.keyed or self.is_past(name)

    def between(self, first_us: int, last_us: int, but: Container[int] = ()) -> list[int]:
        """Those that may hold an event of the stretch, both ends of which belong to it."""
        if not self.keyed:
            return []
        found = (start_us + self.shelf_us for start_us in self.live.between(first_us, last_us + 1))
        return [name for name in found if name not in but]

    def due_by(self, now_us: int | None, watermark_us: int) -> list[int]:
        """Those that keyed windows read which are executed when the watermark gets there."""
        return [name for due in self.keyed.due_by(now_us, watermark_us) for name in self.between(*due)]

    def active(self, now_us: int | None, but: Container[int] = ()) -> list[int]:
        """Those that keyed windows may need which have not ended."""
        return self.between(self.keyed.active_from_us(now_us), NEVER, but)

    def placed(self, order: ExecuteKeyed) -> ExecuteKeyed:
        """The order with the segments that its rows are in."""
        low, high = int(order.windows["start"].min()), int(order.windows["last"].max())
        return replace(order, slices=tuple(self.between(low, high)))

    def settle(self, now_us: int | None, first: int) -> list[int]:
        """Those that only late windows need from now on. ``first``: the first of the other windows that is not late."""
        before_us, self.settled_us = self.settled_us, self.keyed.active_from_us(now_us)
        near = [name for name in self.between(before_us, self.settled_us) if self.is_past(name)]
        return [name for name, needed in zip(near, self._needed(near, first), strict=True) if not needed]

    def unneeded(self, names: Iterable[int]) -> list[int]:
        """Of these, the ones that no window needs any more."""
        old = self._old(names)
        if not old or not self.keyed:
            return old
        needed = self.keyed.needed_in(*self._bounds(old)).tolist()
        return [name for name, rows in zip(old, needed, strict=True) if not rows]

    def swept(self, compaction: BlockCompaction | None) -> list[int]:
        """Those that are kept for few of the sessions whose rows they have: the others' rows are to go."""
        if compaction is None or not self.keyed:
            return []
        gone = self.between(*self.keyed.gone_between())
        for name, rows in zip(gone, self.keyed.gone_in(*self._bounds(gone)).tolist(), strict=True):
            if rows:
                compaction.wasted(name, rows)
        old = self._old(compaction.wasteful)
        needed = self.keyed.needed_in(*self._bounds(old)).tolist() if old else []
        return [name for name, rows in zip(old, needed, strict=True) if compaction.sweep(name, rows)]

    def _old(self, names: Iterable[int]) -> list[int]:
        """Those of which only the index says whether they are needed."""
        settled_us = self.keyed.settled_us()
        settled = [name for name in names if self.grid.end(name - self.shelf_us) <= settled_us]
        return [name for name, needed in zip(settled, self._needed(settled, 0), strict=True) if not needed]

    def _bounds(self, names: Sequence[int]) -> tuple[Ints, Ints]:
        """Starts and ends."""
        starts = np.array(names, np.int64) - self.shelf_us
        return starts, self.grid.ends(starts)
