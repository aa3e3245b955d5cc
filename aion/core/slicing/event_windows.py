"""Windows over the events of keys in event-time order: per record (KIP-450) and by count. Many keys at once. Pure."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aion.core.windows import Count
from state_backends.thresholds import threshold

Micros = npt.NDArray[np.int64]
Index = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]

# The times of each key are shifted to a range of their own, so that one search serves as many keys as 64 bits allow.
_ROOM = threshold(2**62, 256)


class RecordWindows(NamedTuple):
    """Windows in order of (key, start), both bounds inclusive. The rows of a window are ``[begin, end)``."""

    keys: Micros
    starts_us: Micros
    ends_us: Micros
    begins: Index
    ends: Index


def record_windows(keys: Micros, times_us: Micros, size_us: int, following_us: int | None = None) -> RecordWindows:
    """Returns one window for each distinct time of a key: the events from ``size_us`` before it up to it.

    ``keys``, ``times_us``: in order of (key, time). With ``following_us``, the resolution of the clock (for Kafka a
    millisecond), there is also the window that begins that much after each event, if it holds any: so does Kafka
    Streams as shipped, where KIP-450 asks for the windows that end at an event only.
    """
    if not len(keys):
        nothing = np.empty(0, np.int64)
        return RecordWindows(nothing, nothing, nothing, nothing, nothing)
    other_key = keys[1:] != keys[:-1]
    distinct = np.concatenate(([True], other_key | (times_us[1:] != times_us[:-1])))
    group = np.concatenate(([0], np.cumsum(other_key)))
    firsts = times_us[distinct] - size_us
    of_group = group[distinct]
    if following_us is not None:
        after = times_us[distinct] + following_us
        both = np.stack((np.tile(of_group, 2), np.concatenate((firsts, after))))
        of_group, firsts = np.unique(both, axis=1)
    low = int(times_us[0] if not len(other_key) else times_us.min())
    span = int(times_us.max()) - low
    # No window of a key reaches into the times of the key before or after it.
    stride = span + 2 * size_us + 2 * (following_us or 0) + 2
    begins, ends = np.empty(len(firsts), np.intp), np.empty(len(firsts), np.intp)
    at_once = max(_ROOM // stride, 1)
    if at_once == 1:
        low, stride = 0, 0  # Nothing is shifted: times this far apart would leave 64 bits.
    for lowest in range(0, int(group[-1]) + 1, at_once):
        bounds = [lowest, lowest + at_once]
        rows, windows = slice(*np.searchsorted(group, bounds)), slice(*np.searchsorted(of_group, bounds))
        lifted = times_us[rows] - low + (group[rows] - lowest) * stride
        wanted = firsts[windows] - low + (of_group[windows] - lowest) * stride
        begins[windows] = np.searchsorted(lifted, wanted) + rows.start
        ends[windows] = np.searchsorted(lifted, wanted + size_us, side="right") + rows.start
    key_of_group = keys[np.concatenate(([0], np.flatnonzero(other_key) + 1))]
    full = ends > begins
    of_group, firsts = of_group[full], firsts[full]
    return RecordWindows(key_of_group[of_group], firsts, firsts + size_us, begins[full], ends[full])


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

    Window k of a key holds its events number ``k * slide`` to ``k * slide + n - 1``. Such windows need all events of a
    key in one place (Disco section 3.2): parts cannot be merged.

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
