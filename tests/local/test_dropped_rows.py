"""What comes too late, or has no time."""

from __future__ import annotations

import math
from datetime import timedelta
from decimal import Decimal
from typing import Any

import orjson
import pyarrow as pa
import pytest

from aion import Apply
from tests.local.seconds import applying, at, seconds_operator


def dropped_event(value: Any, type_: pa.DataType) -> Any:
    """A value of an event that comes too late, as the JSON that the user gets."""
    policy = {"lateness": {"initial_bound": 0}}
    with applying(lambda key, window, events: {"n": 0}, policy=policy) as operator:
        operator.process(pa.table({"ts": at(100), "x": pa.array([None], type_)}))
        operator.advance(50_000_000)
        (row,) = operator.process(pa.table({"ts": at(1), "x": pa.array([value], type_)})).to_pylist()
    assert (row["kind"], row["event_time"].timestamp(), row["lateness_us"]) == ("dropped", 1.0, 40_000_000)
    return orjson.loads(row["event"])["x"]


@pytest.mark.parametrize(
    ("value", "type_", "wanted"),
    [
        ('ü"\n', pa.string(), 'ü"\n'),
        (b"\xff\x00", pa.binary(), "/wA="),
        (Decimal("1.50"), pa.decimal128(5, 2), "1.50"),
        (math.nan, pa.float64(), None),
        (2**63 - 1, pa.int64(), 2**63 - 1),
        (True, pa.bool_(), True),
        ([1, None], pa.list_(pa.int32()), [1, None]),
        ({"a": {"b": b"x"}}, pa.struct([("a", pa.struct([("b", pa.binary())]))]), {"a": {"b": "eA=="}}),
        ([("k", 1)], pa.map_(pa.string(), pa.int32()), [["k", 1]]),
        (timedelta(seconds=1), pa.duration("us"), "0:00:01"),
    ],
)
def test_a_dropped_event_is_told_as_json_whatever_its_type(value: Any, type_: pa.DataType, wanted: Any) -> None:
    assert dropped_event(value, type_) == wanted


@pytest.mark.parametrize("year", [-5_000, -1, 12_000])
@pytest.mark.parametrize(
    "definition",
    [
        {},
        {"aggregates": None, "apply": Apply(lambda *_: {"n": 0}, "n bigint")},
    ],
)
def test_a_time_that_no_calendar_has_harms_nobody(year: int, definition: dict[str, Any]) -> None:
    """A broken clock's event is a late one, or an early one; in either case it is just an event."""
    broken = at((year - 1970) * 365.25 * 86_400)
    with seconds_operator(policy={"lateness": {"initial_bound": 0}}, **definition) as operator:
        operator.process(pa.table({"ts": at(1)}))
        operator.advance(50_000_000)
        found = operator.process(pa.table({"ts": pa.concat_arrays([broken, at(51)])}))
        found = pa.concat_tables([found, operator.advance(60_000_000)])
    assert found["kind"].to_pylist() == (["dropped"] if year < 1970 else []) + ["on_time"]


def test_an_event_without_time_is_dropped_with_the_reason() -> None:
    with seconds_operator(key="k") as operator:
        rows = operator.process(pa.table({"ts": at(None, 1, None), "k": ["a", "b", "a"]})).to_pylist()
    (row,) = rows
    assert (row["k"], row["n"], row["events"], row["window"], row["lateness_us"]) == ("a", 2, 2, None, None)
    assert "null" in row["reason"]
