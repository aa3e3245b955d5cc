"""The range of numbers: counts saturate, and times are limited. Pure.

State is stored in 64 bits. A commit with a larger number would fail, and so would every retry. So:

- A *count* (events, bytes) saturates at ``MOST``, in whatever order counts are added.
- A *time* lies in ``[EARLIEST_US, LATEST_US]``, 73,000 years around 1970. An event outside is dropped, as if it had no
  time. A watermark stops at the limit. No bound and no window is longer than ``LONGEST_US``. So the end of a window, a
  lateness, and the difference of two times always fit.
- A *measurement* in time times events is a double, which is large enough.

Items that are worked on some at a time are counted here, too (:func:`at_once`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

MOST = 2**63 - 1
NEVER = 2**63 - 1
"""The instant of what does not happen. It is later than any time."""
LATEST_US = 2**61
EARLIEST_US = -LATEST_US
LONGEST_US = 2**61


def counted(number: int, what: str) -> str:
    """Returns a count in words: ``1 shard``, ``1,000 shards``."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def plus(count: int, more: int) -> int:
    """Returns the sum of two counts, at most ``MOST``."""
    return min(count + more, MOST)


def sum_of(counts: Ints) -> int:
    """Returns the sum of counts, at most ``MOST``."""
    return int(sums_by(np.zeros(len(counts), np.int64), counts, 1)[0])


def sums_by(of: Ints, counts: Ints, groups: int) -> Ints:
    """Returns the sum of the counts of each group, at most ``MOST``. ``of[i]``: the group of ``counts[i]``."""
    found = np.zeros(groups, np.int64)
    if int(counts.max(initial=0)) <= MOST // max(len(counts), 1):
        np.add.at(found, of, counts)
        return found
    # The sums may overflow. Add the low and the high 32 bits separately: those sums fit.
    low, high = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    np.add.at(low, of, counts & 0xFFFFFFFF)
    np.add.at(high, of, counts >> 32)
    high += low >> 32
    return np.where(high >= 2**31, MOST, (np.minimum(high, 2**31 - 1) << 32) | (low & 0xFFFFFFFF))


def coarse(value: float) -> float:
    """Returns a measurement, rounded down to 24 bits. So it takes half the space in a window's state."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(math.floor(mantissa * 2**24), exponent - 24)


def within(us: int) -> int:
    """Returns the time, limited to ``[EARLIEST_US, LATEST_US]``."""
    return min(max(us, EARLIEST_US), LATEST_US)


def at_once(weights: Any, limit: int) -> Iterator[slice]:
    """Splits items into stretches. Each weighs at most ``limit`` together, or is a single item."""
    upto = np.cumsum(weights)
    start = 0
    while start < len(upto):
        done = int(upto[start - 1]) if start else 0
        end = max(start + 1, int(np.searchsorted(upto, done + limit, side="right")))
        yield slice(start, end)
        start = end
