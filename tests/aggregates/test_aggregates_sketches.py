"""Sketches: within their bounds on data of every shape, whatever the split, and those of Apache DataSketches."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import datasketches
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion import aggregates as A
from aion.aggregates.binding import bind
from aion.aggregates.cardinality import Registers
from aion.aggregates.groups import Groups
from aion.aggregates.layout import Layout
from aion.aggregates.partial import Rows


def layout_of(aggregate: A.Aggregate, type_: pa.DataType) -> Layout:
    return Layout([bind("r", aggregate, pa.schema([("v", type_)]))])


def lifted(layout: Layout, values: Any, keys: Any = None) -> pa.Table:
    keys = np.zeros(len(values), np.int64) if keys is None else keys
    values = values if isinstance(values, pa.Array) else pa.array(values, from_pandas=False)
    return layout.lift({"k": pa.array(keys)}, {"v": values})


def result(layout: Layout, parts: Sequence[pa.Table]) -> dict[int, Any]:
    table = layout.combine(["k"], pa.concat_tables(parts))
    lowered = layout.lower(layout.states(table))["r"].to_pylist()
    return dict(zip(table["k"].to_pylist(), lowered, strict=True))


# -- distinct values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rsd", [0.09, 0.05, 0.02, 0.01])
def test_distinct_counts_are_as_close_as_was_asked(rsd: float) -> None:
    """The spread of the errors over 100 keys of the same number of values is the one that was asked for."""
    layout = layout_of(A.approx_count_distinct("v", rsd), pa.int64())
    keys = np.repeat(np.arange(100), 3000)
    values = np.random.default_rng(6).permutation(len(keys))
    table = lifted(layout, values, keys)
    errors = np.array(list(result(layout, [table, table]).values())) / 3000 - 1
    assert np.sqrt((errors**2).mean()) < 1.15 * rsd
    assert abs(errors.mean()) < rsd / 3, "not to one side"
    assert np.abs(errors).max() < 4 * rsd
    size = max(len(state) for state in table["p1"].to_pylist())
    assert size < 2 * (1.04 / rsd) ** 2, "bytes"


@pytest.mark.parametrize("n", [0, 1, 2, 100, 127])
def test_few_distinct_values_are_counted(n: int) -> None:
    layout = layout_of(A.approx_count_distinct("v"), pa.string())
    values = [f"value {i}" for i in range(n)]
    assert result(layout, [lifted(layout, pa.array([*values, None, *values], pa.string()))]) == {0: n}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3000)), max_size=8), st.randoms(use_true_random=False))
def test_sketches_of_distinct_values_do_not_depend_on_the_split(ranges: list[tuple[int, int]], random: Any) -> None:
    """To the last bit: what is dense in one part may be a few coupons in another."""
    layout = layout_of(A.approx_count_distinct("v"), pa.int64())
    parts = [(np.full(n, key), np.arange(n) * 3 + key) for key, n in [*ranges, (1, 5)]]
    at_once = lifted(layout, *[np.concatenate(column) for column in zip(*((v, k) for k, v in parts), strict=True)])
    tables = [lifted(layout, values, keys) for keys, values in parts]
    random.shuffle(tables)
    while len(tables) > 1:
        i = random.randint(2, len(tables))
        tables = [layout.combine(["k"], pa.concat_tables(tables[:i])), *tables[i:]]
    ordered = [t.sort_by("k") for t in (layout.combine(["k"], at_once), layout.combine(["k"], tables[0]))]
    assert ordered[0].equals(ordered[1])


def test_types_that_spark_takes_for_one_value_are_one() -> None:
    doubles = layout_of(A.approx_count_distinct("v"), pa.float64())
    assert result(doubles, [lifted(doubles, [0.0, -0.0, np.nan, -np.nan, 1.0])]) == {0: 3}


@pytest.mark.parametrize(
    "type_", [pa.bool_(), pa.int8(), pa.date32(), pa.timestamp("us"), pa.decimal128(38, 2), pa.binary()]
)
def test_distinct_values_of_every_type(type_: pa.DataType) -> None:
    layout = layout_of(A.approx_count_distinct("v"), type_)
    by_way_of = {pa.binary(): pa.string(), pa.date32(): pa.int32()}.get(type_, pa.int64())
    values = pa.array([0, 1, None, 0], pa.int64()).cast(by_way_of).cast(type_)
    assert result(layout, [lifted(layout, values)]) == {0: 2}


def as_library_set(coupons: np.ndarray[Any, Any]) -> datasketches.hll_sketch:
    """The library's own sketch of these coupons, in its form for few of them."""
    bits = max(5, int(np.ceil(np.log2(len(coupons) * 4 / 3 + 1))))
    head = struct.pack("<8BI", 3, 1, 7, 21, bits, 8, 0, 1 | 2 << 2, len(coupons))
    return datasketches.hll_sketch.deserialize(head + coupons.astype("<u4").tobytes())


@pytest.mark.parametrize("lg", [7, 9, 12, 14])
@pytest.mark.parametrize("n", [40, 1000, 30_000])
def test_registers_and_estimates_are_those_of_datasketches(lg: int, n: int) -> None:
    """The library merges sketches of the same coupons into the same registers, and we estimate what it does."""
    registers = Registers("v", lg, pa.int64())
    values = pa.array(np.arange(n) * 7919)
    groups = Groups(np.zeros(n, np.int64), 1)
    half = Groups((np.arange(n) % 2).astype(np.int64), 2)
    halves = datasketches.hll_union(lg)
    for coupons in coupons_of(Registers("v", 21, pa.int64()), values, half):
        # Each half as a sketch of its own first, so that the library, too, knows nothing of an order of arrival.
        one = datasketches.hll_union(lg)
        one.update(as_library_set(coupons))
        halves.update(one.get_result(datasketches.HLL_8))
    state = registers.lift(Rows({"v": values}, groups), {})
    ours = registers.estimates(state)[0].as_py()
    merged = halves.get_result(datasketches.HLL_8)
    dense = len(state[0][0].as_py()) == 1 << lg
    assert dense == (4 * n >= 1 << lg)
    if dense:
        assert state[0][0].as_py() == bytes(merged.serialize_compact())[40:]
        assert ours == round(merged.get_estimate())
    else:
        assert ours == n


def coupons_of(registers: Registers, values: pa.Array, groups: Groups) -> list[np.ndarray[Any, Any]]:
    """With so many registers that all coupons stay what they are."""
    states = registers.lift(Rows({"v": values}, groups), {})[0]
    return [np.frombuffer(state.as_py(), "<u4") for state in states]


# -- quantiles --------------------------------------------------------------------------------------------------

SHARES = [0.0, 0.001, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0]


def shape(name: str, n: int) -> Any:
    rng = np.random.default_rng(8)
    match name:
        case "normal":
            return rng.normal(size=n)
        case "log-normal":
            return rng.lognormal(0, 2, n)
        case "ascending":
            return np.arange(n) / 7
        case "descending":
            return -np.arange(n) / 7
        case "two clusters":
            return np.where(rng.random(n) < 0.3, rng.normal(size=n), 1e9 + rng.normal(size=n))
        case "few values":
            return rng.integers(0, 10, n).astype(float)
        case "sawtooth":
            return (np.arange(n) % 1000).astype(float)
    raise AssertionError(name)


def rank_errors(found: Sequence[float], values: Any, shares: Sequence[float] = SHARES) -> list[float]:
    """By how much of all values each answer misses its share: 0 where it is among the values of that rank."""
    ordered, n = np.sort(values), len(values)
    errors = []
    for answer, share in zip(found, shares, strict=True):
        low, high = np.searchsorted(ordered, answer, "left") / n, np.searchsorted(ordered, answer, "right") / n
        errors.append(max(low - share, share - high, 0.0))
    return errors


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("accuracy", [50, 500])
@pytest.mark.parametrize(
    "name", ["normal", "log-normal", "ascending", "descending", "two clusters", "few values", "sawtooth"]
)
def test_quantiles_are_as_close_as_was_asked(name: str, accuracy: int) -> None:
    """From one block, from many in any order, and from blocks that hold a stretch of the values each."""
    layout = layout_of(A.approx_percentile("v", SHARES, accuracy), pa.float64())
    values = shape(name, 60_000)
    mixed = np.random.default_rng(1).permutation(values)
    for arrived, blocks in [(values, 1), (values, 60), (np.sort(values), 60), (mixed, 600)]:
        parts = [lifted(layout, part) for part in np.array_split(arrived, blocks)]
        while len(parts) > 1:
            parts = [layout.combine(["k"], pa.concat_tables(parts[i : i + 8])) for i in range(0, len(parts), 8)]
        (found,) = result(layout, parts).values()
        errors = rank_errors(found, values)
        assert max(errors) <= 1 / accuracy, f"{errors} of {blocks} blocks"
        assert found[0] == values.min() and found[-1] == values.max()
        assert found == sorted(found)
        assert parts[0].nbytes < 256 * accuracy


def test_a_group_of_few_values_beside_one_of_many() -> None:
    layout = layout_of(A.approx_percentile("v", [0.5, 0.9], 100), pa.float64())
    keys = np.array([0] * 5000 + [1] * 3 + [2] * 4000)
    values = np.concatenate((np.arange(5000.0), [1.0, 2.0, 3.0], np.arange(4000.0)))
    found = result(layout, [lifted(layout, values[i::2], keys[i::2]) for i in range(2)])
    assert found[1] == [2.0, 3.0], "exact"
    assert found[0] == pytest.approx([2500, 4500], abs=50) and found[2] == pytest.approx([2000, 3600], abs=40)


def test_infinities_and_nan_have_their_places() -> None:
    layout = layout_of(A.approx_percentile("v", [0.0, 0.09, 0.5, 0.87, 0.93, 1.0], 100), pa.float64())
    values = np.concatenate((np.full(500, -np.inf), np.arange(8000.0), np.full(500, np.inf), np.full(1000, np.nan)))
    parts = [lifted(layout, part) for part in np.array_split(np.random.default_rng(2).permutation(values), 9)]
    thirds = [layout.combine(["k"], pa.concat_tables(parts[i::3])) for i in range(3)]
    assert all(third["p2"].null_count == 0 for third in thirds), "digests, with some of the infinities each"
    (found,) = result(layout, thirds).values()
    assert (found[0] == -np.inf and found[3] == np.inf) or found[3] == pytest.approx(8000, abs=100)
    assert found[1:3] == pytest.approx([400, 4500], abs=100)
    assert np.isnan(found[4]) and np.isnan(found[5])


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        (pa.int64(), np.arange(10_000) * 1000),
        (pa.int8(), np.arange(10_000) % 100),
        (pa.float32(), np.arange(10_000)),
        (pa.decimal128(21, 2), np.arange(10_000)),
        (pa.date32(), np.arange(10_000) + 3),
        (pa.timestamp("us", "UTC"), np.arange(10_000) * 1_000_000),
    ],
)
def test_quantiles_are_of_the_columns_type(type_: pa.DataType, values: Any) -> None:
    integers = pa.array(values, pa.int32() if pa.types.is_date(type_) else pa.int64())
    layout = layout_of(A.approx_percentile("v", 0.25, 100), type_)
    table = layout.combine(["k"], lifted(layout, integers.cast(type_)))
    found = layout.lower(layout.states(table))["r"]
    assert found.type == type_
    plain = found.cast(pa.int32()).cast(pa.int64()) if pa.types.is_date(type_) else found
    number = plain.cast(pa.int64()) if not pa.types.is_decimal(type_) else plain.cast(pa.float64())
    assert rank_errors([float(number[0].as_py())], values, [0.25])[0] <= 0.01


def test_a_digest_is_the_same_each_time() -> None:
    """A batch that is retried yields what it did: of the library's sketches for quantiles only this one does."""
    layout = layout_of(A.approx_percentile("v", 0.5, 50), pa.float64())
    values = np.random.default_rng(3).normal(size=20_000)
    one, other = ([lifted(layout, part) for part in np.array_split(values, 9)] for _ in range(2))
    assert layout.combine(["k"], pa.concat_tables(one)).equals(layout.combine(["k"], pa.concat_tables(other)))
