"""The life of windows, as a pure state machine: ``handle(event) -> [action]`` (docs/start/concepts.md).

Facts come in with their times and sizes in them. Orders go out, and a shell carries them out. There is no clock, no
thread, no file and no randomness here. One operator manages one shard. It is a list of definitions with one clock and
one numbering of blocks: those of windows that all keys share (:mod:`aion.core.timed`) are decided together, and each
definition of windows of keys (:mod:`aion.core.keyed`) by itself. What the operator knows of them is
:class:`aion.core.life.definition.DefinedWindows`.

Blocks are numbered by ``seq`` in the order of arrival, across all segments of the shard. The watermark never goes back.
So the blocks that are late for a window are exactly those numbered from the window's ``late_from_seq`` on, and the
blocks that are new to it are those above its ``executed_seq``. The operator remembers nothing about a single block
except how it is compacted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from aion.base.numbers import NEVER, within
from aion.core.compaction import BlockCompaction, BlockFact, CompactionDone
from aion.core.keyed.orders import ExecuteKeyed, Order, Retract, RowArrivals
from aion.core.keyed.table import Ints, Table
from aion.core.keyed.waiting import WaitingRows
from aion.core.keyed.windows import KeyedWindows
from aion.core.lateness.completeness import Completeness
from aion.core.lateness.observe import Lateness
from aion.core.life.actions import (
    Action,
    Append,
    Arrived,
    BatchEnded,
    Destage,
    Event,
    Execute,
    FillGaps,
    Prestage,
    Purge,
    SliceFacts,
    WatermarkAdvanced,
)
from aion.core.life.arrival import Arrival, LateCounts, untimed
from aion.core.life.definition import Claim, DefinedWindows, TimeRanges, Turn
from aion.core.life.late_work import LateWork
from aion.core.life.lifecycle import Counters, Watermark
from aion.core.life.rules import Rules
from aion.core.life.segments import Segments
from aion.core.life.window_table import WindowTable
from aion.core.slicing.grid import EVENT_ROWS_US, SliceGrid, has_event_rows, slices_from_json, slices_to_json
from aion.core.timed.windows import TimeWindows
from state_backends.format.ordered_map import OrderedMap

PLANNED_AHEAD = 3
"""For this many batches after the next one, :meth:`Operator.plan_ahead` says what they will read."""
SNAPSHOT_VERSION = 7


class GridWindows(NamedTuple):
    """The grid of a plan, and the windows of keys whose rows lie in it."""

    grid: SliceGrid
    keyed: Sequence[KeyedWindows] = ()


class Operator:
    """Manages the windows of one shard. Takes its policy objects and, optionally, an earlier snapshot.

    ``grids``: of the plans. There is a second one if rows of single events are kept beside partials
    (``Plan.event_rows``). ``completeness``: None if rows do not say how complete they are.
    """

    def __init__(
        self,
        grids: Sequence[GridWindows],
        rules: Rules,
        *,
        late_work: LateWork | None = None,
        compaction: BlockCompaction | None = None,
        completeness: Completeness | None = None,
        snapshot: Mapping[str, Any] | None = None,
    ) -> None:
        self._rules = rules
        self._late_work = LateWork() if late_work is None else late_work
        self._compaction = compaction
        self.completeness = completeness
        self.watermark = Watermark()
        self.next_seq = 0
        self.next_pane_seq = 0
        self.reached_us: int | None = None  # no event that ever came is as late as this instant. It only grows
        self.counters = Counters()
        self._late_counts = LateCounts()
        if snapshot is not None:
            self.watermark = Watermark(snapshot["watermark_us"], snapshot["watermark_step_us"])
            self.next_seq = snapshot["next_seq"]
            self.next_pane_seq = snapshot["next_pane_seq"]
            self.reached_us = snapshot["reached_us"]
            self.counters = Counters.from_json(snapshot["counters"])
        names = [] if snapshot is None else slices_from_json(snapshot["slices"])
        shared = [n for n in names if not has_event_rows(n)]
        self._segments = [Segments(grids[0].grid, names=shared, compaction=compaction)]
        for of_grid in grids[1:]:
            own = [n for n in names if has_event_rows(n)]
            self._segments.append(Segments(of_grid.grid, name_offset_us=EVENT_ROWS_US, names=own))
        self._timed = TimeWindows(self._segments[0], rules, snapshot)
        self.keyed = tuple(sorted((w for of_grid in grids for w in of_grid.keyed), key=lambda w: w.definition))
        for number, (segments, of_grid) in enumerate(zip(self._segments, grids, strict=True)):
            segments.definitions = (*of_grid.keyed,) if number else (self._timed, *of_grid.keyed)
            for windows in of_grid.keyed:
                windows.open_from_us = -NEVER if snapshot is None else snapshot["settled_us"][number]
        self._definitions: tuple[DefinedWindows, ...] = (self._timed, *self.keyed)
        self._segments_of = {d: segments for segments in self._segments for d in segments.definitions}
        self._keyed_of = {windows.definition: windows for windows in self.keyed}
        for definition in self._definitions:
            definition.count_in(self.counters)

    # -- what the shell asks ------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Action | Order]:
        """Returns what follows from an event, in order."""
        return [*self.actions(event)]

    def actions(self, event: Event) -> Iterator[Action | Order]:
        """Yields the same, as it is decided. Ask for all of it: the operator goes on only as it is asked.

        Windows of keys are decided some pages at a time, so neither they nor the orders must be in memory together.
        """
        match event:
            case Arrived(blocks, rows, slices):
                yield from self._arrived(blocks, rows, slices)
            case WatermarkAdvanced(to_us):
                yield from self._advanced(to_us)
            case BatchEnded(ends_run, batch_follows):
                yield from self._batch_ended(ends_run, batch_follows)
            case CompactionDone(compaction):
                assert self._compaction is not None
                self._compaction.compacted(event)
                yield from self._compactions([compaction.slice_us])

    def number(self, blocks: int) -> int:
        """Reserves this many block numbers, for blocks that replace others. Returns the first."""
        first = self.next_seq
        self.next_seq += blocks
        return first

    def number_panes(self) -> int:
        """Returns the number of the next panes of this shard, which no earlier ones have."""
        self.next_pane_seq += 1
        return self.next_pane_seq - 1

    def plan(self, watermark_us: int, surely_us: int | None = None) -> Prestage | None:
        """Returns what to stage in the gap before the watermark gets there, or None.

        Call it at the end of a batch, and stage it: late windows for which nothing is planned are far from now on.
        ``surely_us``: where the watermark gets at least, if that is known. What is due by then comes first, and the
        rest after it: memory may not have room for both, and ``watermark_us`` may be too far.
        """
        at_us = self.watermark.at_us
        if surely_us is None or (at_us is not None and surely_us <= at_us):
            # Steps of the watermark differ a little, so it gets half as far as expected more surely than all the way.
            surely_us = watermark_us if at_us is None else at_us + (watermark_us - at_us) // 2
        planned = tuple(dict.fromkeys((*self._due(min(surely_us, watermark_us)), *self._due(watermark_us))))
        for definition in self._definitions:
            definition.leave(self._turn(), watermark_us)
        return Prestage(planned) if planned else None

    def plan_ahead(self, watermark_us: int) -> tuple[int, ...]:
        """Returns what to stage after that, for the batches after the next one, as far as memory has room.

        ``watermark_us``: of the next batch. Those after it move the watermark as far as the last one did.
        """
        step_us = self.watermark.step_us
        slices: dict[int, None] = {}
        for batch in range(1, PLANNED_AHEAD + 1) if step_us else ():
            slices |= dict.fromkeys(self._due(within(watermark_us + batch * step_us)))
        return tuple(slices)

    def _due(self, watermark_us: int) -> tuple[int, ...]:
        """The segments that are read if the watermark gets there, in the order in which they are."""
        turn = self._turn()
        slices: dict[int, None] = {}
        for definition in self._definitions:
            for intervals in definition.due(turn, watermark_us):
                slices |= dict.fromkeys(self._segments_of[definition].within(intervals))
        return tuple(slices)

    def active_slices(self) -> tuple[int, ...]:
        """Returns the segments of windows that have not ended. The segments that are needed soonest come first."""
        turn = self._turn()
        return tuple(name for segments in self._segments for name in segments.open_first(turn))

    @property
    def next_due_us(self) -> int | None:
        """The next watermark at which something happens even if no event comes. None if there is none."""
        turn = self._turn()
        dues = [definition.next_due_us(turn) for definition in self._definitions]
        if turn.at_us is not None and any(definition.waits for definition in self._definitions):
            dues.append(turn.at_us + 1)
        return soonest if (soonest := min(dues)) < NEVER else None

    @property
    def lateness(self) -> Lateness:
        """What has been learnt about how late events come."""
        return self._rules.shared.bound.lateness

    @property
    def windows(self) -> WindowTable:
        """The windows of time."""
        return self._timed.table

    @property
    def segments(self) -> list[int]:
        """All segments with kept blocks, in order."""
        return [name for segments in self._segments for name in segments]

    # -- where windows of keys are kept -------------------------------------------------------------------

    def keep_in(self, values: OrderedMap) -> None:
        """Sets the map in which the windows of keys are kept, before any event. Otherwise they are kept in a dict."""
        for windows in self.keyed:
            windows.memory.kept.values = values

    def wait_in(self, definition: int, rows: WaitingRows) -> None:
        """Sets where rows of a definition wait for the end of a batch, before any event. Otherwise it is in memory."""
        self._keyed_of[definition].arriving.waiting = rows

    def write(self) -> None:
        """Writes what changed to the map. Call it at the end of a batch."""
        for definition in self._definitions:
            definition.write()

    # -- arrivals -----------------------------------------------------------------------------------------

    def _turn(self, before_us: int | None = None) -> Turn:
        return Turn(self.watermark.at_us, self.watermark.step_us, self.next_seq, self._late_work, before_us)

    def _arrived(
        self, blocks: Sequence[BlockFact], rows: Sequence[RowArrivals | None] = (), facts: SliceFacts | None = None
    ) -> list[Action | Order]:
        if blocks:
            self._late_work.arrived()
        arrival, turn = Arrival.of(blocks, facts), self._turn()
        self._reach(arrival)
        hashed = [None if of_grid is None else of_grid.hashed() for of_grid in rows]
        claims: dict[DefinedWindows, Claim] = {}
        for segments, of_grid in zip(self._segments, (*hashed, None, None), strict=False):
            claims |= {d: d.arrive(arrival, of_grid, turn) for d in segments.definitions}
        actions: list[Action | Order] = [*untimed(blocks, self.counters)]
        actions += [order for claim in claims.values() for order in (*claim.drops, *claim.orders)]
        self._late_counts.drop(blocks, [claim.dropped for claim in claims.values()])
        for place, definition in enumerate(self._definitions):
            self._late_counts.came_late(place, claims[definition].late)
        appends = self._kept(blocks, claims, _wasted(hashed, self._segments[0], claims), turn)
        seqs, turn = {append.index: append.seq for append in appends}, self._turn()
        announced: dict[int, None] = {}
        for definition, claim in claims.items():
            soon = definition.keep(claim, seqs, turn)
            announced |= dict.fromkeys(self._segments_of[definition].within(soon))
        return [*actions, *appends, *([Prestage(tuple(announced))] if announced else [])]

    def _reach(self, arrival: Arrival) -> None:
        """Notes that events came up to the end of a slice, whether they are taken or left out."""
        for end_us in self._segments[0].grid.ends(arrival.slices_us[-1:]).tolist():
            self.reached_us = end_us if self.reached_us is None else max(self.reached_us, end_us)

    def _kept(
        self,
        blocks: Sequence[BlockFact],
        claims: Mapping[DefinedWindows, Claim],
        wasted_rows: Mapping[int, int],
        turn: Turn,
    ) -> list[Append]:
        """Orders to keep the blocks that any window needs, numbered in their order."""
        appends = []
        for index in sorted(frozenset().union(*(claim.blocks for claim in claims.values()))):
            block, seq = blocks[index], self.number(1)
            segments = self._segments[has_event_rows(block.slice_us)]
            start_us = segments.add(block.slice_us)
            if segments.compaction is not None:
                segments.compaction.arrived(block, seq, wasted_rows.get(index, 0))
            if turn.at_us is not None:
                self._rules.shared.bound.observe_state(start_us, turn.at_us, block.size_bytes)
            is_open = segments.is_open(block.slice_us, index, [claims[d] for d in segments.definitions], turn)
            appends.append(Append(index, block.slice_us, seq, not is_open))
        return appends

    def _all_arrived(self) -> None:
        """All events of the batch are there."""
        turn, counts, self._late_counts = self._turn(), self._late_counts, LateCounts()
        for place, definition in enumerate(self._definitions):
            counts.came_late(place, definition.join(turn))
        counts.end(self.counters)

    # -- executions ---------------------------------------------------------------------------------------

    def _advanced(self, to_us: int) -> Iterator[Action | Order]:
        self._all_arrived()
        before_us, to_us = self.watermark.at_us, within(to_us)
        if not self.watermark.advance(to_us):
            return
        if self.completeness is not None:
            windows = self.windows
            self.completeness.close(lambda definition, end_us: windows.find(definition, end_us) >= 0)
        # The events so far are complete up to the old watermark. Bounds that are decided from them hold from now on.
        self._rules.shared.bound.advance(before_us, to_us)
        self._rules.advance(to_us)
        turn = self._turn(before_us)
        at_once = self._timed.advance(turn)
        for of_keys in self.keyed:
            yield from self._counted(of_keys.advance(turn))
        at_once += self._timed.close(turn)
        left, free = self._released(watermark_moved=True)
        compactions = self._compactions([*left, *self._segments[0].swept()])
        # Releases come last: to compact blocks is cheaper while they are in memory.
        yield from (*self._counted(at_once), *compactions, *_releases(left, free))

    def _batch_ended(self, ends_run: bool, batch_follows: bool) -> Iterator[Action | Order]:
        self._all_arrived()
        turn = self._turn()
        at_once = self._timed.end_batch(turn, ends_run=ends_run, batch_follows=batch_follows)
        for windows in self.keyed:
            yield from self._counted(windows.end_batch(turn, ends_run=ends_run))
        self._rules.end_batch()
        self._late_work.end_batch()
        left, free = self._released(watermark_moved=False)
        touched = self._compaction.touched() if self._compaction is not None else []
        yield from (*self._counted(at_once), *self._compactions(touched), *_releases(left, free))

    def _counted(self, orders: Iterable[Any]) -> Iterator[Action | Order]:
        """Counts the orders of a definition. Adds to those for windows of keys the segments that hold their rows."""
        for order in orders:
            match order:
                case Execute() | ExecuteKeyed():
                    self.counters.executions[order.kind.value] += len(order)
                case FillGaps():
                    self.counters.executions[order.order.kind.value] += len(order.order)
                case Retract():
                    self.counters.retracted += len(order.windows)
            yield self._placed(order) if isinstance(order, ExecuteKeyed) else order

    def _placed(self, order: ExecuteKeyed) -> ExecuteKeyed:
        segments = self._segments_of[self._keyed_of[order.definition]]
        return replace(order, slices=segments.within(TimeRanges.of(order.interval_us)))

    def _released(self, *, watermark_moved: bool) -> tuple[list[int], list[int]]:
        """The segments that open windows have left, and those that nobody needs any more."""
        turn = self._turn()
        left = [name for segments in self._segments for name in segments.left(turn)]
        free = [n for each in self._segments for n in each.free(all_=watermark_moved and each.grid.has_changed)]
        return left, free

    def _compactions(self, names: Iterable[int]) -> list[Action]:
        """What to compact in these segments. Segments that are not kept are ignored."""
        compaction, shared = self._compaction, self._segments[0]
        if compaction is None:
            return []
        turn = self._turn()
        actions: list[Action] = []
        for name in dict.fromkeys(name for name in names if name in shared and compaction.may_compact(name)):
            cuts, ended, sweeps = shared.cuts(name, turn)
            actions += compaction.due(name, cuts, ended=ended, sweeps=sweeps)
        return actions

    def owners(self, rows: Table) -> list[Ints]:
        """For each definition of sessions: the session that each row of a block belongs to. -1: none."""
        return [
            windows.arriving.owners(rows) for windows in self.keyed if self._segments_of[windows] is self._segments[0]
        ]

    # -- snapshot -----------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Everything that a restart needs, as JSON values."""
        timed = self._timed.snapshot()
        return {
            "version": SNAPSHOT_VERSION,
            "watermark_us": self.watermark.at_us,
            "watermark_step_us": self.watermark.step_us,
            "next_seq": self.next_seq,
            "next_pane_seq": self.next_pane_seq,
            "reached_us": self.reached_us,
            "windows": timed.pop("windows"),
            "slices": slices_to_json(self.segments),
            "settled_us": [
                min((w.open_from_us for w in self.keyed if self._segments_of[w] is segments), default=-NEVER)
                for segments in self._segments
            ],
            "runs": self._compaction.to_json() if self._compaction is not None else None,
            **timed,
            "lateness": self._rules.shared.bound.to_json(),
            **self._rules.to_json(self._segments[0].grid.aligned),
            "completeness": None if self.completeness is None else self.completeness.to_json(),
            "counters": self.counters.to_json(),
            "keyed": [windows.snapshot() for windows in self.keyed],
        }

    def validate(self) -> None:
        """Checks every invariant that spans collections. Raises AssertionError that says which window breaks it."""
        self._timed.validate(self.watermark.at_us, self.next_seq)
        if not self.keyed:
            for name in self._segments[0].unneeded(self._segments[0]):
                raise AssertionError(f"segment {name} is kept for nobody")


def _wasted(
    hashed: Sequence[RowArrivals | None], segments: Segments, claims: Mapping[DefinedWindows, Claim]
) -> dict[int, int]:
    """For each block of single rows: how many of them no definition takes. ``segments``: that it would be kept in."""
    taken = [rows for d in segments.definitions if (rows := claims[d].rows) is not None]
    if not taken or not hashed or (arrivals := hashed[0]) is None:
        return {}
    numbers, counts = np.unique(arrivals.block[~np.logical_or.reduce(taken)], return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def _releases(left: Sequence[int], free: Sequence[int]) -> list[Action]:
    return [*([Destage(tuple(left))] if left else []), *([Purge(tuple(free))] if free else [])]
