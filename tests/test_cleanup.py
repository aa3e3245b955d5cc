"""Predictive cleanup: what a bound promises, what it takes to promise it, and how it follows the data."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from aion.core.lateness.bound import AdaptiveBound, Expected
from aion.core.lateness.change import change
from aion.core.lateness.estimate import arrivals
from aion.core.lateness.models import NAMES
from aion.core.lateness.observe import Lateness
from aion.errors import FormatError
from policies.cleanup import BoundDecision, Cleanup, Reason, decide
from tests.examples import some
from tests.late import DAY, HOUR, MINUTE, SECOND, Draw, drawn, exponential, lognormal, same_in_every_epoch

ASKED = Cleanup(initial_bound_us=HOUR)


@dataclass(frozen=True)
class Told:
    """A history in which everything is as a test says."""

    edges_us: npt.NDArray[np.int64]
    later: npt.NDArray[np.float64]
    margin: float = 1.2
    unseen: float = 0.0
    watched_us: int = 10 * HOUR
    events: int = 1000
    epochs: int = 20
    late_share: float = 0.3
    of_all: bool = False
    source: str = "told"

    def at_most(self, confidence: float) -> npt.NDArray[np.float64]:
        return np.minimum(1.0, self.later * (1 + (self.margin - 1) * confidence) + 1e-3 * confidence)

    def later_than(self, lateness_us: Any) -> npt.NDArray[np.float64]:
        return np.interp(lateness_us, self.edges_us, self.later)


def told(**changes: Any) -> Told:
    edges = np.array([-1, 10, 20, 30, 40, 60]) * MINUTE
    edges[0] = -1
    return replace(Told(edges, np.array([1.0, 0.2, 0.05, 0.008, 0.001, 0.0])), **changes)


# -- one decision --------------------------------------------------------------------------------------------------


def test_the_smallest_bound_that_surely_covers_enough() -> None:
    decision = decide(ASKED, told(margin=1.0))
    assert (decision.bound_us, decision.reason) == (30 * MINUTE + 1, Reason.LEARNT)
    assert decide(ASKED, told(margin=1.3)).bound_us == 40 * MINUTE + 1, "0.8 % may be 1.1 %"
    assert decide(replace(ASKED, coverage=0.9), told()).bound_us == 20 * MINUTE + 1


def test_a_decision_says_why_and_what_is_to_be_expected() -> None:
    decision = decide(ASKED, told(margin=1.0))
    assert "covers 0.99 of late events with confidence 0.95: of 1,000" in decision.why
    assert "0.80% came later (told)" in decision.why
    assert decision.late_share == 0.3
    assert decision.lost_share == pytest.approx(0.3 * 0.008)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"watched_us": HOUR - 1}, "shorter than initial_bound"),
        ({"epochs": 7}, "only 7 stretches of time"),
        ({"unseen": 0.0011}, "may be later than anything that could be observed"),
        ({"later": np.array([1.0, 0.9, 0.8, 0.5, 0.3, 0.1])}, "do not support 0.99"),
        ({"edges_us": np.array([-1, 1, 2, 320, 400, 500]) * MINUTE}, "too short to see what comes later than"),
    ],
)
def test_what_history_does_not_support_keeps_the_conservative_bound(changes: dict[str, Any], why: str) -> None:
    asked = replace(ASKED, initial_bound_us=9 * HOUR) if "edges_us" in changes else ASKED
    changes = {"watched_us": 9 * HOUR, **changes} if "edges_us" in changes else changes
    decision = decide(asked, told(**changes))
    assert decision.reason is Reason.UNSUPPORTED and why in decision.why
    assert decision.bound_us >= asked.initial_bound_us


def test_an_initial_bound_that_loses_too_much_gives_way_to_the_longest_seen() -> None:
    asked = replace(ASKED, initial_bound_us=15 * MINUTE)
    decision = decide(asked, told(epochs=3))
    assert (decision.reason, decision.bound_us) == (Reason.UNSUPPORTED, HOUR + 1)
    assert "15 minutes would lose 12.50%" in decision.why


def test_max_bound_is_never_exceeded() -> None:
    asked = replace(ASKED, initial_bound_us=20 * MINUTE, max_bound_us=25 * MINUTE)
    decision = decide(asked, told())
    assert (decision.bound_us, decision.reason) == (25 * MINUTE, Reason.MAX_BOUND)
    assert "cut to max_bound, 25 minutes" in decision.why and "of late events are expected in time" in decision.why
    assert decide(asked, None, at_least_us=HOUR).bound_us == 25 * MINUTE


def test_max_state_trades_coverage_for_room_and_says_so() -> None:
    asked = replace(ASKED, max_state_bytes=10**9)
    decision = decide(asked, told(margin=1.0), room_us=15 * MINUTE)
    assert (decision.bound_us, decision.reason) == (15 * MINUTE, Reason.MAX_STATE)
    assert "because max_state is 1,000,000,000 bytes" in decision.why
    assert "87.50% of late events are expected in time" in decision.why
    assert decide(asked, told(margin=1.0), room_us=31 * MINUTE).reason is Reason.LEARNT
    assert decide(asked, None, room_us=15 * MINUTE).bound_us == 15 * MINUTE
    assert decide(asked, told(), room_us=-5).bound_us == 0


def test_without_a_coverage_the_bound_is_fixed() -> None:
    asked = replace(ASKED, coverage=None)
    for known in (None, told()):
        decision = decide(asked, known, at_least_us=2 * HOUR)
        assert (decision.bound_us, decision.reason) == (HOUR, Reason.FIXED)


@pytest.mark.parametrize(
    "wrong",
    [{"coverage": 0.0}, {"coverage": 1.0}, {"confidence": 1.0}, {"initial_bound_us": -1}, {"max_bound_us": 1},
     {"max_state_bytes": 0}],
)  # fmt: skip
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Cleanup(**{"initial_bound_us": HOUR, **wrong})


SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=12)


@st.composite
def histories(draw: st.DrawFn) -> Told:
    later = np.array([1.0, *sorted(draw(SHARES), reverse=True)])
    edges = np.array([-1, *sorted(draw(st.sets(st.integers(0, 3 * HOUR), min_size=len(later) - 1,
                                               max_size=len(later) - 1)))])  # fmt: skip
    return Told(
        edges,
        later,
        margin=draw(st.floats(1, 3)),
        unseen=draw(st.floats(0, 0.2)),
        watched_us=draw(st.integers(int(edges[-1]), 8 * HOUR)),
        epochs=draw(st.integers(1, 20)),
        of_all=draw(st.booleans()),
    )


COVERAGES = st.lists(st.floats(0.01, 0.999), min_size=2, max_size=6).map(sorted)


@given(
    histories(),
    COVERAGES,
    st.integers(0, 4 * HOUR),
    st.one_of(st.none(), st.integers(0, 5 * HOUR)),
    st.integers(0, 3 * HOUR),
)
def test_more_coverage_or_confidence_never_gives_a_smaller_bound(
    known: Told, shares: list[float], initial_us: int, room_us: int | None, at_least_us: int
) -> None:
    for name in ("coverage", "confidence"):
        bounds = []
        for share in shares:
            asked = replace(
                Cleanup(initial_us, coverage=0.9, confidence=0.9, max_bound_us=4 * HOUR, max_state_bytes=1),
                **{name: share},
            )
            bounds.append(decide(asked, known, at_least_us=at_least_us, room_us=room_us).bound_us)
        assert bounds == sorted(bounds), name
        assert max(bounds) <= 4 * HOUR


@some(1 / 3)
@given(st.integers(0, 20), st.sampled_from(["empirical", "auto", "weibull"]))
def test_more_coverage_never_gives_a_smaller_bound_of_what_was_learnt(seed: int, model: str) -> None:
    rng = np.random.default_rng(seed)
    lateness, at = drawn(exponential(float(rng.uniform(10, 600))), windows=int(rng.integers(30, 600)), seed=seed)
    bounds = []
    for coverage in (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999):
        bound = AdaptiveBound(Cleanup(30 * MINUTE, coverage=coverage), model=model)
        bound.lateness.merge(lateness)
        bound.advance(at, at + 1)
        bounds.append(bound.decision.bound_us)
    assert bounds == sorted(bounds)


# -- what was learnt, asked ----------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.floats(0.5, 0.99), st.floats(0.55, 0.99))
def test_a_bound_is_the_textbook_order_statistic(each: int, coverage: float, confidence: float) -> None:
    """Independent events of old windows, none faded: the smallest r with P(Bin(n, coverage) < r) >= confidence."""
    latenesses = sorted(int(x) for x in np.random.default_rng(each).integers(0, 50, each))
    lateness, at = same_in_every_epoch(latenesses)
    known = arrivals(lateness.cohorts(at))
    assert known is not None
    everyone = np.sort(latenesses * 16)
    ranks = np.arange(1, len(everyone) + 1)
    enough = binom.cdf(ranks - 1, len(everyone), coverage) >= confidence
    decision = decide(Cleanup(0, coverage=coverage, confidence=confidence), known)
    if enough.any():
        assert (decision.reason, decision.bound_us) == (Reason.LEARNT, everyone[np.argmax(enough)] + 1)
    else:
        assert decision.reason is Reason.UNSUPPORTED


def test_299_events_for_99_percent_with_confidence_95() -> None:
    for events, supported in ((18 * 16, False), (19 * 16, True)):
        lateness, at = same_in_every_epoch(list(range(events // 16)))
        known = arrivals(lateness.cohorts(at))
        assert known is not None and known.events == events
        decision = decide(Cleanup(0), known)
        assert (decision.reason is Reason.LEARNT) == supported
        if not supported:
            assert f"{events} late events do not support 0.99 with confidence 0.95" in decision.why


def learnt_bound(draw: Draw, seed: int, *, windows: int, model: str = "empirical", **changes: Any) -> BoundDecision:
    bound = AdaptiveBound(replace(Cleanup(2 * HOUR), **changes), model=model, half_life_us=100 * DAY)
    lateness, at = drawn(draw, windows=windows, per_window=15, seed=seed)
    bound.lateness.merge(lateness)
    bound.advance(at, at + 1)
    return bound.decision


def clumps(seed: int) -> Draw:
    """One window in ten has all of its late events delayed by an outage; the rest is a little late."""
    outages = np.random.default_rng(seed + 10_000)

    def draw(rng: np.random.Generator, n: int) -> np.ndarray:
        return rng.exponential(900 if outages.random() < 0.1 else 20, n)

    return draw


def quantile_of_clumps(share: float) -> float:
    low, high = 0.0, 1e5
    for _ in range(60):
        middle = (low + high) / 2
        later = 0.1 * math.exp(-middle / 900) + 0.9 * math.exp(-middle / 20)
        low, high = (middle, high) if later > 1 - share else (low, middle)
    return high


@pytest.mark.parametrize("model", ["empirical", "auto"])
@pytest.mark.parametrize("kind", ["independent", "clumps"])
def test_the_confidence_holds_over_many_histories(kind: str, model: str) -> None:
    """Of 60 histories, at least 48 cover what they promise with confidence 0.9: fewer come once in 170 times."""
    covered, ratios = 0, []
    for seed in range(60):
        draw = exponential(200) if kind == "independent" else clumps(seed)
        decision = learnt_bound(draw, seed, windows=1200, model=model, coverage=0.97, confidence=0.9)
        true_s = -200 * math.log(0.03) if kind == "independent" else quantile_of_clumps(0.97)
        assert decision.reason is Reason.LEARNT, decision.why
        covered += decision.bound_us / SECOND >= true_s * 0.9999
        ratios.append(decision.bound_us / SECOND / true_s)
    assert covered >= 48
    assert np.median(ratios) < (1.12 if kind == "independent" else 1.35)


def test_of_all_events_less_is_needed_than_of_the_late_ones() -> None:
    lateness, at = drawn(exponential(200), windows=2000, late_share=0.1)
    found = {}
    for of_all in (False, True):
        bound = AdaptiveBound(Cleanup(2 * HOUR, coverage=0.98), of_all=of_all, model="empirical")
        bound.lateness.merge(lateness)
        bound.advance(at, at + 1)
        assert bound.decision.reason is Reason.LEARNT
        found[of_all] = bound.decision
    assert found[False].bound_us / SECOND == pytest.approx(-200 * math.log(0.02), rel=0.15)
    assert found[True].bound_us / SECOND == pytest.approx(-200 * math.log(0.2), rel=0.15)
    assert "of all events" in found[True].why
    for decision in found.values():
        assert decision.late_share == pytest.approx(0.1, abs=0.01)
        assert decision.lost_share is not None and decision.lost_share <= 0.02
    # Where next to all is in time, nothing has to be kept.
    bound = AdaptiveBound(Cleanup(2 * HOUR, coverage=0.85), of_all=True, model="empirical")
    bound.lateness.merge(lateness)
    bound.advance(at, at + 1)
    assert (bound.decision.bound_us, bound.decision.reason) == (0, Reason.LEARNT)


# -- regimes -------------------------------------------------------------------------------------------------------


def changed_of(lateness: Lateness, at_us: int) -> str | None:
    cohorts = lateness.cohorts(at_us)
    known = arrivals(cohorts, of_all=True)
    assert known is not None
    return change(cohorts, known)


def test_what_stays_the_same_is_no_change() -> None:
    found = [changed_of(*drawn(lognormal(60), windows=1500, seed=seed)) for seed in range(30)]
    found += [changed_of(*drawn(clumps(seed), windows=1500, seed=seed)) for seed in range(30)]
    assert [words for words in found if words] == []


def test_a_slow_rhythm_is_no_change() -> None:
    for phase in range(8):
        lateness = Lateness(100 * DAY)
        at = 0
        for hour in range(36):
            median = 60 * math.exp(math.sin(2 * math.pi * (hour + 3 * phase) / 24))
            lateness, at = drawn(lognormal(median), windows=60, seed=hour, into=lateness, first=60 * hour)
        assert changed_of(lateness, at) is None


@pytest.mark.parametrize(
    ("after", "late_share"), [(lognormal(240), 0.2), (lognormal(15), 0.2), (lognormal(60), 0.5), (lognormal(60), 0.05)]
)
@pytest.mark.parametrize("windows", [200, 600])
def test_another_regime_is_noticed(after: Draw, late_share: float, windows: int) -> None:
    """Soon, and still if it was missed at first."""
    lateness, _ = drawn(lognormal(60), windows=2000)
    assert changed_of(lateness, 2000 * MINUTE) is None
    lateness, at = drawn(after, windows=windows, late_share=late_share, into=lateness, first=2000, seed=1)
    found = changed_of(lateness, at)
    assert found is not None and "were usual" in found


# -- the bound that follows ----------------------------------------------------------------------------------------


def live(
    bound: AdaptiveBound,
    draw: Draw,
    *,
    windows: int,
    first: int = 0,
    seed: int = 0,
    restart: bool = False,
    observing: list[tuple[int, int, int]] | None = None,
) -> tuple[AdaptiveBound, list[BoundDecision]]:
    """Windows of a minute, a watermark every few seconds; what comes is told when it comes. A decision for each window.

    ``observing``: what is still to come, (arrival, window end, events); goes on from one call to the next.
    """
    rng = np.random.default_rng(seed)
    coming = [] if observing is None else observing
    decisions = []
    for window in range(first, first + windows):
        end = (window + 1) * MINUTE
        steps = [end, *(end + np.sort(rng.integers(1, MINUTE, 5))).tolist(), end + MINUTE]
        for before, now, after in zip([end - SECOND, *steps], steps, steps[1:], strict=False):
            bound.advance(before if now > MINUTE else None, now)
            if now == end:
                decisions.append(bound.decision)
                late = int(rng.binomial(20, 0.2))
                bound.observe_on_time(end, 20 - late)
                bound.observe_state(end - MINUTE, end, 2000)
                coming += [(end + int(s * SECOND), end, 1) for s in draw(rng, late)]
                coming.sort(reverse=True)
            while coming and coming[-1][0] < after:
                _, late_for, events = coming.pop()
                bound.observe(late_for, now, events)
        if restart and window % 7 == 0:
            bound = reborn(bound)
    return bound, decisions


def reborn(bound: AdaptiveBound) -> AdaptiveBound:
    snapshot = orjson.loads(orjson.dumps(bound.to_json()))
    return AdaptiveBound(
        bound.asked, half_life_us=bound.lateness.half_life_us, model=bound.model, of_all=bound.of_all,
        ahead_us=bound.ahead_us, snapshot=snapshot,
    )  # fmt: skip


@pytest.mark.parametrize("model", ["auto", "empirical"])
def test_a_restart_does_not_change_what_is_decided(model: str) -> None:
    asked = Cleanup(30 * MINUTE, coverage=0.95, max_state_bytes=100_000)
    lives = []
    for restart in (False, True):
        bound = AdaptiveBound(asked, half_life_us=2 * HOUR, model=model, ahead_us=MINUTE)
        coming: list[tuple[int, int, int]] = []
        bound, first = live(bound, lognormal(60), windows=330, restart=restart, observing=coming)
        bound, then = live(bound, lognormal(300), windows=120, first=330, seed=1, restart=restart, observing=coming)
        lives.append((first + then, bound))
    (one, bound), (other, again) = lives
    assert one == other
    assert bound.to_json() == again.to_json()
    assert bound.restarts == again.restarts == 1
    reasons = [decision.reason for decision in one]
    assert {Reason.NO_HISTORY, Reason.UNSUPPORTED, Reason.LEARNT} <= set(reasons)


def test_it_begins_conservatively_learns_and_begins_again_when_lateness_changes() -> None:
    bound = AdaptiveBound(Cleanup(HOUR, coverage=0.95), half_life_us=DAY)
    coming: list[tuple[int, int, int]] = []
    bound, decisions = live(bound, lognormal(60), windows=600, observing=coming)
    assert {d.bound_us for d in decisions[:60]} == {HOUR}
    quantile = 60 * math.exp(1.645)
    assert decisions[-1].bound_us / SECOND == pytest.approx(quantile, rel=0.25)
    known = decisions[-1]
    bound, decisions = live(bound, lognormal(400), windows=400, first=600, seed=1, observing=coming)
    assert bound.restarts == 1
    after = next(i for i, d in enumerate(decisions) if "lateness has changed" in d.why)
    assert "were usual" in decisions[after].why
    assert decisions[after].bound_us == max(HOUR, known.bound_us)
    assert after < 150, "a few epochs later"
    bound, decisions = live(bound, lognormal(400), windows=400, first=1000, seed=2, observing=coming)
    assert decisions[-1].reason is Reason.LEARNT
    assert decisions[-1].bound_us / SECOND == pytest.approx(400 * math.exp(1.645), rel=0.3)


def test_a_bound_longer_than_the_initial_one_is_not_given_up_when_lateness_changes() -> None:
    bound = AdaptiveBound(Cleanup(MINUTE, coverage=0.95), half_life_us=DAY, model="empirical")
    coming: list[tuple[int, int, int]] = []
    bound, decisions = live(bound, lognormal(100), windows=600, observing=coming)
    before = decisions[-1].bound_us
    assert before > 3 * MINUTE
    bound, decisions = live(bound, lognormal(1000), windows=200, first=600, seed=1, observing=coming)
    again = next(d for d in decisions if "lateness has changed" in d.why)
    assert again.bound_us >= before


def test_a_change_is_not_looked_for_again_until_history_is_twice_as_long() -> None:
    """Lateness that jumps every three hours: learnt in the end as what it is, not restarted for ever."""
    bound = AdaptiveBound(Cleanup(30 * MINUTE, coverage=0.95), half_life_us=20 * DAY, model="empirical")
    coming: list[tuple[int, int, int]] = []
    restarts = []
    for turn in range(16):
        bound, _ = live(
            bound, lognormal(400 if turn % 2 else 60), windows=180, first=180 * turn, seed=turn, observing=coming
        )
        restarts.append(bound.restarts)
    assert restarts[-1] <= 3 and restarts[-1] == restarts[8]
    assert bound.decision.reason is Reason.LEARNT


def test_max_state_is_kept_through_a_change_of_regime() -> None:
    asked = Cleanup(HOUR, coverage=0.95, max_state_bytes=40_000)
    bound = AdaptiveBound(asked, half_life_us=DAY, ahead_us=MINUTE, model="empirical")
    coming: list[tuple[int, int, int]] = []
    bound, _ = live(bound, lognormal(600), windows=500, observing=coming)
    assert bound.decision.reason is Reason.MAX_STATE
    # 2,000 bytes a minute: 20 minutes, less the one of windows that have not ended.
    assert bound.decision.bound_us == pytest.approx(19 * MINUTE, rel=0.1)
    bound, decisions = live(bound, lognormal(5), windows=150, first=500, seed=1, observing=coming)
    assert bound.restarts == 1
    assert max(d.bound_us for d in decisions) <= 21 * MINUTE


def test_settings_that_changed_are_asked_again() -> None:
    bound, _ = live(AdaptiveBound(Cleanup(HOUR, coverage=0.95), model="empirical"), exponential(60), windows=300)
    snapshot = bound.to_json()
    assert bound.decision.reason is Reason.LEARNT
    stricter = AdaptiveBound(Cleanup(2 * HOUR, coverage=0.99), snapshot=snapshot)
    assert (stricter.decision.reason, stricter.decision.bound_us) == (Reason.NO_HISTORY, 2 * HOUR)
    stricter.advance(300 * MINUTE, 301 * MINUTE)
    assert stricter.decision.reason is Reason.LEARNT
    assert stricter.decision.bound_us > bound.decision.bound_us
    with pytest.raises(FormatError, match="format 9"):
        AdaptiveBound(Cleanup(HOUR), snapshot={**snapshot, "version": 9})
    with pytest.raises(ValueError, match="model 'normal'"):
        AdaptiveBound(Cleanup(HOUR), model="normal")


@pytest.mark.parametrize("model", NAMES)
def test_every_model_gives_a_bound_and_is_named(model: str) -> None:
    def two_bumps(rng: np.random.Generator, n: int) -> np.ndarray:
        return np.abs(np.where(rng.random(n) < 0.7, rng.normal(300, 60, n), rng.normal(1500, 150, n)))

    draw = two_bumps if model == "mixture" else lognormal(300)
    bound, _ = live(AdaptiveBound(Cleanup(2 * HOUR, coverage=0.95), model=model), draw, windows=400)
    assert bound.decision.reason is Reason.LEARNT
    assert f"({'lognormal' if model == 'auto' else model})" in bound.decision.why
    true_s = 1640 if model == "mixture" else 300 * math.exp(1.645)
    assert 0.7 < bound.decision.bound_us / SECOND / true_s < (2 if model == "pareto" else 1.5)


# -- what the trigger is to expect ---------------------------------------------------------------------------------


def test_nothing_known_is_forecast_as_even() -> None:
    forecast = Expected(AdaptiveBound(Cleanup(HOUR)))
    assert (forecast.version, forecast.expected_late(np.array([100])).tolist()) == (0, [0.0])
    shares = forecast.late_share(np.array([0, HOUR / 2, HOUR]))
    assert shares / shares[-1] == pytest.approx([0, 0.5, 1])
    assert AdaptiveBound(Cleanup(HOUR)).still_to_come(HOUR) is None


def test_a_forecast_follows_the_lateness_that_was_learnt() -> None:
    bound, _ = live(AdaptiveBound(Cleanup(HOUR, coverage=0.95), model="empirical"), exponential(300), windows=800)
    forecast = Expected(bound)
    at = np.linspace(-1, 12 * MINUTE, 300)
    shares = forecast.late_share(at)
    assert (np.diff(shares) >= 0).all() and shares[0] == 0
    # A watermark that moves every ten seconds or so sees what comes in between as late as before it moved.
    assert shares == pytest.approx(1 - np.exp(-at / SECOND / 300), abs=0.06)
    assert forecast.expected_late(np.array([16])) == pytest.approx(4, rel=0.15)
    whole = bound.still_to_come(10 * MINUTE)
    later = bound.still_to_come(10 * MINUTE, 5 * MINUTE)
    assert whole is not None and later is not None
    assert whole == pytest.approx(0.2 * (1 - math.exp(-2)), rel=0.15)
    assert later == pytest.approx(0.2 * (math.exp(-1) - math.exp(-2)), rel=0.3)
    assert bound.still_to_come(10 * MINUTE, 20 * MINUTE) == 0


def test_a_forecast_has_a_new_version_when_lateness_has_moved() -> None:
    bound = AdaptiveBound(Cleanup(HOUR, coverage=0.95), half_life_us=DAY, model="empirical")
    coming: list[tuple[int, int, int]] = []
    bound, _ = live(bound, exponential(300), windows=800, observing=coming)
    version = Expected(bound).version
    assert version > 0
    bound, _ = live(bound, exponential(300), windows=200, first=800, seed=1, observing=coming)
    assert Expected(bound).version - version <= 1, "the same distribution, give or take"
    version = Expected(bound).version
    bound, _ = live(bound, exponential(3000), windows=600, first=1000, seed=2, observing=coming)
    assert Expected(bound).version > version
    assert float(Expected(bound).late_share(np.array(5.0 * MINUTE))) < 0.4
