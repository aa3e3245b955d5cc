"""An operator and its restored copy do the same, whatever comes in whatever order."""

from __future__ import annotations

from collections import Counter

import numpy as np
import orjson
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from aion.core.compaction import BlockFact
from aion.core.life.actions import (
    Action,
    Append,
    Arrived,
    BatchEnded,
    EmitDropped,
    EmitUntimed,
    Event,
    Execute,
    PaneKind,
    SliceFacts,
    WatermarkAdvanced,
    WindowRef,
)
from aion.core.periodic import Cumulative, Periodic, Sliding, Tumbling
from aion.core.slicing.grid import NO_SLICE, SliceGrid
from tests.durations import us
from tests.examples import some
from tests.operators import executes, make, purged, said, windows_of

GRIDS = [
    (Tumbling(us(10)),),
    (Sliding(us(20), us(10)),),
    (Sliding(us(25), us(10), us(3)),),
    (Tumbling(us(10)), Tumbling(us(30)), Sliding(us(40), us(20))),
    (Tumbling(us(7)), Tumbling(us(10), us(3)), Sliding(us(25), us(15))),
    (Cumulative(us(10), us(40), us(5)),),
    (Cumulative(us(10), us(30)), Tumbling(us(15)), Cumulative(us(4), us(12))),
]


class OperatorMachine(RuleBasedStateMachine):
    """Gives the same facts to two operators. One of them is saved and restored now and then.

    A ledger beside them says what their orders must be: numbers of events, panes, what is gone.
    """

    def __init__(self, windows: tuple[Periodic, ...], bound: int, segmented: bool) -> None:
        super().__init__()
        self.windows, self.bound, self.segmented = windows, bound, segmented
        self.operator = make(*self.windows, bound=self.bound, segmented=segmented)
        self.restored = make(*self.windows, bound=self.bound, segmented=segmented)
        self.grid = SliceGrid(self.windows, segmented=segmented)
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
            WindowRef(n, start, end)
            for n, window in enumerate(self.windows)
            for start, end in window.covering(slice_us)
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
            assert {w for a in drops for w in windows_of(a) if w.start_us <= slice_us < w.end_us} == too_late
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
        """Checks that every window has run in the end, and that its last pane stands for all its events."""
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
