"""The settings of `aion experiment cleanup`."""

from __future__ import annotations

from dataclasses import dataclass

HOUR_S, DAY_S = 3600, 86400


@dataclass(frozen=True, slots=True)
class Leg:
    """A stream: its length, its events per minute, and how many days of it are warm-up."""

    kind: str
    days: float
    per_minute: int
    warm_up_days: float


@dataclass(frozen=True, slots=True)
class Settings:
    """The requirements on the bound, and the number of seeds."""

    coverage: float = 0.99
    confidence: float = 0.95
    initial_bound_s: int = 6 * HOUR_S
    flights_initial_bound_s: int = DAY_S
    half_life_s: int = 7 * DAY_S
    model: str = "auto"
    seeds: int = 40


DEFAULTS = Settings()


REAL = ("flights", "flights 2001")
"""The streams of real data."""
