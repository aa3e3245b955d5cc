"""The life of a window: every row of its table by name, then everything in any order."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from aion.core.compaction.blocks import BlockFact
from aion.core.lateness.bound import AdaptiveBound
from aion.core.lateness.sketch import bin_of
from aion.core.numbers import EARLIEST_US, LATEST_US
from aion.core.operator.actions import (
    Action,
    Append,
    Arrived,
    BatchEnded,
    Destage,
    EmitDropped,
    EmitUntimed,
    Event,
    Execute,
    Execution,
    PaneKind,
    Purge,
    SliceFacts,
    WatermarkAdvanced,
    WindowRef,
)
from aion.core.operator.lifecycle import TRANSITIONS, Status
from aion.core.operator.operator import Operator
from aion.core.operator.watermark import Watermark
from aion.core.slicing.grid import NO_SLICE, SliceGrid
from aion.core.trigger.triggers import EveryBatchTrigger
from aion.core.windows import Periodic, Sliding, Tumbling
from policies.cleanup import Cleanup
from tests.examples import some


def bound_of(bound_us: int, snapshot: dict[str, Any] | None = None) -> AdaptiveBound:
    """The same for every window."""
    return AdaptiveBound(Cleanup(bound_us, coverage=None), snapshot=snapshot["lateness"] if snapshot else None)


def make(
    *windows: Periodic, bound: int = 100, snapshot: dict[str, Any] | None = None, segmented: bool = False
) -> Operator:
    grid = SliceGrid(windows or (Tumbling(10),), segmented=segmented)
    return Operator(grid, bound=bound_of(bound, snapshot), trigger=EveryBatchTrigger(), snapshot=snapshot)


def arrive(operator: Operator, *slices: int, events: int = 1) -> list[Action]:
    return handle(operator, Arrived([BlockFact(s, events, 64) for s in slices]))


def advance(operator: Operator, to: int) -> list[Action]:
    return handle(operator, WatermarkAdvanced(to))


def end_batch(operator: Operator) -> list[Action]:
    return handle(operator, BatchEnded())


def handle(operator: Operator, event: Event) -> list[Action]:
    """What is ordered, but for hints about what will be needed soon: they change no pane."""
    actions = operator.handle(event)
    operator.validate()
    return [a for a in actions if isinstance(a, Append | EmitUntimed | EmitDropped | Execute | Destage | Purge)]


def executes(actions: Sequence[Action]) -> list[Execution]:
    return [execution for a in actions if isinstance(a, Execute) for execution in a]


def said(actions: Sequence[Action]) -> list[Any]:
    """Actions as values that can be compared."""
    plain = [(a.kind, a.slices, *a) if isinstance(a, Execute) else a for a in actions]
    return [(a.blocks, a.windows(), a.lateness_us.tolist()) if isinstance(a, EmitDropped) else a for a in plain]


def executed(actions: Sequence[Action]) -> list[tuple[str, int, int]]:
    """(kind, window start, pane) of every execution, in order."""
    return [(a.kind.value, a.window.start_us, a.pane) for a in executes(actions)]


def kinds(actions: Sequence[Action]) -> list[type]:
    return [type(a) for a in actions]


def dropped(actions: Sequence[Action]) -> list[EmitDropped]:
    return [a for a in actions if isinstance(a, EmitDropped)]


def purged(actions: Sequence[Action]) -> list[int]:
    return [s for a in actions if isinstance(a, Purge) for s in a.slices]


# -- in time ----------------------------------------------------------------------------------------------


def test_blocks_are_kept_under_numbers_that_only_grow() -> None:
    operator = make()
    assert arrive(operator, 0, 20, 0) == [Append(0, 0, 0, False), Append(1, 20, 1, False), Append(2, 0, 2, False)]
    assert arrive(operator, 0) == [Append(0, 0, 3, False)]


def test_a_window_runs_on_time_exactly_at_its_end() -> None:
    operator = make()
    arrive(operator, 0, events=3)
    assert advance(operator, 9) == []
    execute, destage = advance(operator, 10)
    assert isinstance(execute, Execute) and execute.slices == (0,)
    assert [*execute] == [
        Execution(WindowRef(0, 0, 10), PaneKind.ON_TIME, 0, changed_since=-1, late_from=1, events=3, late_events=0)
    ]
    assert destage == Destage((0,))
    assert advance(operator, 11) == []


def test_windows_run_in_the_order_of_their_ends() -> None:
    operator = make(Tumbling(10), Sliding(30, 10))
    arrive(operator, 20, 0, 10)
    runs = [a.window for a in executes(advance(operator, 1000))]
    assert [w.end_us for w in runs] == sorted(w.end_us for w in runs)
    assert runs == sorted(runs, key=lambda w: (w.end_us, w.definition, w.start_us))


def test_a_window_that_nothing_came_for_does_not_exist() -> None:
    operator = make()
    assert advance(operator, 1000) == []
    arrive(operator, 1000)
    assert executed(advance(operator, 5000)) == [("on_time", 1000, 0)]
    assert operator.counters.windows == 1


def test_a_slice_is_destaged_when_its_last_window_has_expired() -> None:
    operator = make(Sliding(20, 10))
    arrive(operator, 0)
    assert executed(advance(operator, 10)) == [("on_time", -10, 0)]
    execute, destage = advance(operator, 20)
    assert isinstance(execute, Execute) and destage == Destage((0,))


def test_a_sliding_window_is_executed_over_all_of_its_slices() -> None:
    operator = make(Sliding(25, 10))
    arrive(operator, 5, 10, 15, 20, 25)
    (order,) = [a for a in advance(operator, 35) if isinstance(a, Execute)]
    assert [a.window.start_us for a in order] == [-10, 0, 10]
    assert order.slices == (5, 10, 15, 20, 25)


# -- the watermark ------------------------------------------------------------------------------------------


def test_a_watermark_that_goes_back_or_stands_still_changes_nothing() -> None:
    operator = make()
    arrive(operator, 0, 30)
    advance(operator, 20)
    before = operator.snapshot()
    assert advance(operator, 5) == advance(operator, 20) == []
    assert operator.snapshot() == before


def test_without_a_watermark_nothing_is_late() -> None:
    operator = make(bound=0)
    assert arrive(operator, -(10**15), 10**15) == [Append(0, -(10**15), 0, False), Append(1, 10**15, 1, False)]
    assert end_batch(operator) == []


@given(st.lists(st.integers(EARLIEST_US, LATEST_US)))
def test_a_watermark_is_the_largest_of_all(instants: list[int]) -> None:
    watermark = Watermark()
    for i, t in enumerate(instants):
        assert watermark.advance(t) == all(t > earlier for earlier in instants[:i])
        assert watermark.at_us == max(instants[: i + 1])
        assert watermark.passed(t) and not watermark.passed(watermark.at_us + 1)


# -- late ---------------------------------------------------------------------------------------------------


def test_a_late_block_goes_to_disk_and_runs_its_window_again_at_the_end_of_the_batch() -> None:
    operator = make()
    arrive(operator, 0, events=3)
    advance(operator, 12)
    assert arrive(operator, 0, events=2) == [Append(0, 0, 1, True)]
    assert executes(end_batch(operator)) == [
        Execution(WindowRef(0, 0, 10), PaneKind.LATE, 1, changed_since=0, late_from=1, events=5, late_events=2)
    ]
    assert operator.counters.late_events == 2


def test_a_late_window_does_not_run_without_news() -> None:
    operator = make()
    arrive(operator, 0)
    advance(operator, 12)
    assert end_batch(operator) == []
    arrive(operator, 0)
    end_batch(operator)
    assert end_batch(operator) == []


def test_the_first_events_of_a_window_may_all_be_late() -> None:
    operator = make()
    advance(operator, 50)
    assert arrive(operator, 0, events=2) == [Append(0, 0, 0, True)]
    assert executes(end_batch(operator)) == [
        Execution(
            WindowRef(0, 0, 10),
            PaneKind.LATE,
            0,
            changed_since=-1,
            late_from=0,
            events=2,
            late_events=2,
            staleness=0.4,
        )
    ]
    assert executed(advance(operator, 110)) == []


def test_a_block_that_is_late_for_some_windows_only_stays_in_memory() -> None:
    operator = make(Tumbling(10), Tumbling(20))
    arrive(operator, 0)
    advance(operator, 10)
    assert arrive(operator, 0) == [Append(0, 0, 1, False)]
    assert executed(end_batch(operator)) == [("late", 0, 1)]
    assert operator.counters.late_events == 1, "an event that is late for one of its windows is a late one, once"
    advance(operator, 20)
    assert arrive(operator, 0) == [Append(0, 0, 2, True)]


def test_panes_are_numbered_per_window() -> None:
    operator = make()
    arrive(operator, 0, 10)
    found = executed(advance(operator, 20))
    for _ in range(2):
        arrive(operator, 0)
        found += executed(end_batch(operator))
    arrive(operator, 10)
    found += executed(advance(operator, 120))
    assert found == [("on_time", 0, 0), ("on_time", 10, 0), ("late", 0, 1), ("late", 0, 2), ("final", 10, 1)]


# -- final, and after ---------------------------------------------------------------------------------------


def test_a_window_runs_a_last_time_when_its_bound_has_passed_and_something_came() -> None:
    operator = make(bound=100)
    arrive(operator, 0)
    advance(operator, 10)
    arrive(operator, 0)
    assert advance(operator, 109) == []
    execute, purge = advance(operator, 110)
    assert isinstance(execute, Execute) and (execute.kind, *execute.pane) == (PaneKind.FINAL, 1)
    assert purge == Purge((0,))
    assert not len(operator.windows) and not len(operator.segments)


def test_a_window_without_news_ends_without_a_last_execution() -> None:
    operator = make(bound=100)
    arrive(operator, 0)
    advance(operator, 10)
    assert advance(operator, 110) == [Purge((0,))]
    assert operator.counters.executions == {"on_time": 1, "late": 0, "final": 0}


def test_a_watermark_that_jumps_over_the_bound_runs_a_window_on_time_once_and_purges_it() -> None:
    operator = make(bound=100)
    arrive(operator, 0)
    actions = advance(operator, 10_000)
    assert executed(actions) == [("on_time", 0, 0)]
    assert purged(actions) == [0]


def test_on_time_windows_run_before_final_ones() -> None:
    operator = make(bound=10)
    arrive(operator, 0, 10)
    advance(operator, 10)
    arrive(operator, 0)
    assert executed(advance(operator, 20)) == [("on_time", 10, 0), ("final", 0, 1)]


def test_what_comes_later_than_the_bound_is_dropped_and_told() -> None:
    operator = make(bound=100)
    advance(operator, 0)  # windows that ended before the first watermark tell nothing of lateness
    arrive(operator, 0)
    advance(operator, 110)
    (drop,) = arrive(operator, 0, events=7)
    assert isinstance(drop, EmitDropped)
    assert (drop.blocks, drop.windows(), drop.lateness_us.tolist()) == ((0,), [WindowRef(0, 0, 10)], [100])
    assert operator.counters.dropped == operator.counters.late_events == 7
    assert sum(operator.lateness.counts.values()) == 7, "it feeds the lateness distribution"
    assert not len(operator.windows)


def test_the_last_instant_in_which_an_event_is_taken() -> None:
    operator = make(bound=100)
    advance(operator, 109)
    assert kinds(arrive(operator, 0)) == [Append]
    assert executed(advance(operator, 110)) == [("final", 0, 0)]


def test_a_bound_of_zero_has_no_late_windows() -> None:
    operator = make(bound=0)
    arrive(operator, 0)
    actions = advance(operator, 10)
    assert executed(actions) == [("on_time", 0, 0)]
    assert purged(actions) == [0]
    assert kinds(arrive(operator, 0)) == [EmitDropped]


def test_a_slice_is_purged_when_the_last_window_that_needs_it_is() -> None:
    operator = make(Tumbling(10), Tumbling(40), bound=5)
    arrive(operator, 0, 10)
    assert purged(advance(operator, 15)) == []
    assert purged(advance(operator, 44)) == []
    assert purged(advance(operator, 45)) == [0, 10]


def test_an_event_can_be_dropped_for_one_window_and_taken_by_another() -> None:
    operator = make(Tumbling(10), Tumbling(40), bound=5)
    arrive(operator, 0)
    advance(operator, 20)
    drop, append, other = arrive(operator, 0, 10)
    assert isinstance(drop, EmitDropped)
    assert (drop.blocks, drop.windows(), drop.lateness_us.tolist()) == ((0,), [WindowRef(0, 0, 10)], [10])
    assert (append, other) == (Append(0, 0, 1, False), Append(1, 10, 2, False))
    assert operator.counters.dropped == 1
    (row,) = [i for i, ref in enumerate(operator.windows.refs()) if ref == WindowRef(1, 0, 40)]
    assert WindowRef(0, 0, 10) not in operator.windows.refs()
    assert operator.windows["events"][row] == 3


def test_what_is_purged_does_not_come_back() -> None:
    operator = make(Tumbling(10), Tumbling(40), bound=5)
    arrive(operator, 0)
    advance(operator, 15)
    for _ in range(2):
        assert [w for d in dropped(arrive(operator, 0)) for w in d.windows()] == [WindowRef(0, 0, 10)]
        assert executed(end_batch(operator)) == []
    assert executed(advance(operator, 40)) == [("on_time", 0, 0)]


def test_a_longer_bound_after_a_restart_does_not_bring_purged_windows_back() -> None:
    """The window's panes are out: a new one would replace them with what came since."""
    operator = make(bound=0)
    arrive(operator, 0, events=5)
    advance(operator, 10)
    restarted = make(bound=1000, snapshot=operator.snapshot())
    assert kinds(arrive(restarted, 0)) == [EmitDropped]


def test_a_longer_bound_after_a_restart_does_not_make_windows_that_events_were_dropped_for() -> None:
    """The slice's earlier block was told as dropped for the short window, and must not be in a pane of it after all."""
    operator = make(Tumbling(10), Tumbling(40), bound=5)
    advance(operator, 20)
    assert [w for d in dropped(arrive(operator, 0)) for w in d.windows()] == [WindowRef(0, 0, 10)]
    restarted = make(Tumbling(10), Tumbling(40), bound=1000, snapshot=operator.snapshot())
    assert [w for d in dropped(arrive(restarted, 0)) for w in d.windows()] == [WindowRef(0, 0, 10)]


def test_a_longer_bound_does_not_bring_back_what_the_shorter_one_went_by() -> None:
    """As if there had been a window: whether something came for it makes no difference."""
    operator = make(bound=5)
    advance(operator, 30)
    restarted = make(bound=1000, snapshot=operator.snapshot())
    (drop,) = dropped(arrive(restarted, 0, 10))
    assert (drop.blocks, drop.windows()) == ((0, 1), [WindowRef(0, 0, 10), WindowRef(0, 10, 20)])
    assert kinds(arrive(restarted, 20)) == [Append], "which ends after what is closed"


def test_of_windows_that_are_gone_only_those_are_remembered_that_a_longer_bound_would_bring_back() -> None:
    operator = make(bound=5)
    for start in range(0, 950, 50):
        arrive(operator, start)
    advance(operator, 960)
    assert operator.snapshot()["purged"] == [[]]
    arrive(operator, 960)
    restarted = make(bound=1000, snapshot=operator.snapshot())
    advance(restarted, 980)
    assert kinds(arrive(restarted, 960)) == [EmitDropped]
    assert restarted.snapshot()["purged"] == [[[960, 960]]]
    advance(restarted, 1970)
    assert restarted.snapshot()["purged"] == [[]]
    assert kinds(arrive(restarted, 960)) == [EmitDropped]


def test_the_bound_of_a_window_is_fixed_when_it_is_made() -> None:
    operator = make(bound=100)
    arrive(operator, 0)
    restarted = make(bound=10, snapshot=operator.snapshot())
    arrive(restarted, 10)
    advance(restarted, 30)
    assert restarted.windows.refs() == [WindowRef(0, 0, 10)], "the other one was made with the shorter bound"
    assert kinds(arrive(restarted, 0)) == [Append]


def test_what_came_in_time_was_not_stale() -> None:
    """The watermark may pass an end by much before the execution on time: none of these events was late."""
    operator = make(bound=100)
    arrive(operator, 0, events=1000)
    advance(operator, 60)
    arrive(operator, 0, events=2)
    assert executed(end_batch(operator)) == [("late", 0, 1)]
    arrive(operator, 0, events=2)
    advance(operator, 70)
    assert executed(end_batch(operator)) == [("late", 0, 2)]
    advance(operator, 110)
    assert operator.counters.staleness.largest == pytest.approx(10 * 2 / (100 * 4))


# -- without a time -----------------------------------------------------------------------------------------


def test_events_without_a_time_are_dropped_with_the_reason() -> None:
    operator = make()
    arrive(operator, 0)
    assert arrive(operator, NO_SLICE, events=4) == [EmitUntimed(0, "the event time is null")]
    assert (operator.counters.events, operator.counters.dropped, operator.counters.late_events) == (5, 4, 0)
    assert not operator.lateness.counts


# -- what comes next ------------------------------------------------------------------------------------------


def test_the_next_watermark_that_matters() -> None:
    operator = make(bound=100)
    assert operator.next_due_us is None
    arrive(operator, 20, 0)
    assert operator.next_due_us == 10
    advance(operator, 10)
    assert operator.next_due_us == 30
    advance(operator, 30)
    assert operator.next_due_us == 110
    advance(operator, 1000)
    assert operator.next_due_us is None


# -- the table, and a damaged one -----------------------------------------------------------------------------


def test_the_life_of_a_window_is_a_line_without_a_way_back() -> None:
    order = [Status.ACTIVE, Status.LATE, Status.FINAL, Status.PURGED]
    assert [(source, target) for (source, _), target in TRANSITIONS.items()] == list(itertools.pairwise(order))


def test_validate_tells_what_is_wrong() -> None:
    operator = make()
    arrive(operator, 0)
    operator.windows.drop(np.ones(1, np.bool_))
    with pytest.raises(AssertionError, match="is kept for nobody"):
        operator.validate()


# -- lateness ---------------------------------------------------------------------------------------------------


def test_lateness_counts_from_the_end_of_the_window() -> None:
    operator = make(bound=1000)
    advance(operator, 0)
    arrive(operator, 0)
    advance(operator, 17)
    arrive(operator, 0, events=5)
    assert operator.lateness.counts == {bin_of(7): 5}


# -- everything in any order ------------------------------------------------------------------------------------


GRIDS = [
    (Tumbling(10),),
    (Sliding(20, 10),),
    (Sliding(25, 10, 3),),
    (Tumbling(10), Tumbling(30), Sliding(40, 20)),
    (Tumbling(7), Tumbling(10, 3), Sliding(25, 15)),
]


class OperatorMachine(RuleBasedStateMachine):
    """Two operators live the same life; one of them is snapshot and restored now and then.

    A ledger kept beside them says what an order must be: numbers of events, panes, what is gone.
    """

    def __init__(self, windows: tuple[Periodic, ...], bound: int, segmented: bool) -> None:
        super().__init__()
        self.windows, self.bound, self.segmented = windows, bound, segmented
        self.operator = make(*self.windows, bound=self.bound, segmented=segmented)
        self.restored = make(*self.windows, bound=self.bound, segmented=segmented)
        self.grid = self.operator.grid
        self.events: Counter[WindowRef] = Counter()
        self.late: Counter[WindowRef] = Counter()
        self.taken: dict[WindowRef, list[tuple[int, bool]]] = {}  # seq, and whether it came late
        self.executed: dict[WindowRef, int] = {}  # the last seq that a window was executed with
        self.panes: Counter[WindowRef] = Counter()
        self.ended: set[WindowRef] = set()
        self.slices: set[int] = set()
        self.arrived = self.gone = 0

    def both(self, event: Event) -> list[Action]:
        actions = self.operator.handle(event)
        assert said(self.restored.handle(event)) == said(actions), "a restart changes what happens next"
        self.restored.validate()
        return actions

    def refs(self, slice_us: int) -> set[WindowRef]:
        return {
            WindowRef(n, start, window.end(start))
            for n, window in enumerate(self.windows)
            for start in window.starts_covering(slice_us)
        }

    def needs(self, ref: WindowRef, segment_us: int) -> bool:
        return ref.start_us < self.grid.end(segment_us) and ref.end_us > segment_us

    def beyond(self, ref: WindowRef) -> bool:
        return self.operator.watermark.passed(ref.end_us + self.bound)

    @rule(blocks=st.lists(st.tuples(st.integers(-60, 120), st.integers(1, 5)), max_size=4))
    def arrive(self, blocks: list[tuple[int, int]]) -> None:
        slices = [max(f.floor(t) for f in self.grid.families) for t, _ in blocks]
        segments = self.grid.segments(np.array(slices, np.int64)).tolist()
        facts = [BlockFact(segment, n, 64) for segment, (_, n) in zip(segments, blocks, strict=True)]
        columns = np.array([(i, s, n) for i, (s, (_, n)) in enumerate(zip(slices, blocks, strict=True))], np.int64)
        of_slices = SliceFacts(*columns.reshape(-1, 3).T) if self.grid.has_segments else None
        actions = self.both(Arrived(facts, (), of_slices))
        for index, (slice_us, fact) in enumerate(zip(slices, facts, strict=True)):
            drops = [a for a in actions if isinstance(a, EmitDropped) and index in a.blocks]
            too_late = {ref for ref in self.refs(slice_us) if self.beyond(ref)}
            assert {w for a in drops for w in a.windows() if w.start_us <= slice_us < w.end_us} == too_late
            appends = [a for a in actions if isinstance(a, Append) and a.index == index]
            takers = self.refs(slice_us) - too_late
            assert len(appends) == bool(takers), "a block is kept once, if anybody needs it"
            for append in appends:
                self.slices.add(append.slice_us)
                late = {ref for ref in takers if self.operator.watermark.passed(ref.end_us)}
                assert append.late == (late == takers)
                for ref in takers:
                    self.taken.setdefault(ref, []).append((append.seq, ref in late))
                    self.events[ref] += fact.events
                    self.late[ref] += fact.events * (ref in late)
            self.arrived += fact.events
            self.gone += fact.events * bool(too_late)
        assert [a.seq for a in actions if isinstance(a, Append)] == sorted(
            a.seq for a in actions if isinstance(a, Append)
        )

    @rule(events=st.integers(1, 5))
    def arrive_without_time(self, events: int) -> None:
        (drop,) = self.both(Arrived([BlockFact(NO_SLICE, events, 64)]))
        assert isinstance(drop, EmitUntimed)
        self.arrived += events
        self.gone += events

    @rule(by=st.integers(-20, 60))
    def advance(self, by: int) -> None:
        to = (self.operator.watermark.at_us or 0) + by
        due = self.operator.next_due_us
        progress = self.operator.watermark.at_us is None or by > 0
        actions = self.both(WatermarkAdvanced(to))
        assert bool(actions) <= (progress and due is not None and due <= to), "nothing happens before it is due"
        if progress and due is not None and due <= to:
            assert self.operator.next_due_us is None or self.operator.next_due_us > to, "and then it has happened"
        self.check_executions(actions, {PaneKind.ON_TIME, PaneKind.FINAL})
        for slice_us in purged(actions):
            self.slices.remove(slice_us)
            assert all(self.beyond(ref) for ref in self.taken if self.needs(ref, slice_us))
        self.ended |= {ref for ref in self.taken if self.beyond(ref)}

    @rule()
    def end_batch(self) -> None:
        self.check_executions(self.both(BatchEnded()), {PaneKind.LATE})

    def check_executions(self, actions: list[Action], allowed: set[PaneKind]) -> None:
        orders = [a for a in actions if isinstance(a, Execute)]
        assert [a.kind for a in orders] == sorted((a.kind for a in orders), key=[*PaneKind].index), "on-time ones first"
        for order in orders:
            wanted = {s for s in self.slices if any(self.needs(run.window, s) for run in order)}
            assert set(order.slices) == wanted
        for run in executes(actions):
            ref = run.window
            assert run.kind in allowed and ref not in self.ended
            assert (run.kind is PaneKind.ON_TIME) <= (self.panes[ref] == 0)
            assert run.pane == self.panes[ref]
            assert (run.events, run.late_events) == (self.events[ref], self.late[ref])
            known = self.executed.get(ref, -1)
            assert all((seq > run.changed_since) == (seq > known) for seq, _ in self.taken[ref])
            self.executed[ref] = self.taken[ref][-1][0]
            assert run.changed_since < self.executed[ref], "never without news"
            assert all((seq >= run.late_from) == late for seq, late in self.taken[ref])
            self.panes[ref] += 1

    @rule()
    def restart(self) -> None:
        snapshot = orjson.loads(orjson.dumps(self.restored.snapshot()))
        self.restored = make(*self.windows, bound=self.bound, snapshot=snapshot, segmented=self.segmented)
        self.restored.validate()
        assert self.restored.snapshot() == snapshot

    @invariant()
    def accounts(self) -> None:
        self.operator.validate()
        counters = self.operator.counters
        assert (counters.events, counters.dropped) == (self.arrived, self.gone)
        assert counters.windows == len(self.taken)
        assert counters.purged_windows == len(self.ended)
        assert sum(counters.executions.values()) == sum(self.panes.values())
        assert set(self.operator.windows.refs()) == set(self.taken) - self.ended
        assert set(self.operator.segments) == self.slices

    def teardown(self) -> None:
        """In the end every window has run, and its last pane stood for all of its events."""
        self.check_executions(self.both(BatchEnded()), {PaneKind.LATE})
        self.check_executions(self.both(WatermarkAdvanced(10**6)), {PaneKind.ON_TIME, PaneKind.FINAL})
        assert set(self.panes) >= set(self.taken)
        assert not len(self.operator.windows) and not len(self.operator.segments)


@pytest.mark.hypothesis
@pytest.mark.parametrize("bound", [0, 30])
@pytest.mark.parametrize("segmented", [False, True], ids=["slices", "segments"])
@pytest.mark.parametrize("windows", GRIDS, ids=lambda windows: ", ".join(map(str, windows)))
def test_any_life(windows: tuple[Periodic, ...], segmented: bool, bound: int) -> None:
    if segmented and not SliceGrid(windows).has_segments:
        pytest.skip("each slice is a segment")
    run_state_machine_as_test(lambda: OperatorMachine(windows, bound, segmented), settings=some(1 / 2))
