"""`aion experiment cleanup`: its oracle, the lateness of its streams, and a stream in miniature."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from experiments.cleanup.runs import known_truth
from experiments.cleanup.settings import Leg, Settings
from experiments.cleanup.streams import (
    KINDS,
    MINUTE_US,
    SECOND_US,
    Stream,
    synthetic,
)

TINY = Settings(coverage=0.9, initial_bound_s=3600, model="empirical", seeds=2)


def by_hand(**changes: Any) -> Stream:
    """Three windows of a minute with five late events."""
    values: dict[str, Any] = {
        "name": "by hand",
        "window_us": MINUTE_US,
        "step_us": 10 * SECOND_US,
        "window": np.array([0, 0, 1, 2, 2]),
        "late_us": np.array([0, 25, 61, 9, 300]) * SECOND_US,
        "on_time": np.array([4, 0, 1]),
        "regime": np.zeros(3, np.int64),
        "later": (lambda s: np.exp(-s / 100),),
    }
    return Stream(**{**values, **changes})


def test_the_oracle_knows_the_smallest_bound_that_is_enough() -> None:
    stream = by_hand()
    (bound_us,) = stream.oracle_us(0.9).tolist()
    # exp(-s / 100) = 0.1 at 230.3 s: whoever is seen up to 230 s late has to come in time, from 231 to 240 s also.
    assert bound_us == 230 * SECOND_US + 1
    assert stream.lost(bound_us, 0) <= 0.1 < stream.lost(bound_us - 1, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_have_the_lateness_they_claim(kind: str) -> None:
    stream = synthetic(kind, 4, 40, seed=1)
    assert stream.later is not None
    events = len(stream.window) + stream.on_time.sum()
    assert events / (4 * 1440) == pytest.approx(40, rel=0.02)
    for regime, later in enumerate(stream.later):
        mine = stream.late_us[stream.regime[stream.window] == regime] / SECOND_US
        for seconds in (20, 120, 1000):
            share = float(later(np.array(float(seconds))))
            assert (mine > seconds).mean() == pytest.approx(share, abs=4 * math.sqrt(share / len(mine)) + 0.012)
    again = synthetic(kind, 4, 40, seed=1)
    assert (again.late_us == stream.late_us).all()
    assert (synthetic(kind, 4, 40, seed=2).on_time != stream.on_time).any()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["log-normal", pytest.param("regime change", marks=pytest.mark.proof)])
def test_a_run_compares_what_was_learnt_with_oracle_and_fixed_bounds(kind: str) -> None:
    days = 2.0 if kind == "regime change" else 0.8
    run = known_truth((Leg(kind, days, 30, 0.4), TINY, 0))
    assert run["learnt_after_s"] is not None and run["learnt_after_s"] >= 3600
    settled = run.get("settled", run)
    assert 0.88 < settled["coverage"] < 0.95
    assert 0.9 < settled["bytes_over_oracle"] < 1.5
    initial = run["fixed"]["initial bound"]
    assert initial["bound_s"] == 3600 and initial["coverage"] > 0.99 and initial["bytes_over_oracle"] > 2
    assert len(run["course"]["day"]) == len(run["course"]["bound_s"]) == len(run["course"]["oracle_s"])
    if kind == "regime change":
        assert run["restarts"] >= 1 and run["noticed_after_s"] > 0
        assert run["learnt_again_after_s"] > run["noticed_after_s"]
        assert run["unnoticed"]["coverage"] < 0.9 < run["relearning"]["coverage"]
