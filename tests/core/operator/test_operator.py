"""Windows run on time, late ones run again, and the watermark moves only forward."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion.base.numbers import EARLIEST_US, LATEST_US
from aion.core.life.actions import (
    Append,
    Destage,
    EmitUntimed,
    Execute,
    Execution,
    PaneKind,
    WindowRef,
)
from aion.core.life.lifecycle import TRANSITIONS, Status, Watermark
from aion.core.periodic import Sliding, Tumbling
from aion.core.slicing.grid import NO_SLICE
from tests.durations import us
from tests.operators import advance, arrive, end_batch, executed, executes, make

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
        Execution(
            WindowRef(0, 0, 10),
            PaneKind.ON_TIME,
            0,
            changed_since=-1,
            late_from=1,
            events=3,
            late_events=0,
            closes_us=110,
        )
    ]
    assert destage == Destage((0,))
    assert advance(operator, 11) == []


def test_windows_run_in_the_order_of_their_ends() -> None:
    operator = make(Tumbling(us(10)), Sliding(us(30), us(10)))
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
    operator = make(Sliding(us(20), us(10)))
    arrive(operator, 0)
    assert executed(advance(operator, 10)) == [("on_time", -10, 0)]
    execute, destage = advance(operator, 20)
    assert isinstance(execute, Execute) and destage == Destage((0,))


def test_a_sliding_window_is_executed_over_all_of_its_slices() -> None:
    operator = make(Sliding(us(25), us(10)))
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
        Execution(
            WindowRef(0, 0, 10), PaneKind.LATE, 1, changed_since=0, late_from=1, events=5, late_events=2, closes_us=110
        )
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
            closes_us=110,
            staleness=0.4,
        )
    ]
    assert executed(advance(operator, 110)) == []


def test_a_block_that_is_late_for_some_windows_only_stays_in_memory() -> None:
    operator = make(Tumbling(us(10)), Tumbling(us(20)))
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
