"""A query with a join is started again with other columns, and goes on with its state."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from typer.testing import CliRunner

import aion
from aion import aggregates as A
from aion.cli import app
from aion.errors import ForeignState
from aion.sinks import going_back
from aion.spark.taking_over import rewind as rewinding
from aion.spark.taking_over.fork import fork
from tests.spark.conftest import FileStream, Sink

TIME = pa.timestamp("us", "UTC")
ORDERS = pa.schema([("id", pa.string()), ("ordered", TIME), ("price", pa.int32()), ("note", pa.string())])
PAYMENTS = pa.schema([("id", pa.string()), ("paid", TIME), ("amount", pa.float64())])
PLAIN, NOTED = "id string, ordered timestamp, price int", "id string, ordered timestamp, price int, note string"
PAYMENTS_DDL = "id string, paid timestamp, amount double"
rewind = partial(rewinding.rewind, tables_of=going_back.Tables)


class Two:
    """The streams of orders and of payments."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.orders = FileStream(spark, folder / "orders", ORDERS)
        self.payments = FileStream(spark, folder / "payments", PAYMENTS)

    def joined(self, ddl: str, wide: bool = False, **definition: Any) -> DataFrame:
        orders = self.orders.read(ddl).withWatermark("ordered", "0 seconds")
        if wide:
            orders = orders.withColumn("price", orders["price"].cast("long"))
        payments = self.payments.read(PAYMENTS_DDL).withWatermark("paid", "0 seconds")
        given = {"key": "id", "within": ("0 seconds", "1 hour"), "how": "left", "bound": "1 hour", **definition}
        return aion.join(orders, payments, **given)

    def pay(self, *keys: str) -> None:
        self.payments.put([(key, 10, 1.0) for key in keys])


@pytest.fixture
def two(spark: SparkSession, tmp_path: Path) -> Two:
    return Two(spark, tmp_path)


def last(rows: list[dict[str, Any]], *columns: str) -> dict[str, tuple[Any, ...]]:
    return {row["id"]: tuple(row.get(name, "gone") for name in columns) for row in rows}


def test_columns_come_and_go(
    two: Two, tmp_path: Path, place: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    place(str(tmp_path / "state"))
    path = tmp_path / "shop.db"

    def run(definition: DataFrame, columns: str) -> list[tuple[Any, ...]]:
        table = aion.sinks.upsert(f"sqlite:///{path}", "paid", dropped="ignore", add_columns=True)
        writer = definition.writeStream.foreachBatch(table).option("checkpointLocation", str(tmp_path / "checkpoint"))
        with caplog.at_level("INFO", logger="aion.spark.start.kept_state"):
            writer.trigger(availableNow=True).start().awaitTermination()
        with contextlib.closing(sqlite3.connect(path)) as database:
            return sorted(database.execute(f"SELECT {columns} FROM paid"), key=str)

    two.orders.put([(key, 0, n, f"of {key}") for n, key in enumerate("abc")])
    two.pay("a")
    assert run(two.joined(PLAIN), "id, price, amount") == [("a", 0, 1.0)]
    assert not caplog.text
    two.orders.put([("d", 1, 3, "of d")])
    two.pay("b", "d")
    rows = run(two.joined(NOTED, wide=True), "id, price, note")
    assert rows == [("a", 0, None), ("b", 1, None), ("d", 3, "of d")]
    assert (
        "join goes on with another definition: columns 'note' of the left side begin, and are null in rows that came "
        "before; columns 'price' of the left side have a wider type" in caplog.text
    )
    assert "table paid of" in caplog.text and "has no column 'note'; its sink adds it" in caplog.text
    kept = aion.state.read(str(tmp_path / "state"), key={"id": "d"}).read_all().to_pylist()
    kept += aion.state.read(str(tmp_path / "state"), key={"id": "c"}).read_all().to_pylist()
    assert [(row["side"], row["note"]) for row in kept] == [("left", "of d"), ("right", None), ("left", None)]
    caplog.clear()
    two.pay("c")
    with pytest.raises(ForeignState, match=r"price of the left side was int64 and is int32, which does not hold all"):
        run(two.joined(PLAIN), "id")
    with pytest.raises(ForeignState, match=r"how: was left; is inner. It cannot go on with this one: only columns of"):
        run(two.joined(NOTED, wide=True, how="inner"), "id")
    for command in ("inspect", "explain"):
        shown = CliRunner().invoke(app, [command, str(tmp_path / "state")])
        assert shown.exit_code == 0, shown.output
    assert run(two.joined(PLAIN, wide=True), "id, price, amount, note")[2:] == [
        ("c", 2, 1.0, None), ("d", 3, 1.0, "of d"),
    ]  # fmt: skip
    assert "columns 'note' of the left side are gone" in caplog.text


@pytest.mark.slow
def test_state_from_before_a_change_has_its_columns_again(
    spark: SparkSession, two: Two, sink: Sink, tmp_path: Path, place: Callable[[str], None]
) -> None:
    """The change fails and is taken back; checkpoints that were copied before it, or go back over it, never see it."""
    place(str(tmp_path / "state"))
    two.orders.put([(key, 0, n, f"of {key}") for n, key in enumerate("abc")])
    sink.run(two.joined(NOTED))
    checkpoint, others = tmp_path / "checkpoint", [Sink(tmp_path / name) for name in ("copied", "forked")]
    before = max(int(path.name) for path in (checkpoint / "commits").glob("[0-9]*"))
    two.pay("a")
    failing = two.joined(PLAIN).writeStream.foreachBatch(_fail).option("checkpointLocation", str(checkpoint))
    with pytest.raises(StreamingQueryException, match="the sink is not there"):
        failing.start().awaitTermination()
    assert last(sink.run(two.joined(NOTED)), "note") == {"a": ("of a",)}
    shutil.copytree(checkpoint, others[0].folder / "checkpoint")
    fork(spark, str(checkpoint), str(others[1].folder / "checkpoint"), state_dir=str(tmp_path / "state"))
    two.pay("b")
    assert last(sink.run(two.joined(PLAIN)), "note")["b"] == ("gone",)
    for other in others:
        assert last(other.run(two.joined(NOTED, wide=True)), "note") == {"b": ("of b",)}
    assert rewind(spark, str(checkpoint), before, state_dir=str(tmp_path / "state")).to == before
    two.pay("c")
    rows = Sink(tmp_path).run(two.joined(NOTED))
    assert last(rows, "note") == {key: (f"of {key}",) for key in "abc"}


@pytest.mark.slow
def test_panes_with_one_more_aggregate_are_a_side_with_one_more_column(two: Two, sink: Sink) -> None:
    def joined(**more: Any) -> DataFrame:
        counts = aion.windowed(
            two.orders.read(NOTED).withWatermark("ordered", "0 seconds"),
            key="id", time="ordered", windows=aion.Tumbling("1 minute"), aggregates={"n": A.count(), **more},
            bound="1 hour", trigger="every_batch", name="counts",
        )  # fmt: skip
        payments = two.payments.read(PAYMENTS_DDL).withWatermark("paid", "0 seconds")
        return aion.join(
            counts.drop("pane", "events", "late_events", "closes_at"), payments,
            key="id", time=("window_start", None), within=("0 seconds", "1 hour"), bound=(None, "1 hour"),
        )  # fmt: skip

    two.orders.put([("a", 0, 1, ""), ("b", 0, 5, "")])
    two.orders.put([("clock", 100, 0, "")])
    two.payments.put([("clock", 100, 1.0)])
    sink.run(joined())
    two.pay("a")
    two.orders.put([("clock", 200, 0, "")])
    rows = sink.run(joined(top=A.max("price")))
    assert last(rows, "n", "top", "amount")["a"] == (1, None, 1.0)
    two.orders.put([("c", 100, 7, ""), ("a", 1, 2, ""), ("clock", 300, 0, "")])
    two.pay("c")
    found = [(row["kind"], row["n"], row["top"]) for row in sink.run(joined(top=A.max("price"))) if row["id"] == "a"]
    assert sorted(found[-2:]) == [("late", 2, None), ("retracted", 1, None)]


def _fail(batch: DataFrame, number: int) -> None:
    batch.collect()
    raise RuntimeError("the sink is not there")
