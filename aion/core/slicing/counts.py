"""Count windows over events in event-time order, for many keys at once. Pure.

Window k of a key holds its events number ``k * slide`` to ``k * slide + n - 1``. Events of equal time are in the order
of arrival. Such windows need all events of a key in one place (Disco section 3.2): parts cannot be merged.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aion.core.windows import Count

Micros = npt.NDArray[np.int64]
Index = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]


class CountWindows(NamedTuple):
    """Complete windows in order of (key, number). The rows of a window are ``[begin, end)``.

    ``changed``: whether its events have changed: it holds a new event, or an earlier new event has moved it.
    """

    keys: Micros
    numbers: Micros
    begins: Index
    ends: Index
    changed: Flags


def event_time_order(keys: Micros, times_us: Micros) -> Index:
    """Returns the order of the rows by (key, time). Rows of equal time stay in the order of arrival."""
    return np.lexsort((times_us, keys))


def count_windows(
    keys: Micros, is_new: Flags, window: Count, dropped: Index | None = None, first: Index | None = None
) -> CountWindows:
    """Returns the complete windows of each key.

    ``keys``: of all stored events, in the order of :func:`event_time_order`. ``is_new``: whether each event is new.
    ``dropped``: how many earlier events of each distinct key are no longer stored. ``first``: the number of the first
    window to return, for each distinct key; by default the first window that has lost no event.
    """
    if not len(keys):
        nothing = np.empty(0, np.intp)
        return CountWindows(keys, nothing, nothing, nothing, np.empty(0, np.bool_))
    key_begins = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    sizes = np.diff(np.append(key_begins, len(keys)))
    gone = np.zeros(len(sizes), np.intp) if dropped is None else dropped
    lowest = -(-gone // window.slide) if first is None else first
    counts = np.maximum((gone + sizes - window.n) // window.slide - lowest + 1, 0)
    of_key = np.repeat(np.arange(len(sizes)), counts)
    numbers = np.arange(len(of_key)) + np.repeat(lowest - (np.cumsum(counts) - counts), counts)
    begins = numbers * window.slide + np.repeat(key_begins - gone, counts)
    ends = begins + window.n
    first_new = np.minimum.reduceat(np.where(is_new, np.arange(len(keys)), len(keys)), key_begins)
    return CountWindows(keys[key_begins][of_key], numbers, begins, ends, ends > first_new[of_key])
