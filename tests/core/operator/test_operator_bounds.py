"""What happens at the bound of a window: it runs a last time, its slices go, and later events are dropped."""

from __future__ import annotations

import itertools

import pytest

from aion.core.compaction import BlockCompaction
from aion.core.lateness.sketch import bin_of
from aion.core.life.actions import (
    Append,
    EmitDropped,
    Execute,
    PaneKind,
    Purge,
    WindowRef,
)
from aion.core.packing import untable
from aion.core.periodic import Tumbling
from aion.core.slicing.grid import SliceGrid
from aion.core.timed.purged import Runs
from tests.durations import us
from tests.operators import (
    advance,
    arrive,
    bound_of,
    dropped,
    end_batch,
    executed,
    kinds,
    make,
    operator_of,
    purged,
    windows_of,
)

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
    assert operator.counters.executions == {"early": 0, "on_time": 1, "late": 0, "final": 0}


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
    advance(operator, 0)  # windows that ended before the first watermark teach nothing about lateness
    arrive(operator, 0)
    advance(operator, 110)
    (drop,) = arrive(operator, 0, events=7)
    assert isinstance(drop, EmitDropped)
    assert (drop.blocks, windows_of(drop), drop.lateness_us.tolist()) == ((0,), [WindowRef(0, 0, 10)], [100])
    end_batch(operator)
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
    operator = make(Tumbling(us(10)), Tumbling(us(40)), bound=5)
    arrive(operator, 0, 10)
    assert purged(advance(operator, 15)) == []
    assert purged(advance(operator, 44)) == []
    assert purged(advance(operator, 45)) == [0, 10]


def test_an_event_can_be_dropped_for_one_window_and_taken_by_another() -> None:
    operator = make(Tumbling(us(10)), Tumbling(us(40)), bound=5)
    arrive(operator, 0)
    advance(operator, 20)
    drop, append, other = arrive(operator, 0, 10)
    assert isinstance(drop, EmitDropped)
    assert (drop.blocks, windows_of(drop), drop.lateness_us.tolist()) == ((0,), [WindowRef(0, 0, 10)], [10])
    assert (append, other) == (Append(0, 0, 1, False), Append(1, 10, 2, False))
    end_batch(operator)
    assert operator.counters.dropped == 1
    (row,) = [i for i, ref in enumerate(operator.windows.refs()) if ref == WindowRef(1, 0, 40)]
    assert WindowRef(0, 0, 10) not in operator.windows.refs()
    assert operator.windows["events"][row] == 3


def test_what_is_purged_does_not_come_back() -> None:
    operator = make(Tumbling(us(10)), Tumbling(us(40)), bound=5)
    arrive(operator, 0)
    advance(operator, 15)
    for _ in range(2):
        assert [w for d in dropped(arrive(operator, 0)) for w in windows_of(d)] == [WindowRef(0, 0, 10)]
        assert executed(end_batch(operator)) == []
    assert executed(advance(operator, 40)) == [("on_time", 0, 0)]


def test_a_longer_bound_after_a_restart_does_not_bring_purged_windows_back() -> None:
    """Its panes are out. A new pane would replace them and hold only the later events."""
    operator = make(bound=0)
    arrive(operator, 0, events=5)
    advance(operator, 10)
    restarted = make(bound=1000, snapshot=operator.snapshot())
    assert kinds(arrive(restarted, 0)) == [EmitDropped]


def test_a_longer_bound_after_a_restart_does_not_make_windows_that_events_were_dropped_for() -> None:
    """The earlier block of the slice was dropped for the short window, so no pane of that window may hold it."""
    operator = make(Tumbling(us(10)), Tumbling(us(40)), bound=5)
    advance(operator, 20)
    assert [w for d in dropped(arrive(operator, 0)) for w in windows_of(d)] == [WindowRef(0, 0, 10)]
    restarted = make(Tumbling(us(10)), Tumbling(us(40)), bound=1000, snapshot=operator.snapshot())
    assert [w for d in dropped(arrive(restarted, 0)) for w in windows_of(d)] == [WindowRef(0, 0, 10)]


def test_a_longer_bound_does_not_bring_back_what_the_shorter_one_went_by() -> None:
    """It does not matter whether the window ever got an event."""
    operator = make(bound=5)
    advance(operator, 30)
    restarted = make(bound=1000, snapshot=operator.snapshot())
    (drop,) = dropped(arrive(restarted, 0, 10))
    assert (drop.blocks, windows_of(drop)) == ((0, 1), [WindowRef(0, 0, 10), WindowRef(0, 10, 20)])
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


def test_what_is_remembered_of_windows_that_are_gone_is_the_same_in_any_order() -> None:
    for order in itertools.permutations([0, 10, 20, 30, 50]):
        runs = Runs(10)
        for value in order:
            runs.add(value)
        assert runs.to_json() == [[0, 30], [50, 50]]
        assert [value for value in range(-10, 70, 10) if value in runs] == [0, 10, 20, 30, 50]
        runs.forget_to(15)
        assert Runs(10, map(tuple, runs.to_json())).to_json() == [[20, 30], [50, 50]]


def test_of_slices_that_are_gone_no_run_is_remembered() -> None:
    """Otherwise each version would be a bit larger than the one before."""
    compaction, bound = BlockCompaction(open_too=True), bound_of(10)
    operator = operator_of(SliceGrid((Tumbling(us(10)),), segmented=False), bound, compaction=compaction)
    arrive(operator, 0, 10)
    advance(operator, 20)
    assert purged(end_batch(operator)) == [] and untable(operator.snapshot()["runs"])["slice"] == [10]
    advance(operator, 30)
    assert untable(operator.snapshot()["runs"])["slice"] == []


def test_the_bound_of_a_window_is_fixed_when_it_is_made() -> None:
    operator = make(bound=100)
    arrive(operator, 0)
    restarted = make(bound=10, snapshot=operator.snapshot())
    arrive(restarted, 10)
    advance(restarted, 30)
    assert restarted.windows.refs() == [WindowRef(0, 0, 10)], "the other one was made with the shorter bound"
    assert kinds(arrive(restarted, 0)) == [Append]


def test_what_came_in_time_was_not_stale() -> None:
    """The watermark may jump far past an end before the on-time execution. None of the events before it was late."""
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


# -- lateness ---------------------------------------------------------------------------------------------------


def test_lateness_counts_from_the_end_of_the_window() -> None:
    operator = make(bound=1000)
    advance(operator, 0)
    arrive(operator, 0)
    advance(operator, 17)
    arrive(operator, 0, events=5)
    assert operator.lateness.counts == {bin_of(7): 5}
