"""The runs of `aion experiment cleanup`: each compares a learning bound with other bounds on one stream."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aion.core.lateness.bound import AdaptiveBound
from experiments.cleanup.streams import (
    DAY_US,
    FIRST_WINDOWS,
    HOUR_US,
    MINUTE_US,
    SECOND_US,
    STRETCH,
    Ints,
    Replay,
    Stream,
    learnt_from,
    outcome,
    replay,
    rolling_coverage,
    synthetic,
)
from policies.cleanup import Cleanup

if TYPE_CHECKING:
    from experiments.cleanup.settings import Leg, Settings

Mask = npt.NDArray[np.bool_]
POINTS = 400
HALF_A_POINT = 0.005 + 1e-12
"""How far the coverage of a stretch of windows may be from what was asked. Shares are doubles, so slightly more."""


def known_truth(task: tuple[Leg, Settings, int]) -> dict[str, Any]:
    """One run of one stream with known truth. ``task``: the stream, the settings, the seed."""
    leg, settings, seed = task
    stream = synthetic(leg.kind, leg.days, leg.per_minute, seed)
    oracle_us = stream.oracle_us(settings.coverage)[stream.regime]
    result, seconds = timed_replay(stream, settings, settings.initial_bound_s * SECOND_US)
    after = np.arange(stream.windows) >= int(leg.warm_up_days * DAY_US) // stream.window_us
    found = compared(stream, result, oracle_us, after, settings, settings.initial_bound_s * SECOND_US)
    last = int(result.bounds_us[-1])
    found |= {
        "seed": seed,
        "seconds": seconds,
        "last_bound_covers": 1 - stream.lost(last, int(stream.regime[-1])),
        "late_events": len(stream.window),
    }
    if len(stream.oracle_us(settings.coverage)) > 1:
        found |= through_the_change(stream, result, oracle_us, after)
    return found | (course(stream, result, oracle_us) if seed == 0 else {})


def timed_replay(stream: Stream, settings: Settings, initial_bound_us: int) -> tuple[Replay, float]:
    """The replay of a stream with a learning bound, and the seconds it took."""
    bound = AdaptiveBound(
        Cleanup(initial_bound_us, coverage=settings.coverage, confidence=settings.confidence),
        half_life_us=settings.half_life_s * SECOND_US,
        model=settings.model,
    )
    started = time.perf_counter()
    return replay(stream, bound), time.perf_counter() - started


def compared(
    stream: Stream, result: Replay, oracle_us: Ints, after: Mask, settings: Settings, initial_bound_us: int
) -> dict[str, Any]:
    """Coverage and bytes of the learnt bounds and of fixed ones. ``after``: which windows come after the warm-up."""
    oracle = outcome(stream, oracle_us, after)

    def against(bounds_us: Ints) -> dict[str, float]:
        found = outcome(stream, bounds_us, after)
        return {"coverage": found.coverage, "bytes_over_oracle": found.byte_seconds / oracle.byte_seconds}

    learnt = learnt_from(stream, result, 0)
    return {
        **against(result.bounds_us),
        "rolling": rolling(stream, result, settings.coverage, oracle_us),
        "oracle_coverage": oracle.coverage,
        "restarts": result.restarts,
        "asked": result.asked,
        "learnt_after_s": None if learnt is None else learnt * stream.window_us // SECOND_US,
        "why": result.changes[-1][1].why if result.changes else "",
        "fixed": {
            name: {**against(np.full(stream.windows, bound_us)), "bound_s": bound_us / SECOND_US}
            for name, bound_us in fixed_bounds(stream, settings.coverage, initial_bound_us).items()
        },
    }


def rolling(stream: Stream, result: Replay, coverage: float, oracle_us: Ints) -> dict[str, Any] | None:
    """The coverage over any 1,000 windows after the first 200, compared with what was asked. None: too few windows.

    ``within``: the share of these stretches whose coverage is within half a point. ``oracle_within``: the same with the
    oracle's bounds, which know each regime, but not the time of day. ``not_below``: the share of those that are not
    lower than that.
    ``lowest_from``: the first window of the lowest. ``lowest_reasons``: of its bounds.
    """
    found = rolling_coverage(stream, result.bounds_us)
    known = ~np.isnan(found)
    if not known.any():
        return None
    off = found[known] - coverage
    oracle_off = rolling_coverage(stream, oracle_us)[known] - coverage
    lowest_from = FIRST_WINDOWS + int(np.nanargmin(found))
    return {
        "stretches": int(known.sum()),
        "within": float((np.abs(off) <= HALF_A_POINT).mean()),
        "oracle_within": float((np.abs(oracle_off) <= HALF_A_POINT).mean()),
        "not_below": float((off >= -HALF_A_POINT).mean()),
        "lowest": float(np.nanmin(found)),
        "highest": float(np.nanmax(found)),
        "lowest_from": lowest_from,
        "lowest_reasons": reasons(result, lowest_from, lowest_from + STRETCH),
    }


def reasons(result: Replay, begin: int, end: int) -> list[str]:
    """What decided the bounds of the windows from ``begin`` to before ``end``, as far as bounds changed."""
    inside = [d.reason for w, d in result.changes if begin <= w < end]
    before = [d.reason for w, d in result.changes if w < begin][-1:]
    return sorted({str(reason) for reason in [*before, *inside]})


def fixed_bounds(stream: Stream, coverage: float, initial_bound_us: int) -> dict[str, int]:
    """Bounds that a careful user might choose: a cautious one, and some from looking at the start of the stream."""
    first_us = DAY_US if stream.window_us == MINUTE_US else 7 * DAY_US
    arrived = stream.ends_us[stream.window] + stream.seen_us <= first_us
    seen = np.sort(stream.seen_us[arrived])
    name = f"first {first_us // DAY_US} d"
    quantile = int(seen[int(np.ceil(coverage * len(seen))) - 1]) + 1 if len(seen) else initial_bound_us
    longest = int(seen[-1]) + 1 if len(seen) else initial_bound_us
    return {
        "initial bound": initial_bound_us,
        f"longest of {name}": longest,
        f"{coverage:g} of {name}": quantile,
        f"twice {coverage:g} of {name}": 2 * quantile,
    }


def through_the_change(stream: Stream, result: Replay, oracle_us: Ints, after: Mask) -> dict[str, Any]:
    """Coverage and bytes before the change is noticed, while it is relearnt, and for all other windows (settled)."""
    windows = np.arange(stream.windows)
    changed = int(np.argmax(stream.regime > 0))
    noticed = next((w for w, d in result.changes if w >= changed and "has changed" in d.why), None)
    again = None if noticed is None else learnt_from(stream, result, noticed + 1)
    unsettled = (windows >= changed) & (windows < (stream.windows if again is None else again))
    found: dict[str, Any] = {
        "noticed_after_s": None if noticed is None else (noticed - changed) * stream.window_us // SECOND_US,
        "learnt_again_after_s": None if again is None else (again - changed) * stream.window_us // SECOND_US,
    }
    parts = {"settled": after & ~unsettled}
    if noticed is not None:
        parts |= {"unnoticed": unsettled & (windows < noticed), "relearning": unsettled & (windows >= noticed)}
    for name, of in parts.items():
        ours, oracle = outcome(stream, result.bounds_us, of), outcome(stream, oracle_us, of)
        found[name] = {"coverage": ours.coverage, "bytes_over_oracle": ours.byte_seconds / oracle.byte_seconds}
    return found


def course(stream: Stream, result: Replay, oracle_us: Ints) -> dict[str, Any]:
    """The bounds and the coverage of the last 1,000 windows over time, at a few hundred points, for figures."""
    at = np.unique(np.linspace(0, stream.windows - 1, POINTS).astype(int))
    stretches = rolling_coverage(stream, result.bounds_us)
    known = np.flatnonzero(~np.isnan(stretches))
    some = known[np.unique(np.linspace(0, len(known) - 1, POINTS).astype(int))] if len(known) else known
    return {
        "course": {
            "day": (at * stream.window_us / DAY_US).tolist(),
            "bound_s": (result.bounds_us[at] / SECOND_US).tolist(),
            "oracle_s": (oracle_us[at] / SECOND_US).tolist(),
        },
        "rolling_course": {
            "day": ((FIRST_WINDOWS + STRETCH + some) * stream.window_us / DAY_US).tolist(),
            "coverage": stretches[some].tolist(),
        },
    }


def flights(
    settings: Settings, times_us: tuple[Ints, Ints], stretches: int, days: int, warm_up_days: int
) -> list[dict[str, Any]]:
    """Runs over all flights and over stretches of them. Each starts without history. Windows of one hour.

    ``times_us``: of each flight, when it was scheduled and when it came.
    """
    scheduled_us, arrived_us = times_us
    first_us = int(scheduled_us.min()) // DAY_US * DAY_US + DAY_US
    span_us = int(scheduled_us.max()) - first_us
    whole = [(first_us, span_us // HOUR_US * HOUR_US)]
    starts = np.linspace(0, span_us - days * DAY_US, stretches).astype(np.int64) // DAY_US * DAY_US
    initial_us = settings.flights_initial_bound_s * SECOND_US
    found = []
    for number, (begin_us, length_us) in enumerate(whole + [(first_us + int(s), days * DAY_US) for s in starts]):
        stream = flight_stream(scheduled_us, arrived_us, begin_us, begin_us + length_us)
        after = np.arange(stream.windows) >= warm_up_days * DAY_US // HOUR_US
        # The true distribution is unknown. The oracle is the one fixed bound that is right for this stretch.
        seen = np.sort(stream.seen_us[after[stream.window]])
        oracle_us = np.full(stream.windows, int(seen[int(np.ceil(settings.coverage * len(seen))) - 1]) + 1)
        result, seconds = timed_replay(stream, settings, initial_us)
        run = compared(stream, result, oracle_us, after, settings, initial_us)
        run |= {"begins_day": (begin_us - first_us) / DAY_US, "days": length_us / DAY_US, "seconds": seconds}
        found.append(run | (course(stream, result, oracle_us) if number == 0 else {}))
    return found


def flight_times_us(flights_2001: Path | None) -> tuple[Ints, Ints]:
    """When flights were scheduled, and when they came: those of 2013, or those of this file of 2001."""
    if flights_2001 is None:
        from aion.demo.flights import load_flights

        data = load_flights()
        return data.scheduled_us, data.departed_us
    from experiments.shared.flights_2001 import load

    table = load(flights_2001)
    scheduled_us, arrived_us = (table[name].cast("int64").to_numpy() for name in ("ts", "arrived"))
    return scheduled_us, arrived_us


def flight_stream(scheduled_us: Ints, arrived_us: Ints, begin_us: int, end_us: int) -> Stream:
    """The flights scheduled from ``begin_us`` to ``end_us``, both full hours. The watermark moves every ten minutes."""
    mine = (scheduled_us >= begin_us) & (scheduled_us < end_us)
    window = (scheduled_us[mine] - begin_us) // HOUR_US
    late_us = arrived_us[mine] - begin_us - (window + 1) * HOUR_US
    windows = (end_us - begin_us) // HOUR_US
    late = late_us >= 0
    return Stream(
        "flights",
        HOUR_US,
        10 * MINUTE_US,
        window[late],
        late_us[late],
        np.bincount(window[~late], minlength=windows),
        np.zeros(windows, np.int64),
        None,
    )
