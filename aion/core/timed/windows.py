"""The windows of time in one shard: of all definitions whose windows are the same for all keys. Pure.

Their bounds are known without any event, so they are rows of one table, and a decision is one about columns.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from aion.base.numbers import NEVER
from aion.core.lateness.observe import observe_late
from aion.core.life.actions import EmitDropped, Execute, FillGaps, Forget, ForgetFilled, KeepFilled, PaneKind
from aion.core.life.arrival import Arrival
from aion.core.life.definition import ALL_ROWS, Claim, Distinguished, TimeRanges, Turn
from aion.core.life.late_work import LEAST_AWAITED_BYTES
from aion.core.life.lifecycle import Counters
from aion.core.life.rules import Rules
from aion.core.life.segments import Segments
from aion.core.life.window_table import WindowTable
from aion.core.slicing.aligned import AlignedWindows, Covering
from aion.core.timed.calendar_state import calendars_to_json
from aion.core.timed.filled import Filled
from aion.core.timed.purged import Purged
from state_backends.thresholds import threshold

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
FEW_PENDING = threshold(16, 2)
"""If less than one in this many of a window's events are pending, they likely have few keys, and lie in few blocks."""

_NOTHING = np.empty(0, np.int64)


class TimeWindows:
    """See :class:`aion.core.life.definition.DefinedWindows`. ``table``: the windows, by their ends.

    ``segments``: those that hold the blocks. ``snapshot``: of the operator.
    """

    def __init__(self, segments: Segments, rules: Rules, snapshot: Mapping[str, Any] | None = None) -> None:
        grid = segments.grid
        definitions = max(grid.aligned, default=0) + 1
        self.table = WindowTable(definitions)
        if snapshot is not None:
            self.table = WindowTable.from_json(snapshot["windows"], definitions, grid.aligned)
            if rules.lengthens:
                self.table.lengthen(rules.bounds_us(self.table["definition"]))
        self._segments = segments
        self._aligned = AlignedWindows(grid.aligned, grid.limits)
        self._unlimited = AlignedWindows(grid.aligned) if grid.limits else None
        self._gone = Purged(grid.aligned, snapshot)
        self._filled = Filled(grid.aligned, self._aligned, snapshot)
        self._gaps: list[tuple[Ints, Ints]] = []
        """By definition and end, the windows that late events of this batch may have given rows to."""
        self._bound = rules.shared.bound
        self._rules = rules
        # If blocks are compacted, the blocks of a few keys can be found.
        self._seeks = segments.compaction is not None
        self._counters = Counters()
        self._left: list[TimeRanges] = []
        self._freed: list[TimeRanges] = []

    def count_in(self, counters: Counters) -> None:
        self._counters = counters

    # -- arrivals -----------------------------------------------------------------------------------------

    def arrive(self, arrival: Arrival, rows: Any, turn: Turn) -> Claim:
        """Finds or creates the windows that take the arrival.

        A window that is gone never comes back, even if bounds have become longer.
        """
        covering = self._aligned.covering(arrival.slices_us)
        events = arrival.events_of(covering.begins, covering.ends)
        windows, now = self.table, turn.at_us
        new = (found := windows.find(covering.definition, covering.end_us)) < 0
        # A window whose bound has passed is only kept until its final execution.
        gone = ~new & windows.over(found, now)
        drops: list[EmitDropped] = []
        if new.any() or gone.any():
            bounds_us = self._rules.bounds_us(covering.definition)
            if now is not None:
                gone |= new & (covering.end_us + bounds_us <= now)
                gone |= new & self._gone.contains(covering.definition, covering.start_us, covering.end_us)
            made = new & ~gone
            past = covering.end_us[made] <= now if now is not None else np.zeros(int(made.sum()), np.bool_)
            windows.add(
                definition=covering.definition[made],
                start_us=covering.start_us[made],
                end_us=covering.end_us[made],
                bound_us=bounds_us[made],
                reason=self._rules.reasons(covering.definition[made]),
                late_from_seq=np.where(past, 0, NEVER),
            )
            self._counters.windows += len(past)
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
        if self._unlimited is not None and arrival.untold().any():
            # The windows of then went when the definitions changed, and those of now begin later.
            then = self._unlimited.covering(arrival.slices_us)
            blocks, lost_us = arrival.mark_left_out(then.begins, then.ends)
            if blocks:
                none, late_us = np.full(len(lost_us), -1), np.maximum((-NEVER if now is None else now) - lost_us, 0)
                drops.append(EmitDropped(blocks, none, lost_us, lost_us + 1, late_us))
        kept_filled = [self._keep_filled(number, covering, arrival, now) for number in self._filled.for_us]
        return Claim(
            arrival.kept_blocks(),
            arrival.active_blocks(),
            drops,
            arrival.lost_events(),
            arrival.late_events(),
            (
                windows.find(covering.definition, covering.end_us),
                events,
                arrival.bytes_of(covering.begins, covering.ends),
            ),
            orders=[order for order in kept_filled if len(order.slices_us)],
        )

    def _keep_filled(self, number: int, covering: Covering, arrival: Arrival, now: int | None) -> KeepFilled:
        """Notes which windows of a definition have rows because of the events that its windows take."""
        own = covering.definition == number
        slices_us = arrival.slices_in(covering.begins[own], covering.ends[own])
        spans = self._filled.of_slices(number, slices_us)
        if now is not None:
            starts_us, ends_us = self._filled.ending(number, -NEVER, now, spans)
            there = self._open_filled(number, starts_us, ends_us, now)
            if not self._rules.final_only and there.any():
                self._gaps.append((np.full(int(there.sum()), number), ends_us[there]))
        return KeepFilled(number, slices_us)

    def _open_filled(self, number: int, starts_us: Ints, ends_us: Ints, now: int) -> Flags:
        """Adds those of these windows that are neither known nor gone. Returns a mask of those that are not gone."""
        definition = np.full(len(ends_us), number)
        found = self.table.find(definition, ends_us)
        bounds_us = self._rules.bounds_us(definition)
        gone = np.where(found < 0, ends_us + bounds_us <= now, self.table.over(found, now))
        gone |= (found < 0) & self._gone.contains(definition, starts_us, ends_us)
        self._add_empty(definition, starts_us, ends_us, (found < 0) & ~gone, late_from_seq=0)
        return ~gone

    def _add_empty(self, definition: Ints, starts_us: Ints, ends_us: Ints, which: Flags, late_from_seq: int) -> None:
        own = definition[which]
        self.table.add(
            definition=own,
            start_us=starts_us[which],
            end_us=ends_us[which],
            bound_us=self._rules.bounds_us(own),
            reason=self._rules.reasons(own),
            late_from_seq=np.full(len(own), late_from_seq),
        )
        self._counters.windows += len(own)

    def _filled_gaps(self, turn: Turn) -> list[Any]:
        """The order to show rows that late events have given to keys in windows without events. It counts as a pane."""
        gaps, self._gaps = self._gaps, []
        if not gaps:
            return []
        assert turn.at_us is not None, "no window has ended without a watermark"
        windows = self.table
        rows = np.unique(windows.find(*(np.concatenate(column) for column in zip(*gaps, strict=True))))
        order = windows.execution(rows, PaneKind.LATE, (), turn.at_us)
        windows["panes"][rows] += 1
        return [FillGaps(order)]

    def _end_filled(self, turn: Turn) -> None:
        """Adds the windows without events that end by this watermark, and have rows."""
        assert turn.at_us is not None, "the watermark has moved"
        for number in self._filled.for_us:
            starts_us, ends_us = self._filled.ending(
                number, -NEVER if turn.before_us is None else turn.before_us, turn.at_us
            )
            definition = np.full(len(ends_us), number)
            self._add_empty(definition, starts_us, ends_us, self.table.find(definition, ends_us) < 0, NEVER)

    def keep(self, claim: Claim, seqs: Mapping[int, int], turn: Turn) -> TimeRanges:
        rows, events, size_bytes = claim.taken
        if seqs:
            windows, now = self.table, turn.at_us
            late = windows["end_us"][rows] <= now if now is not None else np.zeros(len(rows), np.bool_)
            windows.came(rows, events, late, turn.next_seq - 1, size_bytes)
            if now is not None and late.any():
                observe_late(self._bound, windows["end_us"][rows[late]], events[late], now)
        return self._announced(rows[self.table["pending"][rows] == events], rows, turn)

    def _announced(self, first: Ints, rows: Ints, turn: Turn) -> TimeRanges:
        """The late windows to stage: their first event since an execution announces the next one.

        ``first``: the rows of windows that got such an event now. ``rows``: of all windows that got events now.
        """
        if not self._rules.shared.stages_late or turn.at_us is None or self._rules.final_only:
            return self._intervals(_NOTHING)
        rows = rows if self._rules.shared.stages_due else first
        rows = rows[(rows < self._late(turn.at_us)) & (self.table["pending"][rows] > 0)]
        if self._rules.shared.stages_due and len(rows):
            due = self._rules.due(self.table, rows, turn.at_us, turn.step_us)
            rows = rows[due | ~self._are_read_whole(rows)]
        return self._intervals(rows)

    def join(self, turn: Turn) -> int:
        """They took all events when these arrived."""
        return 0

    # -- executions ---------------------------------------------------------------------------------------

    def advance(self, turn: Turn) -> list[Any]:
        assert turn.at_us is not None, "the watermark has moved"
        gaps = self._filled_gaps(turn)
        self._end_filled(turn)
        windows, first, late = self.table, self._late(turn.before_us), self._late(turn.at_us)
        self._gone.close(turn.at_us - self._rules.bounds_us(np.arange(len(self._gone.closed_us))))
        if late == first:
            return gaps
        rows = np.arange(first, late)
        windows["late_from_seq"][first:late] = turn.next_seq
        came = rows[windows["events"][rows] > 0]
        self._bound.observe_all_on_time(windows["end_us"][came], windows["events"][came])
        self._left.append(self._intervals(rows))
        return gaps if self._rules.final_only else [*gaps, self._execute(rows, PaneKind.ON_TIME, turn)]

    def close(self, turn: Turn) -> list[Any]:
        """Returns what runs for the last time and may wait, after :meth:`advance` of all. Lets windows go."""
        assert turn.at_us is not None, "the watermark has moved"
        windows, late = self.table, self._late(turn.at_us)
        orders: list[Any] = []
        over = windows.over(np.arange(late), turn.at_us)
        shown = windows["pending"][:late] > 0
        if self._rules.final_only and self._filled:
            shown |= np.isin(windows["definition"][:late], [*self._filled.for_us])
        final = np.flatnonzero(over & shown)
        if len(final):
            windows.close(final, turn.before_us, turn.next_seq - 1)
            final = final[turn.late_work.take_rows(windows, final, all_=self._rules.final_only)]
            orders += [self._execute(final, PaneKind.FINAL, turn)] if len(final) else []
            over &= windows["owed"][:late] == 0
        if over.any():
            orders += self._purge(np.concatenate((over, np.zeros(len(windows) - late, np.bool_))))
        closed_us = self._gone.closed_us
        forgotten = self._filled.close(closed_us) if self._filled else {}
        return [*orders, *(ForgetFilled(number, int(closed_us[number]), all_) for number, all_ in forgotten.items())]

    def end_batch(self, turn: Turn, *, ends_run: bool, batch_follows: bool) -> list[Any]:
        windows, now = self.table, turn.at_us
        if now is None:
            return []
        orders: list[Any] = self._filled_gaps(turn)
        late, waiting = self._late(now), self._waiting(now)
        due = np.ones(len(waiting), np.bool_) if ends_run else self._rules.due(windows, waiting, now, turn.step_us)
        due |= windows["owed"][waiting] > 0
        windows.look(waiting[~due], now)
        windows.owe(waiting[due])
        windows.owe(self._rules.early(windows, late))
        patient = self._patient(now) if batch_follows else _NOTHING
        runs = turn.late_work.runs(windows, late, now, all_=ends_run, patient=patient)
        for kind, rows in runs.items():
            orders.append(self._execute(rows, kind, turn))
            if kind is not PaneKind.EARLY:
                # Blocks that were staged for a late execution leave memory after it (paper 3.2).
                self._left.append(self._intervals(rows))
        if PaneKind.FINAL in runs:
            orders += self._purge(np.isin(np.arange(len(windows)), runs[PaneKind.FINAL]))
        return orders

    def _patient(self, now_us: int) -> Ints:
        """The rows of late windows that are due and wait until their blocks are in memory."""
        windows = self.table
        far = np.flatnonzero(windows["far"][: self._late(now_us)] > 0)
        owed, patience = windows["owed"][far], self._rules.patience(windows["definition"][far])
        rows = far[(owed > 0) & (owed <= patience) & ~windows.over(far, now_us)]
        if not len(rows):
            return _NOTHING
        sizes = self._segments.sizes(self._intervals(rows)) if self._seeks else windows["size_bytes"][rows]
        return np.asarray(rows[sizes >= LEAST_AWAITED_BYTES])

    def _execute(self, rows: Ints, kind: PaneKind, turn: Turn) -> Execute:
        assert turn.at_us is not None, "nothing runs without a watermark"
        slices = self._segments.within(self._intervals(rows[self.table["events"][rows] > 0]))
        order = self.table.execution(rows, kind, slices, turn.at_us)
        # A window that only runs once does not become stale.
        shown = PaneKind.ON_TIME if self._rules.final_only else kind
        self.table.executed(rows, turn.at_us, turn.next_seq - 1, kind=shown)
        if shown is PaneKind.ON_TIME:
            turn.late_work.on_time(turn.late_work.read(order.definition, order.events))
        return order

    def _purge(self, rows: Flags) -> list[Forget]:
        self._freed.append(self._intervals(np.flatnonzero(rows)))
        gone = self.table.drop(rows)
        if not self._rules.final_only:
            gone.count_in(self._counters.staleness, self._rules.staleness_bound)
        definitions, starts_us, ends_us = (gone[name] for name in ("definition", "start_us", "end_us"))
        self._gone.add(definitions, starts_us, ends_us)
        self._counters.purged_windows += len(gone)
        which = ((number, definitions == number) for number in np.unique(definitions).tolist())
        return [Forget(number, starts_us[own], ends_us[own]) for number, own in which]

    # -- what is due --------------------------------------------------------------------------------------

    def due(self, turn: Turn, watermark_us: int) -> list[TimeRanges]:
        """Windows that run on time come first, then early ones, then final ones, then late ones and those that wait.

        If blocks are compacted, windows that read only a few keys are left out (:meth:`_are_read_whole`).
        """
        return [self._intervals(rows) for rows in self._planned(turn, watermark_us)]

    def leave(self, turn: Turn, watermark_us: int) -> None:
        self.table.leave(self._late(turn.at_us), np.concatenate(self._planned(turn, watermark_us)))

    def _planned(self, turn: Turn, watermark_us: int) -> list[Ints]:
        """The rows of the windows that are :meth:`due`. Without ``stages_due``, nobody asks."""
        windows, late = self.table, self._late(turn.at_us)
        until = max(windows.ended_by(watermark_us), late)
        rows = np.arange(until)
        dies = windows["end_us"][:until] + windows["bound_us"][:until] <= watermark_us
        final = dies & (windows["pending"][:until] > 0)
        on_time = (rows >= late) & (not self._rules.final_only)
        waiting = self._waiting(turn.at_us)
        again = np.zeros(until, np.bool_)
        again[waiting[(self._dues_us(waiting, turn) <= watermark_us) | (windows["owed"][waiting] > 0)]] = True
        early = self._rules.early_by(windows, until, watermark_us)
        kinds = (np.flatnonzero(on_time), early, np.flatnonzero(final), np.flatnonzero(again))
        return [rows[self._are_read_whole(rows)] for rows in kinds]

    def _are_read_whole(self, rows: Ints) -> Flags:
        """A mask of the windows whose next execution reads nearly all blocks: the first, or one with many events.

        For the others, the blocks of the changed keys are staged when the events arrive. More would be in vain.
        """
        if not self._seeks:
            return np.ones(len(rows), np.bool_)
        pending, events, executed = (self.table[name][rows] for name in ("pending", "events", "executed_seq"))
        return np.asarray((pending >= -(-events // FEW_PENDING)) | (executed < 0))

    def next_due_us(self, turn: Turn) -> int:
        windows, late = self.table, self._late(turn.at_us)
        dues = [
            int(self._dues_us(self._waiting(turn.at_us), turn).min(initial=NEVER)),
            *windows["end_us"][late : late + 1].tolist(),
            self._rules.next_early_us(windows, late),
            int((windows["end_us"][:late] + windows["bound_us"][:late]).min(initial=NEVER)),
            self._filled.next_end_us(-NEVER if turn.at_us is None else turn.at_us),
        ]
        return int(min(dues))

    @property
    def waits(self) -> bool:
        return bool((self.table["owed"] > 0).any())

    def _late(self, at_us: int | None) -> int:
        """The number of windows that are late at a watermark. They are at the front of the table."""
        return 0 if at_us is None else self.table.ended_by(at_us)

    def _waiting(self, at_us: int | None) -> Ints:
        """The rows of late windows that got events since their last execution. They wait for the trigger."""
        if self._rules.final_only:
            return _NOTHING
        return np.flatnonzero(self.table["pending"][: self._late(at_us)] > 0)

    def _dues_us(self, waiting: Ints, turn: Turn) -> Ints:
        """The watermarks at which the trigger checks these windows again even if no event comes. NEVER: none."""
        if turn.at_us is None:
            return waiting
        return self._rules.dues_us(self.table, waiting, turn.at_us, turn.step_us)

    # -- which segments -----------------------------------------------------------------------------------

    def needed_in(self, starts_us: Ints, ends_us: Ints) -> Ints:
        """A window needs all that lies in it."""
        return np.where(self.table.needed(starts_us, ends_us), ALL_ROWS, 0)

    def are_open(self, starts_us: Ints, ends_us: Ints, turn: Turn) -> Flags:
        return self.table.needed(starts_us, ends_us, self._late(turn.at_us))

    def first_ends(self, starts_us: Ints, ends_us: Ints, turn: Turn) -> Ints:
        return self.table.first_ends(starts_us, ends_us, self._late(turn.at_us))

    def left(self) -> TimeRanges:
        left, self._left = self._left, []
        return _joined(left)

    def freed(self) -> TimeRanges:
        freed, self._freed = self._freed, []
        return _joined(freed)

    def removed(self) -> TimeRanges:
        """They need all rows of a segment, or none."""
        return self._intervals(_NOTHING)

    def distinguished(self, start_us: int, end_us: int, turn: Turn) -> Distinguished:
        """A block must not mix arrivals that a window distinguishes.

        Later cuts are never between existing blocks: what is new, late or too late then begins with the next block.
        """
        rows = self.table.overlapping(start_us, end_us)
        ended = bool((rows < self._late(turn.at_us)).all())
        return Distinguished(self.table.cuts(rows, turn.at_us), ended, False if len(rows) else None)

    def _intervals(self, rows: Ints) -> TimeRanges:
        return TimeRanges(self.table["start_us"][rows], self.table["end_us"][rows])

    # -- snapshot -----------------------------------------------------------------------------------------

    def write(self) -> None:
        """They are in the snapshot."""

    def snapshot(self) -> dict[str, Any]:
        """Their part of the operator's snapshot."""
        return {
            "windows": self.table.to_json(),
            **self._gone.to_json(),
            **self._filled.to_json(),
            **calendars_to_json(self._segments.grid, self.table, self._gone, self._segments.live),
        }

    def validate(self, at_us: int | None, next_seq: int) -> None:
        """Raises AssertionError that says which window breaks what."""
        check(
            self.table, at_us, next_seq, lambda rows: self._segments.within(self._intervals(rows)), self._filled.for_us
        )


def _joined(intervals: Iterable[TimeRanges]) -> TimeRanges:
    starts_us, ends_us = zip(*intervals, strict=True) if (intervals := [*intervals]) else ((_NOTHING,), (_NOTHING,))
    return TimeRanges(np.concatenate(starts_us), np.concatenate(ends_us))


def check(
    windows: WindowTable,
    at_us: int | None,
    next_seq: int,
    segments_of: Callable[[Ints], tuple[int, ...]],
    filled: Container[int] = (),
) -> None:
    """Raises AssertionError that says which window breaks what.

    ``at_us``: the watermark. ``next_seq``: the number of the next block. ``segments_of``: the kept segments of windows.
    ``filled``: definitions that have windows without events.
    """
    order = np.lexsort((windows["definition"], windows["end_us"]))
    assert (order == np.arange(len(windows))).all(), "windows are in the order of their ends"
    for row, ref in enumerate(windows.refs()):
        state = {name: column[row] for name, column in windows.columns.items()}
        assert not windows.over(np.array([row]), at_us)[0] or state["owed"] > 0, f"{ref} outlived its bound"
        assert state["executed_seq"] <= state["last_seq"] < next_seq, f"{ref}: {state}"
        assert (state["pending"] > 0) == (state["last_seq"] > state["executed_seq"]), f"{ref}: {state}"
        late = at_us is not None and ref.end_us <= at_us
        assert late == (state["late_from_seq"] < NEVER), f"{ref}: {state}"
        has_events = state["events"] > 0 or ref.definition not in filled
        assert not has_events or segments_of(np.array([row])), f"{ref} has no segment"
