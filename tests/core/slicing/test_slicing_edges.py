"""From events to slices: edges and assignment, against the oracle of the periodic windows and brute force."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion.core.periodic import Periodic, Sliding, Tumbling
from aion.core.slicing.edges import EdgeSet, assign
from aion.core.slicing.grid import SliceGrid
from tests.core.slicing.test_windows import brute as definition_of
from tests.core.slicing.test_windows import instants, several
from tests.durations import us
from tests.oracle import Definition, slice_of

HOUR = 3_600_000_000


def edge_set(windows: Sequence[Periodic]) -> EdgeSet:
    return EdgeSet(family for window in windows for family in window.families())


def brute(windows: Sequence[Periodic]) -> list[Definition]:
    return [definition_of(w) for w in windows]


def many(count: int) -> list[Periodic]:
    return [Tumbling(us(int(ms) * 1_000)) for ms in np.linspace(1_000, 20_000, count).round()]


# -- edges ------------------------------------------------------------------------------------------------


@given(several, st.integers(-(10**12), 10**12), st.integers(0, 100))
def test_edges_are_where_the_windows_of_an_instant_change(windows: list[Periodic], low: int, span: int) -> None:
    oracle = brute(windows)
    found = edge_set(windows).between(low, low + span).tolist()
    assert found[0] == slice_of(oracle, low)
    assert found[1:] == [t for t in range(low + 1, low + span + 1) if slice_of(oracle, t) == t]


@given(several)
def test_no_family_of_edges_is_kept_that_adds_none(windows: list[Periodic]) -> None:
    assert set(edge_set(windows).families) == set(SliceGrid(windows, segmented=False).families)


def test_edges_lie_on_the_lattice_of_the_unit() -> None:
    edges = edge_set([Tumbling("1 s", offset=us(300)), Sliding("2 s", "1500 ms", offset=us(300))])
    assert (edges.unit_us, edges.origin_us) == (500_000, 300)
    assert edges.density * HOUR >= len(edges.between(0, HOUR)) - 1
    assert (EdgeSet([]).unit_us, EdgeSet([]).density) == (0, 0.0)


@given(several, st.lists(instants, min_size=1, max_size=20))
def test_slices_are_those_that_each_family_by_itself_says(windows: list[Periodic], times: list[int]) -> None:
    array = np.array(times, np.int64)
    assert edge_set(windows).starts(array).tolist() == edge_set(windows).floors(array).tolist()


@given(several, st.lists(instants | st.integers(10**9, 10**9 + 60), min_size=1, max_size=20))
def test_slices_that_are_numbered_are_the_same(windows: list[Periodic], times: list[int]) -> None:
    array = np.array(times, np.int64)
    codes, starts = edge_set(windows).slots(array, (min(times), max(times)))
    assert starts[codes].tolist() == edge_set(windows).floors(array).tolist()


def test_a_thousand_windows_take_no_pass_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = many(1_000)
    rng = np.random.default_rng(1)
    times = rng.integers(-10_000_000, 10_000_000, 50_000)
    edges = edge_set(windows)
    assert len(edges.families) > 900
    expected = SliceGrid(windows).starts(times)
    monkeypatch.setattr(EdgeSet, "floors", lambda *_: pytest.fail("a pass for each family"))
    assert (edges.starts(times) == expected).all()


def test_a_few_instants_far_apart_do_not_cost_the_edges_between_them() -> None:
    windows = many(50)
    edges = edge_set(windows)
    rng = np.random.default_rng(2)
    dense = rng.integers(0, 10_000_000, 2_000)
    times = np.concatenate(([-90 * 365 * 24 * HOUR], dense, dense + 40 * 365 * 24 * HOUR))
    laid_out = edges.covering(times)
    assert laid_out is not None and len(laid_out) < 1_000
    assert (edges.starts(times) == SliceGrid(windows).starts(times)).all()
    scattered = rng.integers(-(10**15), 10**15, 500)
    assert edges.covering(scattered) is None
    assert (edges.starts(scattered) == SliceGrid(windows).starts(scattered)).all()


# -- assignment -------------------------------------------------------------------------------------------

NOW = 1_700_000_000_000_000


def random_times(n: int, low: int, high: int) -> np.ndarray:
    return np.random.default_rng(3).integers(low, high, n)


@pytest.mark.parametrize(
    ("edges", "times"),
    [
        pytest.param(np.arange(NOW, NOW + 10**7, 10**6), random_times(1_000, NOW - 10**6, NOW + 10**8), id="regular"),
        pytest.param(np.array([NOW]), random_times(100, NOW - 10, NOW + 10), id="one edge"),
        pytest.param(np.array([5, 5, 5]), np.array([4, 5, 6]), id="equal edges"),
        pytest.param(
            np.unique(random_times(500, 0, 10_000) * 1_000 + NOW),
            random_times(60_000, NOW - 10**6, NOW + 11 * 10**6),
            id="milliseconds",
        ),
        pytest.param(np.unique(random_times(500, 0, 10**9)), random_times(70_000, -(10**8), 2 * 10**9), id="irregular"),
        pytest.param(
            np.concatenate((np.arange(0, 999, 3), [10**15])),
            random_times(1_000, -9, 2_000),
            id="many edges in one cell",
        ),
        pytest.param(
            np.unique(random_times(50, 0, 10**6)), np.sort(random_times(1_000, -(10**5), 10**6)), id="sorted times"
        ),
        pytest.param(np.unique(random_times(500, 0, 10**6)), np.array([7, 9]), id="fewer times than edges"),
        pytest.param(
            np.sort(random_times(900, -500, 500) * 1_000), random_times(900, -(10**6), 10**6), id="with repeats"
        ),
        pytest.param(np.empty(0, np.int64), np.array([1, 2]), id="no edge"),
        pytest.param(np.array([1, 2]), np.empty(0, np.int64), id="no time"),
    ],
)
def test_assignment_is_the_last_edge_at_or_before(edges: np.ndarray, times: np.ndarray) -> None:
    assert assign(times, edges).tolist() == (np.searchsorted(edges, times, side="right") - 1).tolist()


@given(st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=30), st.lists(instants, max_size=30))
def test_any_times_are_assigned_to_any_edges(edges: list[int], times: list[int]) -> None:
    array, sorted_edges = np.array(times, np.int64), np.array(sorted(edges))
    expected = [sum(edge <= t for edge in sorted_edges.tolist()) - 1 for t in times]
    assert assign(array, sorted_edges).tolist() == expected
