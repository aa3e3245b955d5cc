"""Cells: windows of single keys that end within one stretch of time wait together for the trigger. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from aion.base.numbers import NEVER, sums_by
from aion.core.keyed.table import Ints
from aion.core.lateness.observe import NewBounds
from aion.core.life.window_table import WindowTable


class Cells:
    """A row of ``table`` stands for all windows that end in a cell, as if they were one that ends where it begins.

    ``width_us``: of a cell. ``table``: from the snapshot. None: there are no cells yet.
    """

    def __init__(self, width_us: int, bound: NewBounds, table: WindowTable | None = None) -> None:
        self._width_us = width_us
        self._bound = bound
        self.table = WindowTable(1) if table is None else table

    def of(self, ends_us: Ints) -> Ints:
        """The start of the cell that each end lies in."""
        cells: Ints = ends_us // self._width_us * self._width_us
        return cells

    def rows(self, cells_us: Ints) -> Ints:
        """The rows of these cells, in the given order. Makes cells that are new. Each cell occurs once."""
        none = np.zeros(len(cells_us), np.int64)
        new = self.table.find(none, cells_us) < 0
        if new.any():
            count = int(new.sum())
            self.table.add(
                definition=none[new],
                start_us=cells_us[new],
                end_us=cells_us[new],
                bound_us=np.full(count, self._bound.bound_for_new_window()),
                late_from_seq=np.zeros(count, np.int64),
            )
        return self.table.find(none, cells_us)

    def came_on_time(self, ends_us: Ints, events: Ints) -> Iterator[tuple[int, int]]:
        """Adds the events of windows that run on time. Returns for each cell its latest end, and these events."""
        cells, cell_of = np.unique(self.of(ends_us), return_inverse=True)
        counts, latest = sums_by(cell_of, events, len(cells)), np.full(len(cells), -NEVER, np.int64)
        np.maximum.at(latest, cell_of, ends_us)
        self.table.add_events(self.rows(cells), counts)
        return zip(latest.tolist(), counts.tolist(), strict=True)

    def forget(self, closed_us: int) -> WindowTable:
        """Removes the cells whose windows are all closed. Returns them."""
        return self.table.drop(self.table["end_us"] + self._width_us <= closed_us)
