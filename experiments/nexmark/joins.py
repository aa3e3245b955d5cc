"""Queries 3, 4, 8 and 9 of Nexmark, which join streams: on Aion, on stock Spark, and from all events at once.

The state of a person and the category of an auction follow from their numbers. What Nexmark joins without a limit of
time has one here, since no engine can keep all rows for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from experiments.nexmark.events import AUCTION, BID, PERSON, SECOND_US
from experiments.nexmark.shared import TEN_S, Query, Row, of_kind, times, us

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

STATES, WANTED_STATES, CATEGORIES = 6, 3, 5
BEFORE, AFTER = "-10 seconds", "60 seconds"
BEFORE_US, AFTER_US = -10 * SECOND_US, 60 * SECOND_US
"""An auction is of a person who came at most a minute before it; events come in any order."""


def _people(df: DataFrame) -> DataFrame:
    return df.where(f"kind = '{PERSON}'").selectExpr("person", "ts as came")


def _auctions(df: DataFrame) -> DataFrame:
    return df.where(f"kind = '{AUCTION}'").selectExpr("auction", "person", "ts as opened")


def _bids(df: DataFrame) -> DataFrame:
    return df.where(f"kind = '{BID}'").selectExpr("auction", "price", "ts as offered")


def _pairs_of(table: pa.Table, kinds: tuple[str, str], key: str) -> dict[int, tuple[list[Any], list[Any]]]:
    """The numbers of rows of two kinds, with their times, by their key."""
    found: dict[int, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for side, kind in enumerate(kinds):
        some = of_kind(table, kind)
        columns = (some.column(name).to_pylist() for name in ("auction", "person", "price"))
        for at, value, *rest in zip(times(some).tolist(), some.column(key).to_pylist(), *columns, strict=True):
            found[value][side].append((at, *rest))
    return found


# -- 3: who sells in one category, in some states ---------------------------------------------------------------


def _q3_sides(df: DataFrame) -> tuple[DataFrame, DataFrame]:
    people = _people(df).where(f"person % {STATES} < {WANTED_STATES}")
    return people, _auctions(df).where(f"auction % {CATEGORIES} = 0")


def _q3_aion(df: DataFrame) -> DataFrame:
    import aion

    return aion.join(*_q3_sides(df), key="person", within=(BEFORE, AFTER), bound="0 seconds")


def _q3_spark(df: DataFrame) -> DataFrame:
    people, auctions = _q3_sides(df)
    near = f"opened >= came + interval {BEFORE} and opened <= came + interval {AFTER}"
    return people.join(auctions.withColumnRenamed("person", "seller")).where(f"person = seller and {near}")


def _q3_truth(table: pa.Table) -> set[Row]:
    return {
        (person, auction)
        for person, (came, opened) in _pairs_of(table, (PERSON, AUCTION), "person").items()
        for at, *_ in came
        for then, auction, *_ in opened
        if person % STATES < WANTED_STATES and auction % CATEGORIES == 0 and BEFORE_US <= then - at <= AFTER_US
    }


def _q3_rows(rows: list[Mapping[str, Any]]) -> set[Row]:
    return {(row["person"], row["auction"]) for row in rows}


# -- 8: people who came and opened an auction in the same ten seconds, each auction --------------------------------


def _q8_sides(df: DataFrame) -> tuple[DataFrame, DataFrame]:
    people, auctions = _people(df), _auctions(df)
    slot = "cast(floor(unix_micros({}) / 10000000) as bigint) as slot"
    return people.selectExpr("*", slot.format("came")), auctions.selectExpr("*", slot.format("opened"))


def _q8_aion(df: DataFrame) -> DataFrame:
    import aion

    return aion.join(
        *_q8_sides(df), key=("person", "slot"), within=("-10 seconds", "10 seconds"), bound="0 seconds"
    )  # fmt: skip


def _q8_spark(df: DataFrame) -> DataFrame:
    people, auctions = _q8_sides(df)
    auctions = auctions.withColumnsRenamed({"person": "seller", "slot": "their"})
    near = "opened >= came - interval 10 seconds and opened <= came + interval 10 seconds"
    return people.join(auctions).where(f"person = seller and slot = their and {near}")


def _q8_truth(table: pa.Table) -> set[Row]:
    return {
        (at // TEN_S, person, auction)
        for person, (came, opened) in _pairs_of(table, (PERSON, AUCTION), "person").items()
        for at, *_ in came
        for then, auction, *_ in opened
        if at // TEN_S == then // TEN_S
    }


def _q8_rows(rows: list[Mapping[str, Any]]) -> set[Row]:
    return {(row["slot"], row["person"], row["auction"]) for row in rows}


# -- 9: the highest bid on each auction, in the ten seconds after it was opened ------------------------------------


def _q9_aion(df: DataFrame) -> DataFrame:
    import aion
    from aion import aggregates as A

    bids = aion.join(
        _auctions(df), _bids(df), key="auction", within=("0 seconds", "10 seconds"), emit="final", bound="0 seconds",
        name="bids",
    )  # fmt: skip
    # All bids on an auction are in ten seconds, so they are one session.
    return aion.windowed(
        bids, key="auction", time="pair_time", windows=aion.Session("10 seconds"),
        aggregates={"price": A.max("price")}, emit="final", name="highest",
    )  # fmt: skip


def _q9_spark(df: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    auctions = _auctions(df).withColumnRenamed("auction", "of")
    near = "offered >= opened and offered <= opened + interval 10 seconds"
    bids = auctions.join(_bids(df)).where(f"auction = of and {near}")
    sessions = bids.groupBy("auction", F.session_window("offered", "10 seconds").alias("session"))
    return sessions.agg(F.max("price").alias("price"))


def _highest(table: pa.Table) -> dict[int, tuple[int, int]]:
    """The highest bid on each auction, and when the last bid came."""
    found = {}
    for auction, (opened, bids) in _pairs_of(table, (AUCTION, BID), "auction").items():
        near = [(price, at) for then, *_ in opened for at, _, _, price in bids if 0 <= at - then <= TEN_S]
        if near:
            found[auction] = max(price for price, _ in near), max(at for _, at in near)
    return found


def _q9_truth(table: pa.Table) -> set[Row]:
    return {(auction, price) for auction, (price, _) in _highest(table).items()}


def _q9_rows(rows: list[Mapping[str, Any]]) -> set[Row]:
    return {(row["auction"], row["price"]) for row in rows if row["price"] is not None}


# -- 4: the mean of the highest bids of each category, every ten seconds -------------------------------------------


def _q4_aion(df: DataFrame) -> DataFrame:
    import aion
    from aion import aggregates as A

    highest = aion.panes(_q9_aion(df)).withColumnRenamed("price", "highest")
    closed = highest.selectExpr(f"auction % {CATEGORIES} as category", "window_end as closed", "highest", "kind")
    # Spark's own window of a window is of its last instant, so windows begin a microsecond later here.
    return aion.windowed(
        closed, key="category", time="closed", windows=aion.Tumbling("10 seconds", offset="1 microsecond"),
        aggregates={"mean": A.avg("highest")}, emit="final", name="means",
    ).selectExpr("category", "window_start - interval 1 microsecond as at", "mean", "kind")  # fmt: skip


def _q4_spark(df: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    closed = _q9_spark(df).withColumn("category", F.col("auction") % CATEGORIES)
    means = closed.groupBy("category", F.window(F.window_time("session"), "10 seconds").alias("of"))
    return means.agg(F.avg("price").alias("mean")).select("category", F.col("of.start").alias("at"), "mean")


def _q4_truth(table: pa.Table) -> set[Row]:
    prices: dict[tuple[int, int], list[int]] = defaultdict(list)
    for auction, (price, at) in _highest(table).items():
        prices[auction % CATEGORIES, (at + TEN_S - 1) // TEN_S * TEN_S].append(price)
    return {(category, at, round(float(np.mean(some)), 3)) for (category, at), some in prices.items()}


def _q4_rows(rows: list[Mapping[str, Any]]) -> set[Row]:
    known = [row for row in rows if row["mean"] is not None]
    return {(row["category"], us(row["at"]), round(row["mean"], 3)) for row in known}


JOINS = {
    "q3": Query("who sells in a category", _q3_aion, _q3_spark, _q3_truth, _q3_rows),
    "q4": Query("mean of the highest bids", _q4_aion, _q4_spark, _q4_truth, _q4_rows),
    "q8-join": Query("new people and their auctions", _q8_aion, _q8_spark, _q8_truth, _q8_rows),
    "q9": Query("the highest bid on an auction", _q9_aion, _q9_spark, _q9_truth, _q9_rows),
}
