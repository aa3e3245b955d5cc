"""The life of windows, as a pure state machine: ``handle(event) -> [action]`` (docs/start/concepts.md).

Facts come in with their times and sizes in them. Orders go out, and a shell carries them out. There is no clock, no
thread, no file and no randomness here. One operator manages one shard. Its windows are shared by all keys of the shard;
:mod:`aion.core.keyed` manages the windows of single keys.

Blocks are numbered by ``seq`` in the order of arrival, across all segments of the shard. The watermark never goes back.
So the blocks that are late for a window are exactly those numbered from the window's ``late_from_seq`` on, and the
blocks that are new to it are those above its ``executed_seq``. The operator remembers nothing about a single block
except how it is compacted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.base.numbers import NEVER, within
from aion.core.compaction import BlockCompaction, BlockFact, CompactionDone
from aion.core.keyed.in_memory import Orders
from aion.core.keyed.orders import Arrivals, ExecuteKeyed, Order
from aion.core.keyed.shard import KeyedShard, Verdict
from aion.core.keyed.slices import PartSegments, parts_of
from aion.core.lateness.completeness import Completeness
from aion.core.lateness.observe import Lateness, NewBounds, observe_late
from aion.core.life.actions import (
    Action,
    Append,
    Arrived,
    BatchEnded,
    Destage,
    EmitDropped,
    Event,
    Execute,
    Forget,
    PaneKind,
    Prestage,
    Purge,
    SliceFacts,
    WatermarkAdvanced,
)
from aion.core.life.late_work import LEAST_AWAITED_BYTES, LateWork
from aion.core.life.lifecycle import Counters
from aion.core.life.rules import Rules
from aion.core.life.watermark import Watermark
from aion.core.life.window_table import WindowTable
from aion.core.operator.arrival import Arrival, Tally, untimed
from aion.core.operator.due import Due
from aion.core.operator.gone import Gone
from aion.core.operator.invariants import check
from aion.core.operator.pins import calendars_to_json
from aion.core.slicing.aligned import AlignedWindows
from aion.core.slicing.grid import SliceGrid, has_event_rows, slices_to_json
from aion.core.trigger.triggers import Trigger

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

PLANNED_AHEAD = 3
"""For this many batches after the next one, :meth:`Operator.plan_ahead` says what they will read."""
SNAPSHOT_VERSION = 7


class Operator:
    """Manages the windows of one shard. Takes its policy objects and, optionally, an earlier snapshot.

    ``grid``: of the plan. ``event_grid``: of the rows of single events that are kept beside partials
    (``Plan.event_rows``). None if there are none. ``keyed``: the windows of single keys, for both grids. ``rules``:
    what holds for single definitions, with the same ``bound`` and ``trigger``. None: the same holds for all.
    ``completeness``: None if rows do not say how complete they are.
    """

    def __init__(
        self,
        grid: SliceGrid,
        *,
        bound: NewBounds,
        trigger: Trigger,
        prestages_late: bool = True,
        prestages_due: bool = False,
        staleness_bound: float | None = None,
        rules: Rules | None = None,
        late_work: LateWork | None = None,
        keyed: KeyedShard | None = None,
        event_grid: SliceGrid | None = None,
        compaction: BlockCompaction | None = None,
        completeness: Completeness | None = None,
        snapshot: Mapping[str, Any] | None = None,
    ) -> None:
        self.grid = grid
        self.keyed = KeyedShard() if keyed is None else keyed
        self._aligned = AlignedWindows(grid.aligned, grid.limits)
        self._bound = bound
        definitions = max(grid.aligned, default=0) + 1
        self._rules = rules or Rules(bound, trigger, {}, definitions=definitions, staleness_bound=staleness_bound)
        self._late_work = LateWork() if late_work is None else late_work
        self._compaction = compaction
        self.completeness = completeness
        self.watermark = Watermark()
        self.windows = WindowTable(definitions)
        self._gone = Gone(grid.aligned, snapshot)
        self.next_seq = 0
        self.next_pane_seq = 0
        self.reached_us: int | None = None  # no event that ever came is as late as this instant. It only grows
        self.counters = Counters()
        self._tally = Tally()
        if snapshot is not None:
            self.watermark = Watermark(snapshot["watermark_us"], snapshot["watermark_step_us"])
            self.next_seq = snapshot["next_seq"]
            self.next_pane_seq = snapshot["next_pane_seq"]
            self.reached_us = snapshot["reached_us"]
            self.windows = WindowTable.from_json(snapshot["windows"], definitions, grid.aligned)
            self.counters = Counters.from_json(snapshot["counters"])
        grids = [grid] if event_grid is None else [grid, event_grid]
        self._parts = parts_of(grids, self.keyed.parts, self._are_needed, snapshot)
        self._shared = self._parts[0]
        self._part_of_definition = {w.definition: part for part in self._parts for w in part.keyed.windows}
        self.keyed.count_in(self.counters.staleness)
        self._due = Due(
            self.windows,
            self._rules,
            self.watermark,
            grid,
            self._parts,
            self.keyed,
            seeks=compaction is not None,
            prestages_late=prestages_late,
            # If due executions are predicted, plan() stages the blocks for the later ones.
            prestages_due=prestages_due,
        )

    # -- what the shell asks ------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Action | Order]:
        match event:
            case Arrived(blocks, rows, slices):
                return self._arrived(blocks, rows, slices)
            case WatermarkAdvanced(to_us):
                return self._advanced(to_us)
            case BatchEnded(last, follows):
                return self._batch_ended(last, follows)
            case CompactionDone(compaction):
                assert self._compaction is not None
                self._compaction.compacted(event)
                return [*self._compactions([compaction.slice_us])]

    def number(self, blocks: int) -> int:
        """Reserves this many block numbers, for blocks that replace others. Returns the first."""
        first = self.next_seq
        self.next_seq += blocks
        return first

    def number_panes(self) -> int:
        """Returns the number of the next panes of this shard, which no earlier ones have."""
        self.next_pane_seq += 1
        return self.next_pane_seq - 1

    def plan(self, watermark_us: int) -> Prestage | None:
        """Returns what to stage in the gap before the watermark gets there, or None. See :meth:`Due.planned`.

        Call it at the end of a batch, and stage it: late windows for which nothing is planned are far from now on.
        """
        planned = self._due.planned(watermark_us)
        self.windows.leave(self._due.late(), np.concatenate(planned))
        return self._due.staged(planned, watermark_us)

    def plan_ahead(self, watermark_us: int) -> tuple[int, ...]:
        """Returns what to stage after that, for the batches after the next one, as far as memory has room.

        ``watermark_us``: of the next batch. Those after it move the watermark as far as the last one did.
        """
        step_us = self.watermark.step_us
        slices: dict[int, None] = {}
        for batch in range(1, PLANNED_AHEAD + 1) if step_us else ():
            later = self._due.staged(self._due.planned(within(watermark_us + batch * step_us)), watermark_us)
            slices |= dict.fromkeys(() if later is None else later.slices)
        return tuple(slices)

    def active_slices(self) -> tuple[int, ...]:
        """Returns the segments of windows that have not ended. The segments that are needed soonest come first."""
        return self._due.active_slices()

    @property
    def next_due_us(self) -> int | None:
        """The next watermark at which something happens even if no event comes. None if there is none."""
        return self._due.next_due_us

    @property
    def lateness(self) -> Lateness:
        """What has been learnt about how late events come."""
        return self._bound.lateness

    @property
    def segments(self) -> list[int]:
        """All segments with kept blocks, in order."""
        return [name for part in self._parts for name in part]

    # -- arrivals -----------------------------------------------------------------------------------------

    def _arrived(
        self, blocks: Sequence[BlockFact], rows: Sequence[Arrivals | None] = (), facts: SliceFacts | None = None
    ) -> list[Action | Order]:
        if blocks:
            self._late_work.arrived()
        verdict = self.keyed.judge(rows, self.watermark.at_us)
        actions: list[Action | Order] = [*untimed(blocks, self.counters)]
        arrival = Arrival.of(blocks, facts)
        self._reach(arrival.slices_us[-1:])
        taken, too_late = self._windows_for(arrival)
        actions += too_late
        arrival.count(self._tally, verdict)
        appends = self._kept(blocks, arrival, verdict)
        actions += appends
        if appends:
            self._came(*taken)
        actions += verdict.dropped
        self.keyed.add(verdict, {a.index: a.seq for a in appends})
        announced = self._due.announced(taken[0][self.windows["pending"][taken[0]] == taken[1]], taken[0])
        return [*actions, Prestage(announced)] if announced else actions

    def _reach(self, last_us: Ints) -> None:
        """Notes that events came up to the end of a slice, whether they are taken or left out."""
        for end_us in self.grid.ends(last_us).tolist():
            self.reached_us = end_us if self.reached_us is None else max(self.reached_us, end_us)

    def _windows_for(self, arrival: Arrival) -> tuple[tuple[Ints, Ints, Ints], list[EmitDropped]]:
        """Finds or creates the windows that take the arrival. Returns their rows, events and bytes, and orders to drop.

        A window that is gone never comes back, even if bounds have become longer.
        """
        covering = self._aligned.covering(arrival.slices_us)
        events = arrival.events_of(covering.begins, covering.ends)
        now = self.watermark.at_us
        new = (rows := self.windows.find(covering.definition, covering.end_us)) < 0
        # A window whose bound has passed is only kept until its final execution.
        gone = ~new & self.windows.over(rows, now)
        drops: list[EmitDropped] = []
        if new.any() or gone.any():
            bounds_us = self._rules.bounds_us(covering.definition)
            if now is not None:
                gone |= new & (covering.end_us + bounds_us <= now)
                gone |= new & self._gone.contains(covering.definition, covering.start_us, covering.end_us)
            made = new & ~gone
            past = covering.end_us[made] <= now if now is not None else np.zeros(int(made.sum()), np.bool_)
            self.windows.add(
                definition=covering.definition[made],
                start_us=covering.start_us[made],
                end_us=covering.end_us[made],
                bound_us=bounds_us[made],
                reason=self._rules.reasons(covering.definition[made]),
                late_from_seq=np.where(past, 0, NEVER),
            )
            self.counters.windows += len(past)
            if gone.any():
                assert now is not None, "nothing is gone without a watermark"
                ends = covering.end_us[gone]
                observe_late(self._bound, ends, events[gone], now)
                blocks = arrival.mark_too_late(covering.begins[gone], covering.ends[gone])
                drops.append(EmitDropped(blocks, covering.definition[gone], covering.start_us[gone], ends, now - ends))
                kept = ~gone
                covering = type(covering)(*(column[kept] for column in covering))
                events = events[kept]
        arrival.mark_taken(covering.begins, covering.ends, covering.end_us > now if now is not None else None)
        rows, sizes = (
            self.windows.find(covering.definition, covering.end_us),
            arrival.bytes_of(covering.begins, covering.ends),
        )
        return (rows, events, sizes), drops

    def _kept(self, blocks: Sequence[BlockFact], arrival: Arrival, verdict: Verdict) -> list[Append]:
        """Orders to keep the blocks that any window needs, numbered in their order."""
        appends, active = [], arrival.active_blocks()
        for index in arrival.kept_blocks(verdict.blocks):
            block = blocks[index]
            seq = self.number(1)
            part = self._parts[has_event_rows(block.slice_us)]
            start_us = part.add(block.slice_us)
            if self._compaction is not None and part is self._shared:
                self._compaction.arrived(block, seq, verdict.wasted_rows.get(index, 0))
            if self.watermark.at_us is not None:
                self._bound.observe_state(start_us, self.watermark.at_us, block.size_bytes)
            settled = index not in verdict.blocks or part.is_past(block.slice_us)
            appends.append(Append(index, block.slice_us, seq, settled and index not in active))
        return appends

    def _all_arrived(self) -> None:
        """All events of the batch are there."""
        tally, self._tally = self._tally, Tally()
        tally.came_late(self.keyed.join(self.watermark.at_us))
        tally.end(self.counters)

    def _came(self, rows: Ints, events: Ints, size_bytes: Ints) -> None:
        now = self.watermark.at_us
        late = self.windows["end_us"][rows] <= now if now is not None else np.zeros(len(rows), np.bool_)
        self.windows.came(rows, events, late, self.next_seq - 1, size_bytes)
        if now is not None and late.any():
            observe_late(self._bound, self.windows["end_us"][rows[late]], events[late], now)

    # -- executions ---------------------------------------------------------------------------------------

    def _advanced(self, to_us: int) -> list[Action | Order]:
        self._all_arrived()
        before_us, to_us = self.watermark.at_us, within(to_us)
        windows, once, first = self.windows, self._rules.final_only, self._due.late()
        if not self.watermark.advance(to_us):
            return []
        if self.completeness is not None:
            self.completeness.close(lambda definition, end_us: windows.find(definition, end_us) >= 0)
        # The events so far are complete up to the old watermark. Bounds that are decided from them hold from now on.
        self._bound.advance(before_us, to_us)
        self._rules.advance(to_us)
        self._gone.close(to_us - self._rules.bounds_us(np.arange(len(self._gone.closed_us))))
        actions: list[Action | Order] = []
        # They come last: to compact blocks is cheaper while they are in memory.
        releases: list[Action] = []
        late = self._due.late()
        if late > first:
            rows = np.arange(first, late)
            windows["late_from_seq"][first:late] = self.next_seq
            self._bound.observe_all_on_time(windows["end_us"][first:late], windows["events"][first:late])
            if not self._rules.final_only:
                actions.append(self._execute(rows, PaneKind.ON_TIME))
            releases += self._destage(rows)
        keyed = self._placed(self.keyed.advance(before_us, to_us, self._late_work))
        over = windows.over(np.arange(late), to_us)
        final = np.flatnonzero(over & (windows["pending"][:late] > 0))
        if len(final):
            windows.close(final, before_us, self.next_seq - 1)
            final = final[self._late_work.take_rows(windows, final, all_=once)]
            actions += [self._execute(final, PaneKind.FINAL)] if len(final) else []
            over &= windows["owed"][:late] == 0
        actions += keyed
        if over.any():
            releases += self._purge(np.concatenate((over, np.zeros(len(windows) - late, np.bool_))))
        releases += self._settle()
        ended = [s for a in releases if isinstance(a, Destage) for s in a.slices]
        return actions + self._compactions(ended + self._shared.swept(self._compaction)) + releases

    def _batch_ended(self, last: bool, follows: bool) -> list[Action | Order]:
        self._all_arrived()
        windows, now, step_us = self.windows, self.watermark.at_us, self.watermark.step_us
        actions: list[Action | Order] = []
        releases: list[Action] = []
        if now is not None:
            waiting = self._due.waiting()
            due = np.ones(len(waiting), np.bool_) if last else self._rules.due(windows, waiting, now, step_us)
            due |= windows["owed"][waiting] > 0
            windows.look(waiting[~due], now)
            windows.owe(waiting[due])
            windows.owe(self._rules.take_early(windows, self._due.late()))
            patient = self._patient(now) if follows else np.empty(0, np.int64)
            runs = self._late_work.runs(windows, self._due.late(), now, all_=last, patient=patient)
            actions += [self._execute(rows, kind) for kind, rows in runs.items()]
            # Blocks that were staged for a late execution leave memory after it (paper 3.2).
            ended = [rows for kind, rows in runs.items() if kind is not PaneKind.EARLY]
            releases += self._destage(np.concatenate([np.empty(0, np.int64), *ended]))
            if PaneKind.FINAL in runs:
                releases += self._purge(np.isin(np.arange(len(windows)), runs[PaneKind.FINAL]))
        actions += self._placed(self.keyed.batch_ended(now, step_us, self._late_work, last=last))
        compactions = self._compactions(self._compaction.touched()) if self._compaction is not None else []
        self._late_work.end_batch()
        return actions + compactions + releases

    def _patient(self, now_us: int) -> Ints:
        """The rows of late windows that are due and wait until their blocks are in memory."""
        windows = self.windows
        far = np.flatnonzero(windows["far"][: self._due.late()] > 0)
        owed, patience = windows["owed"][far], self._rules.patience(windows["definition"][far])
        rows = far[(owed > 0) & (owed <= patience) & ~windows.over(far, now_us)]
        return np.asarray(rows[self._due.sizes(rows, self._compaction) >= LEAST_AWAITED_BYTES])

    def _execute(self, rows: Ints, kind: PaneKind) -> Execute:
        now = self.watermark.at_us
        assert now is not None
        order = self.windows.execution(rows, kind, self._due.segments_of(rows), now)
        # A window that only runs once does not become stale.
        shown = PaneKind.ON_TIME if self._rules.final_only else kind
        self.windows.executed(rows, now, self.next_seq - 1, kind=shown)
        self.counters.executions[kind.value] += len(rows)
        if shown is PaneKind.ON_TIME:
            self._late_work.on_time(self._late_work.read(order.definition, order.events))
        return order

    def _destage(self, rows: Ints) -> list[Action]:
        """Destages the segments of these windows that no active window needs."""
        segments = self._due.segments_of(rows)
        active = self._are_needed(segments, self._due.late())
        free = [s for s, needed in zip(segments, active, strict=True) if not needed and self._shared.is_settled(s)]
        return [Destage(tuple(free))] if free else []

    def _are_needed(self, segments: Sequence[int], first: int = 0) -> list[bool]:
        """Whether each segment overlaps any window from row ``first`` on."""
        starts = np.array(segments, np.int64)
        needed: list[bool] = self.windows.needed(starts, self.grid.ends(starts), first).tolist()
        return needed

    def _purge(self, rows: Flags) -> list[Action]:
        touched = self._due.segments_of(np.flatnonzero(rows))
        gone = self.windows.drop(rows)
        if not self._rules.final_only:
            gone.count_in(self.counters.staleness, self._rules.staleness_bound)
        definitions, starts_us, ends_us = (gone[name] for name in ("definition", "start_us", "end_us"))
        self._gone.add(definitions, starts_us, ends_us)
        self.counters.purged_windows += len(gone)
        which = ((number, definitions == number) for number in np.unique(definitions).tolist())
        forgotten: list[Action] = [Forget(number, starts_us[own], ends_us[own]) for number, own in which]
        return forgotten if self._shared.keyed else [*forgotten, *self._free(self._shared, touched)]

    def _free(self, part: PartSegments, segments: Iterable[int]) -> list[Action]:
        """Purges the segments, out of these, that no window needs."""
        free = part.unneeded(segments)
        part.drop(free)
        if self._compaction is not None and part is self._shared:
            self._compaction.forget(free)
        return [Purge(tuple(free))] if free else []

    def _compactions(self, segments: Iterable[int]) -> list[Action]:
        """What to compact in these segments. Segments that are not kept are ignored."""
        if self._compaction is None:
            return []
        actions: list[Action] = []
        late = self._due.late()
        live = self._shared.live
        for s in dict.fromkeys(s for s in segments if s in live and self._compaction.may_compact(s)):
            rows = self.windows.overlapping(s, self.grid.end(s))
            # A block must not mix arrivals that a window distinguishes. Windows of single keys distinguish none. Later
            # cuts are never between existing blocks: what is new, late or too late then begins with the next block.
            ended = bool((rows < late).all()) and self._shared.is_settled(s)
            sweeps = bool(self._shared.keyed) and not len(rows)
            cuts = self.windows.cuts(rows, self.watermark.at_us)
            actions += self._compaction.due(s, cuts, ended=ended, sweeps=sweeps)
        return actions

    # -- windows of single keys ---------------------------------------------------------------------------

    def _placed(self, orders: Orders) -> list[Action | Order]:
        """Counts orders for windows of single keys. Adds to each execution the segments that hold its rows."""
        placed: list[Action | Order] = []
        for order in orders:
            if isinstance(order, ExecuteKeyed):
                self.counters.executions[order.kind.value] += len(order.windows)
                order = self._part_of_definition[order.definition].placed(order)
            else:
                self.counters.retracted += len(order.windows)
            placed.append(order)
        return [*placed, *self.keyed.take_forgotten()]

    def _settle(self) -> list[Action]:
        """Purges the segments that no window needs, and destages those that only late windows need."""
        actions: list[Action] = []
        for part in self._parts:
            ended = part.settle(self.watermark.at_us, self._due.late()) if part.keyed else []
            actions += [Destage(tuple(ended))] if ended else []
            if part.keyed or part.grid.has_changed:
                actions += self._free(part, list(part))
        return actions

    # -- snapshot -----------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Everything that a restart needs, as JSON values."""
        return {
            "version": SNAPSHOT_VERSION,
            "watermark_us": self.watermark.at_us,
            "watermark_step_us": self.watermark.step_us,
            "next_seq": self.next_seq,
            "next_pane_seq": self.next_pane_seq,
            "reached_us": self.reached_us,
            "windows": self.windows.to_json(),
            "slices": slices_to_json(self.segments),
            "settled_us": [part.settled_us for part in self._parts],
            "runs": self._compaction.to_json() if self._compaction is not None else None,
            **self._gone.to_json(),
            **calendars_to_json(self.grid, self.windows, self._gone, self._shared.live),
            "lateness": self._bound.to_json(),
            **self._rules.to_json(),
            "completeness": None if self.completeness is None else self.completeness.to_json(),
            "counters": self.counters.to_json(),
            "keyed": self.keyed.snapshot(),
        }

    def validate(self) -> None:
        """Checks every invariant that spans collections. Raises AssertionError that says which window breaks it."""
        check(self.windows, self.watermark.at_us, self.next_seq, self._due.segments_of)
        shared = list(self._shared)
        for s, is_needed in zip(shared, self._are_needed(shared), strict=True):
            assert is_needed or self._shared.keyed, f"segment {s} is kept for nobody"
