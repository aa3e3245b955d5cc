"""Aggregates of many ranges at once, however they are computed, against ufuncs over plain slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion.core.slicing import ranges
from aion.core.slicing.ranges import RangeTree, reduce_ranges, running_max
from aion.errors import ConfigError, IntegerOverflow
from aion.slicing import SUM, Fold
from aion.slicing.rows import Table

UFUNCS = [np.add, np.minimum, np.maximum]


def random_ranges(values: int, count: int, longest: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    begins = rng.integers(0, values, count)
    return begins, np.minimum(begins + rng.integers(1, longest + 1, count), values)


def brute(ufunc: np.ufunc, values: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    return np.array([ufunc.reduce(values[b:e]) for b, e in zip(begins.tolist(), ends.tolist(), strict=True)])


@pytest.mark.parametrize("ufunc", UFUNCS)
@pytest.mark.parametrize("dtype", [np.int64, np.float64])
@pytest.mark.parametrize(("count", "longest"), [(1, 900), (5, 3), (300, 900), (2_000, 1), (300, 8)])
def test_ranges_are_those_of_the_ufunc(ufunc: np.ufunc, dtype: Any, count: int, longest: int) -> None:
    values = np.random.default_rng(2).integers(-1_000, 1_000, 1_000).astype(dtype)
    begins, ends = random_ranges(len(values), count, longest)
    found = reduce_ranges(ufunc, values, begins, ends)
    assert found.dtype == dtype
    assert (found == brute(ufunc, values, begins, ends)).all()


@pytest.mark.parametrize("ufunc", UFUNCS)
def test_columns_that_are_too_long_for_a_table_get_a_tree(ufunc: np.ufunc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "_TABLE_AT_MOST", 100)
    monkeypatch.setattr(ranges, "_by_table", lambda *_: pytest.fail("a table"))
    values = np.random.default_rng(2).normal(size=1_000)
    begins, ends = random_ranges(len(values), 300, 900)
    expected = brute(ufunc, values, begins, ends)
    assert np.allclose(reduce_ranges(ufunc, values, begins, ends), expected, rtol=1e-12, atol=1e-12)


@given(
    st.sampled_from(UFUNCS),
    st.lists(st.integers(-9, 9), min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(0, 39), st.integers(1, 40)), min_size=1, max_size=60),
)
def test_any_ranges(ufunc: np.ufunc, items: list[int], pairs: list[tuple[int, int]]) -> None:
    values = np.array(items)
    begins = np.array([b % len(items) for b, _ in pairs])
    ends = np.minimum(begins + np.array([length for _, length in pairs]), len(items))
    assert (reduce_ranges(ufunc, values, begins, ends) == brute(ufunc, values, begins, ends)).all()


def test_no_range_at_all() -> None:
    nothing = np.empty(0, np.intp)
    assert len(reduce_ranges(np.add, np.arange(3), nothing, nothing)) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_one_extreme_float_spoils_only_what_it_is_in(bad: float) -> None:
    """By differences of prefix sums it would spoil everything behind it."""
    values = np.full(1_000, 0.5)
    values[10] = bad
    begins, ends = random_ranges(len(values), 500, 900)
    outside = begins > 10
    assert outside.sum() > 100
    found = reduce_ranges(np.add, values, begins, ends)
    assert (found[outside] == 0.5 * (ends - begins)[outside]).all()
    assert not (found[~outside & (ends > 10)] == 0.5 * (ends - begins)[~outside & (ends > 10)]).any()


def test_sums_over_ranges_never_wrap() -> None:
    values = np.full(200, 2**62)
    begins, ends = np.repeat(np.arange(100), 3), np.repeat(np.arange(100), 3) + 1
    assert (SUM.ranges(values, begins, ends) == 2**62).all()
    values[1::2] *= -1
    assert SUM.ranges(values, begins, ends + 1).tolist() == [0] * 300
    with pytest.raises(IntegerOverflow):
        SUM.ranges(np.abs(values), begins, ends + 1)


def test_only_folds_that_are_known_can_be_made() -> None:
    with pytest.raises(ConfigError, match="multiply"):
        Fold(np.multiply)


@given(st.lists(st.integers(-5, 5), max_size=20))
def test_running_maximum(items: list[int]) -> None:
    assert running_max(np.array(items, np.int64)).tolist() == [max(items[: n + 1]) for n in range(len(items))]


# -- the tree ---------------------------------------------------------------------------------------------


@given(
    st.sampled_from(UFUNCS),
    st.lists(st.tuples(st.integers(0, 60), st.lists(st.integers(-9, 9), min_size=1, max_size=30)), max_size=6),
)
def test_a_tree_is_the_column_that_was_written(ufunc: np.ufunc, writes: list[tuple[int, list[int]]]) -> None:
    tree = RangeTree(ufunc, np.int64)
    column: list[int] = []
    for at, items in writes:
        at = min(at, len(column))  # a tail is written anew, from somewhere on
        column[at:] = items
        tree.write(at, np.array(items))
        begins, ends = random_ranges(len(column), 40, len(column))
        assert (tree.ranges(begins, ends) == brute(ufunc, np.array(column), begins, ends)).all()


# -- the table --------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 40), st.lists(st.integers(0, 9), max_size=400)), max_size=12)
)
def test_a_table_is_a_list_that_loses_its_front(steps: list[tuple[int, int, list[int]]]) -> None:
    table, model = Table({"a": np.int64, "b": np.bool_}), []
    for back, dropped, new in steps:
        at = max(len(model) - back, 0)
        model[at:] = new
        table.replace_tail(at, {"a": np.array(new, np.int64), "b": np.array(new, np.int64) > 4})
        dropped = min(dropped, len(model))
        del model[:dropped]
        table.drop_front(dropped)
        assert table["a"].tolist() == model
        assert table["b"].tolist() == [item > 4 for item in model]
        assert len(table) == len(model)
    assert len(table._buffers["a"]) <= 4 * 400 * max(len(steps), 1) + 1024
