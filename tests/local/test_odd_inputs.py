"""Inputs that are rare: names that Aion itself uses, slices without events, values of many digits."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import aion
from aion import aggregates as A
from aion.errors import ApplyError

SECOND = 1_000_000
TIME = pa.timestamp("us", "UTC")
NAMES = ["slice", "block", "shard", "seq", "hash", "events", "first", "last", "k0", "p0"]


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize(
    ("values", "type_"),
    [
        ([3, 2, 1], pa.int64()),
        ([None, "a", None], pa.string()),
        ([{"a": 1}, None, None], pa.struct([("a", pa.int64())])),
    ],
    ids=["integers", "strings", "structs"],
)
@pytest.mark.parametrize("name", NAMES)
def test_a_column_of_events_may_have_any_name(name: str, values: list[Any], type_: pa.DataType) -> None:
    """The events of a key come in the order of arrival, also when their blocks have been compacted."""
    seen: list[list[int]] = []

    def function(key: Any, window: Any, batches: Any) -> dict[str, Any]:
        seen.append([n for batch in batches for n in batch.column("id").to_pylist()])
        return {"n": len(seen[-1])}

    def events(first: int, count: int) -> pa.Table:
        ids = range(first, first + count)
        times = pa.array([5 * SECOND] * count, TIME)
        column = pa.array([values[i % len(values)] for i in ids], type_)
        return pa.table({"k": [1] * count, "ts": times, "id": ids, name: column})

    policy = {"trigger": {"kind": "every_batch"}}
    with aion.LocalOperator(
        windows=aion.Tumbling("1 minute"), time="ts", key="k", apply=aion.Apply(function, "n bigint"), policy=policy
    ) as operator:
        for batch in range(4):
            operator.process(events(50 * batch, 50))
        operator.advance(60 * SECOND)
        operator.process(events(200, 1))
        operator.process(events(201, 1))
    assert seen[-1] == list(range(202))


@pytest.mark.parametrize("minutes", [1, 10])
def test_an_own_aggregate_without_a_key_over_slices_of_which_some_have_no_event(minutes: int) -> None:
    own = A.aggregate(
        "v", lift=lambda v: v, combine=lambda left, right: pc.add(left[0], right[0]), lower=lambda v: v,
        partial="s bigint", result="bigint", name="s",
    )  # fmt: skip
    times = pa.array([i % 2 * minutes * 60 * SECOND + i for i in range(1000)], TIME)
    with aion.LocalOperator(windows=aion.Tumbling("1 minute"), time="ts", aggregates={"s": own, "n": A.count()}) as op:
        op.process(pa.table({"ts": times, "v": range(1000)}))
        rows = op.advance(10**12).to_pylist()
    assert [(row["s"], row["n"]) for row in rows] == [(249_500, 500), (250_000, 500)]


@pytest.mark.parametrize(("digits", "scale"), [(20, 2), (38, 0), (38, 37), (9, 3)])
def test_a_quantile_of_decimals_with_many_digits(digits: int, scale: int) -> None:
    largest = Decimal("9" * digits + f"E-{scale}")
    values = pa.array([Decimal(1)] + [largest] * 3999, pa.decimal128(digits, scale))
    times = pa.array([0] * len(values), TIME)
    found = {"low": A.approx_percentile("v", 1.0, 100), "middle": A.approx_percentile("v", 0.5, 100)}
    with aion.LocalOperator(windows=aion.Tumbling("1 minute"), time="ts", aggregates=found) as operator:
        operator.process(pa.table({"ts": times, "v": values}))
        (row,) = operator.advance(10**12).to_pylist()
    for value in (row["low"], row["middle"]):
        assert abs(value / largest - 1) < Decimal("1e-12")


NOT_UTF8 = pa.Array.from_buffers(
    pa.string(), 1, [None, pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xff")]
)
YEAR_10000 = pa.array([2932897], pa.int32()).view(pa.date32())
UNREADABLE = {
    "date": (YEAR_10000, "10000-01-01"),
    "time": (pa.array([2**61], TIME), "9503-04-04"),
    "list": (pa.array([[2**61]], pa.list_(TIME)), "9503-04-04"),
    "map": (pa.array([[("a", 2**61)]], pa.map_(pa.string(), TIME)), "9503-04-04"),
    "struct": (pa.StructArray.from_arrays([NOT_UTF8], ["a"]), "\ufffd"),
    "list of structs": (pa.array([[{"a": 2**61}, None]], pa.list_(pa.struct([("a", TIME)]))), "9503-04-04"),
}


@pytest.mark.parametrize("which", UNREADABLE)
def test_an_event_that_python_cannot_read_is_told_when_it_is_dropped(which: str) -> None:
    value, shown = UNREADABLE[which]
    value = pa.concat_arrays([pa.nulls(2, value.type), value])
    counted = aion.Apply(lambda key, window, batches: {"n": sum(b.num_rows for b in batches)}, "n bigint")
    windows = aion.Tumbling("1 minute", bound="1 minute")
    with aion.LocalOperator(windows=windows, time="ts", key="k", apply=counted) as operator:
        events = pa.table({"k": [1, 1, 1], "ts": pa.array([30 * SECOND] * 3, TIME), "v": value})
        operator.process(events)
        operator.advance(3600 * SECOND)
        told = operator.process(events.slice(1)).to_pylist()
    assert [row["kind"] for row in told] == ["dropped"] * 2
    assert any(shown in row["event"] for row in told)


@pytest.mark.parametrize(
    ("schema", "fits", "other"),
    [
        ("x array<bigint>", [1], [1.5]),
        ("x struct<a: bigint>", {"a": 1}, {"a": 1.5}),
        ("x map<string, bigint>", {"a": 1}, {"a": 1.5}),
        ("x array<struct<a: bigint>>", [{"a": 1}, None], [{"a": 1.5}]),
        ("x date", 1, 1.5),
        ("x timestamp", 1, 1.5),
    ],
)
def test_a_number_that_would_be_cut_is_an_error_at_every_depth(schema: str, fits: Any, other: Any) -> None:
    for value in (fits, other):
        with aion.LocalOperator(
            windows=aion.Tumbling("1 minute"), time="ts", apply=aion.Apply(lambda k, w, e, v=value: {"x": v}, schema)
        ) as operator:
            operator.process(pa.table({"ts": pa.array([0], TIME)}))
            if value is fits:
                assert operator.advance(10**12).num_rows == 1
            else:
                with pytest.raises(ApplyError, match=r"does not fit the declared schema: 1\.5 is not a"):
                    operator.advance(10**12)


def test_the_smallest_by_long_strings_takes_the_memory_of_the_strings() -> None:
    """Not that of the longest one for each row: 600 times 4 MiB do not fit into an array."""
    count = 600
    keys = pa.array(["a" * (4 << 20)] + [f"b{i}" for i in range(count - 1)])
    events = pa.table({"ts": pa.array([0] * count, TIME), "order": keys, "v": range(count)})
    with aion.LocalOperator(
        windows=aion.Tumbling("1 minute"), time="ts", aggregates={"least": A.min_by("v", "order")}
    ) as operator:
        operator.process(events)
        assert operator.advance(10**12)["least"].to_pylist() == [0]
