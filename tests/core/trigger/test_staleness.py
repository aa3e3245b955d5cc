"""Distributions of late events, and plans of executions for them: against brute force and plain arithmetic."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.special import ndtr

from aion.core.trigger.distribution import RESOLUTION, LateDistribution
from aion.core.trigger.planner import MOST_EXECUTIONS, TriggerPlan, balanced, fewest, plan
from experiments.staleness.descent import descent
from experiments.staleness.model import (
    BOUNDS,
    DISTRIBUTIONS,
    brute_force,
    compare,
    fewest_by,
    grid,
    paper_distribution,
    placed_by,
    random_distributions,
)

Knots = tuple[list[int], list[int]]

# Widths that differ by 10,000; of knots, 0 in one row makes an atom, in the other a gap.
step = st.sampled_from([0, 0, 1, 10, 100, 1000, 10_000])
bounds = st.sampled_from([0.5, 0.1, 0.05, 0.03, 0.01, 0.004])
numbers = st.integers(1, 12)


@st.composite
def knots(draw: st.DrawFn, atoms: bool = True, gaps: bool = True) -> Knots:
    steps = draw(
        st.lists(
            st.tuples(step, step).filter(lambda s: (atoms or s[0] > 0) and (gaps or s[1] > 0)), min_size=1, max_size=12
        )
    )
    x, f = [0], [0]
    for right, up in steps:
        x.append(x[-1] + right)
        f.append(f[-1] + up)
    assume(f[-1] > 0)
    return x, f


@st.composite
def distributions(draw: st.DrawFn, atoms: bool = True, gaps: bool = True) -> LateDistribution:
    x, f = draw(knots(atoms, gaps))
    return LateDistribution(x, f, horizon=max(x[-1] + draw(step), 1))


def come(of: Knots, at: float) -> tuple[float, float]:
    """What has come just before ``at`` and at it, in events: by walking the knots."""
    x, f = of

    def straight(i: int) -> float:
        return f[i - 1] + (f[i] - f[i - 1]) * (at - x[i - 1]) / (x[i] - x[i - 1])

    first = bisect_left(x, at)
    if at < x[0]:
        return 0.0, 0.0
    if first == len(x):
        return float(f[-1]), float(f[-1])
    if x[first] == at:
        return float(f[first]), float(f[bisect_right(x, at) - 1])
    return straight(first), straight(first)


def assert_true(late: LateDistribution, found: TriggerPlan) -> None:
    """Executions in order, to the end, each having seen what had come just before its instant or at it."""
    assert (np.diff(found.instants, prepend=found.after) >= 0).all()
    assert (found.instants[-1], found.shares[-1]) == (late.end, 1.0)
    of = (late.lateness.tolist(), late.share.tolist())
    for instant, share in zip(found.instants.tolist(), found.shares.tolist(), strict=True):
        # On a steep piece an instant's last bit is worth more than the share's.
        nearby = [come(of, near) for near in (instant - 1e-15, instant, instant + 1e-15)]
        low, high = nearby[0][0], nearby[-1][1]
        before, at = nearby[1]
        assert low - 1e-12 <= share <= high + 1e-12
        if high - low > 1e-9:
            assert min(abs(share - before), abs(share - at), abs(share - high), abs(share - low)) < 1e-9, "in an atom"


# -- distributions ----------------------------------------------------------------------------------------


@given(knots(), st.lists(st.integers(1, 996), max_size=20))
def test_a_distribution_is_its_knots(of: Knots, parts: list[int]) -> None:
    horizon = max(of[0][-1], 1)
    late = LateDistribution(*of, horizon=horizon)
    # A part of 997 is no knot, so that rounding does not put it on another side of an atom.
    wanted = [part / 997 for part in parts]
    for at, lateness in [*((at, at * horizon) for at in wanted), *((x / horizon, x) for x in of[0])]:
        assert late.at(at) == pytest.approx(come(of, lateness)[1] / of[1][-1], abs=1e-9)
    assert late.at_all(wanted).tolist() == pytest.approx([late.at(at) for at in wanted], abs=1e-15)
    assert (late.lateness[0], late.share[0], late.share[-1]) == (0, 0, 1)
    assert late.share[-2] < 1, "it ends where nothing comes any more"
    assert late.at(late.end) == late.at(1.5) == 1


@given(knots(), st.integers(1, 40), st.integers(1, 40), bounds, numbers)
def test_units_of_time_and_events_do_not_matter(of: Knots, time: int, events: int, bound: float, number: int) -> None:
    horizon = max(of[0][-1], 1)
    late = LateDistribution(*of, horizon=horizon)
    other = LateDistribution(np.array(of[0]) * 2.0**time, np.array(of[1]) * 2.0**-events, horizon=horizon * 2.0**time)
    for arguments in ({"bound": bound}, {"executions": number}):
        one, two = plan(late, **arguments), plan(other, **arguments)  # type: ignore[arg-type]
        assert (one.instants.tolist(), one.shares.tolist()) == (two.instants.tolist(), two.shares.tolist())
    odd = LateDistribution(np.array(of[0]) * time / 7, np.array(of[1]) * events / 3, horizon=horizon * time / 7)
    assert plan(odd, executions=number).maximum == pytest.approx(plan(late, executions=number).maximum, abs=1e-7)


@given(knots(), st.floats(0.1, 1))
def test_what_lies_beyond_the_horizon_is_left_out(of: Knots, share: float) -> None:
    horizon = max(of[0][-1], 1) * share
    within = come(of, horizon)[1]
    if within == 0:
        with pytest.raises(ValueError, match="no late event comes up to the horizon"):
            LateDistribution(*of, horizon=horizon)
        return
    late = LateDistribution(*of, horizon=horizon)
    assert late.end <= 1
    for at in np.linspace(0, 1, 11):
        assert late.at(at) == pytest.approx(come(of, at * horizon)[1] / within, abs=1e-6)


@given(distributions(), st.floats(0, 1))
def test_a_quantile_is_the_earliest_lateness_by_which_so_many_have_come(late: LateDistribution, share: float) -> None:
    at = late.quantile(share)
    assert late.at(math.nextafter(at, 2)) >= share * (1 - 1e-9)
    assert late.at(at - 1e-9) <= share + 1e-9 or late.density(at - 1e-9) > 1e-3, "on a steep piece 1e-9 is much"
    assert [late.quantile(1), late.quantile(0)] == pytest.approx([late.end, 0], rel=1e-12)


def test_knots_inside_an_atom_say_nothing() -> None:
    late = LateDistribution([0, 5, 5, 5, 10, 10], [0, 1, 2, 3, 4, 4], horizon=10)
    assert late.at(0.4999) == pytest.approx(0.25, rel=1e-3)
    assert (late.lateness.tolist(), late.share.tolist()) == ([0, 0.5, 0.5, 1], [0, 0.25, 0.75, 1])


def test_events_that_come_in_the_batch_of_the_on_time_execution_are_late_for_it() -> None:
    late = LateDistribution([0, 0, 1], [0, 1, 2])
    assert late.at(0) == 0.5
    assert plan(late, executions=1).staleness.tolist() == [1.0]
    assert plan(late, executions=1, after=0.0).staleness.tolist() == [0.5], "a late execution at 0 has seen them"
    at_once = LateDistribution([0, 0], [0, 3])
    assert (at_once.end, plan(at_once, bound=0.05).instants.tolist()) == (0, [0])


@pytest.mark.parametrize(
    ("lateness", "events", "horizon", "says"),
    [
        ([], [], 1, "two rows"),
        ([0, 1], [0], 1, "two rows"),
        ([0, math.nan], [0, 1], 1, "finite"),
        ([[0, 1]], [[0, 1]], 1, "two rows"),
        ([0, 2, 1], [0, 1, 2], 1, "never descend"),
        ([0, 1, 2], [0, 2, 1], 1, "never descend"),
        ([-1, 1], [0, 1], 1, "at 0 or above"),
        ([0, 1], [0, 0], 1, "no late event"),
        ([2, 3], [0, 1], 1, "no late event"),
        ([0, 1], [0, 1], 0, "not above 0"),
        ([0, 1], [0, 1], math.inf, "not above 0"),
    ],
)
def test_what_is_no_distribution(lateness: list[Any], events: list[Any], horizon: float, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LateDistribution(lateness, events, horizon=horizon)


def test_a_distribution_with_an_atom_and_one_cut_at_the_horizon() -> None:
    late = LateDistribution([0, 10, 20, 20, 40], [0, 0.5, 0.9, 0.95, 1], horizon=40)
    assert [late.at(x / 40) for x in (0, 5, 10, 15, 20, 30, 40)] == pytest.approx([0, 0.25, 0.5, 0.7, 0.95, 0.975, 1])
    cut = LateDistribution([0, 10, 30], [0, 0.5, 1], horizon=20)
    assert cut.at(0.5) == pytest.approx(0.5 / 0.75)


def heavy(x: Any) -> Any:
    return 1 - (1 + x / 1e-6) ** -0.5


def jumps(x: Any) -> Any:
    return 0.3 * x + 0.3 * (x >= 0.2) + 0.4 * (x >= 0.21)


def lognormal(x: Any) -> Any:
    return ndtr(np.log(np.maximum(x, 1e-300) / 0.01))


@pytest.mark.parametrize("share", [heavy, jumps, lognormal], ids=lambda share: share.__name__)
def test_a_sampled_distribution_hides_next_to_nothing(share: Callable[[Any], Any]) -> None:
    late = LateDistribution.sampled(share, horizon=1.0)
    assert (np.diff(late.lateness) * np.diff(late.share)).max() <= RESOLUTION * (1 + 1e-9)
    assert len(late.lateness) < 2000
    x = np.concatenate([np.linspace(0, 1, 1001), np.geomspace(1e-9, 1, 1001)])
    # As far off as the curve may lie to the left or right of the truth, or above or below it.
    wrong = np.abs(late.at_all(x) - share(x) / share(np.ones(1)))
    low, high = (share(np.clip(x + d, 0, 1)) / share(np.ones(1)) for d in (-2e-5, 2e-5))
    assert (np.minimum(wrong, np.maximum(low - late.at_all(x), late.at_all(x) - high)) < 2e-3).all()
    other = LateDistribution.sampled(lambda y: 7 * share(y / 3600), horizon=3600)
    assert other.lateness.tolist() == pytest.approx(late.lateness.tolist())


# -- plans ------------------------------------------------------------------------------------------------


@given(distributions(), bounds)
def test_no_plan_exceeds_its_bound(late: LateDistribution, bound: float) -> None:
    for found in (fewest(late, bound), plan(late, bound=bound)):
        assert found.maximum <= bound
        assert_true(late, found)
        assert found.executions == fewest(late, bound).executions


@given(distributions(), numbers)
def test_a_plan_is_as_stale_as_it_says(late: LateDistribution, number: int) -> None:
    found = plan(late, executions=number)
    assert found.executions <= number
    assert_true(late, found)


@given(distributions(), numbers)
def test_no_smaller_bound_can_be_kept(late: LateDistribution, number: int) -> None:
    found = plan(late, executions=number)
    if found.maximum > 1e-20:
        assert fewest(late, found.maximum * (1 - 1e-6)).executions > number
        assert fewest(late, found.maximum * (1 + 1e-9)).executions <= number


@given(distributions(atoms=False, gaps=False), numbers)
def test_plans_are_balanced(late: LateDistribution, number: int) -> None:
    found = plan(late, executions=number)
    assert found.executions == number
    assert found.staleness.min() >= found.maximum * (1 - 1e-6)


@given(distributions(atoms=False), numbers)
def test_without_atoms_staleness_is_at_most_what_it_is_when_events_come_evenly(
    late: LateDistribution, number: int
) -> None:
    found = plan(late, executions=number)
    assert found.executions == number
    assert found.maximum <= (1 + 1e-6) / number**2, "Cauchy-Schwarz"


@given(distributions(), st.integers(1, 11))
def test_more_executions_are_never_worse(late: LateDistribution, number: int) -> None:
    assert plan(late, executions=number + 1).maximum <= plan(late, executions=number).maximum * (1 + 1e-7)


@given(distributions(), bounds, bounds)
def test_a_smaller_bound_never_takes_fewer_executions(late: LateDistribution, one: float, two: float) -> None:
    assert fewest(late, min(one, two)).executions >= fewest(late, max(one, two)).executions


@given(distributions())
def test_brute_force_finds_nothing_better(late: LateDistribution) -> None:
    compared = compare(late, 40)
    assert (compared.better, compared.untrue) == (0, 0)


def test_brute_force_finds_nothing_better_on_random_distributions() -> None:
    for _, late in random_distributions(50, np.random.default_rng(7)):
        assert compare(late, 60).holds


def test_brute_force_sees_what_is_worse() -> None:
    late = paper_distribution("lnorm")
    on_grid = brute_force(grid(late, 200), 6)
    for k in range(2, 7):
        best = balanced(late, k).maximum
        assert best <= on_grid[k - 1] < 1.1 * best, "the grid comes near the best"
        assert on_grid[k - 1] < placed_by("interval", late, k).maximum


@given(distributions(atoms=False), st.integers(2, 8))
def test_what_is_left_of_a_plan_is_the_plan_for_what_is_left(late: LateDistribution, number: int) -> None:
    found = plan(late, executions=number)
    rest = plan(late, executions=number - 1, after=float(found.instants[0]))
    assume(late.at(float(found.instants[0])) == pytest.approx(found.shares[0], abs=1e-9))
    assert rest.maximum == pytest.approx(found.maximum, rel=1e-5)


@given(distributions(), bounds, numbers)
def test_a_plan_may_have_to_end_at_the_horizon(late: LateDistribution, bound: float, number: int) -> None:
    whole = late.to_horizon()
    assert [whole.at(x / 10) for x in range(11)] == [late.at(x / 10) for x in range(11)]
    assert fewest(whole, bound).executions == fewest(late, bound).executions
    found = plan(whole, executions=number)
    assert found.shares[-1] == 1
    assert found.maximum >= plan(late, executions=number).maximum * (1 - 1e-7)
    assert plan(whole, executions=1).maximum == 1 if late.end > 0 else True


@given(distributions(), st.floats(0, 1), bounds)
def test_after_an_execution_only_the_rest_is_planned(late: LateDistribution, after: float, bound: float) -> None:
    rest = plan(late, bound=bound, after=after)
    assert rest.maximum <= bound
    if late.at(after) == 1:
        assert (rest.executions, rest.maximum) == (0, 0)
    else:
        assert_true(late, rest)
        assert (rest.after, rest.already) == (after, late.at(after))


@pytest.mark.parametrize(
    "arguments", [{}, {"bound": 0.1, "executions": 2}, {"bound": 0}, {"bound": -1}, {"executions": 0}]
)
def test_what_cannot_be_planned(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"either|not above 0|less than 1"):
        plan(LateDistribution.uniform(), **arguments)


def test_more_executions_than_are_of_use_are_not_looked_for() -> None:
    late = LateDistribution([0, 5, 10], [0, 3, 4], horizon=10)
    found = plan(late, executions=10**9)
    assert found.executions == MOST_EXECUTIONS
    assert found.maximum < 2e-6


def test_instants_in_microseconds() -> None:
    found = plan(LateDistribution.uniform(), executions=4)
    us = found.instants_us(3_600_000_000)
    assert us.tolist() == pytest.approx([900_000_000, 1_800_000_000, 2_700_000_000, 3_600_000_000], rel=1e-6)
    assert us[-1] == 3_600_000_000


# -- gradient descent -------------------------------------------------------------------------------------


@given(distributions(), st.integers(1, 8))
def test_descent_is_never_better(late: LateDistribution, number: int) -> None:
    found = descent(late, number, iterations=100)
    assert found.iterations <= 100
    assert found.plan.maximum >= plan(late, executions=number).maximum * (1 - 1e-7)
    assert_true(late, found.plan)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("number", [2, 5, 12])
def test_descent_arrives_on_the_papers_distributions(name: str, number: int) -> None:
    late = paper_distribution(name)
    found = descent(late, number)
    assert found.converged
    assert found.plan.maximum == pytest.approx(balanced(late, number).maximum, rel=1e-4)


# -- figure 9 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trigger", "executions"),
    [("exact", (3, 4, 7)), ("descent", (3, 4, 7)), ("interval", (8, 13, 30)), ("count", (9, 15, 55))],
)
def test_lognormal_lateness_as_in_the_paper(trigger: str, executions: tuple[int, ...]) -> None:
    late = paper_distribution("lnorm", 17.0)
    assert tuple(fewest_by(trigger, late, bound) for bound in BOUNDS) == executions


def test_even_lateness_needs_equal_intervals() -> None:
    late = LateDistribution.uniform()
    assert plan(late, executions=5).instants.tolist() == pytest.approx([0.2, 0.4, 0.6, 0.8, 1], rel=1e-6)
    for bound in BOUNDS:
        assert fewest_by("interval", late, bound) == plan(late, bound=bound).executions
