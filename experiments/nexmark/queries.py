"""Queries 5, 7, 8, 11 and 12 of Nexmark, and those that join: on Aion, on stock Spark, and from all events at once.

Each gives rows of the same columns, so that the three can be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from experiments.nexmark.events import AUCTION, BID, PERSON
from experiments.nexmark.joins import JOINS
from experiments.nexmark.shared import TEN_S, TWO_S, Query, Row, of_kind, times, us

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# -- 5: the auctions with the most bids in the last ten seconds, every two seconds ------------------------------


def hottest(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    """Of the counts of all auctions, those that are the largest."""
    counts = pa.Table.from_batches(list(events))
    most = pa.compute.max(counts.column("n")).as_py()
    best = counts.filter(pa.compute.equal(counts.column("n"), most)).column("auction").to_pylist()
    return {"most": most, "auctions": sorted(best)}


def _q5_aion(df: DataFrame) -> DataFrame:
    import aion
    from aion import aggregates as A

    bids = df.where(f"kind = '{BID}'")
    counts = aion.windowed(
        bids, key="auction", time="ts", windows=aion.Sliding("10 seconds", "2 seconds"),
        aggregates={"n": A.count()}, emit="final", bound="0 seconds", name="counts",
    )  # fmt: skip
    return aion.windowed(
        aion.panes(counts), time="window_end", windows=aion.Tumbling("2 seconds"),
        apply=aion.Apply(hottest, "most bigint, auctions array<bigint>"),
        emit="final", name="hottest",
    ).selectExpr("kind", "window_start as at", "most", "auctions")  # fmt: skip


def _q5_spark(df: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    counts = df.where(f"kind = '{BID}'").groupBy(F.window("ts", "10 seconds", "2 seconds"), "auction").count()
    ends = counts.groupBy(F.window("window", "2 seconds").alias("of")).agg(
        F.max("count").alias("most"),
        F.collect_list(F.struct("count", "auction", F.col("window.end").alias("end"))).alias("all"),
    )
    best = F.expr("sort_array(transform(filter(all, x -> x.count = most), x -> x.auction))")
    return ends.select(F.expr("all[0].end").alias("at"), "most", best.alias("auctions"))


def _q5_truth(table: pa.Table) -> set[Row]:
    bids = of_kind(table, BID)
    counts: dict[int, Counter[int]] = {}
    firsts = times(bids) // TWO_S * TWO_S
    pairs, numbers = np.unique(np.stack([firsts, bids.column("auction").to_numpy()]), axis=1, return_counts=True)
    for (first, auction), number in zip(pairs.T.tolist(), numbers.tolist(), strict=True):
        for end in range(first + TWO_S, first + TEN_S + 1, TWO_S):
            counts.setdefault(end, Counter())[auction] += number
    rows = set()
    for end, of in counts.items():
        most = max(of.values())
        rows.add((end, most, tuple(sorted(auction for auction, n in of.items() if n == most))))
    return rows


def _q5_rows(rows: list[Mapping[str, Any]]) -> set[Row]:
    return {(us(row["at"]), row["most"], tuple(row["auctions"])) for row in rows if min(row["auctions"]) >= 0}


# -- 7: the highest bid of each ten seconds ---------------------------------------------------------------------


def _q7_aion(df: DataFrame) -> DataFrame:
    import aion
    from aion import aggregates as A

    return aion.windowed(
        df.where(f"kind = '{BID}'"), time="ts", windows=aion.Tumbling("10 seconds"),
        aggregates={"price": A.max("price")}, emit="final", bound="0 seconds",
    )  # fmt: skip


def _q7_spark(df: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    highest = df.where(f"kind = '{BID}'").groupBy(F.window("ts", "10 seconds")).agg(F.max("price").alias("price"))
    return highest.select(F.col("window.start").alias("window_start"), "price")


def _q7_truth(table: pa.Table) -> set[Row]:
    bids = of_kind(table, BID)
    starts = pa.array(times(bids) // TEN_S * TEN_S)
    found = pa.table({"at": starts, "price": bids.column("price")}).group_by("at").aggregate([("price", "max")])
    return set(zip(found.column("at").to_pylist(), found.column("price_max").to_pylist(), strict=True))


def _q7_rows(rows: list[Mapping[str, Any]]) -> set[Row]:
    return {(us(row["window_start"]), row["price"]) for row in rows if row["price"] is not None}


# -- 8: people who came and opened an auction in the same ten seconds -------------------------------------------


def _q8_events(df: DataFrame) -> DataFrame:
    came, opened = f"if(kind = '{PERSON}', 1, 0) as came", f"if(kind = '{AUCTION}', 1, 0) as opened"
    return df.where(f"kind in ('{PERSON}', '{AUCTION}')").selectExpr("person", "ts", came, opened)


def _q8_aion(df: DataFrame) -> DataFrame:
    import aion
    from aion import aggregates as A

    return aion.windowed(
        _q8_events(df), key="person", time="ts", windows=aion.Tumbling("10 seconds"),
        aggregates={"came": A.sum("came"), "opened": A.sum("opened")}, emit="final", bound="0 seconds",
    ).where("came > 0 and opened > 0")  # fmt: skip


def _q8_spark(df: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    sums = (
        _q8_events(df)
        .groupBy(F.window("ts", "10 seconds"), "person")
        .agg(F.sum("came").alias("came"), F.sum("opened").alias("opened"))
    )
    return sums.where("came > 0 and opened > 0").select(F.col("window.start").alias("window_start"), "person", "opened")


def _q8_truth(table: pa.Table) -> set[Row]:
    some = of_kind(table, PERSON, AUCTION)
    came, opened = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    rows = zip((times(some) // TEN_S * TEN_S).tolist(), some.column("person").to_pylist(), strict=True)
    for place, kind in zip(rows, some.column("kind").to_pylist(), strict=True):
        (came if kind == PERSON else opened)[place] += 1
    return {(start, person, opened[start, person]) for start, person in came if opened[start, person]}


def _q8_rows(rows: list[Mapping[str, Any]]) -> set[Row]:
    return {(us(row["window_start"]), row["person"], row["opened"]) for row in rows}


# -- 11: how many bids each bidder made in a session ------------------------------------------------------------


def _q11_aion(df: DataFrame) -> DataFrame:
    import aion
    from aion import aggregates as A

    return aion.windowed(
        df.where(f"kind = '{BID}'"), key="person", time="ts", windows=aion.Session("10 seconds"),
        aggregates={"n": A.count()}, emit="final", bound="0 seconds",
    )  # fmt: skip


def _q11_spark(df: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    counts = df.where(f"kind = '{BID}'").groupBy(F.session_window("ts", "10 seconds").alias("of"), "person").count()
    return counts.select(F.col("of.start").alias("window_start"), "person", F.col("count").alias("n"))


def _q11_truth(table: pa.Table) -> set[Row]:
    bids = of_kind(table, BID)
    people, at = bids.column("person").to_numpy(), times(bids)
    order = np.lexsort((at, people))
    people, at = people[order], at[order]
    begins = np.flatnonzero(np.concatenate(([True], (np.diff(people) != 0) | (np.diff(at) > TEN_S))))
    counts = np.diff(np.append(begins, len(people)))
    return set(zip(at[begins].tolist(), people[begins].tolist(), counts.tolist(), strict=True))


def _q11_rows(rows: list[Mapping[str, Any]]) -> set[Row]:
    return {(us(row["window_start"]), row["person"], row["n"]) for row in rows if row["person"] >= 0}


# -- 12: how many bids each bidder made in ten seconds of the clock ---------------------------------------------


def _q12_aion(df: DataFrame) -> DataFrame:
    import aion
    from aion import aggregates as A

    return aion.windowed(
        df.where(f"kind = '{BID}'"), key="person", time="at", windows=aion.Tumbling("10 seconds", early="batch"),
        aggregates={"n": A.count()}, bound="0 seconds",
    )  # fmt: skip


def _q12_spark(df: DataFrame) -> DataFrame:
    from pyspark.sql import functions as F

    counts = df.where(f"kind = '{BID}'").groupBy(F.window("at", "10 seconds"), "person").count()
    return counts.select(F.col("window.start").alias("window_start"), "person", F.col("count").alias("n"))


def _q12_truth(table: pa.Table) -> set[Row]:
    return set(Counter(of_kind(table, BID).column("person").to_pylist()).items())


def _q12_rows(rows: list[Mapping[str, Any]]) -> set[Row]:
    """Windows of the clock are others in each run, so only what each bidder made in all of them is compared."""
    newest = {(row["person"], row["window_start"]): row["n"] for row in rows if row["person"] >= 0}
    made = Counter[int]()
    for (person, _), n in newest.items():
        made[person] += n
    return set(made.items())


QUERIES = {
    "q5": Query("the auctions with the most bids", _q5_aion, _q5_spark, _q5_truth, _q5_rows),
    "q7": Query("the highest bid", _q7_aion, _q7_spark, _q7_truth, _q7_rows),
    "q8": Query("new people who opened auctions", _q8_aion, _q8_spark, _q8_truth, _q8_rows),
    "q11": Query("bids in sessions", _q11_aion, _q11_spark, _q11_truth, _q11_rows),
    "q12": Query("bids by the clock", _q12_aion, _q12_spark, _q12_truth, _q12_rows, mode="update", by_arrival=True),
    **JOINS,
}
