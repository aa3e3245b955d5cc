"""Triggers: what each asks for, and what they do with streams that come as planned, and with any other."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aion.base.numbers import NEVER
from aion.core.trigger.distribution import Floats, LateDistribution
from aion.core.trigger.planner import plan
from aion.core.trigger.staleness import NothingKnown, StalenessTrigger
from aion.core.trigger.triggers import (
    CountTrigger,
    EveryBatchTrigger,
    Flags,
    IntervalTrigger,
    Ints,
    LateWindows,
    Trigger,
)
from experiments.staleness.model import Learnt, paper_distribution
from experiments.staleness.replay import Replay, replay

HOUR = 3_600_000_000

Stream = list[tuple[int, int]]

# Lateness in microseconds, also beyond the bound, and how many events come then.
streams: st.SearchStrategy[Stream] = st.lists(
    st.tuples(
        st.one_of(st.integers(0, HOUR + 10), st.sampled_from([0, 1, HOUR // 2, HOUR - 1, HOUR])), st.integers(0, 50)
    ),
    max_size=30,
)
learnt = st.builds(
    Learnt,
    st.sampled_from(["lnorm", "unif", "norm", "bursts"]).map(paper_distribution),
    st.just(HOUR),
    st.sampled_from([0.0, 3.0, 40.0, 1000.0]),
)
bounds = st.sampled_from([0.3, 0.05, 0.01])
staleness_triggers = st.one_of(
    st.builds(StalenessTrigger, bounds, forecast=st.none() | learnt),
    st.builds(lambda k, f: StalenessTrigger(executions=k, forecast=f), st.integers(1, 8), st.none() | learnt),
)
triggers = st.one_of(
    st.just(EveryBatchTrigger()),
    st.builds(IntervalTrigger, st.sampled_from([1000, HOUR // 7, HOUR // 2, 2 * HOUR])),
    st.builds(CountTrigger, st.integers(1, 60)),
    staleness_triggers,
)
# The numbers of a late window, in the order of LateWindows.
states = st.builds(
    lambda at, last, pending, before, bound_us, on_time, executions: (
        int(at * bound_us), int(at * last * bound_us), pending, pending + before, bound_us, on_time, executions
    ),
    st.floats(0, 0.999), st.sampled_from([0.0, 0.3, 0.9]), st.integers(0, 60), st.integers(0, 200),
    st.sampled_from([HOUR, HOUR // 3]), st.integers(0, 500), st.integers(0, 4),
)  # fmt: skip
steps = st.sampled_from([0, 0, HOUR // 11, HOUR // 100])


def run(trigger: Trigger, stream: Stream, *, step_us: int = 0, bound_us: int = HOUR) -> Replay:
    lateness, events = ([pair[i] for pair in stream] for i in (0, 1))
    return replay(trigger, lateness, events, bound_us=bound_us, step_us=step_us)


def one(
    lateness_us: int,
    executed_us: int,
    pending: int,
    late_events: int,
    bound_us: int = HOUR,
    on_time_events: int = 0,
    executions: int = 0,
    step_us: int = 0,
) -> LateWindows:
    """A single late window."""
    numbers = (lateness_us, executed_us, pending, late_events, bound_us, on_time_events, executions)
    return LateWindows(*(np.array([number]) for number in numbers), step_us=step_us)


def view(at: float, last: float = 0.0, pending: int = 1, late: int | None = None, **more: Any) -> LateWindows:
    """A single late window. Times are shares of an hour's bound."""
    return one(round(at * HOUR), round(last * HOUR), pending, pending if late is None else late, **more)


def is_due(trigger: Trigger, window: LateWindows, **changed: int) -> bool:
    """Whether the trigger runs a single window, with some of its numbers ``changed``."""
    (due,) = trigger.due(replace(window, **{name: np.array([number]) for name, number in changed.items()})).tolist()
    return bool(due)


def next_due_us(trigger: Trigger, window: LateWindows) -> int | None:
    """When the trigger checks a single window again."""
    (due_us,) = trigger.next_due_us(window).tolist()
    return None if due_us == NEVER else due_us


def quantiles(late: LateDistribution, events: int) -> list[int]:
    """Lateness of so many events that come just as the distribution says."""
    return [int(late.quantile((i + 0.5) / events) * HOUR) for i in range(events)]


# -- any trigger, any stream ------------------------------------------------------------------------------


@given(triggers, streams, steps)
def test_every_event_is_executed_once_and_nothing_runs_without_one(trigger: Trigger, of: Stream, step_us: int) -> None:
    done = run(trigger, of, step_us=step_us)
    assert done.events == sum(n for at, n in of if at < HOUR) == done.pending.sum()
    assert done.dropped == sum(n for at, n in of if at >= HOUR)
    assert (done.pending > 0).all()
    assert (np.diff(done.executed_us) > 0).all()
    assert (done.first_us <= done.executed_us).all()
    late = [at for at, n in of if n and at < HOUR]
    assert done.final == (bool(late) and done.executed_us[-1] == HOUR)
    before_the_purge = done.executed_us[:-1] if done.final else done.executed_us
    assert (before_the_purge < HOUR).all(), "a window is gone at its bound"
    if late and not done.final:
        assert done.executed_us[-1] >= max(late), "else something came since, and the final one is missing"


@given(triggers, streams, steps)
def test_the_order_of_a_batch_does_not_matter(trigger: Trigger, of: Stream, step_us: int) -> None:
    split = [(at, 1) for at, n in of for _ in range(n)][::-1]
    assert (
        run(trigger, split, step_us=step_us).executed_us.tolist()
        == run(trigger, of, step_us=step_us).executed_us.tolist()
    )


@given(triggers, streams)
def test_a_trigger_wants_to_look_again_later_and_before_the_bound(trigger: Trigger, of: Stream) -> None:
    for at, pending in of:
        for last in (0, at // 2):
            v = one(at, last, pending, pending + 7, executions=int(last > 0))
            if at < HOUR and not is_due(trigger, v):
                due_us = next_due_us(trigger, v)
                assert due_us is None or (pending > 0 and at < due_us < HOUR)


@given(triggers, st.lists(states, max_size=12), steps)
def test_a_trigger_decides_about_each_window_alone(trigger: Trigger, of: list[tuple[int, ...]], step_us: int) -> None:
    columns = np.array(of, np.int64).reshape(-1, 7).T
    together = LateWindows(*columns, step_us=step_us)
    alone = [one(*state, step_us=step_us) for state in of]
    assert trigger.due(together).tolist() == [is_due(trigger, window) for window in alone]
    assert trigger.next_due_us(together).tolist() == [trigger.next_due_us(window)[0] for window in alone]
    assert trigger.planned(together) == [trigger.planned(window)[0] for window in alone]


@given(staleness_triggers, st.floats(0, 0.99), st.floats(0, 1), st.integers(1, 50), st.integers(0, 50))
def test_without_an_event_a_window_is_due_when_it_was_said(
    trigger: StalenessTrigger, at: float, last: float, pending: int, before: int
) -> None:
    v = view(at, at * last, pending, pending + before, executions=1)
    if is_due(trigger, v):
        return
    due_us = next_due_us(trigger, v)
    assert not is_due(trigger, v, lateness_us=(int(v.lateness_us[0]) + (due_us or HOUR) - 1) // 2)
    if due_us is None:
        assert not is_due(trigger, v, lateness_us=HOUR - 1) or trigger.staleness(v) == 0
    else:
        assert is_due(trigger, v, lateness_us=due_us)


@given(staleness_triggers, streams, st.integers(2, 1000))
def test_the_unit_of_time_does_not_matter(trigger: StalenessTrigger, of: Stream, factor: int) -> None:
    if not isinstance(trigger.forecast, NothingKnown):
        return
    small, large = run(trigger, of), run(trigger, [(at * factor, n) for at, n in of], bound_us=HOUR * factor)
    for by_us in (-2, 2):  # where an event comes just before or after an execution, the rounding decides
        moved = run(trigger, [(max(0, at + by_us), n) for at, n in of])
        assume(
            moved.executions == small.executions and np.abs(moved.executed_us - small.executed_us).max(initial=0) < 9
        )
    assert small.executions == large.executions
    # Executions are put to the next microsecond, once for each.
    assert np.abs(small.executed_us * factor - large.executed_us).max(initial=0) <= factor * 2 * (small.executions + 1)


# -- the simple ones --------------------------------------------------------------------------------------


def test_every_batch() -> None:
    assert run(EveryBatchTrigger(), [(10, 2), (10, 1), (30, 5)]).executed_us.tolist() == [10, 30]
    assert next_due_us(EveryBatchTrigger(), view(0.5)) is None


def test_an_interval_begins_on_its_grid() -> None:
    done = run(IntervalTrigger(100), [(at, 1) for at in range(5, 350, 10)])
    assert done.executed_us.tolist() == [100, 200, 300, HOUR // 100 * 100 if HOUR % 100 else 400]
    late = run(IntervalTrigger(100), [(5, 1), (250, 1), (260, 1)])
    assert late.executed_us.tolist() == [100, 250, 300], "pending after a quiet time at once"


def test_an_interval_that_ends_with_the_window_is_the_final_execution() -> None:
    done = run(IntervalTrigger(HOUR // 2), [(10, 1), (HOUR - 10, 1)])
    assert (done.executed_us.tolist(), done.final) == ([HOUR // 2, HOUR], True)


def test_a_count() -> None:
    done = run(CountTrigger(3), [(1, 2), (5, 2), (6, 2), (9, 1)])
    assert (done.executed_us.tolist(), done.pending.tolist(), done.final) == ([5, 9], [4, 3], False)
    assert run(CountTrigger(3), [(1, 2)]).final
    assert next_due_us(CountTrigger(3), view(0.5, pending=2)) is None


@pytest.mark.parametrize(
    "made",
    [
        lambda: IntervalTrigger(0),
        lambda: CountTrigger(0),
        lambda: StalenessTrigger(),
        lambda: StalenessTrigger(0),
        lambda: StalenessTrigger(0.1, executions=2),
    ],
)
def test_what_is_no_trigger(made: Any) -> None:
    with pytest.raises(ValueError, match=r"not above 0|less than 1|either"):
        made()


def test_what_is_no_stream() -> None:
    for lateness, events in (([1, 2], [1]), ([-1], [1]), ([1], [-1]), ([[1]], [[1]])):
        with pytest.raises(ValueError, match="two rows"):
            replay(EveryBatchTrigger(), lateness, events, bound_us=10)


# -- staleness --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lnorm", "unif", "norm", "bursts"])
def test_what_comes_as_expected_is_executed_as_planned(name: str) -> None:
    late = paper_distribution(name)
    events = 20_000
    trigger = StalenessTrigger(0.05, forecast=Learnt(late, HOUR, events))
    planned = plan(late, bound=0.05)
    done = run(trigger, [(at, 1) for at in quantiles(late, events)])
    assert done.executions == planned.executions
    assert done.maximum <= 0.05
    assert (done.executed_us / HOUR).tolist() == pytest.approx(planned.instants.tolist(), abs=2e-3)


def test_an_execution_is_early_when_more_comes() -> None:
    trigger = StalenessTrigger(0.05, forecast=Learnt(LateDistribution.uniform(), HOUR, 1000))
    first = plan(LateDistribution.uniform(), bound=0.05).instants[0]
    assert first == pytest.approx(0.2)
    assert not is_due(trigger, view(0.15, pending=150))
    assert not is_due(trigger, view(0.19, pending=190))
    assert is_due(trigger, view(0.15, pending=450))


def test_an_execution_waits_when_less_comes() -> None:
    trigger = StalenessTrigger(0.05, forecast=Learnt(LateDistribution.uniform(), HOUR, 1000))
    assert is_due(trigger, view(0.2001, pending=200))
    few = view(0.2001, pending=20)
    assert not is_due(trigger, few)
    due_us = next_due_us(trigger, few)
    assert due_us is None or due_us > 0.5 * HOUR
    assert not is_due(trigger, view(0.9, pending=0, late=100))
    assert next_due_us(trigger, view(0.1, pending=0, late=100)) is None


def test_the_rest_is_planned_from_the_last_execution() -> None:
    trigger = StalenessTrigger(0.05, forecast=Learnt(LateDistribution.uniform(), HOUR, 1000))
    early = view(0.15, last=0.1, pending=50, late=400, executions=1)
    rest = plan(LateDistribution.uniform(), bound=0.05, after=0.1)
    due_us = next_due_us(trigger, early)
    assert due_us is not None
    assert due_us >= rest.instants[0] * HOUR
    assert not is_due(trigger, early)
    assert is_due(trigger, view(rest.instants[0] + 1e-6, last=0.1, pending=190, late=290, executions=1))


def test_nothing_is_run_before_the_purge_where_one_execution_is_enough() -> None:
    done = run(StalenessTrigger(0.05, forecast=Learnt(paper_distribution("lnorm"), HOUR, 1000)), [(HOUR // 2, 1)])
    assert (done.executed_us.tolist(), done.final) == ([HOUR // 2], False), "one event of one is all there was"
    trigger = StalenessTrigger(0.05, forecast=Learnt(LateDistribution.uniform(), HOUR, 1000))
    assert not is_due(trigger, view(0.5, last=0.45, pending=2, late=500, executions=2))


@given(st.lists(st.integers(0, HOUR - 1), max_size=60, unique=True), bounds)
def test_with_nothing_known_the_bound_holds_whatever_comes(lateness: list[int], bound: float) -> None:
    done = run(StalenessTrigger(bound), [(at, 1) for at in lateness])
    exceeded = done.staleness > bound * (1 + 1e-6)
    assert (~exceeded | done.at_once).all(), "but for what came after too long a time, and is executed at once"


@pytest.mark.parametrize("name", ["lnorm", "unif", "norm", "bursts"])
def test_the_bound_holds_between_batches(name: str) -> None:
    late = paper_distribution(name)
    events, step_us = 5000, HOUR // 50
    stream = [(at, 1) for at in quantiles(late, events)]

    class Blind(StalenessTrigger):
        """Does not know how far the watermark moves between two checks."""

        def due(self, windows: LateWindows) -> Flags:
            return super().due(replace(windows, step_us=0))

        def next_due_us(self, windows: LateWindows) -> Ints:
            return super().next_due_us(replace(windows, step_us=0))

    forecast = Learnt(late, HOUR, events)
    seeing = run(StalenessTrigger(0.01, forecast=forecast), stream, step_us=step_us)
    unseeing = run(Blind(0.01, forecast=forecast), stream, step_us=step_us)
    assert (seeing.executed_us[:-1] % step_us == 0).all()
    possible = seeing.staleness[~seeing.at_once].max()
    assert possible <= 0.01
    assert possible <= unseeing.maximum


@given(streams, st.integers(1, 8), st.none() | learnt, steps)
def test_so_many_executions_are_made_at_most(of: Stream, number: int, forecast: Learnt | None, step_us: int) -> None:
    assert run(StalenessTrigger(executions=number, forecast=forecast), of, step_us=step_us).executions <= number


@pytest.mark.parametrize("name", ["lnorm", "unif", "norm", "bursts"])
@pytest.mark.parametrize("number", [1, 2, 5, 9])
def test_so_many_executions_are_placed_as_well_as_can_be(name: str, number: int) -> None:
    late = paper_distribution(name)
    events = 20_000
    trigger = StalenessTrigger(executions=number, forecast=Learnt(late, HOUR, events))
    done = run(trigger, [(at, 1) for at in quantiles(late, events)])
    assert done.executions == number
    assert done.maximum == pytest.approx(plan(late.to_horizon(), executions=number).maximum, rel=0.02)


@dataclass
class Moving:
    """A forecast that changes."""

    share: float = 1.0
    version: int = 1
    asked: int = 0

    def late_share(self, lateness_us: Floats) -> Floats:
        self.asked += 1
        return np.minimum(lateness_us / (HOUR * self.share), 1.0)

    def expected_late(self, on_time_events: Ints) -> Floats:
        return 0.5 * on_time_events


def test_plans_are_shared_until_the_forecast_changes() -> None:
    forecast = Moving()
    trigger = StalenessTrigger(0.05, forecast=forecast)
    v = view(0.01, pending=10, on_time_events=2000)
    first = next_due_us(trigger, v)
    asked = forecast.asked
    for at in range(20):
        is_due(trigger, view(0.01 + at / 1000, pending=10 + at, on_time_events=1000 + at))
    assert forecast.asked == asked
    forecast.share = 0.1
    assert next_due_us(trigger, v) == first, "not before it says so"
    forecast.version = 2
    sooner = next_due_us(trigger, v)
    assert forecast.asked > asked
    assert first is not None and sooner is not None and sooner != first
    other = next_due_us(trigger, replace(v, bound_us=np.array([2 * HOUR])))
    assert other is not None and other != sooner


def remembered(trigger: StalenessTrigger) -> int:
    return sum(len(plans.last_us) for known in trigger._known.values() for plans in known.plans.values())


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aion.core.trigger.staleness.REMEMBERED_PLANS", 5)
    monkeypatch.setattr("aion.core.trigger.staleness.REMEMBERED_DISTRIBUTIONS", 3)
    trigger = StalenessTrigger(0.05)
    for i in range(1, 20):
        v, fresh = one(HOUR // 2 + i, i, 3, 10, HOUR + i % 7, executions=1), StalenessTrigger(0.05)
        assert (next_due_us(trigger, v), is_due(trigger, v)) == (next_due_us(fresh, v), is_due(fresh, v))
        assert remembered(trigger) <= 5 and len(trigger._known) <= 3
    many = LateWindows(*(np.repeat(column, 9) for column in astuple(v)[:-1]))
    many = replace(many, executed_us=np.arange(9, 18))
    assert trigger.next_due_us(many).tolist() == StalenessTrigger(0.05).next_due_us(many).tolist()
    assert 0 < remembered(trigger) <= 5


def test_a_forecast_beyond_the_bound_counts_what_comes_within() -> None:
    """Half of the late events come up to the bound: N is half of what is expected in all."""
    forecast = Moving(share=2.0)
    trigger = StalenessTrigger(executions=3, forecast=forecast)
    assert trigger.expected_total(view(0.0, pending=1, late=1, on_time_events=400)) == pytest.approx(1 + 100)
    assert trigger.expected_total(view(0.5, pending=1, late=60, on_time_events=400)) == pytest.approx(60 + 50)


def test_a_bound_counts_on_fewer_events_than_are_expected() -> None:
    v = view(0.0, pending=0, late=0, on_time_events=800)
    assert StalenessTrigger(0.05, forecast=Moving()).expected_total(v) == pytest.approx(400 - 2 * math.sqrt(400))
    assert StalenessTrigger(0.05, forecast=Moving()).expected_total(replace(v, on_time_events=np.array([2]))) == 0
    assert StalenessTrigger(0.05).staleness(view(0.5, pending=3, late=4)) == pytest.approx(0.5 * 3 / 4)
    assert StalenessTrigger(0.05).staleness(view(0.5, pending=0, late=0)) == 0


def test_a_late_execution_in_the_batch_of_the_on_time_one_is_a_late_execution() -> None:
    at_once = LateDistribution([0, 0, 1], [0, 9, 10])
    trigger = StalenessTrigger(executions=2, forecast=Learnt(at_once, HOUR, 100))
    on_time, late = view(0.1, pending=91, late=91), view(0.1, pending=1, late=91, executions=1)
    assert next_due_us(trigger, late) is None
    assert next_due_us(StalenessTrigger(0.05, forecast=Learnt(at_once, HOUR, 100)), late) is None
    assert is_due(trigger, on_time)
