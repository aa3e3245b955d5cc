"""Joins on Spark: late rows find their partners, whatever happens to the query."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import aion
from aion import aggregates as A
from aion.errors import ConfigError, ForeignState, SchemaError, WatermarkError
from aion.spark.api.rescale import rescale
from tests.documents import run_python
from tests.spark.conftest import FileStream, Sink, take_all

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


@pytest.mark.slow
def test_a_row_comes_at_once_if_it_is_asked_for(two: Two, sink: Sink) -> None:
    """An order that is not paid yet is shown, and shown once more when it should have been."""
    joined = two.joined(early="batch")
    two.orders.put([("a", 0, 10.0), ("b", 1, 20.0)])
    assert sorted(shown(sink.run(joined))) == [("early", "a", 10.0, None), ("early", "b", 20.0, None)]
    two.payments.put([("a", 5, 10.0)])
    found = shown(sink.run(joined))[2:]
    assert found == [("retracted", "a", 10.0, None), ("on_time", "a", 10.0, 10.0)]
    for table in (two.orders, two.payments):
        table.put([("later", 4000, 0.0)])
    assert shown(sink.run(joined))[4:] == [("on_time", "later", 0.0, 0.0), ("on_time", "b", 20.0, None)]


@pytest.mark.slow
def test_what_is_later_than_the_bound_of_its_side_is_dropped(two: Two, sink: Sink) -> None:
    joined = two.joined(how="inner", bound=("10 minutes", "1 hour"))
    for table in (two.orders, two.payments):
        table.put([("now", 7200, 0.0)])
    sink.run(joined)
    two.orders.put([("a", 6000, 1.0), ("b", 6700, 1.0)])
    two.payments.put([("a", 6600, 1.0), ("b", 6700, 2.0), ("b", 3000, 1.0)])
    rows = sink.run(joined)
    dropped = sorted((row["side"], row["reason"], row["lateness_us"] / 1e6) for row in rows if row["kind"] == "dropped")
    assert dropped == [
        ("left", "later than the bound of its side", 1200.0),
        ("right", "later than the bound of its side", 4200.0),
    ]
    assert shown([row for row in rows if row["kind"] == "late"]) == [("late", "b", 1.0, 2.0)]
    event = next(row["event"] for row in rows if row["side"] == "left")
    assert '"price":1.0' in event and aion.dropped(joined).columns.count("side") == 1


@pytest.mark.slow
def test_a_late_price_takes_back_the_pairs_that_it_changes(spark: SparkSession, tmp_path: Path, sink: Sink) -> None:
    """How much an order cost: by the newest price before it."""
    orders, prices = FileStream(spark, tmp_path / "o", ORDERS), FileStream(spark, tmp_path / "p", PAYMENTS)
    joined = aion.join(
        orders.read(ORDERS_DDL).withWatermark("ordered", "0 seconds"),
        prices.read(PAYMENTS_DDL).withWatermark("paid", "0 seconds"),
        key="id",
        within=("-1 hour", "0 seconds"),
        how="asof",
        bound="1 hour",
    )
    prices.put([("a", 100, 1.0), ("a", 200, 2.0)])
    orders.put([("a", 150, 0.0), ("a", 250, 0.0), ("a", 350, 0.0)])
    sink.run(joined)
    for table in (prices, orders):
        table.put([("later", 1000, 0.0)])
    rows = sink.run(joined)
    assert sorted((row["ordered"].timestamp(), row["amount"]) for row in rows if row["id"] == "a") == [
        (150, 1.0), (250, 2.0), (350, 2.0),
    ]  # fmt: skip
    prices.put([("a", 300, 3.0)])
    changed = [(row["kind"], row["ordered"].timestamp(), row["amount"]) for row in sink.run(joined)[len(rows) :]]
    assert changed == [("retracted", 350, 2.0), ("late", 350, 3.0)]


@pytest.mark.slow
def test_the_table_of_a_sink_is_the_join(two: Two, tmp_path: Path) -> None:
    """Without ``key=``: a result says what identifies its rows."""
    path = tmp_path / "shop.db"

    def run() -> list[tuple[Any, ...]]:
        table = aion.sinks.upsert(f"sqlite:///{path}", "paid_orders", dropped="ignore")
        writer = two.joined(how="full").writeStream.foreachBatch(table)
        checkpoint = str(tmp_path / "checkpoint")
        writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
        with contextlib.closing(sqlite3.connect(path)) as database:
            return sorted(database.execute("SELECT id, price, amount FROM paid_orders"), key=str)

    two.orders.put([("a", 0, 10.0), ("b", 1, 20.0), ("b", 1, 20.0)])
    two.payments.put([("a", 5, 10.0), ("x", 5, 1.0)])
    run()
    for table in (two.orders, two.payments):
        table.put([("later", 4000, 0.0)])
    assert run() == [("a", 10.0, 10.0), ("b", 20.0, None), ("b", 20.0, None), ("later", 0.0, 0.0), ("x", None, 1.0)]
    two.payments.put([("b", 1200, 20.0)])
    assert run() == [("a", 10.0, 10.0), ("b", 20.0, 20.0), ("b", 20.0, 20.0), ("later", 0.0, 0.0), ("x", None, 1.0)]


@pytest.mark.slow
@pytest.mark.parametrize("emit", ["all", "changes"])
def test_windows_of_pairs_count_what_is_taken_back(two: Two, sink: Sink, emit: str) -> None:
    """Orders without a payment, by hour. A late payment makes them fewer."""
    joined = two.joined(emit=emit)
    hours = aion.windowed(
        joined.withColumn("unpaid", joined["paid"].isNull().cast("int")),
        time="pair_time", windows=aion.Tumbling("1 hour"), aggregates={"n": A.count(), "unpaid": A.sum("unpaid")},
        name="hours",
    )  # fmt: skip
    two.orders.put([("a", 0, 10.0), ("b", 1, 20.0), ("c", 2, 30.0)])
    two.payments.put([("a", 5, 10.0)])
    sink.run(hours)
    for table in (two.orders, two.payments):
        table.put([("later", 5000, 0.0)])
    assert last_panes(sink.run(hours))[0] == (3, 2)
    two.payments.put([("b", 3000, 20.0)])
    assert last_panes(sink.run(hours))[0] == (3, 1)


def last_panes(rows: list[dict[str, Any]]) -> dict[float, tuple[int, int]]:
    panes = sorted((row for row in rows if row["kind"] != "dropped"), key=lambda row: row["pane_seq"])
    return {row["window_start"].timestamp(): (row["n"], row["unpaid"]) for row in panes}


@pytest.mark.slow
def test_other_partitions_and_a_batch_that_runs_again_change_nothing(
    spark: SparkSession, two: Two, sink: Sink, tmp_path: Path
) -> None:
    joined = two.joined(name="orders")
    two.orders.put([(key, 0, 1.0) for key in "abcdefgh"])
    sink.run(joined)
    checkpoint = str(tmp_path / "checkpoint")
    rescale(spark, checkpoint, 1, state_dir=spark.conf.get("spark.aion.state.dir"))
    two.payments.put([(key, 10, 2.0) for key in "aceg"])
    fails = [True]

    def keep(batch: DataFrame, number: int) -> None:
        sink.keep(batch, number)
        if fails.pop():
            fails.append(False)
            raise ValueError("no answer")

    query = two.joined(name="orders").writeStream.foreachBatch(keep).option("checkpointLocation", checkpoint)
    with pytest.raises(StreamingQueryException):
        query.trigger(availableNow=True).start().awaitTermination()
    for table in (two.orders, two.payments):
        table.put([("later", 4000, 0.0)])
    rows = sink.run(two.joined(name="orders"))
    paid = sorted((row["id"], row["amount"]) for row in rows if row["id"] != "later")
    assert paid == [(key, 2.0 if key in "aceg" else None) for key in "abcdefgh"]


def test_a_first_batch_that_runs_again_makes_the_same_rows(two: Two, tmp_path: Path) -> None:
    """What its first run has written is replaced, and does not stay beside it."""
    two.orders.put([("a", 0, 10.0), ("b", 1, 20.0)])
    two.payments.put([("a", 5, 10.0)])
    table, fails = aion.sinks.upsert(f"sqlite:///{tmp_path}/shop.db", "paid"), [True]

    def write(batch: DataFrame, number: int) -> None:
        table(batch, number)
        if fails.pop():
            raise ValueError("no answer")

    query = two.joined(early="batch").writeStream.foreachBatch(write)
    query = query.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True)
    with pytest.raises(StreamingQueryException):
        query.start().awaitTermination()
    fails += [False] * 9
    query.start().awaitTermination()
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as shop:
        assert shop.execute("select id, amount from paid order by id").fetchall() == [("a", 10.0), ("b", None)]


def test_a_definition_that_changes_is_refused(two: Two, sink: Sink) -> None:
    two.orders.put([("a", 0, 1.0)])
    sink.run(two.joined())
    with pytest.raises(ForeignState, match=r"how: was left; is inner"):
        sink.run(two.joined(how="inner"))
    with pytest.raises(ForeignState, match=r"on: was none; is price <= amount"):
        sink.run(two.joined(on="price <= amount"))


def test_what_cannot_be_joined_is_refused_with_a_sentence(spark: SparkSession, two: Two) -> None:
    orders = two.orders.read(ORDERS_DDL).withWatermark("ordered", "0 seconds")
    payments = two.payments.read(PAYMENTS_DDL).withWatermark("paid", "0 seconds")
    right = {"key": "id", "within": ("0 seconds", "1 hour")}
    for error, words, change in (
        (WatermarkError, "right: it has no watermark", {"right": two.payments.read(PAYMENTS_DDL)}),
        (ConfigError, "within: '1 hour' is not two values", {"within": "1 hour"}),
        (ConfigError, "give the smaller difference first", {"within": ("1 hour", "0 seconds")}),
        (SchemaError, "key: the left side has no column 'order'", {"key": "order"}),
        (SchemaError, "'price' is a column of both sides", {"right": payments.withColumnRenamed("amount", "price")}),
        (
            SchemaError,
            "'kind' is a column that every result has",
            {"right": payments.withColumnRenamed("amount", "kind")},
        ),
        (ConfigError, "how: 'outer' is none of inner, left, right, full, asof", {"how": "outer"}),
        (ConfigError, "early: '1 minute' is neither 'batch' nor None", {"how": "left", "early": "1 minute"}),
        (ConfigError, "is none of a text in SQL, an expression", {"on": payments["amount"] > 1}),
        (SchemaError, "unique: the left side has no column 'order'", {"unique": ("order", None)}),
        (ConfigError, "id, unique: both name columns that", {"id": (None, "id"), "unique": (None, "amount")}),
        (SchemaError, "on: there is no column 'prize'", {"on": "a.prize < b.amount"}),
        (ConfigError, "right: it is not a stream", {"right": spark.createDataFrame([], PAYMENTS_DDL)}),
        (SchemaError, "cast one of them", {"right": payments.withColumn("id", payments["id"].cast("binary"))}),
        (SchemaError, "the left side has two columns named 'price'", {"left": orders.select("*", "price")}),
        (
            SchemaError,
            "'price' and 'PRICE' differ only in case",
            {"right": payments.withColumnRenamed("amount", "PRICE")},
        ),
        (
            SchemaError,
            "compares strings byte by byte",
            {"left": orders.withColumn("c", F.expr("id collate UNICODE_CI"))},
        ),
        (
            WatermarkError,
            "max_ahead, idle_after and complete_until of aion.watermark are for aion.windowed",
            {"left": aion.watermark(two.orders.read(ORDERS_DDL), "ordered", "1 minute", max_ahead="1 hour")},
        ),
    ):
        given = {"left": orders, "right": payments, **right, **change}
        with pytest.raises(error, match=words):
            aion.join(given.pop("left"), given.pop("right"), **given)
    counted = two.joined().groupBy("id").count().writeStream.format("noop").outputMode("update")
    with pytest.raises(ConfigError, match=r"groupBy behind the join 'join'"):
        counted.start()


@pytest.mark.slow
def test_the_page(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of the page runs, and its table is what the page says."""
    orders = FileStream(spark, tmp_path / "o", pa.schema([("order_id", pa.string()), *list(ORDERS)[1:]]))
    payments = FileStream(spark, tmp_path / "p", pa.schema([("order_id", pa.string()), *list(PAYMENTS)[1:]]))
    orders.put([("a", 0, 10.0), ("b", 1, 20.0)])
    payments.put([("a", 5, 10.0)])
    monkeypatch.chdir(tmp_path)
    streams = {
        "orders": orders.read(ORDERS_DDL.replace("id", "order_id", 1)),
        "payments": payments.read(PAYMENTS_DDL.replace("id", "order_id", 1)),
    }
    found = run_python("docs/how-to/joins.md", {"aion": aion, "A": A, **streams}, tmp_path, {})
    for table in (orders, payments):
        table.put([("later", 9000, 0.0)])
        take_all(found["query"])
    payments.put([("b", 7000, 20.0)])
    take_all(found["query"])
    found["query"].stop()
    with contextlib.closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        rows = sorted(database.execute("SELECT order_id, price, amount, kind FROM paid_orders"))
    assert rows == [("a", 10.0, 10.0, "on_time"), ("b", 20.0, 20.0, "late"), ("later", 0.0, 0.0, "on_time")]


@pytest.mark.slow
def test_columns_may_have_any_name(two: Two, sink: Sink, tmp_path: Path) -> None:
    """pyspark itself takes a dot in a name for the field of a column. The key is a Column."""
    odd = {"id": "id`1", "price": "price.eur"}
    orders = two.orders.read(ORDERS_DDL).withColumnsRenamed(odd).withWatermark("ordered", "0 seconds")
    payments = two.payments.read(PAYMENTS_DDL).withColumnsRenamed(odd).withWatermark("paid", "0 seconds")
    within = ("0 seconds", "1 hour")
    joined = aion.join(
        orders, payments, key=orders["`id``1`"], within=within, on="`price.EUR` <= Amount", how="left", bound="1 hour"
    )
    two.orders.put([("a", 0, 10.0), ("b", 0, 20.0)])
    two.payments.put([("a", 1, 10.0), ("b", 1, 10.0)])
    assert [(row["id`1"], row["price.eur"], row["amount"]) for row in sink.run(joined)] == [("a", 10.0, 10.0)]
    for table in (two.orders, two.payments):
        table.put([("later", 4000, 1.0)])
    sink = Sink(tmp_path)
    rows = [(row["id`1"], row["price.eur"], row["amount"]) for row in sink.run(joined) if row["id`1"] != "later"]
    assert rows == [("b", 20.0, None)]


@pytest.mark.parametrize("sensitive", [True, False])
def test_names_by_case(spark: SparkSession, two: Two, sensitive: bool) -> None:
    """As in Spark, a column has the name that it is asked for by."""
    orders = two.orders.read(ORDERS_DDL).withWatermark("ordered", "0 seconds")
    payments = two.payments.read(PAYMENTS_DDL).withWatermark("paid", "0 seconds").withColumnRenamed("id", "Id")
    asked: dict[str, Any] = {"key": "ID", "time": ("ORDERED", None), "id": ("Price", None), "on": "PRICE < amount"}
    spark.conf.set("spark.sql.caseSensitive", sensitive)
    try:
        with pytest.raises(SchemaError, match="no column '") if sensitive else contextlib.nullcontext():
            joined = aion.join(orders, payments, within=("0 seconds", "1 hour"), **asked)
            assert joined.columns[:5] == ["ID", "ORDERED", "Price", "paid", "amount"]
            columns = {"time": (orders["ordered"], None), "id": ([F.col("price")], None), "key": F.col("ID")}
            assert aion.join(orders, payments, within=("0 seconds", "1 hour"), **columns).columns == [
                *("ID", "ordered", "price", "paid", "amount"),
                *joined.columns[5:],
            ]
        both = {
            "right": payments.withColumnRenamed("Id", "id").withColumnRenamed("amount", "Price"),
            "on": "price < Price",
        }
        with contextlib.nullcontext() if sensitive else pytest.raises(SchemaError, match="differ only in case"):
            aion.join(orders, key="id", within=("0 seconds", "1 hour"), **both)
    finally:
        spark.conf.set("spark.sql.caseSensitive", False)
