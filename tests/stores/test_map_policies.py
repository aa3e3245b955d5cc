"""Parts of the store of keyed values: which runs are merged, which values leave memory, what an attempt has put."""

from __future__ import annotations

import math
import os
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.destage import leaving
from state_backends.format.ordered_map import NEVER_MS
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.map.cache import VALUE_BYTES, ValueCache
from state_backends.store.map.overlay import CHANGE_BYTES, Overlay
from state_backends.store.merge_choice import FAN_IN, MOST_RUNS, neighbours

KEYS = st.binary(min_size=1, max_size=3)
CHANGES = st.lists(st.tuples(KEYS, st.none() | st.binary(min_size=1, max_size=20), st.none() | st.integers(0, 9)))


def merged(sizes: list[int]) -> tuple[list[int], int]:
    """The runs after all merges that are worth it, if no value replaces another; and the bytes written."""
    written = 0
    while (chosen := neighbours(sizes)) is not None:
        begin, end = chosen
        total = sum(sizes[begin:end])
        written += total
        sizes = [*sizes[:begin], total, *sizes[end:]]
    return sizes, written


@pytest.mark.usual_sizes
def test_equal_commits_leave_few_runs_and_are_written_a_few_times() -> None:
    sizes: list[int] = []
    written = 0
    for count in range(1, 3000):
        sizes, more = merged([*sizes, 1000])
        written += more
        assert len(sizes) <= 3 + math.log2(count + 1)
        assert sum(sizes) == 1000 * count
    assert written / sum(sizes) < math.log2(3000)


@given(st.lists(st.integers(1, 1 << 40), max_size=60))
def test_whatever_their_sizes_are_runs_stay_few(commits: list[int]) -> None:
    sizes: list[int] = []
    for size in commits:
        sizes, _ = merged([*sizes, size])
        assert len(sizes) <= MOST_RUNS


@given(st.lists(st.integers(1, 1000), max_size=20))
def test_a_merge_takes_neighbours_of_similar_size(sizes: list[int]) -> None:
    chosen = neighbours(sizes)
    if chosen is None:
        assert len(sizes) <= MOST_RUNS
        return
    begin, end = chosen
    assert 0 <= begin < end <= len(sizes) and end - begin >= 2
    if len(sizes) <= MOST_RUNS:
        assert end - begin >= FAN_IN
        assert all(sizes[at] <= sum(sizes[at + 1 : end]) for at in range(begin, end - 1))


@pytest.mark.usual_sizes
def test_a_large_old_run_is_not_written_again_for_small_new_ones() -> None:
    assert neighbours([10_000, 10, 10, 10]) is None
    assert neighbours([10_000, 10, 10, 10, 10]) == (1, 5)
    assert neighbours([100, 10, 10, 10, 100]) == (0, 5)


# -- what leaves memory -----------------------------------------------------------------------------------


def test_values_that_are_needed_soon_leave_last() -> None:
    keys = [b"a", b"b", b"c", b"d"]
    needed = {b"a": 10, b"c": 20, b"d": 21}
    assert list(leaving(keys, needed, None)) == keys
    assert list(leaving(keys, {}, 20)) == keys
    assert list(leaving(keys, needed, 20)) == [b"b", b"d", b"a", b"c"]
    assert list(leaving(keys, needed, 9)) == keys


@given(st.lists(KEYS, unique=True), st.dictionaries(KEYS, st.integers(0, 9)), st.none() | st.integers(0, 9))
def test_every_value_leaves_once(keys: list[bytes], needed: dict[bytes, int], expected: int | None) -> None:
    order = list(leaving(keys, needed, expected))
    assert sorted(order) == sorted(keys)
    if expected is not None:
        soon = [needed.get(key, 99) <= expected for key in order]
        assert all(before <= after for before, after in pairwise(soon))


def test_a_value_takes_about_the_memory_that_is_counted() -> None:
    values = [(os.urandom(20), os.urandom(50)) for _ in range(50_000)]
    budget = MemoryBudget(1 << 30)
    cache, overlay = ValueCache(budget), Overlay()

    def to_cache() -> None:
        cache.put(values, {key: 10**12 + n for n, (key, _) in enumerate(values)})

    def to_overlay() -> None:
        overlay.put(((key, value, 10**12 + n) for n, (key, value) in enumerate(values)), 1 << 60)

    for fill, constant in ((to_cache, VALUE_BYTES), (to_overlay, CHANGE_BYTES)):
        tracemalloc.start()
        fill()
        grown = tracemalloc.get_traced_memory()[0] / len(values)
        tracemalloc.stop()
        # Keys and values exist already. Each is an object, with 33 bytes besides its own.
        assert grown + 66 == pytest.approx(constant, rel=0.25)
    assert budget.cached_bytes == len(values) * (70 + VALUE_BYTES)
    cache.close()
    assert budget.cached_bytes == 0


def test_what_only_scans_find_is_not_kept() -> None:
    budget = MemoryBudget(1 << 20)
    cache = ValueCache(budget)
    cache.put([(b"index", b"x"), (b"key", b"y")], {b"index": NEVER_MS, b"key": 5})
    assert cache.get([b"index", b"key"]) == ([None, b"y"], True)
    cache.put([(b"key", b"z")], {b"key": NEVER_MS})
    assert len(cache) == 0 and budget.cached_bytes == 0
    cache.validate()


# -- what an attempt has put ------------------------------------------------------------------------------


@given(st.lists(CHANGES), st.binary(max_size=3), st.none() | KEYS)
def test_an_overlay_is_a_sorted_dict(
    puts: list[list[tuple[bytes, bytes | None, int | None]]], begin: bytes, end: bytes | None
) -> None:
    overlay, wanted, needed = Overlay(), dict[bytes, bytes | None](), dict[bytes, int | None]()
    for changes in puts:
        overlay.put(iter(changes), 1 << 30)
        wanted |= {key: value for key, value, _ in changes}
        needed |= {key: ms for key, _, ms in changes}
        assert overlay.size_bytes == sum(len(k) + len(v or b"") + CHANGE_BYTES for k, v in wanted.items())
        between = [(k, wanted[k]) for k in sorted(wanted) if k >= begin and (end is None or k < end)]
        assert overlay.between(begin, end) == between
    assert overlay.needed_ms == {key: ms for key, ms in needed.items() if ms is not None}
    assert list(overlay.entries()) == sorted(wanted.items())


def test_an_overlay_stops_when_it_is_full() -> None:
    overlay, left = Overlay(), iter([(b"%d" % n, b"x" * 100, None) for n in range(100)])
    overlay.put(left, 1000)
    assert 1000 < overlay.size_bytes < 1000 + 400
    assert next(left)[0] == b"%d" % len(overlay)
