"""The facts that an operator gets, and the actions that it orders. Pure.

Facts have their times and sizes in them. A shell brings them to :mod:`aion.core.operator.operator` and carries out the
orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from aion.base.numbers import NEVER
from aion.core.compaction import BlockFact, Compact, CompactionDone

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


class PaneKind(StrEnum):
    EARLY = "early"
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


class SliceFacts(NamedTuple):
    """How many events each block of an arrival holds of each slice.

    Three columns: the number of the block in the arrival, the slice, and the events.
    """

    block: Ints
    slice_us: Ints
    events: Ints


@dataclass(frozen=True, slots=True)
class Arrived:
    """Blocks arrived.

    ``rows``: for windows that depend on rows, an :class:`~aion.core.keyed.orders.RowArrivals` for each part of
    the plan. None for a part that got no rows. ``slices``: None if each block holds a single slice. The block then has
    that slice's name.
    """

    blocks: Sequence[BlockFact]
    rows: Sequence[Any] = ()
    slices: SliceFacts | None = None


@dataclass(frozen=True, slots=True)
class WatermarkAdvanced:
    to_us: int


@dataclass(frozen=True, slots=True)
class BatchEnded:
    """A batch ended. ``ends_run``: the input ends here, so late windows do not wait for their trigger.

    ``batch_follows``: another batch comes even if no event does, so late windows may wait for it.
    """

    ends_run: bool = False
    batch_follows: bool = False


Event = Arrived | WatermarkAdvanced | BatchEnded | CompactionDone

# -- orders -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Append:
    """Keep block ``index`` of the arrival under the number ``seq``. A ``late`` block goes straight to the p-bucket."""

    index: int
    slice_us: int
    seq: int
    late: bool


@dataclass(frozen=True, slots=True)
class EmitUntimed:
    """The events of block ``index`` have no time, or one out of range. Emit them as dropped."""

    index: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class EmitDropped:
    """Events in these blocks came too late for some windows. Emit them as dropped.

    The arrays are columns with one row for each window: its definition, its interval, and how late the events were. The
    definition is -1 for slices that no window holds any more, and the interval then begins with the slice.
    """

    blocks: tuple[int, ...]
    definition: Ints
    start_us: Ints
    end_us: Ints
    lateness_us: Ints


class Execution(NamedTuple):
    """One window of an :class:`Execute`."""

    window: WindowRef
    kind: PaneKind
    pane: int
    changed_since: int
    late_from: int
    events: int
    late_events: int
    staleness: float = 0.0
    closes_us: int = NEVER
    until: int = NEVER


@dataclass(frozen=True, slots=True, eq=False)
class Execute:
    """Compute windows over their slices and emit their panes. The arrays are columns with one row for each window.

    ``slices``: the segments that any of the windows overlaps. ``changed_since``: only the keys with a block above this
    seq have changed. -1: all keys have. ``late_from``: blocks from this seq on are late for the window. ``events`` and
    ``late_events``: of the window, for all keys together. ``staleness``: of the interval that this execution ends,
    ``t * n / (T * N)``, where N is the number of late events so far (paper 3.4). 0 for an on-time execution.
    ``closes_us``: the watermark from which on the window cannot change. NEVER: it is not known. ``until``: only blocks
    up to this seq are in the window. Later ones came too late for it, but may lie in its slices for other windows.
    """

    kind: PaneKind
    slices: tuple[int, ...]
    definition: Ints
    start_us: Ints
    end_us: Ints
    pane: Ints
    changed_since: Ints
    late_from: Ints
    events: Ints
    late_events: Ints
    staleness: Floats
    closes_us: Ints
    until: Ints

    @classmethod
    def of(cls, executions: Sequence[Execution], slices: tuple[int, ...]) -> Execute:
        """Puts executions of one kind into columns. ``slices``: the segments of all of them."""
        numbers = [(*e.window, e.pane, e.changed_since, e.late_from, e.events, e.late_events) for e in executions]
        columns: list[Any] = [*np.array(numbers, np.int64).reshape(-1, 8).T]
        columns.append(np.array([e.staleness for e in executions], np.float64))
        columns += [np.array([getattr(e, name) for e in executions], np.int64) for name in ("closes_us", "until")]
        return cls(executions[0].kind, slices, *columns)

    def __len__(self) -> int:
        return len(self.end_us)

    def __iter__(self) -> Iterator[Execution]:
        refs = zip(self.definition.tolist(), self.start_us.tolist(), self.end_us.tolist(), strict=True)
        names = ("pane", "changed_since", "late_from", "events", "late_events", "staleness", "closes_us", "until")
        columns = zip(*(getattr(self, name).tolist() for name in names), strict=True)
        return (Execution(WindowRef(*ref), self.kind, *row) for ref, row in zip(refs, columns, strict=True))

    def some(self, which: Any, slices: tuple[int, ...] | None = None) -> Execute:
        """Some of the windows. ``which``: a mask, a slice or their numbers. ``slices``: their segments, if fewer."""
        columns = (getattr(self, f.name)[which] for f in fields(self)[2:])
        return Execute(self.kind, self.slices if slices is None else slices, *columns)


@dataclass(frozen=True, slots=True)
class Prestage:
    """These slices will be read soon. Bring their blocks from disk back into memory before that (paper 3.2)."""

    slices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Destage:
    """No active window needs these slices any more. Their m-buckets may be freed."""

    slices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Purge:
    """No window needs these slices any more.

    A segment comes back if later events of the same batch begin a window in it. It is then not purged.
    """

    slices: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Forget:
    """Nothing of these windows of a definition will be shown or taken back any more.

    ``keys``: a column for each key column, with a row for each window. None if the windows are those of all keys.
    """

    definition: int
    start_us: Ints
    end_us: Ints
    keys: Sequence[Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class KeepFilled:
    """Windows of a definition took events of these slices of the arrival. So their keys have rows in its windows."""

    definition: int
    slices_us: Ints


@dataclass(frozen=True, slots=True, eq=False)
class FillGaps:
    """Late events have given their keys rows in windows that ended before. Emit those that have no event.

    ``order``: these windows, and perhaps others that no such key lacks. Nothing is read.
    """

    order: Execute


@dataclass(frozen=True, slots=True)
class ForgetFilled:
    """No window of a definition that ends by then will have a row for want of events. ``all_``: and no other one, as
    far as is known.
    """

    definition: int
    by_us: int
    all_: bool


Filling: TypeAlias = KeepFilled | FillGaps | ForgetFilled
Action = Filling | Forget | Append | EmitUntimed | EmitDropped | Execute | Prestage | Destage | Purge | Compact


def dropped_of(rows: Iterable[pa.RecordBatch], keep: Callable[[pa.RecordBatch], None]) -> Iterator[pa.RecordBatch]:
    """Yields the rows of dropped events, and gives the others to ``keep``."""
    for batch in rows:
        is_dropped = pc.equal(batch.column("kind"), PaneKind.DROPPED.value)
        if is_dropped.true_count:
            yield batch.filter(is_dropped)
        if is_dropped.true_count < batch.num_rows:
            keep(batch.filter(pc.invert(is_dropped)))
