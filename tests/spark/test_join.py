"""Joins on Spark: late rows find their partners, whatever happens to the query."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import aion
from tests.spark.conftest import FileStream, Sink

ORDERS = pa.schema([("id", pa.string()), ("ordered", pa.timestamp("us", "UTC")), ("price", pa.float64())])
PAYMENTS = pa.schema([("id", pa.string()), ("paid", pa.timestamp("us", "UTC")), ("amount", pa.float64())])
ORDERS_DDL, PAYMENTS_DDL = "id string, ordered timestamp, price double", "id string, paid timestamp, amount double"


class Two:
    """The streams of orders and of payments."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.orders = FileStream(spark, folder / "orders", ORDERS)
        self.payments = FileStream(spark, folder / "payments", PAYMENTS)

    def joined(self, **definition: Any) -> DataFrame:
        orders = self.orders.read(ORDERS_DDL).withWatermark("ordered", "0 seconds")
        payments = self.payments.read(PAYMENTS_DDL).withWatermark("paid", "0 seconds")
        given = {"key": "id", "within": ("0 seconds", "1 hour"), "how": "left", "bound": "1 hour", **definition}
        return aion.join(orders, payments, **given)


@pytest.fixture
def two(spark: SparkSession, tmp_path: Path) -> Two:
    return Two(spark, tmp_path)


def shown(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["kind"], row["id"], row["price"], row["amount"]) for row in rows]


def test_a_payment_that_is_late_takes_back_that_there_is_none(two: Two, sink: Sink) -> None:
    joined = two.joined()
    two.orders.put([("a", 0, 10.0), ("b", 1, 20.0)])
    two.payments.put([("a", 5, 10.0), ("x", 5, 1.0)])
    assert shown(sink.run(joined)) == [("on_time", "a", 10.0, 10.0)]
    for table in (two.orders, two.payments):
        table.put([("later", 4000, 0.0)])
    assert shown(sink.run(joined))[1:] == [("on_time", "later", 0.0, 0.0), ("on_time", "b", 20.0, None)]
    two.payments.put([("b", 1200, 20.0)])
    assert shown(sink.run(joined))[3:] == [("retracted", "b", 20.0, None), ("late", "b", 20.0, 20.0)]
    two.payments.put([("b", 100, 3.0)])
    two.orders.put([("b", 200, 4.0), (None, 5000, 1.0)])
