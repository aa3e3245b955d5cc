"""What an operator is told, and what it orders: facts with their times and sizes in them, and actions. Pure.

The words of :mod:`aion.core.operator.operator`; a shell brings the facts and carries out the orders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from aion.core.compaction.blocks import Fold, Folded


class Kind(StrEnum):
    ON_TIME = "on_time"
    LATE = "late"
    FINAL = "final"
    RETRACTED = "retracted"
    DROPPED = "dropped"


class WindowRef(NamedTuple):
    """A window: the number of its definition, and its interval ``[start_us, end_us)``."""

    definition: int
    start_us: int
    end_us: int


# -- facts ------------------------------------------------------------------------------------------------


class BlockFact(NamedTuple):
    """A block that arrived: its slice, how many events it stands for, and its encoded size."""

    slice_us: int
    events: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """Blocks came. ``rows``: the :class:`~aion.core.operator.keyed.orders.Arrivals`, where windows depend on rows."""

    blocks: Sequence[BlockFact]
    rows: Any = None


@dataclass(frozen=True, slots=True)
class WatermarkAdvanced:
    to_us: int


@dataclass(frozen=True, slots=True)
class BatchEnded:
    """``last``: nothing will come any more, so that no late window waits for its trigger."""

    last: bool = False


Event = Arrived | WatermarkAdvanced | BatchEnded | Folded

# -- orders -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Append:
    """Keep block ``index`` of the arrival under ``seq``; ``late`` ones go straight to the p-bucket."""

    index: int
    slice_us: int
    seq: int
    late: bool


@dataclass(frozen=True, slots=True)
class EmitDropped:
    """Block ``index`` came too late for ``window`` (None: it has no event time); yield it as dropped."""

    index: int
    window: WindowRef | None
    lateness_us: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Execute:
    """Compute ``window`` over its ``slices`` and emit the pane.

    ``changed_since``: only keys with a block above this seq have changed (-1: all of them have).
    ``late_from``: blocks from this seq on are late for the window. ``events`` and ``late_events`` are those
    of the window, of all keys together. ``staleness``: of the interval that it ends, ``t * n / (T * N)`` with N the
    late events so far (paper 3.4): 0 for an execution on time.
    """

    window: WindowRef
    kind: Kind
    pane: int
    slices: tuple[int, ...]
    changed_since: int
    late_from: int
    events: int
    late_events: int
    staleness: float = 0.0


@dataclass(frozen=True, slots=True)
class Prestage:
    """These slices will be read soon: bring what is on disk back into memory meanwhile (paper 3.2)."""

    slices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Destage:
    """The windows of these slices have expired: their m-buckets may be freed."""

    slices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Purge:
    """No window needs these slices any more; they never come back."""

    slices: tuple[int, ...]


Action = Append | EmitDropped | Execute | Prestage | Destage | Purge | Fold
