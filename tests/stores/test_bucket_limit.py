"""How much memory the m-bucket of a window may take in its shard: of all slices that the window spans."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion.core.periodic import Periodic, Sliding, Tumbling
from aion.core.slicing.grid import SliceGrid
from state_backends.store.m_bucket import MBuckets, MemoryBudget, PeriodicWindows
from tests.stores.rig import KIB, Rig, make_block

MINUTE = 60_000_000
LIMIT = 10 * KIB


def stretches(*windows: Periodic) -> list[PeriodicWindows]:
    return [PeriodicWindows(w.size_us, w.slide_us, w.offset_us) for w in windows]


@pytest.mark.parametrize(
    "windows", [[Sliding("5 minutes", "1 minute")], [Tumbling("1 minute"), Tumbling("5 minutes")]], ids=str
)
def test_a_window_takes_no_more_memory_than_its_limit_over_all_of_its_slices(
    make: Callable[..., Rig], windows: list[Periodic]
) -> None:
    rig = make("tiered", bucket_limit=LIMIT, windows=stretches(*windows))
    rig.append(*((20 * minute + n, minute * MINUTE) for minute in range(10) for n in range(10)), size=KIB)
    rig.store.flush()
    rig.settle()
    held = {view["name"]: view["m_bytes"] for view in rig.store.views()}
    for window in windows:
        for start in range(-5 * MINUTE, 11 * MINUTE, window.slide_us):
            of_window = sum(size for s, size in held.items() if start <= s < start + window.size_us)
            assert of_window <= LIMIT, f"{window} that starts at {start}"
    # As much as it may: what is not in memory would have exceeded it.
    assert sum(held.values()) >= LIMIT - KIB
    assert rig.read(*range(0, 10 * MINUTE, MINUTE)) == [20 * minute + n for minute in range(10) for n in range(10)]


def test_windows_that_share_no_slice_have_a_limit_each(make: Callable[..., Rig]) -> None:
    rig = make("tiered", bucket_limit=LIMIT, windows=stretches(Tumbling("1 minute")))
    rig.append(*((20 * minute + n, minute * MINUTE) for minute in range(4) for n in range(20)), size=KIB)
    rig.store.flush()
    rig.settle()
    held = [view["m_bytes"] for view in rig.store.views()]
    assert len(held) == 4
    assert all(LIMIT - KIB <= size <= LIMIT for size in held)


durations = st.integers(1, 12)
periodic = st.tuples(durations, durations, durations).map(
    lambda t: Sliding(f"{max(t[0], t[1])} minutes", f"{min(t[0], t[1])} minutes", f"{t[2]} minutes")
)


@given(windows=st.lists(periodic, min_size=1, max_size=3), times=st.lists(st.integers(0, 40), min_size=1, max_size=30))
def test_the_heaviest_window_is_that_of_all_that_cover_the_slice(windows: list[Periodic], times: list[int]) -> None:
    grid = SliceGrid(windows, segmented=False)
    held = MBuckets(MemoryBudget(0))
    for number, minute in enumerate(times):
        slice_us = max(family.floor(minute * MINUTE) for family in grid.families)
        held.add(number, make_block(slice_us, number, KIB))
    sizes = held.sizes()
    for slice_us in sizes:
        covering = [span for window in windows for span in window.covering(slice_us)]
        expected = max(sum(size for s, size in sizes.items() if start <= s < end) for start, end in covering)
        assert held.heaviest(slice_us, stretches(*windows), 0) == expected
