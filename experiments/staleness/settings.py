"""The settings of `aion experiment staleness`."""

from __future__ import annotations

from dataclasses import dataclass

EXECUTIONS = 20
STEPS = 50
"""The batches between a replayed window's end and its bound, in replays with batches."""
REPLAYED_BOUND = 0.05


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of one run of the experiment. ``grid``: how many places brute force tries in time, and in events."""

    horizon: float = 17.0
    distributions: int = 1000
    grid: int = 120
    windows: int = 40
    seed: int = 1


DEFAULTS = Settings()
