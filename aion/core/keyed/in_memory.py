"""The windows of one definition that are in memory: those of the pages that a batch touches. Pure.

Windows that end within one stretch of time, a cell, wait together for the trigger.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from aion.base.numbers import NEVER, sums_by
from aion.core.keyed.assigners import INDEX, Assigner, Flags, total
from aion.core.keyed.closing import BEFORE_ALL, Closing
from aion.core.keyed.indexed_windows import IndexedWindows, indexed_windows, orphans
from aion.core.keyed.orders import ExecuteKeyed, Members, Retract
from aion.core.keyed.page_store import (
    CLOSED,
    EARLY,
    KEPT,
    OPEN,
    WAITING,
    Bins,
    Facts,
    PageGroup,
    PageStore,
)
from aion.core.keyed.pages import PageFormat
from aion.core.keyed.table import Ints, Table, stacked
from aion.core.lateness.observe import NewBounds
from aion.core.life.actions import Forget
from aion.core.life.rules import OfDefinition
from aion.core.life.window_table import WindowTable


class Cells:
    """A row of ``table`` stands for all windows that end in a cell, as if they were one that ends where it begins.

    ``width_us``: the width of a cell. ``table``: the cells of the snapshot. It is None if there are none yet.
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


YIELDED = ("start", "end", "number", "pane", "seq", "early", "hash")
"""The columns for each executed window: its interval, the number of its last pane, and the newest block in that pane.

``number`` distinguishes windows with the same key and interval. ``hash``: of the key.
"""

Orders: TypeAlias = Iterator[ExecuteKeyed | Retract | Forget]
"""They are decided one after the other, some pages at a time: what is decided changes as they are asked for."""


class WindowsInMemory:
    """Rows of the pages in memory, and the windows that they make. Each key has all of its rows there, or none.

    ``index``, ``yielded``: the rows, and the windows that were executed. ``kept``: the pages. ``cells``: what waits for
    the trigger. ``definition``: its number in the operator.
    """

    def __init__(
        self,
        definition: int,
        assigner: Assigner,
        key_types: Sequence[pa.DataType],
        rules: OfDefinition,
        bins: Bins,
        snapshot: Mapping[str, Any] | None = None,
    ) -> None:
        self.definition = definition
        self.assigner = assigner
        self.key_types = tuple(key_types)
        self.index = Table.empty(key_types, INDEX)
        self.yielded = Table.empty(key_types, YIELDED)
        state = snapshot or {"kept": None, "closed_us": BEFORE_ALL, "promised": (), "last_end_us": BEFORE_ALL}
        format_ = PageFormat(key_types, assigner.stored, YIELDED)
        self.kept = PageStore(definition, format_, assigner.lasts, bins, state["kept"])
        self.last_end_us: int = state["last_end_us"]  # no complete window has ended later, or will
        self.closing = Closing(state["closed_us"], state["promised"])
        # Windows that end within one cell wait together for the trigger, as if they were one that ends where it begins.
        cells = None if snapshot is None else WindowTable.from_json(snapshot["cells"], 1)
        self.rules, self.bound = rules, rules.bound
        self.cells = Cells(assigner.cell_us, rules.bound, cells)
        self.at_us: int | None = None  # the watermark
        self._went_through = False  # pages were written since the last write(), but their number is as it was
        self._known: IndexedWindows | None = None

    @property
    def closed_us(self) -> int:
        """Windows that end by then are gone."""
        return self.closing.closed_us

    def read(self, pages: Ints) -> None:
        if not len(pages):
            return
        index, yielded = self.kept.read(pages)
        # The rows of a key are in one page, in the order that the assigner needs.
        self.replace(stacked([self.index, index]), stacked([self.yielded, yielded]))

    def replace(self, index: Table | None = None, yielded: Table | None = None) -> None:
        """Replaces the rows, or the windows that were executed. What is None stays."""
        self.index = self.index if index is None else index
        self.yielded = self.yielded if yielded is None else yielded
        self._known = None

    def write(self) -> None:
        """Writes the pages that changed, and keeps none in memory."""
        if self.kept.held or self._went_through:
            self._went_through = False
            self.resize(self.kept.wanted(self.kept.rest.sums["rows"] + len(self.index) + len(self.yielded)))

    def resize(self, wanted: int) -> None:
        """Writes the pages that changed to as many pages as are ``wanted``, and keeps none in memory."""
        while True:
            pages, needed = self.kept.resize(wanted)
            if self.kept.held and len(self.kept.groups(needed)) > 1:
                self.let_pages_go(self.kept.pages)
                continue
            self.read(needed)
            self.let_pages_go(pages)
            if pages == wanted:
                return

    def let_pages_go(self, pages: int) -> None:
        """Writes the pages that changed, and keeps none in memory. ``pages``: how many there are from now on."""
        if self.kept.held:
            self.kept.write(pages, self.index, self.yielded, self._facts())
            self.replace(Table.empty(self.key_types, INDEX), Table.empty(self.key_types, YIELDED))
        self.kept.pages = pages

    def _facts(self) -> Facts:
        """What the due index says about the windows in memory, and the sums over all pages."""
        now, index = self.now(), self.index
        windows, over = now.windows, now.windows.over_us
        there = self.there(over, self.closed_us)
        open_ = np.ones(len(over), np.bool_) if self.at_us is None else over > self.at_us
        events = total(index["events"], windows)
        early = open_ & now.news & (self.rules.early is not None)
        waiting = ~open_ & there & (now.news | now.early)
        lost = self.lost()
        kept, until = self.assigner.kept_until(index, windows, self.closed_us)
        # What is closed already goes with the next watermark, unless it is kept to be recognised.
        closing = ~open_ & ((over > self.closed_us) | ~np.isin(windows.begins, kept))
        if (over < NEVER).any():
            self.last_end_us = max(self.last_end_us, int(windows.ends_us[over < NEVER].max()))
        cells = self.cells.of(over[waiting])
        of_kinds = [
            (OPEN, over[open_], None, windows.begins[open_]),
            (CLOSED, over[closing], None, windows.begins[closing]),
            (CLOSED, self.yielded["end"][lost], None, -1 - lost),
            (KEPT, until, None, kept),
            (EARLY, index["first"][windows.begins[early]], None, windows.begins[early]),
            (WAITING, cells, events[waiting], windows.begins[waiting]),
        ]
        entries = [
            np.column_stack([np.full(len(t), kind), t, np.zeros(len(t), np.int64) if e is None else e])
            for kind, t, e, _ in of_kinds
        ]
        rows = np.concatenate([rows for *_, rows in of_kinds])
        at_us = BEFORE_ALL if self.at_us is None else self.at_us
        passed = {OPEN: at_us, CLOSED: self.closed_us, KEPT: self.closed_us, EARLY: BEFORE_ALL}
        return Facts(windows.begins, there, now.at >= 0, open_, early, events, np.concatenate(entries), rows, passed)

    def in_groups(self, groups: Sequence[PageGroup]) -> Iterator[Ints]:
        """Yields the items of each group while its pages are in memory. They stay there if it is the only group."""
        for group in groups:
            self.read(group.pages)
            yield group.items
            if len(groups) > 1:
                self.let_pages_go(self.kept.pages)  # with other pages, the numbers of pages would mean nothing
                self._went_through = True

    def some_of(self, pages: Ints) -> Iterator[None]:
        """Yields while some of the windows in memory and of those in these pages are in memory, until all were."""
        for _ in self.in_groups(self.kept.groups(pages)):
            if len(self.index) or len(self.yielded):
                yield

    def now(self) -> IndexedWindows:
        if self._known is None:
            self._known = indexed_windows(self.assigner, self.index, self.yielded)
        return self._known

    def there(self, over_us: Ints, closed_us: int) -> Flags:
        """A mask of the windows that are not gone. The index may still hold some events of windows that are gone."""
        return np.asarray(over_us > closed_us) if self.assigner.outlives else np.ones(len(over_us), np.bool_)

    def lost(self) -> Ints:
        """The rows of ``yielded`` that must be retracted even if nothing replaces them: early panes promise nothing."""
        lost = orphans(self.now(), self.yielded)
        return np.asarray(lost[self.yielded["early"][lost] == 0])

    def peek(self, pages: Ints, only: Callable[[Table], Flags] | None = None) -> tuple[Table, Members | None]:
        """Returns the windows that are not gone, of the keys of some pages, and their rows if single events make them.

        The windows are a table as of :class:`ExecuteKeyed`. ``closes`` is NEVER while a window is not complete.
        ``pane`` is the number of its next pane. ``only``: a mask of the rows whose keys are wanted. The pages
        are not in memory afterwards.
        """
        index, yielded = self.kept.peek(pages)
        if only is not None:
            index, yielded = index.take(only(index)), yielded.take(only(yielded))
        now = indexed_windows(self.assigner, index, yielded)
        windows = now.windows
        rows = np.flatnonzero(self.there(windows.over_us, self.closed_us))
        found = Table(
            index.take(windows.begins[rows]).keys,
            {
                "start": windows.starts_us[rows],
                "end": windows.ends_us[rows],
                "last": index["last"][windows.ends[rows] - 1],
                "pane": now.pane[rows],
                "events": total(index["events"], windows)[rows],
                "late_events": total(index["late_events"], windows)[rows],
                "closes": self.closing.closes(windows.over_us[rows], self.bound.bound_for_new_window()),
            },
        )
        if not self.assigner.by_event:
            return found, None
        lengths = (windows.ends - windows.begins)[rows]
        return found, Members(windows.begins[rows], lengths, index["seq"], index["row"])

    def snapshot(self) -> dict[str, Any]:
        """What a restart needs besides the pages, as JSON values. Call it when no page is in memory."""
        return {
            "closed_us": self.closed_us,
            "promised": self.closing.to_json(),
            "last_end_us": self.last_end_us,
            "kept": self.kept.to_json(),
            "cells": self.cells.table.to_json(),
        }
