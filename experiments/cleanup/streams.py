"""Streams with known lateness, and their replay with a bound, for `aion experiment cleanup`. Seeded.

The replay does what the operator would do: windows of one minute, a watermark that is the clock and advances every
millisecond, and late events that are observed at the watermark when they arrive, kept or not. It counts what a bound
decides: which events came in time, and how many bytes were kept for how long.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aion.core.lateness.bound import AdaptiveBound
from policies.cleanup import BoundDecision, Reason

SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US
HOUR_US = 60 * MINUTE_US
DAY_US = 24 * HOUR_US
EVENT_BYTES = 100

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Later = Callable[[Floats], Floats]
"""A function from seconds to the true long-run share of late events that are later than that."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream of events. Window i ends at ``(i + 1) * window_us``.

    ``window``: the window of each late event. ``late_us``: its lateness against a continuous watermark. ``step_us``:
    how far the watermark moves at a time. ``on_time``: events in time, by window. ``regime``: the regime of each
    window. ``later``: the true distribution of each regime; None if unknown.
    """

    name: str
    window_us: int
    step_us: int
    window: Ints
    late_us: Ints
    on_time: Ints
    regime: Ints
    later: tuple[Later, ...] | None

    @property
    def windows(self) -> int:
        return len(self.on_time)

    @property
    def ends_us(self) -> Ints:
        return (np.arange(self.windows) + 1) * self.window_us

    @property
    def seen_us(self) -> Ints:
        """The lateness of the late events against the actual watermark, which moves in steps."""
        return self.late_us // self.step_us * self.step_us

    def lost(self, bound_us: int, regime: int) -> float:
        """The true share of late events that a bound loses."""
        assert self.later is not None
        steps = -(-bound_us // self.step_us)
        return float(self.later[regime](np.array(steps * self.step_us / SECOND_US)))

    def oracle_us(self, coverage: float) -> Ints:
        """The smallest bound that truly covers this share of the late events, by regime."""
        assert self.later is not None
        bounds = []
        for regime in range(len(self.later)):
            low, high = 0, 1
            while self.lost(high * self.step_us, regime) > 1 - coverage:
                low, high = high, 2 * high
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self.lost(middle * self.step_us, regime) > 1 - coverage else (low, middle)
            bounds.append(low * self.step_us + 1)
        return np.array(bounds)


def lognormal_later(median_s: float, sigma: float) -> Later:
    from scipy.special import ndtr

    return lambda s: ndtr(-np.log(np.maximum(s, 1e-9) / median_s) / sigma)


GOOD_MEDIAN_S, GOOD_LATE_SHARE = 60.0, 0.2


class BadSource(NamedTuple):
    """One of ``sources`` equal sources goes bad in the middle of the stream, and stays so.

    From then on ``share`` of its events are late, with this median. All others stay as they were.
    """

    sources: int
    share: float
    median_s: float

    @property
    def late_share(self) -> tuple[float, float]:
        """The late share of all events, before and after."""
        return GOOD_LATE_SHARE, GOOD_LATE_SHARE * (1 - 1 / self.sources) + self.share / self.sources

    @property
    def of_late(self) -> float:
        """The share of the late events that come from the bad source."""
        return self.share / self.sources / self.late_share[1]

    def later(self, s: Floats) -> Floats:
        good, bad = lognormal_later(GOOD_MEDIAN_S, 1)(s), lognormal_later(self.median_s, 1)(s)
        return self.of_late * bad + (1 - self.of_late) * good


BAD_SOURCE = BadSource(sources=5, share=0.8, median_s=600.0)


def synthetic(kind: str, days: float, per_minute: int, seed: int) -> Stream:
    """A stream of one of :data:`KINDS`, with about ``per_minute`` events a minute; in most kinds a fifth are late."""
    rng = np.random.default_rng((KINDS.index(kind), seed))
    windows = int(days * DAY_US) // MINUTE_US
    minute = np.arange(windows)
    regime = np.zeros(windows, np.int64)
    rate, late_share = np.full(windows, float(per_minute)), np.full(windows, 0.2)
    outage = np.zeros(windows, bool)
    if kind == "daily rhythm":
        # More events by day, and longer delays by night.
        phase = 2 * math.pi * minute * MINUTE_US / DAY_US
        rate = rate * (1 + 0.5 * np.sin(phase))
    if kind == "bursts":
        outage = rng.random(windows) < 1 / 20
        late_share = np.where(outage, 0.6, 0.05)
    if kind in ("regime change", "bad source"):
        regime = (minute >= windows // 2).astype(np.int64)
    if kind == "bad source":
        late_share = np.array(BAD_SOURCE.late_share)[regime]
    events = rng.poisson(rate)
    late = rng.binomial(events, late_share)
    window = np.repeat(minute, late)
    count = len(window)
    normal = rng.standard_normal(count)
    if kind == "log-normal":
        seconds = 120 * np.exp(normal)
        later: tuple[Later, ...] = (lognormal_later(120, 1),)
    elif kind == "pareto":
        seconds = 60 * rng.pareto(1.5, count)
        later = (lambda s: (1 + s / 60) ** -1.5,)
    elif kind == "bursts":
        seconds = np.where(outage[window], rng.exponential(1200, count), rng.exponential(30, count))
        weights = np.array([0.6 / 20, 0.05 * 19 / 20])
        weights /= weights.sum()
        later = (lambda s: weights[0] * np.exp(-s / 1200) + weights[1] * np.exp(-s / 30),)
    elif kind == "regime change":
        medians = np.array([60.0, 240.0])
        seconds = medians[regime[window]] * np.exp(normal)
        later = tuple(lognormal_later(median, 1) for median in medians)
    elif kind == "bad source":
        bad = (regime[window] == 1) & (rng.random(count) < BAD_SOURCE.of_late)
        seconds = np.where(bad, BAD_SOURCE.median_s, GOOD_MEDIAN_S) * np.exp(normal)
        later = (lognormal_later(GOOD_MEDIAN_S, 1), BAD_SOURCE.later)
    else:
        seconds = 120 * np.exp(0.7 * normal - np.sin(phase)[window])
        phases = np.linspace(0, 2 * math.pi, 1440, endpoint=False)
        parts = [(1 + 0.5 * math.sin(p), lognormal_later(120 * math.exp(-math.sin(p)), 0.7)) for p in phases]
        whole = sum(weight for weight, _ in parts)
        later = (lambda s: sum((weight * part(s) for weight, part in parts), np.zeros_like(s)) / whole,)
    late_us = (np.minimum(seconds, 1e9) * SECOND_US).astype(np.int64)
    return Stream(kind, MINUTE_US, 1000, window, late_us, events - late, regime, later)


KINDS = ("log-normal", "pareto", "bursts", "daily rhythm", "regime change", "bad source")


class Replay(NamedTuple):
    """``bounds_us``: the bound of each window. ``changes``: each decision with a new bound, with its first window."""

    bounds_us: Ints
    changes: list[tuple[int, BoundDecision]]
    restarts: int
    asked: int


def replay(stream: Stream, bound: AdaptiveBound) -> Replay:
    """Replays the stream with ``bound``."""
    step_us, window_us = stream.step_us, stream.window_us
    arrives = (stream.ends_us[stream.window] + stream.late_us) // step_us
    order = np.lexsort((stream.window, arrives))
    keys = np.stack([arrives[order], stream.window[order]])
    first = np.flatnonzero(np.any(np.diff(keys, axis=1, prepend=-1), axis=0))
    counts = np.diff(np.append(first, len(order))).tolist()
    batches, windows = keys[0, first].tolist(), keys[1, first].tolist()
    on_time = stream.on_time.tolist()
    bounds = np.zeros(stream.windows, np.int64)
    changes: list[tuple[int, BoundDecision]] = []
    at = made = ended = asked = 0
    # Skip watermarks at which no event comes and no window begins or ends.
    starts = np.arange(stream.windows) * window_us // step_us
    last = stream.windows * window_us // step_us
    stops = np.unique(np.concatenate([starts, keys[0, first]]))
    for batch in stops[stops < last].tolist():
        now = batch * step_us
        decision = bound.decision
        bound.advance(now - step_us if batch else None, now)
        if bound.decision is not decision:
            asked += 1
            if not changes or bound.decision.bound_us != changes[-1][1].bound_us:
                changes.append((made, bound.decision))
        while (ended + 1) * window_us <= now:
            bound.observe_on_time((ended + 1) * window_us, on_time[ended])
            ended += 1
        while made < stream.windows and made * window_us <= now:
            bounds[made] = bound.bound_for_new_window()
            made += 1
        while at < len(counts) and batches[at] <= batch:
            bound.observe((windows[at] + 1) * window_us, now, counts[at])
            at += 1
    return Replay(bounds, changes, bound.restarts, asked)


class Outcome(NamedTuple):
    """The share of late events that came in time, the number of late events, and bytes times seconds kept."""

    coverage: float
    late_events: int
    byte_seconds: float


def outcome(stream: Stream, bounds_us: Ints, of: npt.NDArray[np.bool_]) -> Outcome:
    """The outcome for the windows that the mask ``of``, (W,), selects, with their bounds ``bounds_us``, (W,)."""
    mine = of[stream.window]
    window, seen = stream.window[mine], stream.seen_us[mine]
    in_time = seen < bounds_us[window]
    # A window is purged at the first watermark that passes its bound.
    kept_us = -(-bounds_us // stream.step_us) * stream.step_us
    on_time = (stream.on_time * (kept_us + stream.window_us / 2))[of].sum()
    late = (kept_us[window] - seen)[in_time].sum()
    total = len(seen)
    return Outcome(float(in_time.sum() / max(1, total)), total, float(on_time + late) * EVENT_BYTES / SECOND_US)


FIRST_WINDOWS, STRETCH = 200, 1000


def rolling_coverage(stream: Stream, bounds_us: Ints) -> Floats:
    """The coverage of each stretch of 1,000 windows in a row, without the first 200 windows.

    ``bounds_us``: of each window, (W,). The result has one value for each first window, (max(0, W - 1199),). It is NaN
    for a stretch without late events.
    """
    first = max(0, stream.windows - FIRST_WINDOWS - STRETCH + 1)
    starts = FIRST_WINDOWS + np.arange(first)

    def of_stretches(of: npt.NDArray[np.bool_]) -> Floats:
        up_to = np.concatenate([[0], np.cumsum(np.bincount(stream.window[of], minlength=stream.windows))])
        return np.asarray(up_to[starts + STRETCH] - up_to[starts], np.float64)

    late = of_stretches(np.ones(len(stream.window), bool))
    in_time = of_stretches(stream.seen_us < bounds_us[stream.window])
    return np.asarray(np.divide(in_time, late, out=np.full(first, np.nan), where=late > 0))


def learnt_from(stream: Stream, result: Replay, window: int) -> int | None:
    """The first window from ``window`` on whose bound was learnt; None if there is none."""
    decided = [w for w, d in result.changes if d.reason is Reason.LEARNT]
    before = [d for w, d in result.changes if w <= window]
    if before and before[-1].reason is Reason.LEARNT:
        return window
    return next((w for w in decided if w >= window), None)
