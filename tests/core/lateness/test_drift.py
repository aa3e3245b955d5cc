"""The bound follows the latest windows: soon, only with evidence, and as far as they show it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import orjson
import pytest
from scipy.special import ndtri

from aion.core.lateness.bound import AdaptiveBound
from aion.core.lateness.drift import Drift
from aion.core.lateness.shared import LearntBound, Outlook
from policies.cleanup import BoundDecision, Cleanup, Reason, carried
from tests.late import DAY, HOUR, MINUTE, SECOND, Draw, exponential, lognormal

LEVELS = np.concatenate([1 - np.arange(1, 48) / 48, 0.5 ** np.arange(1, 12) / 48])
MEDIAN, MISS = 60.0, 0.01
QUANTILE = float(ndtri(1 - MISS))


def usually() -> Outlook:
    """The log-normal distribution with the median, as history shows it."""
    at = (MEDIAN * np.exp(-ndtri(LEVELS)) * SECOND).astype(np.int64)
    return Outlook(0, np.concatenate([[-1], at]), np.concatenate([[1.0], LEVELS]), 0.2)


USUAL, USUAL_US = usually(), int(MEDIAN * math.exp(QUANTILE) * SECOND)


def fed(
    draws: list[Draw],
    *,
    per_window: int = 10,
    seed: int = 0,
    suffices: bool = True,
    restarts: bool = False,
    clump: int = 1,
    margin: float = 1.0,
) -> list[int | None]:
    """The bound after each minute. The window that ends in minute i has late events of draw i, ``clump`` times.

    The usual bound is longer than needed by the factor ``margin``.
    """
    rng = np.random.default_rng(seed)
    drift, coming, found = Drift(), [], []
    drift.forget_before(0)
    for minute, draw in enumerate(draws):
        end = minute * MINUTE
        late = (draw(rng, per_window) * SECOND).astype(np.int64).tolist()
        coming += [(end + us, end, clump) for us in late]
        coming.sort(reverse=True)
        while coming and coming[-1][0] < end + MINUTE:
            at, of, events = coming.pop()
            drift.observe(of, at, events)
        if drift.due(end + MINUTE):
            drift.follow(end + MINUTE, USUAL, int(margin * USUAL_US), MISS, suffices=suffices)
        found.append(drift.bound_us)
        if restarts:
            drift = Drift(orjson.loads(orjson.dumps(drift.to_json())))
    return found


def bounds_of(found: list[int | None]) -> np.ndarray:
    """As multiples of the usual bound."""
    return np.array([1.0 if us is None else us / USUAL_US for us in found])


def test_without_a_drift_the_bound_stays_about_what_was_learnt() -> None:
    off = np.abs([np.log(bounds_of(fed([lognormal(MEDIAN)] * 90, seed=seed))) for seed in range(12)])
    assert np.median(off) < 0.05 and np.quantile(off, 0.95) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("times", [4.0, 0.25])
def test_another_lateness_is_followed_within_a_few_bounds(times: float) -> None:
    soon, settled = [], []
    for seed in range(8):
        bounds = bounds_of(fed([lognormal(MEDIAN)] * 60 + [lognormal(times * MEDIAN)] * 120, seed=seed))
        soon.append(bounds[60 + 3 * USUAL_US // MINUTE])
        settled.append(bounds[-1] / times)
    assert np.median(soon) > 1.6 if times > 1 else np.median(soon) < 0.8
    assert 0.75 < np.median(settled) < 1.5


@pytest.mark.parametrize("times", [2.0, 0.25])
def test_a_carried_bound_does_not_keep_the_margin_of_history(times: float) -> None:
    draws = [lognormal(MEDIAN)] * 60 + [lognormal(times * MEDIAN)] * 120
    settled = [bounds_of(fed(draws, seed=seed, margin=3.0))[-1] / times for seed in range(8)]
    assert 0.75 < np.median(settled) < 1.5


def test_after_a_few_hours_a_far_longer_bound_is_what_the_windows_show_and_not_a_guess_about_their_tail() -> None:
    # Half of the late events come from a source that went bad: no shift and stretch of the usual ones looks like that.
    def both(rng: np.random.Generator, count: int) -> np.ndarray:
        return np.where(rng.random(count) < 0.5, lognormal(MEDIAN)(rng, count), lognormal(10 * MEDIAN)(rng, count))

    needed_us = 10 * MEDIAN * math.exp(float(ndtri(1 - 2 * MISS))) * SECOND
    settled = [us for seed in range(4) for us in fed([lognormal(MEDIAN)] * 60 + [both] * 480, seed=seed)[-240:]]
    bounds = np.array([us or 0.0 for us in settled]) / needed_us
    assert bounds.min() > 0.9 and bounds.max() < 1.7


def test_young_windows_do_not_make_lateness_look_short() -> None:
    """Nothing can have been later than ten seconds yet, so it says nothing that nothing was."""
    drift = Drift()
    drift.forget_before(0)
    rng = np.random.default_rng(3)
    for second in range(10):
        for us in (lognormal(MEDIAN)(rng, 200) * SECOND).astype(np.int64).tolist():
            if (second * SECOND) + us < 10 * SECOND:
                drift.observe(second * SECOND, second * SECOND + us, 1)
    drift.follow(10 * SECOND, USUAL, USUAL_US, MISS, suffices=True)
    assert drift.bound_us is None


def test_events_that_come_together_are_worth_fewer() -> None:
    """Of ten late events, two come from a worse source. Repeating each a hundred times adds little evidence."""

    def draw(rng: np.random.Generator, n: int) -> np.ndarray:
        return np.concatenate([lognormal(MEDIAN)(rng, n - 2), rng.exponential(300, 2)])

    alone, together = (bounds_of(fed([draw] * 60, seed=4, clump=clump)) for clump in (1, 100))
    assert together.max() < 1.2 * alone.max()
    assert together.max() > 1.05, "a hundred times the same still shows something"


def test_a_bound_that_no_history_supports_needs_more_evidence() -> None:
    draws = [lognormal(4 * MEDIAN)] * 90
    strict, usual = (fed(draws, suffices=suffices) for suffices in (False, True))
    first = [next(i for i, us in enumerate(found) if us is not None) for found in (strict, usual)]
    assert first[0] > first[1]


def test_a_restart_changes_nothing() -> None:
    draws = [lognormal(MEDIAN)] * 30 + [exponential(600)] * 60
    assert fed(draws, seed=2) == fed(draws, seed=2, restarts=True)


# -- the decision --------------------------------------------------------------------------------------------------

LEARNT = BoundDecision(10 * MINUTE, Reason.LEARNT, "covers 0.99", 0.2, 0.002)


def test_a_carried_bound_has_its_limits() -> None:
    asked = Cleanup(30 * MINUTE, max_bound_us=HOUR)
    short = carried(asked, LEARNT, 20 * MINUTE, 0.01)
    assert (short.bound_us, short.reason, short.lost_share) == (20 * MINUTE, Reason.LEARNT, 0.2 * 0.01)
    assert "20 minutes for late events like those of the latest windows, in place of: covers 0.99" in short.why
    assert carried(asked, LEARNT, 50 * MINUTE, 0.01).bound_us == 40 * MINUTE, "four times what was learnt"
    assert carried(Cleanup(50 * MINUTE), LEARNT, DAY, 0.01).bound_us == 50 * MINUTE, "or the initial bound"
    asked = Cleanup(30 * MINUTE, max_bound_us=35 * MINUTE)
    storm = carried(asked, LEARNT, HOUR, 0.01)
    assert (storm.bound_us, storm.reason) == (35 * MINUTE, Reason.MAX_BOUND)
    conservative = BoundDecision(30 * MINUTE, Reason.CHANGED, "lateness has changed")
    assert carried(asked, conservative, HOUR, 0.01).bound_us == 30 * MINUTE
    assert carried(asked, conservative, 5 * MINUTE, 0.01).reason is Reason.CHANGED


def through_a_change() -> tuple[AdaptiveBound, list[tuple[int, BoundDecision]]]:
    """Windows of a minute. After ten hours the median lateness grows fourfold. Restarts and decisions of the windows"""
    bound = AdaptiveBound(Cleanup(HOUR, coverage=0.95), half_life_us=DAY, model="empirical")
    rng = np.random.default_rng(7)
    coming: list[tuple[int, int]] = []
    found = []
    for minute in range(960):
        end = minute * MINUTE
        bound.advance(end - MINUTE if minute else None, end)
        found.append((bound.restarts, bound.decision))
        bound.observe_on_time(end, 40)
        draw = lognormal(MEDIAN if minute < 600 else 4 * MEDIAN)
        coming += [(end + int(s * SECOND), end) for s in draw(rng, 10)]
        coming.sort(reverse=True)
        while coming and coming[-1][0] < end + MINUTE:
            bound.observe(coming.pop()[1], end, 1)
    return bound, found


def test_the_bound_grows_before_the_change_is_noticed_and_is_not_conservative_after_it() -> None:
    bound, found = through_a_change()
    true_us = 4 * MEDIAN * math.exp(1.645) * SECOND
    followed = next(i for i, (_, decision) in enumerate(found) if i >= 600 and decision.bound_us > 0.6 * true_us)
    noticed = next(i for i, (restarts, _) in enumerate(found) if restarts)
    assert followed < 660 and followed < noticed
    assert "like those of the latest windows" in found[followed][1].why
    relearning = [d for _, d in found[noticed + 5 :] if d.reason in (Reason.CHANGED, Reason.UNSUPPORTED)]
    assert relearning and np.median([d.bound_us for d in relearning]) == pytest.approx(true_us, rel=0.35)
    again = AdaptiveBound.of_snapshot(orjson.loads(orjson.dumps(bound.to_json())))
    assert again.decision == bound.decision


def test_what_an_older_aion_wrote_is_read() -> None:
    bound, _ = through_a_change()
    value: dict[str, Any] = orjson.loads(orjson.dumps(bound.to_json()))
    del value["drift"], value["learnt_bound"]["usual"], value["learnt_bound"]["usual_us"]
    again = AdaptiveBound.of_snapshot(value)
    assert again.decision == LearntBound.from_json(value["learnt_bound"]).decision
    again.advance(960 * MINUTE, 961 * MINUTE)
    assert again.decision.bound_us == pytest.approx(bound.decision.bound_us, rel=0.2)
