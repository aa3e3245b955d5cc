"""The realised coverage of bounds follows what was asked, whatever the data do."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion.core.lateness.bound import AdaptiveBound
from aion.core.lateness.conformal import CAUTION, LEAST, MOST, STEP, Conformal
from policies.cleanup import Cleanup, Reason
from tests.late import HOUR, MINUTE

ALLOWED, BOUND = 0.1, 8_000_000


def fed(shares: list[float], *, restarts: bool = False) -> tuple[Conformal, list[float]]:
    """Periods of a second each; of their thousand late events, these shares are later than the bound."""
    conformal, levels = Conformal(ALLOWED), []
    for second, share in enumerate([*shares, *[0.0] * 60]):
        conformal.advance(second * 1_000_000, BOUND, 0)
        missed = round(share * 1000) if second < len(shares) else 0
        conformal.observe(second * 1_000_000, 0, 1000 - missed if second < len(shares) else 0)
        conformal.observe(second * 1_000_000, BOUND, missed)
        levels.append(conformal.miss)
        if restarts:
            conformal = Conformal(ALLOWED, json.loads(json.dumps(conformal.to_json())))
    return conformal, levels


@given(st.lists(st.floats(0, 1), min_size=1, max_size=60))
def test_the_mean_of_the_errors_is_bounded_by_how_far_the_level_moved(shares: list[float]) -> None:
    """Equation (2) and Proposition 4.1 of Gibbs and Candes, as long as no limit is reached."""
    conformal, levels = fed(shares)
    assert conformal.judged == len(shares)
    assert conformal.missed == sum(round(share * 1000) for share in shares)
    if min(levels) > LEAST * ALLOWED and max(levels) < MOST * ALLOWED:
        mean = conformal.missed / conformal.late
        assert CAUTION * ALLOWED - mean == pytest.approx((conformal.miss - ALLOWED) / (STEP * len(shares)), abs=1e-6)


def test_misses_make_the_bound_longer_only_when_they_are_known() -> None:
    _, levels = fed([0.5] * 50)
    assert levels[32] == ALLOWED > levels[34]
    assert all(later <= earlier for earlier, later in itertools.pairwise(levels))


def test_a_restart_changes_nothing() -> None:
    shares = np.random.default_rng(1).random(40).tolist()
    assert fed(shares)[1] == fed(shares, restarts=True)[1]


@pytest.mark.parametrize("missed", [0.0, 0.5], ids=["too cautious", "too bold"])
def test_the_bound_follows_what_bounds_have_lost(missed: float) -> None:
    def bound(change: Callable[[Conformal], None]) -> AdaptiveBound:
        adaptive = AdaptiveBound(Cleanup(HOUR, coverage=0.9), model="empirical")
        rng = np.random.default_rng(5)
        for minute in range(60 * 24):
            adaptive.observe_on_time(minute * MINUTE, 50)
            for lateness in rng.exponential(5, 10):
                adaptive.observe(minute * MINUTE, minute * MINUTE + int(lateness * MINUTE), 1)
        assert adaptive.conformal is not None
        change(adaptive.conformal)
        adaptive.advance(60 * 24 * MINUTE, 60 * 24 * MINUTE + 1)
        return adaptive

    usual = bound(lambda conformal: None)
    moved = bound(lambda conformal: setattr(conformal, "miss", 0.02 if missed else 0.3))
    assert usual.decision.reason is moved.decision.reason is Reason.LEARNT
    longer = moved.decision.bound_us > usual.decision.bound_us
    assert longer == (missed > 0)
    again = AdaptiveBound.of_snapshot(json.loads(json.dumps(moved.to_json())))
    assert again.decision == moved.decision
    assert again.conformal is not None and moved.conformal is not None
    assert again.conformal.miss == moved.conformal.miss
