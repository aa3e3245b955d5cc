"""Durations as text for people. Pure."""

from __future__ import annotations


def short_duration(us: int) -> str:
    """A duration for people, to three digits: ``4_321_987_654`` -> ``"1.2 hours"``."""
    for name, scale in (("day", 86_400_000_000), ("hour", 3_600_000_000), ("minute", 60_000_000)):
        if abs(us) >= scale:
            count = _three_digits(us / scale)
            return f"{count} {name}" if count == "1" else f"{count} {name}s"
    if abs(us) >= 1_000_000:
        return f"{_three_digits(us / 1_000_000)} s"
    return f"{_three_digits(us / 1000)} ms"


def _three_digits(number: float) -> str:
    """Without an exponent, however large."""
    return f"{float(f'{number:.3g}'):,.15g}"
