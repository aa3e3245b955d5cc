"""The bound follows the data while windows come and go, and so does the forecast."""

from __future__ import annotations

import math

import numpy as np
import orjson
import pytest

from aion.core.lateness.bound import AdaptiveBound, Expected
from aion.core.lateness.models import NAMES
from aion.errors import FormatError
from policies.cleanup import BoundDecision, Cleanup, Reason
from tests.late import DAY, HOUR, MINUTE, SECOND, Draw, exponential, lognormal

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
    state_at_us: int = -MINUTE,
) -> tuple[AdaptiveBound, list[BoundDecision]]:
    """Feeds windows of a minute to a bound, with a watermark every few seconds. Returns the decision for each window.

    ``state_at_us``: where the state that comes lies, counted from the watermark.
    ``observing``: events that come later, as (arrival, window end, events). The next call goes on with this list.
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
                bound.observe_state(end + state_at_us, end, 2000)
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


@pytest.mark.slow
@pytest.mark.parametrize("model", ["auto", pytest.param("empirical", marks=pytest.mark.proof)])
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_bound_longer_than_the_initial_one_is_not_given_up_when_lateness_changes() -> None:
    bound = AdaptiveBound(Cleanup(MINUTE, coverage=0.95), half_life_us=DAY, model="empirical")
    coming: list[tuple[int, int, int]] = []
    bound, decisions = live(bound, lognormal(100), windows=600, observing=coming)
    before = decisions[-1].bound_us
    assert before > 3 * MINUTE
    bound, decisions = live(bound, lognormal(1000), windows=200, first=600, seed=1, observing=coming)
    again = next(d for d in decisions if "lateness has changed" in d.why)
    assert again.bound_us >= before


@pytest.mark.proof
def test_a_change_is_not_looked_for_again_until_history_is_twice_as_long() -> None:
    """Lateness jumps every three hours. The bound learns this in the end and stops to start again."""
    bound = AdaptiveBound(Cleanup(30 * MINUTE, coverage=0.95), half_life_us=20 * DAY, model="empirical")
    coming: list[tuple[int, int, int]] = []
    restarts = []
    for turn in range(12):
        bound, _ = live(
            bound, lognormal(400 if turn % 2 else 60), windows=180, first=180 * turn, seed=turn, observing=coming
        )
        restarts.append(bound.restarts)
    assert restarts[-1] <= 3 and restarts[-1] == restarts[8]
    assert bound.decision.reason is Reason.LEARNT


@pytest.mark.slow
def test_a_storm_beyond_max_bound_is_said_as_such() -> None:
    asked = Cleanup(10 * MINUTE, coverage=0.95, max_bound_us=15 * MINUTE)
    bound = AdaptiveBound(asked, half_life_us=DAY, model="empirical")
    coming: list[tuple[int, int, int]] = []
    bound, before = live(bound, lognormal(60), windows=300, observing=coming)
    assert before[-1].reason is Reason.LEARNT and bound.conformal is not None
    late, missed = bound.conformal.late, bound.conformal.missed
    bound, during = live(bound, lognormal(1200, 0.5), windows=300, first=300, seed=1, observing=coming)
    assert {d.bound_us for d in during if d.reason is Reason.MAX_BOUND} == {15 * MINUTE}
    assert max(d.bound_us for d in [*before, *during]) == 15 * MINUTE
    last = during[-1]
    assert last.reason is Reason.MAX_BOUND and Reason.of_code(bound.reason_for_new_window()) is Reason.MAX_BOUND
    assert "cut to max_bound, 15 minutes" in last.why and "of late events are expected in time" in last.why
    # The normal distribution of log(15 / 20) / 0.5 is 0.28. The realised coverage of the storm says the same.
    share = float(last.why.rpartition("; ")[2].partition("%")[0]) / 100
    realised = 1 - (bound.conformal.missed - missed) / (bound.conformal.late - late)
    assert 0.2 < share < 0.4 and 0.2 < realised < 0.4, (share, realised)


def test_max_state_is_kept_through_a_change_of_regime() -> None:
    asked = Cleanup(HOUR, coverage=0.95, max_state_bytes=40_000)
    bound = AdaptiveBound(asked, half_life_us=DAY, ahead_us=MINUTE, model="empirical")
    coming: list[tuple[int, int, int]] = []
    bound, _ = live(bound, lognormal(600), windows=500, observing=coming)
    assert bound.decision.reason is Reason.MAX_STATE
    # 2,000 bytes a minute fill 20 minutes. One minute is for windows that have not ended.
    assert bound.decision.bound_us == pytest.approx(19 * MINUTE, rel=0.1)
    bound, decisions = live(bound, lognormal(5), windows=150, first=500, seed=1, observing=coming)
    assert bound.restarts == 1
    assert max(d.bound_us for d in decisions) <= 21 * MINUTE


@pytest.mark.parametrize("restart", [False, True])
def test_max_state_holds_what_lies_ahead_of_the_watermark(restart: bool) -> None:
    asked = Cleanup(HOUR, coverage=0.95, max_state_bytes=40_000)
    bound = AdaptiveBound(asked, half_life_us=DAY, ahead_us=MINUTE, model="empirical")
    bound.observe_state(10**18, SECOND, 1)  # a clock that is wrong does not decide alone
    bound, _ = live(bound, lognormal(600), windows=500, state_at_us=12 * MINUTE, restart=restart)
    assert bound.decision.reason is Reason.MAX_STATE
    # 2,000 bytes a minute fill 20 minutes: 12 ahead, one of a window that has not ended, 7 of windows that have.
    assert bound.decision.bound_us == pytest.approx(7 * MINUTE, rel=0.1)


@pytest.mark.slow
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


@pytest.mark.slow(but_first=True)
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


@pytest.mark.slow
def test_a_forecast_follows_the_lateness_that_was_learnt() -> None:
    bound, _ = live(AdaptiveBound(Cleanup(HOUR, coverage=0.95), model="empirical"), exponential(300), windows=800)
    forecast = Expected(bound)
    at = np.linspace(-1, 12 * MINUTE, 300)
    shares = forecast.late_share(at)
    assert (np.diff(shares) >= 0).all() and shares[0] == 0
    # The watermark moves every ten seconds or so. Events in between have the lateness of its last step.
    assert shares == pytest.approx(1 - np.exp(-at / SECOND / 300), abs=0.06)
    assert forecast.expected_late(np.array([16])) == pytest.approx(4, rel=0.15)
    whole = bound.still_to_come(10 * MINUTE)
    later = bound.still_to_come(10 * MINUTE, 5 * MINUTE)
    assert whole is not None and later is not None
    assert whole == pytest.approx(0.2 * (1 - math.exp(-2)), rel=0.15)
    assert later == pytest.approx(0.2 * (math.exp(-1) - math.exp(-2)), rel=0.3)
    assert bound.still_to_come(10 * MINUTE, 20 * MINUTE) == 0


@pytest.mark.slow
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
