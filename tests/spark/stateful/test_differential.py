"""The same processors on Spark's state store and on Aion's: each batch gives the same rows, wrong calls the same error.

One of the cases is a quick test, in pandas, with timers, a restart and rows that are too late; the quick test of random
calls (test_random_calls.py) has the rest of the API, in rows. The other cases are for ``make proof``.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from decimal import Decimal
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.spark.stateful import processors as p
from tests.spark.stateful.rig import Case, Rows, both, compare, error, grouped_by_spark, ours

EVENTS = [("k", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("kind", pa.string()), ("v", pa.float64())]
OUT = "k string, what string"
WATERMARK = ("ts", "3 seconds")


def events(kinds: Sequence[str], keys: int = 6, rows: int = 40, batches: int = 5, seed: int = 1) -> list[Rows]:
    """Batches of ten seconds. Of four events, one is as much as 25 seconds late; a key is null."""
    rng = Random(seed)
    names = [None, *(f"k{i}" for i in range(1, keys))]
    return [
        [
            (
                rng.choice(names),
                100 + 10 * batch + rng.randrange(10_000) / 1000 - (rng.random() < 0.25) * rng.randrange(25),
                rng.choice(kinds),
                float(rng.randrange(100)),
            )
            for _ in range(rows)
        ]
        for batch in range(batches)
    ]


def event_time(processor: Any, kinds: Sequence[str], output: str = OUT, **more: Any) -> Case:
    given = {"watermark": WATERMARK, "time_mode": "eventTime", "pandas": False, "restart_after": (2,), **more}
    return Case(processor, EVENTS, output, given.pop("batches", None) or events(kinds), **given)


def plain(processor: Any, kinds: Sequence[str], output: str = OUT, **more: Any) -> Case:
    return event_time(processor, kinds, output, **{"watermark": None, "time_mode": "none", **more})


def composite(processor: Any, pandas: bool) -> Case:
    """Keys of three columns, with nulls; but no null timestamps, on which Spark's pandas mode fails."""
    columns = [("s", pa.string()), ("i", pa.int32()), ("t", pa.timestamp("us", "UTC")), ("v", pa.float64())]
    rng = Random(3)
    batches = [
        [(rng.choice(["a", "", None]), rng.choice([1, -(2**31)]), rng.choice([0.5, -1.0]), 1.0) for _ in range(20)]
        for _ in range(3)
    ]
    keys = ("s", "i", "t")
    return Case(processor, columns, "key string, n long", batches, keys=keys, pandas=pandas, restart_after=(0,))


def extremes() -> Case:
    utc = datetime.UTC
    rows: list[tuple[Any, ...]] = [
        (1, 1.5, "ü", True, datetime.datetime(2024, 1, 1, tzinfo=utc), datetime.date(1, 1, 1), Decimal("1.250"),
         b"\x00", ["a", None], [("x", 1.0), ("y", None)], {"a": 1, "b": {"c": "deep"}}),
        (2, float("nan"), "", False, datetime.datetime(1500, 1, 1, tzinfo=utc), None, Decimal("-0.001"), b"", [], [],
         {"a": None, "b": None}),
        (3, -0.0, None, None, None, datetime.date(9999, 12, 31), None, None, None, None, None),
        (2**63 - 1, float("-inf"), "x" * 1000, True, None, None, Decimal("123456789.123"), bytes(1000), ["y"] * 100,
         [(str(i), float(i)) for i in range(50)], {"a": -(2**31), "b": {"c": None}}),
    ]  # fmt: skip
    inner = pa.struct([("a", pa.int32()), ("b", pa.struct([("c", pa.string())]))])
    simple = [pa.int64(), pa.float64(), pa.string(), pa.bool_(), pa.timestamp("us", "UTC"), pa.date32()]
    nested = [pa.list_(pa.string()), pa.map_(pa.string(), pa.float64()), inner]
    types = [*simple, pa.decimal128(12, 3), pa.binary(), *nested]
    names = [column.split(" ")[0] for column in p.Extremes.COLUMNS.split(", ")]
    epoch = datetime.datetime(1970, 1, 1, tzinfo=utc)
    batches = [
        [
            (key, *((value - epoch) / datetime.timedelta(seconds=1) if isinstance(value, datetime.datetime) else value
                    for value in rows[(at + shift) % len(rows)]))
            for shift, key in enumerate(("a", "b", None))
        ]
        for at in range(len(rows))
    ]  # fmt: skip
    columns = [("k", pa.string()), *zip(names, types, strict=True)]
    return Case(p.Extremes, columns, f"k string, {p.Extremes.COLUMNS}", batches, pandas=False, restart_after=(1,))


def balance(processor: Any, pandas: bool) -> Case:
    initial = [("k1", 10.0, "gift"), ("k1", 5.0, None), ("only", 7.0, "found"), (None, 1.0, "lost")]
    columns = [("k", pa.string()), ("start", pa.float64()), ("why", pa.string())]
    return event_time(processor, ["a"], pandas=pandas, initial_columns=columns, initial=initial, restart_after=(0, 2))


def counted_by_window(df: DataFrame) -> DataFrame:
    window = F.window("at", "10 seconds").alias("window")
    counted = df.groupBy("k", window).agg(F.count("*").alias("rows"), F.max("n").alias("n"))
    return counted.select("k", F.unix_micros("window.start"), "rows", "n")


def two_streams(df: DataFrame) -> DataFrame:
    profiles = df.where("v < 10").withColumn("kind", F.lit("profile"))
    return df.where("v >= 10").unionByName(profiles)


def releases() -> Case:
    number = count(1)
    return plain(lambda: p.Renamed(next(number)), ["a"], batches=events(["a"], batches=6), restart_after=(1, 3))


SHOP = ["see", "put", "pay", "pay", "reset"]
SESSIONS_OUT = "k string, start long, end long, n long"
PROCESSORS = {
    "fraud": lambda: event_time(p.Fraud, ["a"], pandas=True),
    "extremes": extremes,
    "sessions": lambda: event_time(p.Sessions, ["a"], SESSIONS_OUT, output_mode="append"),
    "basket": lambda: plain(p.Basket, ["apple", "pear", "plum", "pay"]),
    "count": lambda: composite(p.Count, pandas=False),
    "count, pandas": lambda: composite(p.CountInPandas, pandas=True),
    "last values": lambda: plain(p.LastValues, ["a", "b", "reset", "only", "twice"]),
    "sessions, pandas": lambda: event_time(p.SessionsInPandas, ["a"], SESSIONS_OUT, pandas=True),
    "reminders": lambda: event_time(p.Reminders, ["a", "b", "c", "done"], restart_after=(0, 1, 2, 3)),
    "heartbeats": lambda: event_time(p.Heartbeats, ["a"], batches=events(["a"], keys=20, rows=15)),
    "deduplicate, a millisecond": lambda: plain(
        lambda: p.Deduplicate(1), ["a", "b"], time_mode="processingTime", batches=events(["a", "b"], batches=4)
    ),
    "deduplicate, a day": lambda: plain(
        lambda: p.Deduplicate(p.DAY_MS), ["a"], time_mode="processingTime", batches=events(["a"], batches=4)
    ),
    "timeouts": lambda: plain(
        p.Timeouts, ["a", "reset"], time_mode="processingTime", batches=[*events(["a", "reset"], rows=5), []]
    ),
    "top three": lambda: plain(p.TopThree, ["a", "b"]),
    "funnel": lambda: plain(p.Funnel, SHOP, pandas=True),
    "enrich": lambda: plain(p.Enrich, ["a"], before=two_streams),
    "balance": lambda: balance(p.Balance, pandas=False),
    "balance, pandas": lambda: balance(p.BalanceInPandas, pandas=True),
    "chained": lambda: event_time(
        p.Passing, ["a"], "k string, at timestamp, n long", output_mode="append", event_time_column="at",
        then=counted_by_window,
    ),
    "releases": releases,
}  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_gives_the_same_rows_in_each_batch(spark: SparkSession, tmp_path: Path, name: str) -> None:
    make = PROCESSORS[name]
    aions, sparks = both(spark, tmp_path, make)
    compare(aions, sparks)
    assert sparks, "the processor gave nothing"


TTL = "STATEFUL_PROCESSOR_INCORRECT_TIME_MODE_TO_ASSIGN_TTL"
HANDLE = "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_HANDLE_STATE"
ERRORS = {
    "rows": ("none", "ValueError: rows are not handled"),
    "init": ("none", ""),  # Spark only says that its driver-side worker has crashed
    "same name": ("none", ""),
    "ttl": ("none", TTL),
    "ttl, event time": ("eventTime", TTL),
    "negative ttl": ("processingTime", "STATEFUL_PROCESSOR_TTL_DURATION_MUST_BE_POSITIVE"),
    "name": ("none", "STATE_STORE_CANNOT_CREATE_COLUMN_FAMILY_WITH_RESERVED_CHARS"),
    "timer": ("none", "STATEFUL_PROCESSOR_CANNOT_PERFORM_OPERATION_WITH_INVALID_TIME_MODE"),
    "late state": ("none", HANDLE),
    "late delete": ("none", HANDLE),
    "too many values": ("none", "STRUCT_ARRAY_LENGTH_MISMATCH"),
    "no tuple": ("none", "TypeError: 'int' object is not iterable"),
    "empty list": ("none", "ILLEGAL_STATE_STORE_VALUE.EMPTY_LIST_VALUE"),
}


@pytest.mark.proof
@pytest.mark.parametrize("what", ERRORS)
def test_a_wrong_call_fails_with_the_same_error(spark: SparkSession, tmp_path: Path, what: str) -> None:
    time_mode, says = ERRORS[what]
    case = plain(
        lambda: p.Wrong(what.partition(",")[0]),
        ["a"],
        time_mode=time_mode,
        watermark=WATERMARK,
        batches=events(["a"], rows=2, batches=1),
        restart_after=(),
    )
    for name, group in (("aion", ours()), ("spark", grouped_by_spark)):
        said = error(spark, tmp_path / name, case, group)
        assert says in said, f"{name} says {said}"
