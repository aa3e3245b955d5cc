"""Aggregates at the edges of their types: sums that overflow, decimals, NaN; and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion import aggregates as A
from aion.aggregates.binding import bind
from aion.aggregates.layout import Layout
from aion.errors import ConfigError, IntegerOverflow, SchemaError
from tests import oracle

I64_MAX = 2**63 - 1

Row = tuple[str | None, Any]  # key and value


def bound(aggregate: A.Aggregate, type_: pa.DataType) -> A.Bound:
    return bind("result", aggregate, pa.schema([("v", type_)]))


def lift(layout: Layout, rows: Sequence[Row], type_: pa.DataType) -> pa.Table:
    keys = pa.array([k for k, _ in rows], pa.string())
    return layout.lift({"k": keys}, {"v": pa.array([v for _, v in rows], type_, from_pandas=False)})


def results(layout: Layout, partials: Sequence[pa.Table]) -> dict[str | None, Any]:
    combined = layout.combine(["k"], pa.concat_tables(partials))
    lowered = layout.lower(layout.states(combined))["result"]
    assert lowered.type == layout.bound[0].type, "the type that it was bound with"
    return dict(zip(combined.column("k").to_pylist(), lowered.to_pylist(), strict=True))


def compute(aggregate: A.Aggregate, rows: Sequence[Row], type_: pa.DataType) -> dict[str | None, Any]:
    layout = Layout([bound(aggregate, type_)])
    return results(layout, [lift(layout, rows, type_)])


def one(aggregate: A.Aggregate, values: Sequence[Any], type_: pa.DataType) -> Any:
    return compute(aggregate, [(None, v) for v in values], type_)[None]


def expected(function: Callable[[list[Any]], Any], rows: Sequence[Row]) -> dict[str | None, Any]:
    return {key: function([v for k, v in rows if k == key]) for key, _ in rows}


def split(draw: st.DataObject, rows: list[Row]) -> list[list[Row]]:
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    return [rows[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(-(2**63), I64_MAX)), max_size=12), st.data())
def test_no_split_hides_an_overflow(rows: list[Row], draw: st.DataObject) -> None:
    layout = Layout([bound(A.sum("v"), pa.int64())])
    parts = split(draw, rows)
    totals = expected(oracle.spark_sum, rows)
    try:
        assert results(layout, [lift(layout, part, pa.int64()) for part in parts]) == totals
    except IntegerOverflow:
        # As in Spark, also where only a part of the sum leaves 64 bits and the whole comes back into them.
        sums = [totals, *(expected(oracle.spark_sum, part) for part in parts)]
        assert any(total not in oracle.I64 for of_keys in sums for total in of_keys.values())
    else:
        assert all(total in oracle.I64 for total in totals.values())


def test_aggregates_of_one_column_share_their_partials() -> None:
    schema = pa.schema([("v", pa.int64())])
    asked = {"n": A.count(), "c": A.count("v"), "s": A.sum("v"), "m": A.mean("v"), "m2": A.avg("v")}
    layout = Layout([bind(name, a, schema) for name, a in asked.items()])
    assert len(layout.fields) == 5, "events, non-nulls, sum of integers, sum of doubles in two"
    assert layout.fields[0].name == "p0" and layout.columns == ["v"]
    rows: list[Row] = [("a", 1), ("a", None), ("a", 4), ("b", None)]
    combined = layout.combine(["k"], lift(layout, rows, pa.int64()))
    found = {name: column.to_pylist() for name, column in layout.lower(layout.states(combined)).items()}
    assert found == {"n": [3, 1], "c": [2, 0], "s": [5, None], "m": [2.5, None], "m2": [2.5, None]}


# -- edges, by name -------------------------------------------------------------------------------------------


def test_nan_is_the_largest() -> None:
    assert one(A.min("v"), [math.nan, math.inf, None], pa.float64()) == math.inf
    assert math.isnan(one(A.max("v"), [math.nan, math.inf], pa.float64()))
    assert math.isnan(one(A.min("v"), [math.nan, None], pa.float32()))
    assert one(A.min("v"), [0.5, -0.0], pa.float32()) == 0.0


@pytest.mark.parametrize("aggregate", [A.sum("v"), A.mean("v"), A.min("v"), A.max("v")])
@pytest.mark.parametrize("type_", [pa.int32(), pa.float32(), pa.float64(), pa.decimal128(10, 2)])
def test_a_group_of_nothing_but_nulls_is_null(aggregate: A.Aggregate, type_: pa.DataType) -> None:
    assert compute(aggregate, [("a", None), ("b", 1), ("a", None)], type_)["a"] is None


@pytest.mark.parametrize("values", [[I64_MAX, 1], [-(2**63), -1], [I64_MAX, I64_MAX, I64_MAX]])
def test_a_sum_beyond_64_bits_is_an_error(values: list[int]) -> None:
    with pytest.raises(IntegerOverflow, match=r"'result' = sum\(v\): -?\d+ does not fit into a bigint"):
        one(A.sum("v"), values, pa.int64())
    layout = Layout([bound(A.sum("v"), pa.int64())])
    parts = [lift(layout, [("a", v)], pa.int64()) for v in values]
    with pytest.raises(IntegerOverflow, match="bigint"):
        results(layout, parts)


def test_sums_at_the_very_edge_of_64_bits_are_right() -> None:
    assert one(A.sum("v"), [I64_MAX, 1, -1], pa.int64()) == I64_MAX
    assert one(A.sum("v"), [-(2**62), -(2**62)], pa.int64()) == -(2**63)
    assert one(A.mean("v"), [I64_MAX, I64_MAX], pa.int64()) == 2.0**63


def test_decimal_means_are_rounded_half_up() -> None:
    cents = pa.decimal128(5, 2)
    assert one(A.mean("v"), [Decimal("0.01"), Decimal("0.02"), Decimal("0.02")], cents) == Decimal("0.016667")
    eighth = [Decimal("0.00001"), *[Decimal(0)] * 7]  # 0.00000125, half of the last digit of a decimal(.., 7)
    assert one(A.mean("v"), eighth, pa.decimal128(6, 3 + 2)) == Decimal("0.000001250")
    thirds = [Decimal(1), Decimal(0), Decimal(0)] * 2
    assert one(A.mean("v"), thirds, pa.decimal128(1, 0)) == Decimal("0.3333")
    halves = [Decimal(1), *[Decimal(0)] * 31]  # 0.03125: half of the last digit
    assert one(A.mean("v"), halves, pa.decimal128(1, 0)) == Decimal("0.0313")
    assert one(A.mean("v"), [-v for v in halves], pa.decimal128(1, 0)) == Decimal("-0.0313")


# Asked of Spark 4.3: typeof(avg(v)) and typeof(sum(v)) for v of each type.
SPARKS_TYPES = [
    ((10, 2), (14, 6), (20, 2)),
    ((30, 5), (34, 9), (38, 5)),
    ((33, 3), (37, 7), (38, 3)),
    ((34, 0), (38, 4), (38, 0)),
    ((35, 10), (38, 14), (38, 10)),
    ((36, 2), (38, 6), (38, 2)),
    ((38, 0), (38, 4), (38, 0)),
    ((38, 18), (38, 22), (38, 18)),
    ((38, 30), (38, 34), (38, 30)),
    ((38, 36), (38, 38), (38, 36)),
    ((5, 5), (9, 9), (15, 5)),
    ((20, 20), (24, 24), (30, 20)),
]


@pytest.mark.parametrize(("source", "mean", "total"), SPARKS_TYPES)
def test_decimal_results_have_sparks_types(
    source: tuple[int, int], mean: tuple[int, int], total: tuple[int, int]
) -> None:
    assert bound(A.mean("v"), pa.decimal128(*source)).type == pa.decimal128(*mean)
    assert bound(A.sum("v"), pa.decimal128(*source)).type == pa.decimal128(*total)


@pytest.mark.parametrize("count", [2, 3, 20])
def test_a_decimal_sum_that_does_not_fit_is_an_error(count: int) -> None:
    """Spark: ARITHMETIC_OVERFLOW. Nothing could be worse than a wrong number."""
    largest = Decimal("9" * 38)
    with pytest.raises(IntegerOverflow):
        one(A.sum("v"), [largest] * count, pa.decimal128(38, 0))
    layout = Layout([bound(A.sum("v"), pa.decimal128(38, 0))])
    with pytest.raises(IntegerOverflow):
        results(layout, [lift(layout, [("a", largest.copy_negate())], pa.decimal128(38, 0)) for _ in range(count)])


def test_a_decimal_mean_that_does_not_fit_is_an_error() -> None:
    """Spark: NUMERIC_VALUE_OUT_OF_RANGE, as the mean of decimal(38, 0) is a decimal(38, 4)."""
    with pytest.raises(IntegerOverflow):
        one(A.mean("v"), [Decimal("9" * 38)], pa.decimal128(38, 0))


# -- bad input --------------------------------------------------------------------------------------------------


def test_a_missing_column_is_named_with_those_that_exist() -> None:
    with pytest.raises(SchemaError, match=r"'speed' = mean\(velocity\).*does not exist.*ts, v"):
        bind("speed", A.mean("velocity"), pa.schema([("ts", pa.timestamp("us")), ("v", pa.int64())]))


@pytest.mark.parametrize("aggregate", [A.sum("v"), A.mean("v")])
@pytest.mark.parametrize("type_", [pa.string(), pa.bool_(), pa.timestamp("us"), pa.date32(), pa.list_(pa.int64())])
def test_only_numbers_are_summed(aggregate: A.Aggregate, type_: pa.DataType) -> None:
    with pytest.raises(SchemaError, match="needs numbers"):
        bound(aggregate, type_)


@pytest.mark.parametrize("aggregate", [A.min("v"), A.max("v")])
@pytest.mark.parametrize(
    "type_", [pa.list_(pa.int64()), pa.struct([("x", pa.list_(pa.int64()))]), pa.null(), pa.map_("i8", "i8")]
)
def test_nested_values_have_no_order(aggregate: A.Aggregate, type_: pa.DataType) -> None:
    with pytest.raises(SchemaError, match="order"):
        bound(aggregate, type_)


@pytest.mark.parametrize("type_", [pa.duration("us"), pa.string_view(), pa.month_day_nano_interval()])
@pytest.mark.parametrize("aggregate", [A.min("v"), A.max("v"), A.count("v")])
def test_what_can_be_bound_can_be_computed(aggregate: A.Aggregate, type_: pa.DataType) -> None:
    """A type that Arrow's kernels cannot take is refused before any data flows, not when the first comes."""
    try:
        layout = Layout([bound(aggregate, type_)])
    except SchemaError:
        return
    results(layout, [lift(layout, [("a", None)], type_)])


@pytest.mark.parametrize("wrong", ["count", None, sum, A.Aggregate("mode", ("v",))])
def test_what_is_no_aggregate_is_shown(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="'result'"):
        bound(wrong, pa.int64())


def test_calendar_types_are_ordered_as_they_are() -> None:
    days = [date(2024, 2, 29), date(1969, 12, 31), None]
    assert one(A.min("v"), days, pa.date32()) == date(1969, 12, 31)
    instants_ = [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)]
    assert one(A.max("v"), instants_, pa.timestamp("us", "UTC")) == instants_[1]
