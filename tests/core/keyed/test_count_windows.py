"""Count windows of many keys against a definition by events, and how a late event moves those behind it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aion.core.slicing.event_windows import CountWindows, count_windows, event_time_order
from aion.core.windows import Count

Event = tuple[int, int]
"""A key and a time."""

events = st.lists(st.tuples(st.integers(0, 3), st.integers(-9, 9)), max_size=40)
windows = st.integers(1, 6).flatmap(lambda n: st.builds(Count, st.just(n), st.integers(1, n)))


def ordered(events: Sequence[Event]) -> tuple[np.ndarray, np.ndarray]:
    """Keys in event-time order, and which events they are, by the order of arrival."""
    keys, times = np.array([k for k, _ in events], np.int64), np.array([t for _, t in events], np.int64)
    order = event_time_order(keys, times)
    return keys[order], order


def brute(events: Sequence[Event], window: Count) -> dict[tuple[int, int], list[int]]:
    """(key, number) -> which events, by the order of arrival."""
    found = {}
    for key in {k for k, _ in events}:
        mine = sorted((t, n) for n, (k, t) in enumerate(events) if k == key)
        for number in range(len(mine)):
            inside = mine[number * window.slide : number * window.slide + window.n]
            if len(inside) == window.n:
                found[key, number] = [n for _, n in inside]
    return found


def contents(found: CountWindows, order: np.ndarray) -> dict[tuple[int, int], list[int]]:
    rows = zip(*(column.tolist() for column in found[:4]), strict=True)
    return {(key, number): order[begin:end].tolist() for key, number, begin, end in rows}


@given(events, windows)
def test_windows_hold_so_many_events_in_event_time_order(events: list[Event], window: Count) -> None:
    keys, order = ordered(events)
    found = count_windows(keys, np.zeros(len(keys), np.bool_), window)
    assert contents(found, order) == brute(events, window)
    named = list(zip(found.keys.tolist(), found.numbers.tolist(), strict=True))
    assert named == sorted(named)
    assert not found.changed.any()


@given(events, events, windows)
def test_a_late_event_changes_its_windows_and_all_behind(old: list[Event], new: list[Event], window: Count) -> None:
    before, after = brute(old, window), brute([*old, *new], window)
    keys, order = ordered([*old, *new])
    found = count_windows(keys, order >= len(old), window)
    assert contents(found, order) == after
    changed = {
        (key, number)
        for key, number, is_changed in zip(
            found.keys.tolist(), found.numbers.tolist(), found.changed.tolist(), strict=True
        )
        if is_changed
    }
    assert changed == {name for name, inside in after.items() if before.get(name) != inside}


@given(events, windows, st.data())
def test_what_was_dropped_still_counts(events: list[Event], window: Count, data: st.DataObject) -> None:
    keys, order = ordered(events)
    dropped = {key: data.draw(st.integers(0, (keys == key).sum())) for key in sorted(set(keys.tolist()))}
    ranks = np.arange(len(keys)) - np.searchsorted(keys, keys)
    kept = ranks >= np.array([dropped[key] for key in keys.tolist()], np.int64)
    left = {key: n for key, n in dropped.items() if n < (keys == key).sum()}
    found = count_windows(
        keys[kept], np.zeros(int(kept.sum()), np.bool_), window, np.array(list(left.values()), np.intp)
    )
    expected = {
        (key, number): inside
        for (key, number), inside in brute(events, window).items()
        if number * window.slide >= dropped[key] and key in left
    }
    assert contents(found, order[kept]) == expected


def test_events_of_equal_times_stay_apart_and_in_the_order_of_arrival() -> None:
    keys, order = ordered([(0, 5), (0, 5), (0, 5), (0, 4)])
    found = count_windows(keys, np.zeros(4, np.bool_), Count(2))
    assert contents(found, order) == {(0, 0): [3, 0], (0, 1): [1, 2]}
