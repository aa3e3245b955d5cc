"""Splits a sequence of items into stretches of a limited weight. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np


def at_once(weights: Any, limit: int) -> Iterator[slice]:
    """Splits items into stretches. Each weighs at most ``limit`` together, or is a single item."""
    upto = np.cumsum(weights)
    start = 0
    while start < len(upto):
        done = int(upto[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(upto, done + limit, side="right")))
        yield slice(start, end)
        start = end
