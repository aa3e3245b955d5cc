"""The facts and orders for windows of single keys. Each holds many rows, as columns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from aion.core.keyed.table import Ints, Table, hashes_of, stacked
from aion.core.life.actions import PaneKind
from aion.core.life.definition import Flags


def gap_name(definition: int) -> str:
    """The column of :class:`RowArrivals` with the gaps that events bring for a definition."""
    return f"gap {definition}"


class RowArrivals(NamedTuple):
    """The rows of the blocks that arrived, in their order, as a table of ``first, last, events, row, mark``.

    ``block``: the number of each row's block in the arrival. ``row``: the row's position in that block. ``mark``: a bit
    for each definition that the row is a punctuation of. For sessions whose events bring their gaps, the table also has
    a column ``gap_name(definition)``, in µs.
    """

    table: Table
    block: Ints

    def hashed(self) -> RowArrivals:
        """The same rows with the column ``hash`` of their keys."""
        return self._replace(table=self.table.replaced(hash=hashes_of(self.table)))

    def seen_by(self, definition: int) -> Table:
        """The rows as one definition sees them.

        ``mark`` is the gap that the row's event brings, or 1 for a punctuation of the definition and 0 for all others.
        """
        table = self.table
        gaps = table.columns.get(gap_name(definition))
        marks = table["mark"] >> definition & 1 if gaps is None else gaps
        return Table(table.keys, {name: table[name] for name in _SEEN} | {"mark": marks})


_SEEN = ("first", "last", "events", "row", "hash")


@dataclass(frozen=True, slots=True)
class Members:
    """The rows of windows: those of window i are ``[begins[i], begins[i] + lengths[i])`` of ``seqs`` and ``rows``.

    ``seqs``: the seq of the block that each row is in. ``rows``: the row's position in that block.
    """

    begins: Ints
    lengths: Ints
    seqs: Ints
    rows: Ints


@dataclass(frozen=True, slots=True)
class ExecuteKeyed:
    """Compute windows of single keys and emit their panes.

    ``windows``: a table of ``start, end, last, pane, events, late_events``, one row for each window, times in µs.
    ``last``: the latest event of the window. ``members``: the rows of each window, or None for all rows of the key from
    ``start`` to ``last``. ``slices``: the slices that hold the rows; the operator fills them in.
    """

    definition: int
    kind: PaneKind
    windows: Table
    members: Members | None
    slices: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.windows)

    def some(self, which: Flags) -> ExecuteKeyed:
        """The same order for some of the windows. ``which``: a mask of them."""
        members = self.members
        if members is not None:
            begins, lengths = members.begins[which], members.lengths[which]
            edges = np.zeros(len(members.seqs) + 1, np.int64)
            np.add.at(edges, begins, 1)
            np.add.at(edges, begins + lengths, -1)
            needed = np.cumsum(edges[:-1]) > 0
            places = np.cumsum(needed) - 1
            members = Members(places[begins], lengths, members.seqs[needed], members.rows[needed])
        return replace(self, windows=self.windows.take(which), members=members)

    @property
    def interval_us(self) -> tuple[int, int]:
        """The interval that holds all rows, ``[start, end)``."""
        return int(self.windows["start"].min()), int(self.windows["last"].max()) + 1


@dataclass(frozen=True, slots=True)
class Retract:
    """Withdraw the panes of windows that no longer exist. ``windows``: a table with ``start, end, pane``."""

    definition: int
    windows: Table


@dataclass(frozen=True, slots=True)
class EmitDroppedRows:
    """Emit rows of block ``index`` as dropped.

    ``rows``: their positions in the block. ``starts_us``, ``ends_us``: the window that each row would be alone in.
    ``latenesses_us``: how late the row is for that window. ``reason``: why the rows can be in no window, however early
    they come, or None if they are only late.
    """

    index: int
    definition: int
    rows: Ints
    starts_us: Ints
    ends_us: Ints
    latenesses_us: Ints | None
    reason: str | None = None


Order: TypeAlias = ExecuteKeyed | Retract | EmitDroppedRows


def together(orders: Sequence[ExecuteKeyed]) -> ExecuteKeyed:
    """Orders of one kind for windows of one definition as one, so that blocks are read once."""
    if len(orders) == 1:
        return orders[0]
    windows = stacked([order.windows for order in orders])
    slices = tuple(sorted({name for order in orders for name in order.slices}))
    members = [order.members for order in orders if order.members is not None]
    if not members:
        return replace(orders[0], windows=windows, slices=slices)
    offsets = np.cumsum([0, *(len(m.seqs) for m in members)])
    begins = [m.begins + offset for m, offset in zip(members, offsets.tolist(), strict=False)]
    rest = (np.concatenate([getattr(m, name) for m in members]) for name in ("lengths", "seqs", "rows"))
    all_of = Members(np.concatenate(begins), *rest)
    return replace(orders[0], windows=windows, members=all_of, slices=slices)
