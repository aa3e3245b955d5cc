"""How many examples a property test looks at: all that the profile allows, or a share of them."""

from __future__ import annotations

from hypothesis import settings


def some(share: float) -> settings:
    """Settings for a property whose examples take long: this share of the profile's examples, at least one.

    No property names a number of its own: one profile makes all of them quick, and another makes all of them thorough.
    """
    return settings(max_examples=max(round(settings.default.max_examples * share), 1))
