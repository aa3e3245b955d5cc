"""The life of a window, as a pure state machine: ``handle(event) -> [action]`` (docs/concepts.md).

Facts come in with their times and sizes in them; orders go out; a shell carries them out. No clock, no thread, no file,
no randomness. One operator rules one shard; windows are the shard's, and :mod:`aion.core.operator.keyed` knows those of
single keys.

Blocks are numbered by ``seq`` in the order of arrival, across all slices of the shard. Because the watermark never goes
back, the blocks that are late for a window are exactly those numbered from the window's ``late_from_seq`` on, and those
that are news to it those above its ``executed_seq``: nothing is remembered per block, but for how they are folded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from typing import Any

from aion.core.compaction.blocks import Folded, Folding
from aion.core.lateness.observe import Bound, Lateness
from aion.core.numbers import within
from aion.core.operator.actions import (
    Action,
    Append,
    Arrived,
    BatchEnded,
    BlockFact,
    Destage,
    EmitDropped,
    Event,
    Execute,
    Kind,
    Prestage,
    Purge,
    WatermarkAdvanced,
    WindowRef,
)
from aion.core.operator.gone import Gone
from aion.core.operator.keyed.orders import Arrivals, ExecuteKeyed, Order
from aion.core.operator.keyed.shard import NOT_KEYED, KeyedShard
from aion.core.operator.keyed.slices import KeyedSlices
from aion.core.operator.keyed.windows import Orders
from aion.core.operator.lifecycle import NEVER, Counters, Status, WindowState, windows_from_json, windows_to_json
from aion.core.operator.watermark import Watermark
from aion.core.slicing.grid import (
    BEYOND_SLICE,
    NO_SLICE,
    LiveSlices,
    SliceGrid,
    is_timed,
    slices_from_json,
    slices_to_json,
)
from aion.core.trigger.triggers import LateView, Trigger

SNAPSHOT_VERSION = 2
READS = (1, 2)
# News that are a smaller part of a window's events are taken to be of few keys, and so to need few blocks.
FEW_NEWS = 16
UNTIMED = {NO_SLICE: "the event time is null", BEYOND_SLICE: "the event time is out of range"}
"""Why events of these slices are dropped."""


class Operator:
    """The windows of one shard. Build it with its policy objects and, optionally, a snapshot of before."""

    def __init__(
        self,
        grid: SliceGrid,
        *,
        bound: Bound,
        trigger: Trigger,
        prestages_late: bool = True,
        prestages_due: bool = False,
        staleness_bound: float | None = None,
        keyed: KeyedShard | None = None,
        folding: Folding | None = None,
        snapshot: Mapping[str, Any] | None = None,
    ) -> None:
        self.grid = grid
        self.keyed = KeyedShard() if keyed is None else keyed
        self._bound = bound
        self._trigger = trigger
        self._prestages_late = prestages_late
        # The rest is planned: see plan().
        self._prestages_due = prestages_due
        self._staleness_bound = staleness_bound
        self._folding = folding
        self.watermark = Watermark()
        self.windows: dict[WindowRef, WindowState] = {}
        # What happens to which window next, the soonest first; entries that are overtaken are passed over.
        self._due: list[tuple[int, WindowRef]] = []
        # Late windows that got events since they were executed: all that the end of a batch looks at.
        self._stirred: set[WindowRef] = set()
        # Every live slice with the windows that still need it.
        self.slices: LiveSlices[list[WindowRef]] = LiveSlices()
        self._keyed_slices = KeyedSlices(grid, self.slices, self.keyed)
        self._gone = Gone(grid.periodic, snapshot)
        # Slices that end by then were let go from memory, as far as the windows of single keys are concerned.
        self._settled_us = -NEVER
        self.next_seq = 0
        self.counters = Counters()
        if snapshot is not None:
            self._restore(snapshot)
        self.keyed.count_in(self.counters.staleness)

    # -- what the shell asks ------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Action | Order]:
        match event:
            case Arrived(blocks, rows):
                return self._arrived(blocks, rows)
            case WatermarkAdvanced(to_us):
                return self._advanced(to_us)
            case BatchEnded(last):
                return self._batch_ended(last)
            case Folded(fold):
                assert self._folding is not None
                self._folding.folded(event)
                return [*self._folds([fold.slice_us])]

    def number(self, blocks: int) -> int:
        """The first of as many new numbers: for blocks that stand for others."""
        first = self.next_seq
        self.next_seq += blocks
        return first

    def plan(self, watermark_us: int) -> Prestage | None:
        """What will be executed when the watermark gets there, so that it can be staged in the gap before.

        Where blocks are folded, windows that were executed before are left out: of those only what changed is read.
        """
        soon = {
            ref
            for ref in self._due_by(watermark_us)
            if self.windows[ref].status is Status.ACTIVE or self.windows[ref].news
        }
        soon |= {ref for ref, due in self._late_dues().items() if due is not None and due <= watermark_us}
        soon = {ref for ref in soon if self._is_read_whole(ref)}
        stretches = self.keyed.due_by(self.watermark.at_us, watermark_us)
        found = {s for ref in soon for s in self._slices_of(ref)}
        slices = sorted(found.union(*(self._keyed_slices.between(*stretch) for stretch in stretches)))
        return Prestage(tuple(slices)) if slices else None

    def _is_read_whole(self, ref: WindowRef) -> bool:
        """Whether an execution reads about all blocks: the first one does, and one of many late events.

        Of others the blocks of their keys are staged when the events come; more would be staged in vain.
        """
        state = self.windows[ref]
        few = self._folding is not None and state.executed_seq >= 0 and state.news * FEW_NEWS < state.events
        return not few

    @property
    def lateness(self) -> Lateness:
        """What was learnt of how late events come."""
        return self._bound.lateness

    def active_slices(self) -> tuple[int, ...]:
        """Slices of the windows that have not ended, those first that are needed soonest."""
        ends = {
            s: [ref.end_us for ref in refs if ref in self.windows and self.windows[ref].status is Status.ACTIVE]
            for s, refs in self.slices.items()
        }
        soonest = sorted((min(found), s) for s, found in ends.items() if found)
        first = [s for _, s in soonest]
        return (
            *first,
            *self._keyed_slices.between(self.keyed.active_from_us(self.watermark.at_us), NEVER, but=set(first)),
        )

    @property
    def next_due_us(self) -> int | None:
        """The next watermark at which something happens without any new event; None when nothing will."""
        self._pass_over()
        dues = [due for due in self._late_dues().values() if due is not None]
        keyed = self.keyed.next_due_us(self.watermark.at_us, self.watermark.step_us)
        dues += [keyed] if keyed is not None else []
        return min([*dues, self._due[0][0]] if self._due else dues, default=None)

    def _late_dues(self) -> dict[WindowRef, int | None]:
        """The watermarks at which the trigger wants to look again at late windows with news, whatever comes."""
        later = {ref: self._trigger.next_due_us(self._view(ref)) for ref in self._stirred}
        return {ref: None if us is None else ref.end_us + us for ref, us in later.items()}

    def _pass_over(self) -> None:
        """Drops entries at the head of the heap that events have overtaken."""
        while self._due and not self._is_due_at(*self._due[0]):
            heappop(self._due)

    def _is_due_at(self, due_us: int, ref: WindowRef) -> bool:
        """Whether an entry of the heap still says what happens to a window next."""
        state = self.windows.get(ref)
        return state is not None and due_us == state.due_us(ref)

    def _due_by(self, watermark_us: int) -> list[WindowRef]:
        """Windows to which something happens up to there; only that part of the heap is looked at."""
        self._pass_over()
        found: set[WindowRef] = set()
        at = [0] if self._due else []
        while at:
            i = at.pop()
            if self._due[i][0] <= watermark_us:
                if self._is_due_at(*self._due[i]):
                    found.add(self._due[i][1])
                at += [child for child in (2 * i + 1, 2 * i + 2) if child < len(self._due)]
        return sorted(found, key=lambda ref: (ref.end_us, ref))

    def _expect(self, ref: WindowRef) -> None:
        heappush(self._due, (self.windows[ref].due_us(ref), ref))

    # -- events -------------------------------------------------------------------------------------------

    def _arrived(self, blocks: Sequence[BlockFact], rows: Arrivals | None = None) -> list[Action | Order]:
        actions: list[Action | Order] = []
        stirred: set[WindowRef] = set()
        verdict = self.keyed.judge(rows, self.watermark.at_us) if rows is not None else NOT_KEYED
        seqs: dict[int, int] = {}
        for index, block in enumerate(blocks):
            self.counters.came(block.events)
            if not is_timed(block.slice_us):
                self.counters.drop(block.events)
                actions.append(EmitDropped(index, None, None, UNTIMED[block.slice_us]))
                continue
            takers, too_late = self._windows_for(block)
            self.counters.drop(block.events if too_late else verdict.dropped_events.get(index, 0))
            actions += [
                EmitDropped(index, ref, lateness, "later than the window's bound") for ref, lateness in too_late
            ]
            if not takers and index not in verdict.blocks:
                self.counters.came_late(block.events)
                continue
            seq = seqs[index] = self.next_seq
            self.next_seq += 1
            late = 0
            for ref in takers:
                state = self.windows[ref]
                state.last_seq = seq
                state.came(block.events, late=state.status is Status.LATE)
                if state.status is Status.LATE:
                    late += 1
                    self._stirred.add(ref)
                    if self._prestages_late and (self._prestages_due or state.news == block.events):
                        # The first late event since the last execution announces the next one.
                        stirred.add(ref)
                    self._observe_late(ref, block.events)
            if late or too_late:
                self.counters.came_late(block.events)
            if block.slice_us not in self.slices:
                self.slices[block.slice_us] = takers
            if self._folding is not None:
                self._folding.arrived(block.slice_us, seq, block.size_bytes, verdict.wasted_rows.get(index, 0))
            if self.watermark.at_us is not None:
                self._bound.observe_state(block.slice_us, self.watermark.at_us, block.size_bytes)
            settled = index not in verdict.blocks or self.grid.end(block.slice_us) <= self._settled_us
            actions.append(Append(index, block.slice_us, seq, late == len(takers) and settled))
        actions += verdict.dropped
        if rows is not None:
            late = self.keyed.add(verdict, seqs, self.watermark.at_us)
            if not self.grid.periodic:
                self.counters.came_late(late)
        if self._prestages_due:
            due = {ref for ref in stirred if self._trigger.due(self._view(ref))}
            stirred = {ref for ref in stirred if ref in due or not self._is_read_whole(ref)}
        if stirred:
            actions.append(Prestage(tuple(sorted({s for ref in stirred for s in self._slices_of(ref)}))))
        return actions

    def _windows_for(self, block: BlockFact) -> tuple[list[WindowRef], list[tuple[WindowRef, int]]]:
        """The windows that take the block, made where they are new, and those that it is too late for."""
        known = self.slices.get(block.slice_us)
        now = self.watermark.at_us
        takers: list[WindowRef] = []
        too_late: list[tuple[WindowRef, int]] = []
        for ref in self._refs(block.slice_us):
            if ref in self.windows:
                takers.append(ref)
                continue
            bound_us = self._bound.bound_for_new_window()
            # What is gone never comes back, even if bounds got longer since. And all windows of a slice are made,
            # or found gone, with its first block: one that is missing from a live slice is gone.
            gone = known is not None or ref in self._gone
            if gone or self.watermark.passed(ref.end_us + bound_us):
                assert now is not None
                self._bound.observe(ref.end_us, now, block.events)
                too_late.append((ref, now - ref.end_us))
                continue
            state = WindowState(bound_us, reason=self._bound.reason_for_new_window())
            if self.watermark.passed(ref.end_us):
                state.move("end_passed")
                state.late_from_seq = 0
            self.windows[ref] = state
            self._expect(ref)
            self.counters.windows += 1
            takers.append(ref)
        return takers, too_late

    def _refs(self, slice_us: int) -> list[WindowRef]:
        return [
            WindowRef(number, start, self.grid.periodic[number].end(start))
            for number, start in self.grid.covering(slice_us)
        ]

    def _observe_late(self, ref: WindowRef, events: int) -> None:
        assert self.watermark.at_us is not None
        self._bound.observe(ref.end_us, self.watermark.at_us, events)

    def _lateness_of(self, ref: WindowRef) -> int:
        """The watermark minus the window's end."""
        assert self.watermark.at_us is not None, "nothing is late without a watermark"
        return self.watermark.at_us - ref.end_us

    def _advanced(self, to_us: int) -> list[Action | Order]:
        before_us, to_us = self.watermark.at_us, within(to_us)
        if not self.watermark.advance(to_us):
            return []
        # What came until here is complete up to where the watermark was: what is decided from it holds from now on.
        self._bound.advance(before_us, to_us)
        self._gone.close(to_us - self._bound.bound_for_new_window())
        actions: list[Action | Order] = []
        expired = [ref for ref in self._due_by(to_us) if self.windows[ref].status is Status.ACTIVE]
        for ref in expired:
            state = self.windows[ref]
            state.move("end_passed")
            self._expect(ref)
            state.late_from_seq = self.next_seq
            self._bound.observe_on_time(ref.end_us, state.events)
            actions.append(self._execute(ref, state, Kind.ON_TIME))
        if expired:
            actions += self._destage(expired)
        gone = self._due_by(to_us)
        for ref in gone:
            state = self.windows[ref]
            state.move("bound_passed")
            if state.news:
                actions.append(self._execute(ref, state, Kind.FINAL))
        actions += self._placed(self.keyed.advance(before_us, to_us))
        if gone:
            actions += self._purge(gone)
        if self.keyed:
            actions += self._settle()
        ended = [s for a in actions if isinstance(a, Destage) for s in a.slices]
        return actions + self._folds(ended + self._keyed_slices.swept(self._folding))

    def _batch_ended(self, last: bool) -> list[Action | Order]:
        due = [ref for ref in self._stirred if last or self._trigger.due(self._view(ref))]
        for ref in self._stirred.difference(due):
            self.windows[ref].look(self._lateness_of(ref))
        due.sort(key=lambda ref: (ref.end_us, ref))
        actions: list[Action | Order] = [self._execute(ref, self.windows[ref], Kind.LATE) for ref in due]
        actions += self._placed(self.keyed.batch_ended(self.watermark.at_us, self.watermark.step_us, last=last))
        folds = self._folds(self._folding.touched()) if self._folding is not None else []
        # What was staged for a late execution is let go after it (paper 3.2).
        return actions + folds + self._destage(due)

    def _folds(self, slices: Iterable[int]) -> list[Action]:
        """What to fold in these slices, as far as they are kept."""
        if self._folding is None:
            return []
        actions: list[Action] = []
        for s in dict.fromkeys(s for s in slices if s in self.slices and self._folding.may_fold(s)):
            states = [self.windows[ref] for ref in self.slices[s] if ref in self.windows]
            # Blocks are told apart by what a window has executed and by what is late for it. Whatever will tell more
            # of them apart is yet to come: the next execution is over all there is, and lateness begins with the next.
            cuts = {state.executed_seq + 1 for state in states} | {state.late_from_seq for state in states}
            # Windows of single keys tell none apart: they have all of a key's rows from their first event to the last.
            ended = all(state.status is not Status.ACTIVE for state in states) and self._is_settled(s)
            sweeps = bool(self.keyed) and not states
            actions += self._folding.due(s, (c for c in cuts if 0 < c < NEVER), ended=ended, sweeps=sweeps)
        return actions

    def _view(self, ref: WindowRef) -> LateView:
        """A late window as its trigger sees it."""
        return self.windows[ref].view(self._lateness_of(ref), self.watermark.step_us)

    def _execute(self, ref: WindowRef, state: WindowState, kind: Kind) -> Execute:
        action = Execute(
            ref,
            kind,
            state.panes,
            self._slices_of(ref),
            state.executed_seq,
            state.late_from_seq,
            state.events,
            state.late_events,
            state.stale(self._lateness_of(ref)) / state.all_staleness if state.all_staleness else 0.0,
        )
        state.executed(self._lateness_of(ref), on_time=kind is Kind.ON_TIME)
        self._stirred.discard(ref)
        self.counters.executions[kind.value] += 1
        return action

    def _slices_of(self, ref: WindowRef) -> tuple[int, ...]:
        return self.slices.between(ref.start_us, ref.end_us)

    def _destage(self, expired: Sequence[WindowRef]) -> list[Action]:
        """A slice is destaged once no active window needs it any more."""
        slices = sorted({s for ref in expired for s in self._slices_of(ref)})
        free = [s for s in slices if self._is_free(s) and self._is_settled(s)]
        return [Destage(tuple(free))] if free else []

    def _is_settled(self, slice_us: int) -> bool:
        """Whether all windows of single keys that may need the slice have ended."""
        return not self.keyed or self.grid.end(slice_us) <= self._settled_us

    def _is_free(self, slice_us: int) -> bool:
        return all(self.windows[ref].status is not Status.ACTIVE for ref in self.slices[slice_us])

    def _purge(self, gone: Sequence[WindowRef]) -> list[Action]:
        touched = sorted({s for ref in gone for s in self._slices_of(ref)})
        for ref in gone:
            state = self.windows.pop(ref)
            state.move("purge")
            self.counters.staleness.observe(state, self._staleness_bound)
            self._gone.add(ref)
            self.counters.purged_windows += 1
        for s in touched:
            self.slices[s] = [ref for ref in self.slices[s] if ref in self.windows]
        return [] if self.keyed else self._free(touched)

    def _free(self, slices: Iterable[int]) -> list[Action]:
        """Lets go of those that no window needs any more."""
        free = self._keyed_slices.unneeded(slices)
        for s in free:
            del self.slices[s]
        if self._folding is not None:
            self._folding.forget(free)
        return [Purge(tuple(free))] if free else []

    # -- windows of single keys ---------------------------------------------------------------------------

    def _placed(self, orders: Orders) -> list[Order]:
        """Orders of keyed windows, with the slices that their rows are in."""
        for order in orders:
            if isinstance(order, ExecuteKeyed):
                self.counters.executions[order.kind.value] += len(order.windows)
            else:
                self.counters.retracted += len(order.windows)
        return self._keyed_slices.placed(orders)

    def _settle(self) -> list[Action]:
        """What no window needs any more is let go; what only late windows need is let go from memory."""
        before_us, self._settled_us = self._settled_us, self.keyed.active_from_us(self.watermark.at_us)
        near = self._keyed_slices.between(before_us, self._settled_us)
        ended = [s for s in near if self.grid.end(s) <= self._settled_us and self._is_free(s)]
        actions: list[Action] = [Destage(tuple(ended))] if ended else []
        return actions + self._free(sorted(self.slices))

    # -- snapshot -----------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Everything that a restart needs, as JSON values; columns instead of one object per window."""
        refs = sorted(self.windows)
        names = {"definition": [ref.definition for ref in refs], "start_us": [ref.start_us for ref in refs]}
        return {
            "version": SNAPSHOT_VERSION,
            "watermark_us": self.watermark.at_us,
            "watermark_step_us": self.watermark.step_us,
            "next_seq": self.next_seq,
            "windows": windows_to_json(names, [self.windows[ref] for ref in refs]),
            "slices": slices_to_json(self.slices),
            "settled_us": self._settled_us,
            "runs": self._folding.to_json() if self._folding is not None else None,
            **self._gone.to_json(),
            "lateness": self._bound.to_json(),
            "trigger": self._trigger.to_json(),
            "counters": self.counters.to_json(),
            "keyed": self.keyed.snapshot(),
        }

    def _restore(self, snapshot: Mapping[str, Any]) -> None:
        self.watermark = Watermark(snapshot["watermark_us"], snapshot["watermark_step_us"])
        self.next_seq = snapshot["next_seq"]
        for (number, start), state in windows_from_json(snapshot["windows"], "definition", "start_us"):
            ref = WindowRef(number, start, self.grid.periodic[number].end(start))
            self.windows[ref] = state
            self._expect(ref)
        self._stirred = {ref for ref, state in self.windows.items() if state.status is Status.LATE and state.news}
        for s in slices_from_json(snapshot["slices"]):
            self.slices[s] = [ref for ref in self._refs(s) if ref in self.windows]
        self._settled_us = snapshot.get("settled_us", -NEVER)
        self.counters = Counters.from_json(snapshot["counters"])

    def validate(self) -> None:
        """Every cross-collection invariant; raises AssertionError with the story."""
        for s, refs in self.slices.items():
            assert refs or self.keyed, f"slice {s} is kept for nobody"
            for ref in refs:
                assert ref in self.windows, f"slice {s} names {ref}, which is gone"
                assert ref.start_us <= s < ref.end_us, f"slice {s} lies outside of {ref}"
        expected = {ref for due_us, ref in self._due if self._is_due_at(due_us, ref)}
        assert expected == set(self.windows), "every window waits for what happens to it next"
        stirred = {ref for ref, state in self.windows.items() if state.status is Status.LATE and state.news}
        assert self._stirred == stirred, "late windows with news, and no others, wait for the trigger"
        for ref, state in self.windows.items():
            assert state.status in (Status.ACTIVE, Status.LATE), f"{ref} is {state.status} and still kept"
            assert (state.status is Status.LATE) == self.watermark.passed(ref.end_us), f"{ref}: {state}"
            assert not self.watermark.passed(ref.end_us + state.bound_us), f"{ref} outlived its bound"
            assert state.executed_seq <= state.last_seq < self.next_seq, f"{ref}: {state}"
            assert (state.news > 0) == (state.last_seq > state.executed_seq), f"{ref}: {state}"
            assert self._slices_of(ref), f"{ref} has no slice"
