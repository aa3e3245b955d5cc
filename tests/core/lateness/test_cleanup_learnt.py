"""What the observed lateness supports, and when lateness counts as changed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from aion.core.lateness.bound import AdaptiveBound
from aion.core.lateness.change import change
from aion.core.lateness.estimate import arrivals
from aion.core.lateness.observe import Lateness
from policies.cleanup import BoundDecision, Cleanup, Reason, decide
from tests.late import DAY, HOUR, MINUTE, SECOND, Draw, drawn, exponential, lognormal, same_in_every_epoch

# -- what was learnt, asked ----------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.floats(0.5, 0.99), st.floats(0.55, 0.99))
def test_a_bound_is_the_textbook_order_statistic(each: int, coverage: float, confidence: float) -> None:
    """The events are independent, their windows old, none has faded. Then it is the smallest r with
    P(Bin(n, coverage) < r) >= confidence."""
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
    """An outage delays all late events of one window in ten. The others are a little late."""
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("independent", "auto"),
        ("clumps", "empirical"),
        pytest.param("independent", "empirical", marks=pytest.mark.proof),
        pytest.param("clumps", "auto", marks=pytest.mark.proof),
    ],
)
def test_the_confidence_holds_over_many_histories(kind: str, model: str) -> None:
    """Of 60 histories, at least 48 cover what they promise with confidence 0.9. Chance fails this once in 170 runs."""
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
    # If nearly all events are in time, no window has to stay.
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


@pytest.mark.slow
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
    """It is noticed soon, and also if the first look missed it."""
    lateness, _ = drawn(lognormal(60), windows=2000)
    assert changed_of(lateness, 2000 * MINUTE) is None
    lateness, at = drawn(after, windows=windows, late_share=late_share, into=lateness, first=2000, seed=1)
    found = changed_of(lateness, at)
    assert found is not None and "were usual" in found
