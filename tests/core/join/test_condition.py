"""Conditions in SQL over the columns of pairs."""

from __future__ import annotations

from datetime import datetime, timedelta
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
        ("coalesce(n, 7) = 7", [2]),
        ("price >= 1.75", [1, 3]),
        ("paid - ordered < interval 10 minutes", [0, 1]),
        ("paid - interval '5' minute > ordered", [2, 3]),
        ("paid > ordered and true", [0, 1, 2, 3]),
        ("x.price < y.amount and x.id = y.id", [0]),
    ],
)
def test_a_text_means_what_it_means_in_spark(text: str, expected: list[int]) -> None:
    """Where it is null, it is not true."""
    assert rows(text) == expected


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
    ],
)
def test_what_is_not_understood_is_refused(text: str, error: type[Any], match: str) -> None:
    with pytest.raises(error) as caught:
        rows(text)
    assert match in str(caught.value)
