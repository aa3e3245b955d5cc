"""The windows of single keys of all definitions in one shard, and the rows that they accept. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aion.base.numbers import NEVER, sum_of
from aion.core.keyed.in_memory import Orders
from aion.core.keyed.orders import Arrivals, EmitDroppedRows, gap_name
from aion.core.keyed.shapes import Flags
from aion.core.keyed.summary import summary
from aion.core.keyed.table import Ints, Table, hashes_of, stacked
from aion.core.keyed.values import Values
from aion.core.keyed.waiting import WaitingRows
from aion.core.keyed.windows import KeyedWindows, overlapping
from aion.core.life.actions import Forget
from aion.core.life.late_work import LateWork
from aion.core.life.lifecycle import StalenessKept


class Taken(NamedTuple):
    """The rows of one part that arrived. ``accepted``: for each definition of the part, a mask of the rows it takes."""

    part: KeyedPart
    arrivals: Arrivals
    accepted: list[Flags]


class Verdict(NamedTuple):
    """The decision about an arrival: ``taken``, the rows that each part takes.

    ``blocks``: the blocks from which any definition takes rows. ``dropped``: orders to emit rows that came too late, or
    that can be in no window. They include rows that are taken for later windows but came too late for the window that
    ends at them. ``dropped_events``: for each block, how many events were dropped for some definition.
    ``wasted_rows``: for each block, how many rows no definition takes. ``too_late``: for each definition, how many
    events it does not take because they came too late.
    """

    taken: list[Taken]
    blocks: frozenset[int]
    dropped: list[EmitDroppedRows]
    dropped_events: dict[int, int]
    wasted_rows: dict[int, int]
    too_late: dict[int, int]

    def drop(
        self, arrivals: Arrivals, windows: KeyedWindows, which: Flags, now_us: int | None, reason: str | None
    ) -> None:
        """Adds orders to emit these rows as dropped. ``now_us``: they came too late. None: they have a ``reason``."""
        numbers = np.flatnonzero(which)
        rows = _marked(arrivals.table, windows).take(numbers)
        starts, ends = windows.shape.alone(rows)
        for block in np.unique(arrivals.block[numbers]).tolist():
            own = arrivals.block[numbers] == block
            late_us = None if now_us is None else now_us - ends[own]
            self.dropped.append(
                EmitDroppedRows(block, windows.definition, rows["row"][own], starts[own], ends[own], late_us, reason)
            )

    def lose(self, arrivals: Arrivals, which: Flags) -> None:
        """Counts the rows that a definition drops."""
        for block in np.unique(arrivals.block[which]).tolist():
            events = sum_of(arrivals.table["events"][which & (arrivals.block == block)])
            self.dropped_events[block] = max(self.dropped_events.get(block, 0), events)


class KeyedPart:
    """Definitions whose windows take rows from the same blocks. False if there are none."""

    def __init__(self, windows: Sequence[KeyedWindows] = ()) -> None:
        self.windows = tuple(windows)

    def __bool__(self) -> bool:
        return bool(self.windows)

    def wait_in(self, make: Callable[[], WaitingRows]) -> None:
        """Sets where rows wait for the end of their batch, before any event. Otherwise they wait in memory."""
        for windows in self.windows:
            windows.waiting = make()

    def judge(self, arrivals: Arrivals, now_us: int | None, verdict: Verdict) -> frozenset[int]:
        """Adds the decision about these rows to the verdict. Returns the blocks that any definition takes rows from."""
        arrivals = arrivals._replace(table=arrivals.table.replaced(hash=hashes_of(arrivals.table)))
        accepted = []
        for windows in self.windows:
            rows = _marked(arrivals.table, windows)
            taken, lost = windows.accepted(rows), np.zeros(len(rows), np.bool_)
            unusable = [*windows.shape.unusable(rows)]
            for reason, which in unusable:
                verdict.drop(arrivals, windows, which, None, reason)
                lost |= which
            taken &= ~lost
            accepted.append(taken)
            late = (~taken & ~lost) | windows.misses_own(rows)
            if late.any():
                assert now_us is not None, "nothing is late without a watermark"
                verdict.drop(arrivals, windows, late, now_us, None)
                too_late = rows.take(~taken & ~lost)
                windows.observe_dropped(windows.shape.alone(too_late)[1], too_late["events"], now_us)
                verdict.too_late[windows.definition] = sum_of(too_late["events"])
            if unusable or late.any():
                verdict.lose(arrivals, lost | late)
        any_taken = np.logical_or.reduce(accepted)
        numbers, counts = np.unique(arrivals.block[~any_taken], return_counts=True)
        verdict.wasted_rows.update(zip(numbers.tolist(), counts.tolist(), strict=True))
        verdict.taken.append(Taken(self, arrivals, accepted))
        return frozenset(np.unique(arrivals.block[any_taken]).tolist())

    def add(self, taken: Taken, seq_of_block: Ints) -> None:
        """Adds the accepted rows to those of the batch."""
        for windows, accepted in zip(self.windows, taken.accepted, strict=True):
            if accepted.any():
                rows = _marked(taken.arrivals.table, windows).take(accepted)
                windows.add(rows, seq_of_block[taken.arrivals.block[accepted]])

    def settled_us(self) -> int:
        """For slices that end by then, :meth:`needed_in` says whether they are needed.

        It lies before all events while no window has been closed.
        """
        return min((windows.settled_us for windows in self.windows), default=NEVER)

    def needed_in(self, starts_us: Ints, ends_us: Ints) -> Ints:
        """For slices that end by :meth:`settled_us`: how many rows of the index need each.

        A slice that no row needs is never needed again.
        """
        needed = np.zeros(len(starts_us), np.int64)
        for windows in self.windows:
            needed += windows.needed_in(starts_us, ends_us)
        return needed

    def gone_in(self, starts_us: Ints, ends_us: Ints) -> Ints:
        """For each slice: how many rows of the index overlapped it that the last watermark removed."""
        gone = np.zeros(len(starts_us), np.int64)
        for windows in self.windows:
            gone += overlapping(*windows.gone, starts_us, ends_us)
        return gone

    def gone_between(self) -> tuple[int, int]:
        """The first and the last event of the rows that the last watermark removed."""
        firsts, lasts = (np.concatenate(column) for column in zip(*(w.gone for w in self.windows), strict=True))
        return int(firsts.min(initial=NEVER)), int(lasts.max(initial=-NEVER))

    def owners(self, rows: Table) -> list[Ints]:
        """For each definition: the session that each row of a block belongs to. -1: none. All must be of sessions."""
        return [windows.owners(rows) for windows in self.windows]

    def active_from_us(self, now_us: int | None) -> int:
        """Events from then on may be in windows that have not ended. In microseconds."""
        return min((windows.active_from_us(now_us) for windows in self.windows), default=NEVER)

    def due_by(self, now_us: int | None, watermark_us: int) -> list[tuple[int, int]]:
        """The stretches of time that hold the events of windows that run when the watermark gets there.

        One pair of first and last event for each definition with such windows.
        """
        stretches = []
        for windows in self.windows:
            starts, lasts = windows.due_by(now_us, watermark_us)
            if len(starts):
                stretches.append((int(starts.min()), int(lasts.max())))
        return stretches


class KeyedShard:
    """The windows of single keys of all parts of a plan. False if there are none."""

    def __init__(self, parts: Sequence[KeyedPart] = (KeyedPart(),)) -> None:
        self.parts = tuple(parts)
        self.windows = tuple(sorted((w for part in parts for w in part.windows), key=lambda w: w.definition))

    def __bool__(self) -> bool:
        return bool(self.windows)

    def count_in(self, staleness: StalenessKept) -> None:
        """Sets the counters in which all definitions note how stale their windows became."""
        for windows in self.windows:
            windows.staleness = staleness

    # -- arrivals -----------------------------------------------------------------------------------------

    def judge(self, rows: Sequence[Arrivals | None], now_us: int | None) -> Verdict:
        """Decides which rows are taken. ``rows``: of each part, None for a part that got none."""
        verdict = Verdict([], frozenset(), [], {}, {}, {})
        blocks: list[frozenset[int]] = []
        for part, arrivals in zip(self.parts, rows, strict=False):
            if arrivals is not None:
                blocks.append(part.judge(arrivals, now_us, verdict))
        return verdict._replace(blocks=frozenset().union(*blocks))

    def add(self, verdict: Verdict, seq_of_block: Mapping[int, int]) -> None:
        """Adds the accepted rows to those of the batch.

        ``seq_of_block``: the seq under which each block of the arrival is kept, by its number in the arrival.
        """
        seqs = np.full(max(seq_of_block, default=0) + 1, -1, np.int64)
        seqs[[*seq_of_block]] = [*seq_of_block.values()]
        for taken in verdict.taken:
            taken.part.add(taken, seqs)

    def join(self, now_us: int | None) -> dict[int, int]:
        """The rows of the batch join their windows. Returns how many events came late, by definition."""
        return {windows.definition: windows.join(now_us) for windows in self.windows}

    # -- executions ---------------------------------------------------------------------------------------

    def advance(self, before_us: int | None, to_us: int, late_work: LateWork) -> Orders:
        return [order for windows in self.windows for order in windows.advance(before_us, to_us, late_work)]

    def batch_ended(self, now_us: int | None, step_us: int, late_work: LateWork, *, last: bool) -> Orders:
        return [o for windows in self.windows for o in windows.batch_ended(now_us, step_us, late_work, last=last)]

    def take_forgotten(self) -> list[Forget]:
        """Returns orders to forget the windows that were let go since the last call."""
        orders = []
        for windows in self.windows:
            if windows.forgotten:
                gone, windows.forgotten = stacked(windows.forgotten), []
                orders.append(Forget(windows.definition, gone["start"], gone["end"], gone.keys))
        return orders

    @property
    def waits(self) -> bool:
        """Whether an execution that is due waits for a later batch."""
        return any(windows.waits for windows in self.windows)

    def next_due_us(self, now_us: int | None, step_us: int) -> int | None:
        dues = [windows.next_due_us(now_us, step_us) for windows in self.windows]
        return min((due for due in dues if due is not None), default=None)

    # -- where they are kept -------------------------------------------------------------------------------

    def keep_in(self, values: Values) -> None:
        """Sets the map in which the windows are kept, before any event. Without it they are kept in a dict."""
        for windows in self.windows:
            windows.kept.values = values

    def write(self) -> None:
        """Writes what changed to the map. Call it at the end of a batch."""
        for windows in self.windows:
            windows.write()

    def snapshot(self) -> list[dict[str, Any]]:
        """JSON values. What the map holds belongs to them."""
        self.write()
        return [{**windows.snapshot(), "live": summary(windows)} for windows in self.windows]


def _marked(table: Table, windows: KeyedWindows) -> Table:
    """The rows as one definition sees them.

    ``mark`` is the gap that the row's event brings, or 1 for a punctuation of the definition and 0 for all other rows.
    """
    gaps = table.columns.get(gap_name(windows.definition))
    marks = table["mark"] >> windows.definition & 1 if gaps is None else gaps
    return Table(table.keys, {name: table[name] for name in _SEEN} | {"mark": marks})


_SEEN = ("first", "last", "events", "row", "hash")
