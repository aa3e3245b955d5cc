"""Sessions of many keys against a definition by events: merging, what was replaced, cells, any order and any tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion.core.slicing import sessions as module
from aion.core.slicing.sessions import Intervals, merge_intervals, merge_sessions
from experiments.slicing.baselines import session_cells

Event = tuple[int, int]
"""A key and a time."""

Session = tuple[int, int, int]

events = st.lists(st.tuples(st.integers(0, 3), st.integers(-40, 60)), max_size=40)
gaps = st.integers(1, 12)


def brute(events: Iterable[Event], gap: int) -> list[Session]:
    """(key, first, last): an event starts a session if the one before it is more than a gap away."""
    found: list[list[int]] = []
    for key, t in sorted(events):
        if found and found[-1][0] == key and t - found[-1][2] <= gap:
            found[-1][2] = t
        else:
            found.append([key, t, t])
    return [(key, first, last) for key, first, last in found]


def intervals(sessions: Sequence[Session]) -> Intervals:
    return Intervals(*(np.array([s[i] for s in sessions], np.int64) for i in range(3)))


def tuples(made: Intervals) -> list[Session]:
    return list(zip(*(column.tolist() for column in made), strict=True))


def columns(events: Sequence[Event]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([k for k, _ in events], np.int64), np.array([t for _, t in events], np.int64)


def instants(events: Sequence[Event]) -> Intervals:
    keys, times = columns(events)
    return Intervals(keys, times, times)


# -- merging ----------------------------------------------------------------------------------------------


@given(events, gaps)
def test_single_events_make_up_the_sessions(events: list[Event], gap: int) -> None:
    made, of = merge_intervals(instants(events), gap)
    assert tuples(made) == brute(events, gap)
    for (key, t), number in zip(events, of.tolist(), strict=True):
        assert made.keys[number] == key and made.firsts[number] <= t <= made.lasts[number]


@given(st.lists(events, max_size=4), gaps)
def test_any_tree_of_merges_gives_the_same(parts: list[list[Event]], gap: int) -> None:
    """Partitions by themselves, then theirs pairwise, then all (Disco section 3.2)."""
    level = [merge_intervals(instants(part), gap).made for part in parts]
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [
            merge_intervals(Intervals(*(np.concatenate(c) for c in zip(*pair, strict=True))), gap).made
            for pair in pairs
        ]
    assert [tuples(made) for made in level] == ([brute([e for part in parts for e in part], gap)] if parts else [])


@given(events, gaps, st.integers(0, 12))
def test_sessions_of_a_larger_gap_are_made_of_those_of_the_smallest(events: list[Event], gap: int, more: int) -> None:
    smallest = merge_intervals(instants(events), gap).made
    assert tuples(merge_intervals(smallest, gap + more).made) == brute(events, gap + more)


@given(events, gaps)
def test_an_event_exactly_a_gap_later_belongs_to_the_session(events: list[Event], gap: int) -> None:
    sessions = brute(events, gap)
    for key, first, last in sessions:
        for t, bounds in ((last + gap, (first, last + gap)), (first - gap, (first - gap, last))):
            made = tuples(merge_intervals(instants([*events, (key, t)]), gap).made)
            assert any(k == key and f <= bounds[0] and bounds[1] <= x for k, f, x in made)


def test_intervals_may_overlap_and_contain_each_other() -> None:
    made, of = merge_intervals(intervals([(0, 5, 6), (0, 0, 100), (0, 111, 120), (1, 50, 60), (0, 99, 105)]), 6)
    assert tuples(made) == [(0, 0, 120), (1, 50, 60)]
    assert of.tolist() == [0, 0, 0, 1, 0]


def test_no_interval_makes_no_session() -> None:
    nothing = intervals([])
    assert tuples(merge_intervals(nothing, 5).made) == []
    assert tuples(merge_sessions(nothing, nothing, 5).sessions) == []
    assert tuples(session_cells(*columns([]), 5).made) == []


def test_many_keys_over_a_long_time_fit_into_64_bits() -> None:
    keys = np.repeat(np.arange(5_000), 3)
    times = np.tile([-(2**60), 0, 2**60], 5_000)
    made, _ = merge_intervals(Intervals(keys, times, times + 7), 10)
    assert len(made.keys) == 15_000
    assert (made.lasts == times + 7).all()


# -- what changed -----------------------------------------------------------------------------------------


@given(events, events, gaps)
def test_new_events_change_sessions_and_replace_old_ones(old: list[Event], new: list[Event], gap: int) -> None:
    before = brute(old, gap)
    found = merge_sessions(intervals(before), instants(new), gap)
    after = brute([*old, *new], gap)
    assert tuples(found.sessions) == after
    assert [s for s, replaced in zip(before, found.replaced.tolist(), strict=True) if replaced] == [
        s for s in before if s not in after
    ]
    changed = {after[n] for n in np.flatnonzero(found.changed).tolist()}
    assert changed == {s for s in after if any(k == s[0] and s[1] <= t <= s[2] for k, t in new)}
    for session, number in zip(before, found.of_old.tolist(), strict=True):
        key, first, last = after[number]
        assert key == session[0] and first <= session[1] and session[2] <= last


def test_one_event_can_replace_two_sessions() -> None:
    found = merge_sessions(intervals([(0, 0, 10), (0, 20, 30), (0, 50, 50)]), instants([(0, 15)]), 5)
    assert tuples(found.sessions) == [(0, 0, 30), (0, 50, 50)]
    assert found.replaced.tolist() == [True, True, False]
    assert found.of_old.tolist() == [0, 0, 1]
    assert found.changed.tolist() == [True, False]


def test_an_event_inside_a_session_replaces_none() -> None:
    found = merge_sessions(intervals([(0, 0, 10)]), instants([(0, 3)]), 5)
    assert (found.changed.tolist(), found.replaced.tolist()) == ([True], [False])


# -- cells ------------------------------------------------------------------------------------------------


def check_cells(events: Sequence[Event], gap: int) -> None:
    keys, times = columns(events)
    made, of = session_cells(keys, times, gap)
    cells: dict[tuple[int, int], list[int]] = {}
    for key, t in events:
        cells.setdefault((key, t // gap), []).append(t)
    expected = sorted((key, min(ts), max(ts)) for (key, _), ts in cells.items())
    assert sorted(tuples(made)) == expected
    for (key, t), number in zip(events, of.tolist(), strict=True):
        assert (made.keys[number], made.firsts[number] // gap) == (key, t // gap)
    assert tuples(merge_intervals(made, gap).made) == brute(events, gap)


@given(events, gaps)
def test_cells_say_all_that_sessions_need(events: list[Event], gap: int) -> None:
    check_cells(events, gap)


@pytest.mark.parametrize(
    ("keys", "span"), [(100, 10**6), (10**6, 10**6), (2**40, 2**60)], ids=["counted", "sorted", "numbered anew"]
)
def test_cells_of_keys_and_times_that_lie_apart(keys: int, span: int) -> None:
    rng = np.random.default_rng(4)
    some = rng.integers(0, keys, 300)
    events = list(zip(rng.choice(some, 900).tolist(), rng.integers(-span, span, 900).tolist(), strict=True))
    check_cells(events, 1_000)


@pytest.mark.usual_sizes
def test_cells_are_not_sorted_where_they_are_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    keys, times = rng.integers(0, 50, 20_000), rng.integers(0, 10**6, 20_000)
    expected = tuples(session_cells(keys, times, 1_000).made)
    for name in ("unique", "argsort", "sort", "lexsort"):
        monkeypatch.setattr(module.np, name, lambda *_, **__: pytest.fail("sorted"))
    assert tuples(session_cells(keys, times, 1_000).made) == expected
