"""The same processors on Spark's state store and on Aion's: each batch gives the same rows, wrong calls the same error.

One of the cases is a quick test, in pandas, with timers, a restart and rows that are too late; the quick test of random
calls (test_random_calls.py) has the rest of the API, in rows. The other cases are for ``make proof``.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.spark.stateful import edges
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


def struct_as_key(processor: Any, pandas: bool) -> Case:
    key = pa.struct([("a", pa.string()), ("b", pa.struct([("c", pa.int64())]))])
    keys = [{"a": "x", "b": {"c": 1}}, {"a": "x", "b": None}, {"a": None, "b": {"c": None}}, None]
    batches = [[(keys[n % 4], 1.0) for n in range(first, 9)] for first in range(3)]
    columns = [("s", key), ("v", pa.float64())]
    return Case(processor, columns, "key string, n long", batches, keys=("s",), pandas=pandas, restart_after=(0,))


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


KEY, AT = ("k", pa.string()), ("ts", pa.timestamp("us", "UTC"))
ODD = [KEY, AT, ("event-type", pa.string()), ("class", pa.string()), ("_id", pa.int32()), ("flag", pa.bool_()),
       ("day", pa.date32()), ("price", pa.decimal128(10, 2)), ("items", pa.list_(pa.int64())),
       ("inner", pa.struct([("a", pa.int32())])), ("by", pa.map_(pa.string(), pa.int32())), ("raw", pa.binary()),
       ("other", pa.timestamp("us", "UTC"))]  # fmt: skip


def shows(pandas: bool, **more: Any) -> Case:
    """Columns of every name and type. Nulls in those of one key; times before 1970 are late in the first batch."""

    def row(key: Any, at: float, id_: int, flag: Any) -> tuple[Any, ...]:
        day, inner, by = datetime.date(2024, 1, id_), {"a": None if flag is None else id_}, [("x", id_)]
        return (key, at, "e", "c", id_, flag, day, Decimal("1.25"), [1, id_], inner, by, b"ab", None if flag else 5.5)

    batches = [
        [row(*rest, n, flag) for *rest, flag in
         [("a", 10.0 * n - 10, True), ("a", 10.0 * n, False), ("b", 10.0 * n, None), ("b", 10.0 * n + 2, True),
          ("c", 10.0 * n, None), ("d", -5.0, True), (None, 13.0, True)]]
        for n in range(1, 4)
    ]  # fmt: skip
    given = {"watermark": ("ts", "3 seconds"), "time_mode": "eventTime", "restart_after": (0,), **more}
    return Case(lambda: edges.Shows(pandas), ODD, edges.OUT, batches, pandas=pandas, **given)


def begins(pandas: bool) -> Case:
    initial = [("a", 1, True), ("a", 2, None), ("b", 1, True), ("z", 1, None)]
    columns = [KEY, ("start-at", pa.int32()), ("flag", pa.bool_())]
    return shows(pandas, watermark=None, time_mode="none", initial_columns=columns, initial=initial)


def in_a_struct(pandas: bool) -> Case:
    """A field of a struct is the key; a column has the same name."""
    columns = [("s", pa.struct([("k", pa.string())])), ("v", pa.int64()), *(() if pandas else (KEY,))]
    batches = [[({"k": k}, v, *(() if pandas else ("same",))) for k, v in [("x", 1), ("y", 2), ("x", 3)]]] * 2
    return Case(lambda: edges.Shows(pandas), columns, edges.OUT, batches, keys=("s.k",), pandas=pandas)


def timers_in_the_past(pandas: bool) -> Case:
    """The watermark does not move in most batches, and most keys have rows in the first one only."""
    batches = [
        [("p1", 100.0), ("p2", 100.0), ("p3", 100.0), ("q1", 100.0), ("z", 100.0)],
        *([(key, at)] for key, at in [("z", 100.0), ("z", 102.0), ("z", 100.0), ("y", 100.5), ("z", 104.0)]),
        [("q5", 103.5), ("p7", 104.0)],
        *([("z", at)] for at in (104.0, 103.5, 110.0)),
    ]
    return Case(
        lambda: edges.SetsTimersInThePast(pandas), [KEY, AT], edges.OUT, batches, pandas=pandas,
        watermark=("ts", "1 seconds"), time_mode="eventTime", restart_after=(1, 3),
        initial_columns=[KEY], initial=[("p1",), ("only",), ("other",), ("third",)],
    )  # fmt: skip


SHOP = ["see", "put", "pay", "pay", "reset"]
SESSIONS_OUT = "k string, start long, end long, n long"
PROCESSORS = {
    "fraud": lambda: event_time(p.Fraud, ["a"], pandas=True),
    "extremes": extremes,
    "sessions": lambda: event_time(p.Sessions, ["a"], SESSIONS_OUT, output_mode="append"),
    "basket": lambda: plain(p.Basket, ["apple", "pear", "plum", "pay"]),
    "count": lambda: composite(p.Count, pandas=False),
    "count, pandas": lambda: composite(p.CountInPandas, pandas=True),
    "a struct as key": lambda: struct_as_key(p.Count, pandas=False),
    "a struct as key, pandas": lambda: struct_as_key(p.CountInPandas, pandas=True),
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
    "columns": lambda: shows(pandas=False),
    "columns, pandas": lambda: shows(pandas=True),
    "columns of initial state": lambda: begins(pandas=False),
    "columns of initial state, pandas": lambda: begins(pandas=True),
    "key in a struct": lambda: in_a_struct(pandas=False),
    "key in a struct, pandas": lambda: in_a_struct(pandas=True),
    "key of another case": lambda: replace(in_a_struct(pandas=False), keys=("K", "V")),
    "timers in the past": lambda: timers_in_the_past(pandas=False),
    "timers in the past, pandas": lambda: timers_in_the_past(pandas=True),
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
