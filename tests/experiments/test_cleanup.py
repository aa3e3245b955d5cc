"""`aion experiment cleanup`: its arithmetic against plain loops, its verdicts, and each stream once, in miniature."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aion.core.lateness.bound import AdaptiveBound
from experiments.cleanup import report as cleanup_report
from experiments.cleanup.report import checks, confidence_check, rolling_checks
from experiments.cleanup.runs import fixed_bounds, flight_stream, known_truth, rolling, timed_replay
from experiments.cleanup.settings import Leg, Settings
from experiments.cleanup.streams import (
    EVENT_BYTES,
    HOUR_US,
    KINDS,
    MINUTE_US,
    SECOND_US,
    Replay,
    Stream,
    outcome,
    replay,
    rolling_coverage,
    synthetic,
)
from policies.cleanup import BoundDecision, Cleanup, Reason

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


def test_what_a_bound_does_to_a_stream() -> None:
    stream = by_hand()
    assert stream.seen_us.tolist() == [s * SECOND_US for s in (0, 20, 60, 0, 300)]
    bounds = np.array([15, 61, 0]) * SECOND_US
    found = outcome(stream, bounds, np.ones(3, bool))
    assert (found.coverage, found.late_events) == (2 / 5, 5), "0 of window 0, 60 of window 1"
    # The first watermark at or behind the bounds: 20 and 70 seconds, and none.
    on_time = 4 * (20 + 30) + 1 * (0 + 30)
    late = (20 - 0) + (70 - 60)
    assert found.byte_seconds == EVENT_BYTES * (on_time + late)
    some = outcome(stream, bounds, np.array([True, False, False]))
    assert (some.coverage, some.byte_seconds) == (1 / 2, EVENT_BYTES * (4 * 50 + 20))


def test_the_oracle_knows_the_smallest_bound_that_is_enough() -> None:
    stream = by_hand()
    (bound_us,) = stream.oracle_us(0.9).tolist()
    # exp(-s / 100) = 0.1 at 230.3 s: whoever is seen up to 230 s late has to come in time, from 231 to 240 s also.
    assert bound_us == 230 * SECOND_US + 1
    assert stream.lost(bound_us, 0) <= 0.1 < stream.lost(bound_us - 1, 0)


def test_a_replay_tells_the_bound_what_an_operator_would() -> None:
    told: list[tuple[Any, ...]] = []

    class Listening(AdaptiveBound):
        def observe(self, end_us: int, at_us: int, events: int) -> None:
            told.append(("late", end_us // SECOND_US, (at_us - end_us) // SECOND_US, events))

        def observe_on_time(self, end_us: int, events: int) -> None:
            told.append(("on time", end_us // SECOND_US, events))

        def advance(self, from_us: int | None, to_us: int, others: Any = None) -> None:
            assert from_us is None or from_us == to_us - 10 * SECOND_US

    result = replay(by_hand(), Listening(Cleanup(HOUR_US)))
    # What comes after the last window's end is not replayed.
    assert told == [
        ("on time", 60, 4),
        ("late", 60, 0, 1),
        ("late", 60, 20, 1),
        ("on time", 120, 0),
    ]
    assert result.bounds_us.tolist() == [HOUR_US] * 3


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


def test_the_coverage_of_stretches_is_that_of_a_plain_loop() -> None:
    stream = synthetic("bad source", 0.85, 10, seed=3)
    bounds = np.full(stream.windows, 100 * SECOND_US)
    bounds[900:] = 1000 * SECOND_US
    found = rolling_coverage(stream, bounds)
    assert stream.windows == 1224 and len(found) == 25
    for number in (0, 11, 24):
        mine = (stream.window >= 200 + number) & (stream.window < 1200 + number)
        in_time = stream.seen_us[mine] < bounds[stream.window[mine]]
        assert found[number] == pytest.approx(in_time.mean())
    changes = [(0, Reason.NO_HISTORY), (900, Reason.MAX_BOUND), (1223, Reason.LEARNT)]
    decisions = [(window, BoundDecision(1, reason, "")) for window, reason in changes]
    oracle = np.full(stream.windows, 2000 * SECOND_US)
    told = rolling(stream, Replay(bounds, decisions, 0, 0), float(found[24]), oracle)
    assert told is not None and told["stretches"] == 25
    assert told["lowest"] == found.min() and told["highest"] == found.max()
    assert told["within"] == (np.abs(found - found[24]) <= 0.005 + 1e-12).mean()
    off = rolling_coverage(stream, oracle) - found[24]
    assert told["oracle_within"] == (np.abs(off) <= 0.005 + 1e-12).mean()
    assert told["not_below"] == (found >= found[24] - 0.005 - 1e-12).mean()
    assert told["lowest_from"] == 200 + found.argmin()
    assert told["lowest_reasons"] == sorted(["no_history", "max_bound"] + ["learnt"] * int(found.argmin() == 24))
    assert rolling(by_hand(), Replay(np.ones(3, int), [], 0, 0), 0.9, np.ones(3, int)) is None


def test_a_stretch_that_is_too_low_or_too_high_is_said() -> None:
    def run(within: float, lowest: float) -> dict[str, Any]:
        return {"rolling": {"within": within, "lowest": lowest}}

    runs = [run(1.0, 0.9851), run(0.5, 0.9849), {"rolling": None}]
    shares, lowest = rolling_checks("s", runs, 0.99)
    assert (shares.measured, shares.words) == (0.75, "does not hold")
    assert (lowest.measured, lowest.words) == (0.9849, "does not hold")
    assert [check.words for check in rolling_checks("s", runs[:1], 0.99)] == ["holds", "holds"]
    assert rolling_checks("s", runs[2:], 0.99) == []


def test_a_careful_user_looks_at_the_first_day() -> None:
    stream = by_hand()
    assert fixed_bounds(stream, 0.8, HOUR_US) == {
        "initial bound": HOUR_US,
        "longest of first 1 d": 300 * SECOND_US + 1,
        "0.8 of first 1 d": 60 * SECOND_US + 1,
        "twice 0.8 of first 1 d": 2 * (60 * SECOND_US + 1),
    }
    none = by_hand(window=np.array([], int), late_us=np.array([], int))
    assert set(fixed_bounds(none, 0.8, HOUR_US).values()) == {HOUR_US, 2 * HOUR_US}


def test_flights_are_events_of_the_hour_they_were_scheduled_for() -> None:
    scheduled = np.array([10, 70, 80, 200, 9000]) * MINUTE_US
    arrived = np.array([59, 125, 60, 500, 9001]) * MINUTE_US
    stream = flight_stream(scheduled, arrived, 0, 240 * MINUTE_US)
    assert stream.on_time.tolist() == [1, 1, 0, 0]
    assert stream.window.tolist() == [1, 3]
    assert (stream.late_us // MINUTE_US).tolist() == [5, 260]
    assert (stream.seen_us // MINUTE_US).tolist() == [0, 260]
    result, seconds = timed_replay(stream, TINY, HOUR_US)
    assert result.bounds_us.tolist() == [HOUR_US] * 4 and seconds > 0


def test_a_share_of_runs_holds_unless_it_is_surprising() -> None:
    # Of 40 runs at 0.95, 35 or fewer come less than once in 20 times: 0.0480.
    found = {kept: confidence_check("s", "w", [True] * kept + [False] * (40 - kept), 0.95) for kept in (35, 36, 38)}
    assert [check.holds for check in found.values()] == [False, False, True]
    assert [check.words for check in found.values()] == ["does not hold", "below, by chance", "holds"]
    assert found[36].measured == 0.9 and "36/40" in found[36].wanted


@pytest.mark.proof
def test_the_report_says_what_was_measured(tmp_path: Path) -> None:
    runs = {
        "log-normal": [known_truth((Leg("log-normal", 0.9, 30, 0.3), TINY, seed)) for seed in range(2)],
        "regime change": [known_truth((Leg("regime change", 1.5, 30, 0.3), TINY, 0))],
    }
    runs["flights"] = [dict(run) for run in runs["log-normal"]]
    for run in runs["flights"]:
        del run["last_bound_covers"]
    runs["flights"][0]["bytes_over_oracle"] = 1.151
    found = {(check.stream, check.what.split(":")[0]): check for check in checks(runs, TINY)}
    assert found["flights", "bytes kept / oracle's, all of it"].holds is False
    assert found["log-normal", "last bounds with enough true coverage"].measured == np.mean(
        [run["last_bound_covers"] >= 0.9 for run in runs["log-normal"]]
    )
    assert ("regime change", "settled runs with enough coverage") in found
    lowest = min(run["rolling"]["lowest"] for run in runs["regime change"])
    assert found["regime change", "lowest coverage over 1,000 windows"].measured == lowest >= 0.895
    bounds, stretches, verdicts = cleanup_report.tables(runs, TINY)
    assert verdicts.row_count == len(found) and bounds.row_count >= 3 * 5
    assert stretches.row_count == 3
    assert "runs: coverage" in cleanup_report.line(runs["log-normal"])
    assert "No bound can cover" in cleanup_report.remarks(TINY)
    paths = cleanup_report.write(tmp_path, {"experiment": "cleanup"}, runs, TINY)
    assert [path.name for path in paths] == [
        "cleanup.json", "cleanup-bounds.png", "cleanup-coverage.png", "cleanup-rolling.png"
    ]  # fmt: skip
    assert all(path.stat().st_size > 10_000 for path in paths)
    record = json.loads(paths[0].read_text())
    assert {check["verdict"] for check in record["checks"]} <= {"holds", "below, by chance", "does not hold"}
    assert record["results"]["flights"][0]["bytes_over_oracle"] == 1.151
