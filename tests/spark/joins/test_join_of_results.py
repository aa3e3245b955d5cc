"""Joins of panes, and of other joins: later results replace earlier ones, and so do the pairs that they are in."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import aion
from aion import aggregates as A
from aion.errors import ConfigError, SchemaError, WatermarkError
from tests.spark.conftest import FileStream

CARS = pa.schema([("road", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("speed", pa.int64())])
TOLLS = pa.schema([("road", pa.string()), ("since", pa.timestamp("us", "UTC")), ("toll", pa.int64())])
CHECKS = pa.schema([("road", pa.string()), ("checked", pa.timestamp("us", "UTC")), ("found", pa.int64())])
CARS_DDL, TOLLS_DDL = "road string, ts timestamp, speed long", "road string, since timestamp, toll long"
MINUTE = 60
OF_PANES = ("pane", "events", "late_events", "closes_at")


class Roads:
    """Cars on roads, the tolls of roads, and a database."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.cars, self.tolls = FileStream(spark, folder / "cars", CARS), FileStream(spark, folder / "tolls", TOLLS)
        self.folder = folder

    def car_rows(self) -> DataFrame:
        return self.cars.read(CARS_DDL).withWatermark("ts", "0 seconds")

    def toll_rows(self) -> DataFrame:
        return self.tolls.read(TOLLS_DDL).withWatermark("since", "0 seconds")

    def minutes(self, **other: Any) -> DataFrame:
        given = {"windows": aion.Tumbling("1 minute"), "bound": "1 hour", "name": "minutes", **other}
        return aion.windowed(self.car_rows(), key="road", time="ts", aggregates={"cars": A.count()}, **given)

    def run(self, make: Callable[[], DataFrame], columns: str) -> list[tuple[Any, ...]]:
        """Runs a query until it has taken all. Returns the table that its sink keeps."""
        path = self.folder / "roads.db"
        table = aion.sinks.upsert(f"sqlite:///{path}", "found", dropped="too_late")
        writer = make().writeStream.foreachBatch(table)
        checkpoint = str(self.folder / "checkpoint")
        writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start().awaitTermination()
        with contextlib.closing(sqlite3.connect(path)) as database:
            return sorted(database.execute(f"SELECT {columns} FROM found"), key=str)

    def move_to(self, second: int) -> None:
        self.cars.put([("clock", second, 0)])
        self.tolls.put([("clock", second, 0)])


@pytest.fixture
def roads(spark: SparkSession, tmp_path: Path) -> Roads:
    return Roads(spark, tmp_path)


@pytest.mark.slow
def test_a_late_event_changes_its_pane_and_then_the_pairs(roads: Roads) -> None:
    """Minutes with the toll that was set within five minutes before their end."""

    def joined() -> DataFrame:
        return aion.join(
            roads.minutes(),
            roads.toll_rows().withColumnRenamed("toll", "price"),
            key="road", time=("window_end", None), within=("-5 minutes", "0 seconds"), how="left",
            bound=(None, "1 hour"),
        )  # fmt: skip

    wanted = "road, cars, price"
    roads.cars.put([("a", 10, 1), ("a", 20, 1), ("b", 30, 1)])
    roads.tolls.put([("a", 5, 100)])
    roads.move_to(10 * MINUTE)
    assert roads.run(joined, wanted)[:2] == [("a", 2, 100), ("b", 1, None)]
    roads.cars.put([("a", 15, 1)])
    assert roads.run(joined, wanted)[:2] == [("a", 3, 100), ("b", 1, None)]
    roads.tolls.put([("b", 40, 7)])
    roads.cars.put([("b", 50, 1), ("c", 1, 1)])
    assert roads.run(joined, wanted)[:3] == [("a", 3, 100), ("b", 2, 7), ("c", 1, None)]


@pytest.mark.slow
def test_panes_of_two_operators_meet(roads: Roads) -> None:
    """Of two streams, each in its own windows. A pane without a partner comes out when none can come any more."""

    def joined() -> DataFrame:
        minutes = roads.minutes().select(
            "road", "window_start", F.col("window_end").alias("ended"), "cars", "kind", "pane_seq"
        )
        prices = aion.windowed(
            roads.toll_rows(), key="road", time="since", windows=aion.Tumbling("1 minute"),
            aggregates={"price": A.max("toll")}, bound="1 hour", name="prices",
        )  # fmt: skip
        prices = prices.select(
            "road",
            F.col("window_start").alias("since"),
            F.col("window_end").alias("until"),
            "price",
            "kind",
            "pane_seq",
        )
        return aion.join(
            minutes, prices, key="road", time=("window_start", "since"), within=("0 seconds", "0 seconds"), how="full"
        )

    wanted = "road, cars, price"
    roads.cars.put([("a", 10, 1), ("b", 30, 1)])
    roads.tolls.put([("a", 5, 100), ("x", 5, 9)])
    roads.move_to(10 * MINUTE)
    assert roads.run(joined, wanted)[:3] == [("a", 1, 100), ("b", 1, None), ("x", None, 9)]
    roads.tolls.put([("a", 50, 200), ("b", 50, 3)])
    roads.cars.put([("a", 11, 1)])
    assert roads.run(joined, wanted)[:3] == [("a", 2, 200), ("b", 1, 3), ("x", None, 9)]


@pytest.mark.slow
def test_a_partner_that_is_final_is_waited_for(roads: Roads) -> None:
    """Final panes come an hour after their end, and until then nothing is said of a toll without one."""

    def joined() -> DataFrame:
        return aion.join(
            roads.minutes(emit="final"), roads.toll_rows(), key="road", time=("window_end", None),
            within=("-5 minutes", "0 seconds"), how="right", bound=(None, "1 hour"),
        )  # fmt: skip

    roads.cars.put([("a", 10, 1)])
    roads.tolls.put([("a", 5, 100), ("b", 5, 7)])
    roads.move_to(30 * MINUTE)
    assert roads.run(joined, "road, cars, toll, kind") == []
    roads.move_to(120 * MINUTE)
    assert roads.run(joined, "road, cars, toll, kind")[:2] == [("a", 1, 100, "on_time"), ("b", None, 7, "on_time")]


@pytest.mark.slow
def test_a_join_of_three_streams(spark: SparkSession, roads: Roads) -> None:
    """What the first join takes back, the second one takes back, too."""
    checks = FileStream(spark, roads.folder / "checks", CHECKS)

    def joined() -> DataFrame:
        first = aion.join(
            roads.car_rows(), roads.toll_rows(), key="road", within=("0 seconds", "1 minute"), how="left",
            bound="1 hour", name="first",
        )  # fmt: skip
        looked = checks.read("road string, checked timestamp, found long").withWatermark("checked", "0 seconds")
        return aion.join(
            first.withColumnRenamed("pair_time", "met"), looked, key="road", time=("met", None),
            within=("-1 minute", "1 minute"), how="left", bound=(None, "1 hour"), name="second",
            on="found > speed",
        )  # fmt: skip

    wanted = "road, speed, toll, found"
    roads.cars.put([("a", 10, 1), ("b", 10, 2)])
    roads.tolls.put([("a", 20, 5)])
    checks.put([("a", 30, 77)])
    roads.move_to(10 * MINUTE)
    checks.put([("clock", 10 * MINUTE, 0)])
    assert roads.run(joined, wanted)[:2] == [("a", 1, 5, 77), ("b", 2, None, None)]
    roads.tolls.put([("b", 15, 6)])
    assert roads.run(joined, wanted)[:2] == [("a", 1, 5, 77), ("b", 2, 6, None)]
    checks.put([("b", 14, 88), ("b", 13, 2)])
    assert roads.run(joined, wanted)[:2] == [("a", 1, 5, 77), ("b", 2, 6, 88)]


def test_what_cannot_be_an_input_is_refused_with_a_sentence(roads: Roads) -> None:
    minutes, tolls = roads.minutes(), roads.toll_rows()
    given: dict[str, Any] = {"key": "road", "within": ("0 seconds", "1 minute"), "time": ("window_end", None)}
    with pytest.raises(SchemaError, match="time: the left side has results of 'minutes', which have no watermark"):
        aion.join(minutes, tolls, key="road", within=given["within"])
    with pytest.raises(SchemaError, match="key: 'cars' is not part of the key of 'minutes'"):
        aion.join(minutes, tolls.withColumn("cars", F.lit(1)), **given | {"key": ("road", "cars")})
    with pytest.raises(ConfigError, match="bound: 1 minute is too short for the left side"):
        aion.join(minutes, tolls, **given, bound="1 minute")
    with pytest.raises(ConfigError, match="id, unique: rows of the left side are results of 'minutes'"):
        aion.join(minutes, tolls, **given, id=("cars", None))
    with pytest.raises(ConfigError, match="name: the operator before is called 'minutes', too"):
        aion.join(minutes, tolls, **given, name="minutes")
    with pytest.raises(WatermarkError, match="Filter comes between"):
        aion.join(minutes.where("cars > 1"), tolls, **given)
    with pytest.raises(ConfigError, match="emit='final': later results of the operator before replace earlier ones"):
        aion.join(minutes, tolls, **given, emit="final")
    with pytest.raises(WatermarkError, match="and a watermark of its own; leave this withWatermark out"):
        aion.join(minutes.withWatermark("window_end", "1 minute"), tolls, **given)
    assert "cars" in aion.join(roads.minutes(emit="final"), tolls, **given, emit="final").columns
