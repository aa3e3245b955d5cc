"""The facts and orders for windows of single keys. Each holds many rows, as columns. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from aion.core.keyed.table import Ints, Table, hashes_of, stacked
from aion.core.life.actions import PaneKind


def gap_name(definition: int) -> str:
    """The column of :class:`Arrivals` with the gaps that events bring for a definition."""
    return f"gap {definition}"


class Arrivals(NamedTuple):
    """The rows of the blocks that arrived, in their order, as a table of ``first, last, events, row, mark``.

    ``block``: the number of each row's block in the arrival. ``row``: the row's position in that block. ``mark``: a bit
    for each definition that the row is a punctuation of. For sessions whose events bring their gaps, the table also has
    a column ``gap_name(definition)``, in µs.
    """

    table: Table
    block: Ints

    def hashed(self) -> Arrivals:
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
    ``last``: the latest event of the window. ``members``: the rows of each window. None: all rows of the key from
    ``start`` to ``last``. ``slices``: the slices that hold the rows; the operator fills them in.
    """

    definition: int
    kind: PaneKind
    windows: Table
    members: Members | None
    slices: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.windows)

    @property
    def stretch_us(self) -> tuple[int, int]:
        """The stretch that holds all rows, ``[start, end)``."""
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
    they come; then there are no latenesses. Both None: not so.
    """

    index: int
    definition: int
    rows: Ints
    starts_us: Ints
    ends_us: Ints
    latenesses_us: Ints | None
    reason: str | None = None


Order: TypeAlias = ExecuteKeyed | Retract | EmitDroppedRows


def joined(parts: Sequence[Sequence[ExecuteKeyed | Retract]]) -> list[ExecuteKeyed | Retract]:
    """The orders for several parts of the keys of one definition, as if they had been decided together.

    Orders of one kind become one, so that blocks are read once. The orders of a part keep their order, because a pane
    comes after the retraction of those that it replaces. Keys of different parts have nothing to do with each other.
    """
    found: dict[tuple[int, bool], list[ExecuteKeyed | Retract]] = {}
    for orders in parts:
        for at, order in enumerate(orders):
            following = orders[at + 1] if at + 1 < len(orders) else None
            of = order if isinstance(order, ExecuteKeyed) else following
            kind = of.kind if isinstance(of, ExecuteKeyed) else _LAST
            found.setdefault((_RANKS[kind], isinstance(order, ExecuteKeyed)), []).append(order)
    return [_one(found[place]) for place in sorted(found)]


_LAST = "retract only"
_RANKS = {kind: rank for rank, kind in enumerate([*PaneKind, _LAST])}


def _one(orders: Sequence[Any]) -> ExecuteKeyed | Retract:
    """Orders of one kind as one."""
    windows = stacked([order.windows for order in orders])
    first: ExecuteKeyed | Retract = orders[0]
    if not isinstance(first, ExecuteKeyed) or first.members is None:
        return replace(first, windows=windows)
    members = [order.members for order in orders]
    offsets = np.cumsum([0, *(len(m.seqs) for m in members)])
    begins = [m.begins + offset for m, offset in zip(members, offsets.tolist(), strict=False)]
    rest = (np.concatenate([getattr(m, name) for m in members]) for name in ("lengths", "seqs", "rows"))
    return replace(first, windows=windows, members=Members(np.concatenate(begins), *rest))
