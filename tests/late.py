"""Histories of lateness for tests: windows that end every ``window_us``, events drawn, or given, by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from aion.core.lateness.observe import Lateness

SECOND = 1_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR

Draw = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]
"""So many latenesses in seconds."""


def drawn(
    draw: Draw,
    *,
    windows: int,
    per_window: int = 20,
    late_share: float = 0.2,
    seed: int = 0,
    window_us: int = MINUTE,
    half_life_us: int = 100 * DAY,
    watched_us: int = 0,
    into: Lateness | None = None,
    first: int = 0,
) -> tuple[Lateness, int]:
    """What was learnt, and the watermark: that of the last window's end and ``watched_us``.

    Events that are later than the watermark has not shown yet have not come yet.
    """
    rng = np.random.default_rng(seed)
    lateness = Lateness(half_life_us) if into is None else into
    at_us = (first + windows) * window_us + watched_us
    for window in range(first, first + windows):
        end = (window + 1) * window_us
        late = int(rng.binomial(per_window, late_share))
        lateness.observe_on_time(end, per_window - late)
        for us in (draw(rng, late) * SECOND).astype(np.int64).tolist():
            if end + us <= at_us:
                lateness.observe(end, end + us, 1)
    return lateness, at_us


def lognormal(median_s: float, sigma: float = 1.0) -> Draw:
    return lambda rng, n: median_s * np.exp(sigma * rng.standard_normal(n))


def exponential(mean_s: float) -> Draw:
    return lambda rng, n: rng.exponential(mean_s, n)


def same_in_every_epoch(latenesses_us: Sequence[int], *, epochs: int = 16, on_time: int = 0) -> tuple[Lateness, int]:
    """Epochs of one window each that all have just these late events, watched for ten seconds and more."""
    lateness = Lateness(10**15)
    width = 1 << 20
    for epoch in range(epochs):
        end = epoch * width
        lateness.observe_on_time(end, on_time)
        for us in latenesses_us:
            lateness.observe(end, end + us, 1)
    # One more window makes epochs as long as they are apart, and nothing else: it is not over.
    lateness.observe_on_time(63 * width, 0)
    return lateness, (epochs + 10) * width
