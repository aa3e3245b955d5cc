"""How large a number may become: counts stop, and times have a range. Pure.

State is written in 64 bits, and a commit that meets a number beyond them would fail for good. So:

- A *count* (events, bytes) stops at ``MOST``. It gets there in the same way whatever is added first.
- A *time* lies in ``[EARLIEST_US, LATEST_US]``, 73,000 years around 1970. An event beyond is dropped as one without a
  time is; a watermark stops there. No bound and no window is longer than ``LONGEST_US``. So the end of a window, a
  lateness, and the difference of two times always fit.
- What is *measured* in time times events is a double, which has room for all of it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

MOST = 2**63 - 1
LATEST_US = 2**61
EARLIEST_US = -LATEST_US
LONGEST_US = 2**61


def plus(count: int, more: int) -> int:
    """The sum of two counts."""
    return min(count + more, MOST)


def sum_of(counts: Ints) -> int:
    """The sum of counts."""
    return int(sums_by(np.zeros(len(counts), np.int64), counts, 1)[0])


def sums_by(of: Ints, counts: Ints, groups: int) -> Ints:
    """The sums of counts by group, ``of[i]`` being the group of the i-th."""
    found = np.zeros(groups, np.int64)
    if int(counts.max(initial=0)) <= MOST // max(len(counts), 1):
        np.add.at(found, of, counts)
        return found
    # The halves of so few counts fit where the whole may not.
    low, high = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    np.add.at(low, of, counts & 0xFFFFFFFF)
    np.add.at(high, of, counts >> 32)
    high += low >> 32
    return np.where(high >= 2**31, MOST, (np.minimum(high, 2**31 - 1) << 32) | (low & 0xFFFFFFFF))


def coarse(value: float) -> float:
    """A measurement to 24 bits, never more than it is: what a window keeps of it takes half the room."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(math.floor(mantissa * 2**24), exponent - 24)


def within(us: int) -> int:
    """A time, or the end of the range that is nearest to it."""
    return min(max(us, EARLIEST_US), LATEST_US)
