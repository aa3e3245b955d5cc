"""Conditions in SQL over the columns of pairs."""

from __future__ import annotations

from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from aion.core.join.condition import expression_of
from aion.core.join.plan import holds
from aion.errors import ConfigError, SchemaError

BEGIN = datetime(2026, 1, 1)
LEFT = pa.schema(
    [
        ("id", pa.string()),
        ("ordered", pa.timestamp("us")),
        ("price", pa.float64()),
        ("n", pa.int64()),
        ("name", pa.string()),
    ]
)
RIGHT = pa.schema([("id", pa.string()), ("paid", pa.timestamp("us")), ("amount", pa.float64()), ("m", pa.int64())])
STAMPED = pa.field("stamped", pa.timestamp("us", "UTC"))
PAIRS = pa.RecordBatch.from_pydict(
    {
        "id": ["a", "b", "c", None],
        "ordered": [BEGIN] * 4,
        "price": [1.5, 2.0, None, 4.0],
        "n": [1, 2, None, -4],
        "name": ["anna", "otto", None, "ann%"],
        "paid": [BEGIN + timedelta(minutes=n) for n in (1, 5, 10, 20)],
        "amount": [2.0, 1.0, 3.0, 4.0],
        "m": [1, 3, None, 4],
    }
)


def rows(text: str) -> list[int]:
    expression = expression_of(text, (LEFT, RIGHT), ("id",))
    return [n for n, is_true in enumerate(holds(expression, PAIRS)) if is_true]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.price <= b.amount", [0, 3]),
        ("left.price > right.amount", [1]),
        ("price = amount", [3]),
        ("price <> amount", [0, 1]),
        ("n <=> m", [0, 2]),
        ("n + 1 = m", [1]),
        ("n * 2 - m >= 1", [0, 1]),
        ("-n = m and abs(n) = m", [3]),
        ("price < amount or n = 2", [0, 1]),
        ("not (price < amount)", [1, 3]),
        ("price is null", [2]),
        ("price is not null", [0, 1, 3]),
        ("n between 1 and 2", [0, 1]),
        ("n in (2, -4)", [1, 3]),
        ("n not in (2, -4)", [0]),
        ("name like 'ann_' and id = 'a'", [0]),
        ("name not like 'ann%'", [1]),
        ("coalesce(n, 7) = 7", [2]),
        ("price >= 1.75", [1, 3]),
        ("paid - ordered < interval 10 minutes", [0, 1]),
        ("paid - interval '5' minute > ordered", [2, 3]),
        ("paid > ordered and true", [0, 1, 2, 3]),
        ("x.price < y.amount and x.id = y.id", [0]),
        ("A.Price <= B.`AMOUNT` and a.PRICE <= LEFT.price", [0, 3]),
    ],
)
def test_a_text_means_what_it_means_in_spark(text: str, expected: list[int]) -> None:
    """Where it is null, it is not true."""
    assert rows(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = y", [0, 1]),
        ("x <> y", [2, 3]),
        ("x <=> y", [0, 1, 4]),
        ("x < y", [2]),
        ("x <= y", [0, 1, 2]),
        ("x > y", [3]),
        ("x >= 1.5", [0, 1, 3]),
        ("x between y and y", [0, 1]),
        ("abs(x) > 2", [0, 3]),
        ("tiny + 1 > 127", [0, 1]),
        ("tiny * 1.5 > 100", [0, 1]),
        ("big * 1.5 > 13510798882111489", [0]),
        ("big = x", [2]),
        ("big > 12345678901234567890", []),
        ("big - 9223372036854775807 < -9214364837600034000", [0, 1, 2, 3]),
        ("cents * 2 > 1", [0, 1]),
        ("cents = 0.1", [2]),
        ("cents > tiny", []),
        ("coalesce(cents, 1.005) > 1", [1, 4]),
    ],
)
def test_numbers_meet_as_in_spark(text: str, expected: list[int]) -> None:
    """NaN equals itself and is more than all other numbers; no number takes the type of a smaller one."""
    nan = float("nan")
    pairs = pa.RecordBatch.from_arrays(
        [
            pa.array([nan, 1.5, 1.0, nan, None]),
            pa.array([nan, 1.5, nan, 1.0, None]),
            pa.array([127, 127, 1, 1, None], pa.int8()),
            pa.array([2**53 + 1, 2**53, 1, 1, None], pa.int64()),
            pa.array([Decimal(n) for n in ("1.00", "2.50", "0.10", "0.00")] + [None], pa.decimal128(10, 2)),
        ],
        ["x", "y", "tiny", "big", "cents"],
    )
    expression = expression_of(text, (pairs.schema, pa.schema([])), ())
    assert [n for n, is_true in enumerate(holds(expression, pairs)) if is_true] == expected


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("price <", ConfigError, "on: 'price <' is no condition in SQL"),
        (
            "price / amount > 2",
            ConfigError,
            "'price / amount' in 'price / amount > 2' is not understood here; give a fun",
        ),
        ("rank() > 2", ConfigError, "is not understood here"),
        ("price < limit", SchemaError, "there is no column 'limit'; there are id, ordered, price, n, name, paid, amou"),
        ("a.price < a.amount", SchemaError, "column 'amount' is of the right side, and 'a' stands for the other one"),
        ("right.price < 1", SchemaError, "column 'price' is of the left side, and 'right' stands for the other one"),
        ("price", SchemaError, "on: 'price' does not fit its columns"),
        ("name < n", SchemaError, "on: 'name < n' does not fit its columns"),
        ("ordered < stamped", SchemaError, "Cannot compare timestamp with timezone to timestamp without timezone"),
        ("n between symmetric 2 and 1", ConfigError, "is not understood here"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, error: type[Any], match: str) -> None:
    with pytest.raises(error) as caught:
        expression_of(text, (LEFT, RIGHT.append(STAMPED)), ("id",))
    assert match in str(caught.value)
