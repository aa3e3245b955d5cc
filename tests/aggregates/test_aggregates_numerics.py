"""Sums, means and variances against exact rationals, whatever the split into blocks and the order of merging."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion import aggregates as A
from aion.aggregates.binding import bind
from aion.aggregates.doubled import add_double, add_pairs, divided, sum_by_group
from aion.aggregates.groups import Digit, Groups, number, pack, stable_order
from aion.aggregates.layout import Layout
from aion.errors import IntegerOverflow
from tests import aggregate_oracle as o

ULP = Fraction(2) ** -53
TINY = Fraction(2) ** -1074
SCHEMA = pa.schema([("v", pa.float64()), ("i", pa.int64())])

# From one end of the doubles to the other, some of them close together and some that cancel.
scattered = st.builds(lambda m, e: math.ldexp(m, e), st.floats(-1, 1), st.integers(-1070, 990))
together = st.builds(lambda m, e: math.ldexp(m, e), st.integers(-(2**53), 2**53), st.integers(-60, 0))
cancelling = st.sampled_from([1e16, -1e16, 1.0, -1.0, 1e-16, 1e300, -1e300, 5e-324, 0.1, -0.0])
doubles = st.one_of(scattered, together, cancelling)


def merged_in_any_order(layout: Layout, parts: list[pa.Table], draw: st.DataObject) -> pa.Table:
    """Any tree over the parts in any order."""
    parts = draw.draw(st.permutations(parts))
    while len(parts) > 1:
        some = draw.draw(st.integers(2, len(parts)))
        parts = [layout.combine(["k"], pa.concat_tables(parts[:some])), *parts[some:]]
    return parts[0]


def split(values: Sequence[Any], draw: st.DataObject) -> list[Sequence[Any]]:
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(values)), max_size=6)))
    return [values[a:b] for a, b in zip([0, *cuts], [*cuts, len(values)], strict=True) if b > a]


def computed(
    asked: dict[str, A.Aggregate], rows: Sequence[tuple[str, float]], draw: st.DataObject
) -> dict[str, dict[str, float]]:
    layout = Layout([bind(name, aggregate, SCHEMA) for name, aggregate in asked.items()])
    parts = []
    for part in split(rows, draw):
        keys, values = zip(*part, strict=True)
        arrays = {"v": pa.array(values, pa.float64()), "i": pa.array([1] * len(values))}
        parts.append(layout.lift({"k": pa.array(keys)}, arrays))
    table = merged_in_any_order(layout, parts, draw)
    columns = layout.lower(layout.states(table))
    rows_out = zip(*(columns[name].to_pylist() for name in asked), strict=True)
    return {k: dict(zip(asked, row, strict=True)) for k, row in zip(table["k"].to_pylist(), rows_out, strict=True)}


@given(st.lists(st.tuples(st.sampled_from("ab"), doubles), min_size=1, max_size=40), st.data())
def test_sums_and_means_are_rounded_once(rows: list[tuple[str, float]], draw: st.DataObject) -> None:
    found = computed({"sum": A.sum("v"), "mean": A.mean("v")}, rows, draw)
    for key, results in found.items():
        values = [Fraction(v) for k, v in rows if k == key]
        exact, size = sum(values, Fraction(0)), sum((abs(v) for v in values), Fraction(0))
        # Half a unit in the last place of the result, and what twice a double's digits leave of all that was added.
        slack = size * Fraction(2) ** -98 + TINY
        assert abs(Fraction(results["sum"]) - exact) <= abs(exact) * ULP + slack
        mean = exact / len(values)
        assert abs(Fraction(results["mean"]) - mean) <= abs(mean) * 2 * ULP + (slack + TINY) / len(values) + TINY


@given(st.lists(together, min_size=1, max_size=40), st.data())
def test_a_sum_does_not_depend_on_split_or_order(values: list[float], draw: st.DataObject) -> None:
    one = computed({"sum": A.sum("v")}, [("a", v) for v in values], draw)
    other = computed({"sum": A.sum("v")}, [("a", v) for v in draw.draw(st.permutations(values))], draw)
    assert one == other == {"a": {"sum": math.fsum(values)}}


near = st.builds(
    lambda base, steps, unit: [base + s * unit for s in steps],
    st.sampled_from([0.0, 1.0, 1e9, -1e15, 1e16, 123456789.125]),
    st.lists(st.integers(-1000, 1000), min_size=1, max_size=30),
    st.sampled_from([1e-6, 0.1, 1.0, 1024.0]),
)


@given(st.lists(near, min_size=1, max_size=3), st.data())
def test_variances_are_those_of_exact_rationals(lists: list[list[float]], draw: st.DataObject) -> None:
    """Also where the values are 10**16 times as far from 0 as from one another."""
    rows = draw.draw(st.permutations([("abc"[i], v) for i, values in enumerate(lists) for v in values]))
    found = computed({"pop": A.var_pop("v"), "samp": A.var_samp("v"), "std": A.stddev_pop("v")}, rows, draw)
    for key, results in found.items():
        values = [v for k, v in rows if k == key]
        n = len(values)
        exact = o.exact_variance(values, n)
        # The means are exact to twice a double's digits, and their errors are squared.
        far = max(abs(Fraction(v)) for v in values) * Fraction(2) ** -96
        allowed = exact * (n + 16) * 2 * ULP + 2 * Fraction(math.sqrt(exact)) * far + far * far
        assert abs(Fraction(results["pop"]) - exact) <= allowed
        if n > 1:
            assert abs(Fraction(results["samp"]) - exact * n / (n - 1)) <= allowed * 2
        assert abs(Fraction(results["std"]) ** 2 - exact) <= allowed * 2


def test_what_plain_addition_gets_wrong() -> None:
    """Named, so that no change of the strategies above loses them."""

    def one(aggregate: A.Aggregate, parts: list[list[float]]) -> Any:
        layout = Layout([bind("r", aggregate, SCHEMA)])
        lifted = [layout.lift({"k": pa.array([0] * len(p))}, {"v": pa.array(p), "i": None}) for p in parts]
        table = layout.combine(["k"], pa.concat_tables(lifted))
        return layout.lower(layout.states(table))["r"][0].as_py()

    assert one(A.sum("v"), [[1e16], [1.0], [1.0], [-1e16]]) == 2.0
    assert one(A.sum("v"), [[1.0, 1e100], [1.0, -1e100]]) == 2.0
    assert one(A.sum("v"), [[0.1] * 10]) == 1.0 and sum([0.1] * 9, 0.1) != 1.0
    assert one(A.mean("v"), [[0.1] * 3, [0.1] * 7]) == 0.1
    assert one(A.var_samp("v"), [[1e9 + 4, 1e9 + 7], [1e9 + 13, 1e9 + 16]]) == 30.0
    assert one(A.var_pop("v"), [[1e16], [1e16 + 2], [1e16 + 4]]) == 8 / 3
    assert one(A.var_pop("v"), [[1e16, 1e16 + 2]]) == 1.0, "with a mean that is no double"
    assert one(A.var_pop("v"), [[3.3]] * 100) == 0.0
    assert one(A.sum("v"), [[1.7e308, 1.7e308, -1.7e308]]) == 1.7e308
    assert one(A.sum("v"), [[1.7e308], [1.7e308]]) == math.inf
    assert one(A.sum("v"), [[math.inf], [1.0]]) == math.inf
    assert math.isnan(one(A.sum("v"), [[math.inf], [-math.inf]]))
    assert math.isnan(one(A.var_pop("v"), [[math.inf], [1.0]]))
    assert one(A.var_pop("v"), [[0.0] * 6 + [1e300]]) == one(A.var_pop("v"), [[0.0] * 6, [1e300]]) == math.inf


def test_a_key_of_small_values_is_as_exact_beside_one_of_large_values() -> None:
    rng = np.random.default_rng(5)
    small, large = rng.normal(size=1000) * 1e-150, rng.normal(size=1000) * 1e150
    ids = np.arange(2000) % 2
    values = np.where(ids == 0, np.repeat(small, 2), np.repeat(large, 2))
    high, _ = sum_by_group(Groups(ids, 2), values)
    assert high.tolist() == [math.fsum(small), math.fsum(large)]


pairs = st.tuples(together, st.floats(-0.5, 0.5)).map(lambda p: (p[0] + 0.0, math.ulp(p[0]) * p[1]))


@given(st.lists(st.tuples(pairs, pairs, together, st.integers(1, 2**50)), min_size=1, max_size=10))
def test_arithmetic_with_twice_the_digits(rows: list[Any]) -> None:
    a, b, c, n = ([row[i] for row in rows] for i in range(4))
    a0, a1, b0, b1 = (np.array([p[i] for p in side]) for side in (a, b) for i in (0, 1))
    third, counts = np.array(c), np.array(n, float)
    for i in range(len(rows)):
        x, y = Fraction(a0[i]) + Fraction(a1[i]), Fraction(b0[i]) + Fraction(b1[i])
        for found, exact, size in [
            (add_double(a0, a1, third), x + Fraction(c[i]), abs(x) + abs(Fraction(c[i]))),
            (add_pairs((a0, a1), (b0, b1)), x + y, abs(x) + abs(y)),
            (divided((a0, a1), counts), x / n[i], abs(x) / n[i]),
        ]:
            assert abs(Fraction(found[0][i]) + Fraction(found[1][i]) - exact) <= size * Fraction(2) ** -98


# -- groups ---------------------------------------------------------------------------------------------------

KEYS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-5, 5)),
    (pa.int64(), st.sampled_from([-(2**63), 0, 2**63 - 1])),
    (pa.int64(), st.integers(-3, 3).map(lambda n: 10**15 + n * 60_000_000)),
    (pa.int64(), st.sampled_from([0, 10**12, 10**12 + 1])),
    (pa.int8(), st.integers(-128, 127)),
    (pa.uint64(), st.sampled_from([0, 2**64 - 1])),
    (pa.string(), st.text(max_size=2)),
    (pa.bool_(), st.booleans()),
    (pa.date32(), st.dates()),
    (pa.timestamp("us", "UTC"), st.integers(0, 3).map(lambda n: n * 10**6)),
    (pa.decimal128(38, 2), st.integers(-2, 2)),
    (pa.null(), st.none()),
]


@given(st.data(), st.lists(st.sampled_from(KEYS), max_size=4), st.integers(0, 30), st.booleans())
def test_rows_are_numbered_by_their_keys(draw: st.DataObject, kinds: list[Any], rows: int, nulls: bool) -> None:
    columns = []
    for type_, values in kinds:
        some = values | st.none() if nulls else values
        columns.append(pa.array(draw.draw(st.lists(some, min_size=rows, max_size=rows)), type_))
    groups = number(columns, rows)
    keys = [tuple(column[i].as_py() for column in columns) for i in range(rows)]
    named = [tuple(column[i].as_py() for column in groups.keys) for i in range(groups.count)]
    assert [column.type for column in groups.keys] == [column.type for column in columns]
    assert len(set(named)) == len(named) == groups.count == len(set(keys))
    assert [named[i] for i in groups.ids] == keys
    assert groups.counts.tolist() == [keys.count(k) for k in named]
    assert groups.order.tolist() == sorted(range(rows), key=lambda i: (groups.ids[i], i))
    assert groups.offsets.tolist() == [sum(groups.counts[:i]) for i in range(groups.count + 1)]


def test_integers_that_only_seem_to_lie_on_a_grid() -> None:
    values = np.arange(300) * 10**9
    values[7] += 1
    column = pa.array(np.concatenate((values, values)))
    groups = number([column], 600)
    assert groups.count == 300 and groups.keys[0].take(pa.array(groups.ids)).equals(column)


def test_more_combinations_than_64_bits_hold() -> None:
    rng = np.random.default_rng(3)
    codes = [rng.integers(0, 2**31, 1000) for _ in range(4)]
    codes[3][:500] = codes[3][500:]
    for column in codes[:3]:
        column[:500] = column[500:]
    groups, parts = pack([Digit(column, 2**31) for column in codes])
    assert groups.count == 500
    for column, part in zip(codes, parts, strict=True):
        assert (part[groups.ids] == column).all()


@pytest.mark.parametrize("count", [1, 200, 65_536, 65_537, 10_000_000])
def test_ids_of_any_size_are_sorted_stably(count: int) -> None:
    ids = np.random.default_rng(count).integers(0, count, 3000)
    ids[::7] = count - 1
    assert stable_order(ids, count).tolist() == np.argsort(ids, kind="stable").tolist()


# -- integers -------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(-(2**63), 2**63 - 1)), min_size=1, max_size=30))
def test_integers_of_any_size_sum_exactly_or_not_at_all(rows: list[tuple[str, int]]) -> None:
    layout = Layout([bind("total", A.sum("i"), SCHEMA)])
    exact = {k: sum(v for key, v in rows if key == k) for k, _ in rows}
    keys, values = zip(*rows, strict=True)
    try:
        table = layout.lift({"k": pa.array(keys)}, {"v": None, "i": pa.array(values, pa.int64())})
    except IntegerOverflow as error:
        assert str(error).startswith("aggregates: 'total' = sum(i): ")
        assert any(not -(2**63) <= total < 2**63 for total in exact.values())
    else:
        found = layout.lower(layout.states(table))["total"].to_pylist()
        assert dict(zip(table["k"].to_pylist(), found, strict=True)) == exact


def test_unsigned_integers_beyond_64_bits_are_an_error() -> None:
    schema = pa.schema([("u", pa.uint64())])
    layout = Layout([bind("total", A.sum("u"), schema)])
    with pytest.raises(IntegerOverflow, match=r"'total' = sum\(u\): .*18446744073709551615.*cast the column to double"):
        layout.lift({"k": pa.array([1])}, {"u": pa.array([2**64 - 1], pa.uint64())})
