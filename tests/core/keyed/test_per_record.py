"""Windows per record: all at once over many keys, and Kafka's two designs record by record, against brute force."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion.core.slicing import event_windows
from aion.core.slicing.event_windows import record_windows
from aion.errors import WindowError
from experiments.slicing.record_designs import BucketDesign, MemoryStorage, PlainDesign, best_buckets

Event = tuple[int, int]
"""A key and a time."""

Window = tuple[int, int, int, list[int]]
"""Key, start, end, and which events, by the order of (key, time)."""

events = st.lists(st.tuples(st.integers(0, 3), st.integers(-40, 60)), max_size=30).map(sorted)
UFUNCS = [np.add, np.minimum, np.maximum]


def found(events: Sequence[Event], size: int, following: int | None = None) -> list[Window]:
    keys, times = np.array([k for k, _ in events], np.int64), np.array([t for _, t in events], np.int64)
    windows = record_windows(keys, times, size, following)
    columns = zip(*(column.tolist() for column in windows), strict=True)
    return [(key, start, end, list(range(begin, until))) for key, start, end, begin, until in columns]


def brute(events: Sequence[Event], size: int, following: int | None = None) -> list[Window]:
    starts = {(key, t - size) for key, t in events}
    if following is not None:
        starts |= {(key, t + following) for key, t in events}
    windows = [
        (key, start, start + size, [n for n, (k, t) in enumerate(events) if k == key and start <= t <= start + size])
        for key, start in sorted(starts)
    ]
    return [window for window in windows if window[3]]


@given(events, st.integers(1, 30))
def test_each_event_has_a_window_that_ends_at_it(events: list[Event], size: int) -> None:
    assert found(events, size) == brute(events, size)


@given(events, st.integers(1, 30), st.integers(1, 5))
def test_kafka_as_shipped_also_begins_windows_behind_events(events: list[Event], size: int, following: int) -> None:
    assert found(events, size, following) == brute(events, size, following)


@given(events, st.integers(1, 30))
def test_keys_that_do_not_fit_into_one_search_take_several(events: list[Event], size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_windows, "_ROOM", 300)
        assert found(events, size) == brute(events, size)


def test_times_at_both_ends_of_the_range() -> None:
    far = 2**61
    apart = [(key, t) for key in (0, 1) for t in (-far, 3 - far, far - 2, far)]
    assert found(apart, far) == brute(apart, far)


# Times and sizes in milliseconds, as in the proposal; records are called by their places.
NAMED = [(0, 8_000), (0, 9_200), (0, 12_400)]
OF_THE_PROPOSAL = [(0, 3_000, 8_000, [0]), (0, 4_200, 9_200, [0, 1]), (0, 7_400, 12_400, [0, 1, 2])]


def test_the_named_example_as_seed_003_says() -> None:
    assert found(NAMED, 5_000) == OF_THE_PROPOSAL


def test_the_named_example_as_kafka_ships_it() -> None:
    assert found(NAMED, 5_000, 1) == [*OF_THE_PROPOSAL, (0, 8_001, 13_001, [1, 2]), (0, 9_201, 14_201, [2])]


@pytest.mark.parametrize("buckets", [None, 1, 2, 3, 50])
def test_the_named_example_record_by_record(buckets: int | None) -> None:
    results, in_time = run(buckets, np.add, 5_000, [8_000, 9_200, 12_400], [1, 10, 100])
    assert (results, in_time) == ([1, 11, 111], [True] * 3)


# -- the two designs --------------------------------------------------------------------------------------


def run(
    buckets: int | None, ufunc: np.ufunc, size: int, times: Sequence[int], values: Sequence[int], split: int = 0
) -> tuple[list[int], list[bool]]:
    store = MemoryStorage()
    design = PlainDesign(size, ufunc, store) if buckets is None else BucketDesign(size, ufunc, store, buckets)
    parts = [
        design.process(np.array(times[part], np.int64), np.array(values[part], np.int64))
        for part in (slice(0, split), slice(split, None))
    ]
    return [r for part in parts for r in part[0].tolist()], [bool(t) for part in parts for t in part[1]]


def brute_stream(
    ufunc: np.ufunc, size: int, times: Sequence[int], values: Sequence[int]
) -> tuple[list[int | None], list[bool]]:
    """The aggregate of ``[stream time - size, stream time]`` after each record; None where it was too old."""
    results: list[int | None] = []
    seen: list[tuple[int, int]] = []
    now = -(10**9)
    for t, v in zip(times, values, strict=True):
        now = max(now, t)
        if t >= now - size:
            seen.append((t, v))
            results.append(int(ufunc.reduce([w for s, w in seen if s >= now - size])))
        else:
            results.append(None)
    return results, [result is not None for result in results]


@given(
    st.sampled_from(UFUNCS),
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(-20, 20), st.integers(0, 3), st.integers(-9, 9)), min_size=1, max_size=40),
    st.sampled_from([None, 1, 2, 5, 50]),
    st.integers(0, 40),
)
def test_both_designs_give_the_same(
    ufunc: np.ufunc, size: int, steps: list[tuple[int, int, int]], buckets: int | None, split: int
) -> None:
    times = [t + drift * n for n, (t, drift, _) in enumerate(steps)]
    values = [v for _, _, v in steps]
    expected, expected_in_time = brute_stream(ufunc, size, times, values)
    results, in_time = run(buckets, ufunc, size, times, values, split)
    assert in_time == expected_in_time
    assert [r for r, ok in zip(results, in_time, strict=True) if ok] == [e for e in expected if e is not None]


def test_the_bucket_design_costs_n_over_m_and_m() -> None:
    records, buckets = 4_096, 64
    times, values = np.arange(2 * records), np.ones(2 * records, np.int64)
    plain = PlainDesign(records - 1, np.add, MemoryStorage())
    bucketed = BucketDesign(records - 1, np.add, MemoryStorage(), buckets)
    for design in (plain, bucketed):
        results, _ = design.process(times[:records], values[:records])
        assert results[-1] == records
        design.costs.combines = design.costs.writes = 0
        results, _ = design.process(times[records : records + 200], values[records : records + 200])
        assert set(results.tolist()) == {records}
    assert plain.costs.combines == plain.costs.writes == 200 * records
    assert bucketed.costs.combines <= 200 * (records / buckets + buckets + 2)
    assert bucketed.costs.writes <= 200 * (buckets + 2)


@pytest.mark.parametrize(("read", "write"), [(1.0, 1.0), (1.0, 16.0), (16.0, 1.0), (1.0, 1e9), (1e9, 1.0)])
def test_the_best_number_of_buckets_costs_least(read: float, write: float) -> None:
    records = 1_000
    costs = {m: records / m * read + m * write for m in range(1, records + 1)}
    assert costs[best_buckets(records, read, write)] == min(costs.values())
    assert best_buckets(0, read, write) == 1


def test_at_equal_costs_it_is_the_square_root_and_dear_writes_make_it_fewer() -> None:
    assert best_buckets(10_000, 1, 1) == 100
    assert best_buckets(10_000, 1, 25) == 20


def test_no_bucket_holds_nothing() -> None:
    with pytest.raises(WindowError, match="0"):
        BucketDesign(5, np.add, MemoryStorage(), 0)
