"""The settings of `aion experiment completeness`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """``windows``: of five minutes each. ``events``: of each key in each window. ``warm_up``: the windows before those
    that are judged. ``flights``: how many, from April on; the first 25 days are the warm-up.
    """

    windows: int = 288
    events: int = 60
    keys: int = 5
    warm_up: int = 72
    flights: int = 70_000
    confidence: float = 0.95
    seed: int = 1


DEFAULTS = Settings()
