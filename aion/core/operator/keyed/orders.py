"""What the windows of single keys add to an operator's facts and orders: many rows at a time, as columns. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from aion.core.operator.actions import PaneKind
from aion.core.operator.keyed.table import Ints, Table


class Arrivals(NamedTuple):
    """The rows of the blocks that arrived, in their order: a table of ``first, last, events, row, mark``.

    ``block``: for each row the number of its block in the arrival; ``row``: its place in there; ``mark``: 1 for a
    punctuation.
    """

    table: Table
    block: Ints


@dataclass(frozen=True, slots=True)
class Members:
    """Rows of blocks, told by the block's seq and the row's place in it: those of window i are
    ``[begins[i], begins[i] + lengths[i])``."""

    begins: Ints
    lengths: Ints
    seqs: Ints
    rows: Ints


@dataclass(frozen=True, slots=True)
class ExecuteKeyed:
    """Compute windows of single keys and emit their panes.

    ``windows``: a table of ``start, end, last, pane, events, late_events``, a row per window; times in µs, ``last`` the
    latest event that it holds. ``members``: which rows those are; None: all of the key from ``start`` to ``last``.
    ``slices``: where the rows are, as the operator knows.
    """

    definition: int
    kind: PaneKind
    windows: Table
    members: Members | None
    slices: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Retract:
    """Windows that are no more, of which panes were emitted: a table of ``start, end, pane``."""

    definition: int
    windows: Table


@dataclass(frozen=True, slots=True)
class EmitDroppedRows:
    """Rows of block ``index`` came too late: ``rows`` are their places in it, ``starts_us`` and ``ends_us`` the window
    that each would have made alone, and ``latenesses_us`` how late it was for that."""

    index: int
    definition: int
    rows: Ints
    starts_us: Ints
    ends_us: Ints
    latenesses_us: Ints


Order: TypeAlias = ExecuteKeyed | Retract | EmitDroppedRows
