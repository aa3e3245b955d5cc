"""The live segments of one part of a plan, and the segments that its windows of single keys need. Pure."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aion.base.numbers import NEVER
from aion.core.compaction import BlockCompaction
from aion.core.keyed.orders import ExecuteKeyed
from aion.core.keyed.shard import KeyedPart
from aion.core.keyed.table import Ints
from aion.core.slicing.grid import EVENT_ROWS_US, LiveSegments, SliceGrid, has_event_rows, slices_from_json

Needed = Callable[[Sequence[int], int], list[bool]]


def parts_of(
    grids: Sequence[SliceGrid], keyed: Sequence[KeyedPart], needed: Needed, snapshot: Mapping[str, Any] | None
) -> list[PartSegments]:
    """The segments of each part of a plan, empty or from an operator's snapshot.

    ``needed``: see :class:`PartSegments`; it applies to the first part only.
    """
    names = [] if snapshot is None else slices_from_json(snapshot["slices"])
    parts = []
    for number, (grid, part) in enumerate(zip(grids, keyed, strict=True)):
        own = [name for name in names if has_event_rows(name) == bool(number)]
        settled_us = -NEVER if snapshot is None else snapshot["settled_us"][number]
        needs = _no_other if number else needed
        name_offset_us = EVENT_ROWS_US if number else 0
        parts.append(PartSegments(grid, part, needs, name_offset_us=name_offset_us, names=own, settled_us=settled_us))
    return parts


def _no_other(names: Sequence[int], first: int) -> list[bool]:
    return [False] * len(names)


class PartSegments:
    """The segments that hold blocks of one part of a plan.

    ``keyed``: the part's windows of single keys. ``needed``: given segments and the number of a window of all keys, it
    says which segments that window or a later one overlaps. ``name_offset_us``: a segment's name minus its start
    (:data:`aion.core.slicing.grid.EVENT_ROWS_US`). All arguments and results here are names.
    """

    def __init__(
        self,
        grid: SliceGrid,
        keyed: KeyedPart,
        needed: Needed,
        *,
        name_offset_us: int = 0,
        names: Iterable[int] = (),
        settled_us: int = -NEVER,
    ) -> None:
        self.grid, self.keyed, self.name_offset_us = grid, keyed, name_offset_us
        self.live = LiveSegments(grid, [name - name_offset_us for name in names])
        # No open window of a single key needs a segment that ends by then.
        self.settled_us = settled_us
        self._needed = needed

    def __iter__(self) -> Iterator[int]:
        return (start_us + self.name_offset_us for start_us in self.live)

    def add(self, name: int) -> int:
        """Adds a segment. Returns its start in µs."""
        self.live.add(name - self.name_offset_us)
        return name - self.name_offset_us

    def drop(self, names: Iterable[int]) -> None:
        self.live.drop([name - self.name_offset_us for name in names])

    def is_past(self, name: int) -> bool:
        """Whether no open window of a single key may need the segment."""
        return self.grid.end(name - self.name_offset_us) <= self.settled_us

    def is_settled(self, name: int) -> bool:
        """The same as :meth:`is_past`, but always True if the part has no windows of single keys."""
        return not self.keyed or self.is_past(name)

    def between(self, first_us: int, last_us: int, but: Container[int] = ()) -> list[int]:
        """The segments that may hold an event from ``first_us`` to ``last_us``, inclusive. ``but``: leave these out."""
        if not self.keyed:
            return []
        names = (start_us + self.name_offset_us for start_us in self.live.between(first_us, last_us + 1))
        return [name for name in names if name not in but]

    def due_by(self, now_us: int | None, watermark_us: int) -> list[int]:
        """The segments that windows of single keys read if the watermark reaches ``watermark_us``."""
        return [name for due in self.keyed.due_by(now_us, watermark_us) for name in self.between(*due)]

    def active(self, now_us: int | None, but: Container[int] = ()) -> list[int]:
        """The segments that open windows of single keys may need. ``but``: leave these out."""
        return self.between(self.keyed.active_from_us(now_us), NEVER, but)

    def placed(self, order: ExecuteKeyed) -> ExecuteKeyed:
        """The order, with the segments that hold its rows."""
        low, high = int(order.windows["start"].min()), int(order.windows["last"].max())
        return replace(order, slices=tuple(self.between(low, high)))

    def settle(self, now_us: int | None, first: int) -> list[int]:
        """The segments that only late windows need from now on.

        ``first``: the number of the first window of all keys that is not late.
        """
        before_us, self.settled_us = self.settled_us, self.keyed.active_from_us(now_us)
        near = [name for name in self.between(before_us, self.settled_us) if self.is_past(name)]
        return [name for name, needed in zip(near, self._needed(near, first), strict=True) if not needed]

    def unneeded(self, names: Iterable[int]) -> list[int]:
        """The names, out of these, that no window needs any more."""
        old = self._old(names)
        if not old or not self.keyed:
            return old
        needed = self.keyed.needed_in(*self._bounds(old)).tolist()
        return [name for name, rows in zip(old, needed, strict=True) if not rows]

    def swept(self, compaction: BlockCompaction | None) -> list[int]:
        """The segments to compact as a whole, because sessions still need at most half of their rows.

        Also tells ``compaction`` how many rows of each segment the last watermark removed.
        """
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
        """The names, out of these, of settled segments that no window of all keys needs.

        Whether they are still needed depends on the index alone.
        """
        settled_us = self.keyed.settled_us()
        settled = [name for name in names if self.grid.end(name - self.name_offset_us) <= settled_us]
        return [name for name, needed in zip(settled, self._needed(settled, 0), strict=True) if not needed]

    def _bounds(self, names: Sequence[int]) -> tuple[Ints, Ints]:
        """The start and end of each segment, in µs."""
        starts = np.array(names, np.int64) - self.name_offset_us
        return starts, self.grid.ends(starts)
