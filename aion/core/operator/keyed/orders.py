"""The facts and orders for windows of single keys. Each holds many rows, as columns. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from aion.core.operator.actions import PaneKind
from aion.core.operator.keyed.table import Ints, Table


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
