"""The settings of `aion experiment planned`."""

from __future__ import annotations

from dataclasses import dataclass

MODES = ("predictive", "on_late_event", "none")


@dataclass(frozen=True, slots=True)
class Settings:
    """``windows``: their number, of a minute each. ``events``: events in time per window. ``late``: late events per
    window, on average. ``median_s``: the median lateness.
    """

    windows: int = 30
    events: int = 2000
    late: int = 100
    median_s: float = 60.0
    payload_bytes: int = 1000
    batch_s: int = 10
    bound_s: int = 600
    budget_bytes: int = 10 << 20
    staleness: float = 0.05
    seed: int = 1


DEFAULTS = Settings()
