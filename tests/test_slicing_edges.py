"""From events to slices: edges, assignment and batches, against the oracle of the periodic windows and brute force."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aion.core.slicing.edges import EdgeSet, assign
from aion.core.slicing.grid import SliceGrid
from aion.core.windows import Family, Periodic, Sliding, Tumbling
from aion.errors import ConfigError, IntegerOverflow
from aion.slicing import MAX, MIN, SUM, batch
from aion.slicing.batch import slice_batch
from aion.slicing.folds import as_values
from aion.slicing.rows import Rows
from tests.oracle import Definition, slice_of
from tests.test_windows import instants, several

FOLDS = {"add": SUM, "minimum": MIN, "maximum": MAX}
HOUR = 3_600_000_000


def edge_set(windows: Sequence[Periodic]) -> EdgeSet:
    return EdgeSet(family for window in windows for family in window.families())


def brute(windows: Sequence[Periodic]) -> list[Definition]:
    return [Definition(w.size_us, w.slide_us, w.offset_us) for w in windows]


def edge_of(windows: Sequence[Periodic], t: int) -> int:
    """The last start or end of a window up to ``t``; ``slice_of`` walks there, too far for these times."""
    return max(t - (t - o) % w.slide_us for w in windows for o in (w.offset_us, w.offset_us + w.size_us))


def many(count: int) -> list[Periodic]:
    return [Tumbling(int(ms) * 1_000) for ms in np.linspace(1_000, 20_000, count).round()]


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
    edges = edge_set([Tumbling("1 s", offset=300), Sliding("2 s", "1500 ms", offset=300)])
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


# -- batches ----------------------------------------------------------------------------------------------


def brute_rows(
    times: list[int], values: list[int], windows: Sequence[Periodic], gap: int | None
) -> list[tuple[Any, ...]]:
    """Per (edge, session of the gap): what is in it. Without a gap, per edge."""
    rows: list[list[Any]] = []
    for t, v in sorted(zip(times, values, strict=True)):
        edge = edge_of(windows, t) if windows else 0
        if rows and rows[-1][0] == edge and (gap is None or t - rows[-1][2] <= gap):
            rows[-1][2] = t
            rows[-1][3].append(v)
        else:
            rows.append([edge, t, t, [v]])
    return [(edge, first, last, len(vs), sum(vs), min(vs), max(vs)) for edge, first, last, vs in rows]


def check(rows: Rows, times: list[int], values: list[int], windows: Sequence[Periodic], gap: int | None) -> None:
    """A batch's slices may be finer than sessions demand, never coarser; put together they are the brute ones."""
    expected = brute_rows(times, values, windows, gap)
    names = ["edge", "events", "add", "minimum", "maximum", *(["first", "last"] if gap is not None else [])]
    assert {name: len(rows[name]) for name in rows} == dict.fromkeys(names, len(rows["edge"]))
    columns = {name: rows[name].tolist() for name in names}
    at = 0
    for edge, first, last, events, total, low, high in expected:
        until = at
        while (
            until < len(columns["edge"])
            and columns["edge"][until] == edge
            and sum(columns["events"][at:until]) < events
        ):
            until += 1
        part = slice(at, until)
        assert until == at + 1 or gap is not None
        assert sum(columns["events"][part]) == events
        assert sum(columns["add"][part]) == total
        assert (min(columns["minimum"][part]), max(columns["maximum"][part])) == (low, high)
        if gap is not None:
            assert (columns["first"][at], columns["last"][until - 1]) == (first, last)
        at = until
    assert at == len(columns["edge"])


@settings(max_examples=150)
@given(
    st.lists(several, max_size=1).map(lambda lists: lists[0] if lists else []),
    st.lists(st.tuples(st.integers(-60, 60), st.integers(-9, 9)), min_size=1, max_size=40),
    st.none() | st.integers(1, 12),
    st.sampled_from([1, 7, 1_000]),
    st.booleans(),
)
def test_a_batch_becomes_slices(
    windows: list[Periodic], events: list[tuple[int, int]], gap: int | None, scale: int, in_order: bool
) -> None:
    if not windows and gap is None:
        gap = 5
    events = sorted(events) if in_order else events
    # Edges are kept where they are while times are stretched: lattices that are fine, coarse, or of no use.
    times, values = [t * scale for t, _ in events], [v for _, v in events]
    rows = slice_batch(np.array(times), np.array(values), edge_set(windows), gap, FOLDS)
    check(rows, times, values, windows, gap)


@pytest.mark.parametrize(
    ("road", "windows", "gap", "span"),
    [
        pytest.param("_by_bins", many(20), None, 20_000_000, id="bins"),
        pytest.param("_by_bins", many(20), 700_000, 20_000_000, id="bins with a gap"),
        pytest.param("_by_slots", [Tumbling(999_983), Tumbling(777_777)], None, 10**9, id="looked up"),
        pytest.param("_of_sorted", [Tumbling(999_983), Tumbling(777_777)], 123_457, 10**9, id="sorted for the gap"),
        pytest.param("_of_sorted", many(20), None, 10**15, id="too many edges"),
        pytest.param("_of_sorted", [], 1_000, 10**9, id="sessions only"),
    ],
)
def test_large_batches_take_every_road(
    road: str, windows: list[Periodic], gap: int | None, span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(5)
    times, values = rng.integers(-span // 2, span // 2, 3_000), rng.integers(-100, 100, 3_000)
    taken: list[str] = []
    for name in ("_by_bins", "_by_slots", "_of_sorted"):
        original = getattr(batch, name)
        monkeypatch.setattr(batch, name, lambda *a, name=name, original=original: taken.append(name) or original(*a))
    rows = slice_batch(times, values, edge_set(windows), gap, FOLDS)
    check(rows, times.tolist(), values.tolist(), windows, gap)
    order = np.argsort(times, kind="stable")
    rows = slice_batch(times[order], values[order], edge_set(windows), gap, FOLDS)
    check(rows, times.tolist(), values.tolist(), windows, gap)
    assert taken == [road, "_of_sorted"]


def test_cells_as_wide_as_the_gap_are_never_divided_by_it() -> None:
    edges = EdgeSet([Family(100, 0)])
    rows = slice_batch(np.array([39, 0, 10, 20]), np.zeros(4), edges, 10, {"add": SUM})
    assert list(zip(rows["first"].tolist(), rows["last"].tolist(), strict=True)) == [
        (0, 0),
        (10, 10),
        (20, 20),
        (39, 39),
    ]
    assert rows["edge"].tolist() == [0] * 4


# -- values -----------------------------------------------------------------------------------------------


def test_sums_of_integers_are_exact_up_to_64_bits_and_never_wrap() -> None:
    edges, largest = EdgeSet([Family(10, 0)]), 2**63 - 1
    times = np.array([5, 1, 2, 3])
    rows = slice_batch(times, np.array([2**62, 2**62 - 1, -3, 3]), edges, None, {"add": SUM})
    assert rows["add"].tolist() == [largest]
    for values in ([largest, 1, 0, 0], [-(2**62)] * 3 + [-1]):
        with pytest.raises(IntegerOverflow):
            slice_batch(times, np.array(values), edges, None, {"add": SUM})
        with pytest.raises(IntegerOverflow):
            slice_batch(np.sort(times), np.array(values), edges, None, {"add": SUM})


def test_values_are_64_bits_wide_or_refused() -> None:
    assert as_values(np.array([True, False])).dtype == as_values(np.array([1], np.uint8)).dtype == np.int64
    assert as_values(np.array([1.5], np.float32)).dtype == np.float64
    with pytest.raises(IntegerOverflow):
        as_values(np.array([2**63], np.uint64))
    with pytest.raises(ConfigError, match="datetime64"):
        as_values(np.array(["2020-01-01"], "datetime64[s]"))
