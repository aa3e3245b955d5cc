"""The recipes, run on Spark as they stand, on small streams; what their sinks hold is compared with plain computations
over all events."""

from __future__ import annotations

import random
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.documents import RECIPES, run_python
from tests.server.conftest import wait_until
from tests.spark.conftest import settle
from tests.spark.truths import START, Event, equal, instant, seconds, visits, write

pytestmark = pytest.mark.timeout(900)  # on a loaded machine

DAY, HOUR, MINUTE = 86_400, 3_600, 60
MIDNIGHT = START // DAY * DAY
TS = pa.timestamp("us", "UTC")
USAGE = pa.schema([("customer", pa.string()), ("used_at", TS), ("cents", pa.int64())])
READINGS = pa.schema([("device", pa.string()), ("at", TS), ("celsius", pa.float64()), ("tick", TS)])
CLICKS = pa.schema([("user", pa.string()), ("at", TS), ("page", pa.string())])
PAYMENTS = pa.schema([("shop", pa.string()), ("at", TS), ("cents", pa.int64())])
METERS = pa.schema([("meter", pa.string()), ("at", TS), ("watts", pa.float64())])
SALES = pa.schema([("shop", pa.string()), ("at", TS), ("sale", pa.string()), ("cents", pa.int64())])
TRIPS = pa.schema([("city", pa.string()), ("at", TS), ("km", pa.float64())])
GONE = 40 * DAY  # later than any bound


def day(n: float) -> float:
    return MIDNIGHT + n * DAY


def usage() -> list[list[Event]]:
    """By batch. The last has what comes too late for its day, a record without a time, and one from long after."""
    rng = random.Random(3)

    def some(n: int, first: float, last: float) -> list[Event]:
        times = [day(rng.uniform(first, last)) for _ in range(n)]
        return [{"customer": rng.choice("abc"), "used_at": t, "cents": rng.randrange(10**12)} for t in times]

    return [
        some(30, 0, 1.5),
        [*some(5, 0, 1), *some(20, 1.5, 2.4)],  # late for the first day
        [*some(5, 0, 2), {"customer": "a", "used_at": day(4.5), "cents": 1}],
        # The watermark is 3.46 days past the end of the first day, or an hour or two more: days are those of Berlin.
        [*some(6, 0, 0.9), {"customer": "b", "used_at": None, "cents": 7}, END],
    ]


END: Event = {"customer": "end", "used_at": day(0) + GONE, "cents": 0}


def check_bills(spark: SparkSession, folder: Path) -> None:
    *in_time, last = usage()
    with closing(sqlite3.connect(folder / "bills.db")) as db:
        bills = {(c, d): (cents, n) for c, d, cents, n in db.execute("SELECT customer, day, cents, records FROM bills")}
    corrections = spark.read.parquet(str(folder / "corrections"))
    corrected = corrections.groupBy("customer", "day").agg(F.sum("cents"), F.sum("records")).collect()
    reasons = {row.reason for row in corrections.select("reason").distinct().collect()}

    def totals(events: Sequence[Event]) -> dict[Any, Any]:
        found: dict[Any, Any] = defaultdict(lambda: (0, 0))
        for e in events:
            at = e["used_at"]
            name = None if at is None else datetime.fromtimestamp(at, ZoneInfo("Europe/Berlin")).date().isoformat()
            cents, n = found[e["customer"], name]
            found[e["customer"], name] = cents + e["cents"], n + 1
        return dict(found)

    assert bills == totals([e for events in in_time for e in events])
    assert {(c, d): (cents, n) for c, d, cents, n in corrected} == totals([e for e in last if e is not END])
    assert len(reasons) == 2


def takings() -> list[list[Event]]:
    """By batch. Shop b has no sale in the afternoon, and a sale of the first morning comes late for all its hours."""
    rng = random.Random(11)

    def sold(shop: str, first: int, last: int) -> list[Event]:
        times = [rng.randrange(first * HOUR, last * HOUR) for _ in range(12)]
        return [{"shop": shop, "at": MIDNIGHT + t, "cents": rng.randrange(1000)} for t in times]

    late = {"shop": "b", "at": MIDNIGHT + 7 * HOUR, "cents": 5}
    end = {"shop": "end", "at": MIDNIGHT + GONE, "cents": 0}
    return [[*sold("a", 6, 11), *sold("b", 7, 11)], [late, *sold("a", 11, 20), *sold("a", 27, 30)], [end]]


def check_takings(folder: Path) -> None:
    events = [e for batch in takings() for e in batch if e["shop"] != "end"]
    truth: dict[Any, Any] = {}
    for shop in "ab":
        for hour in range(1, 2 * 24 + 1):
            begin = MIDNIGHT + (hour - 1) // 24 * DAY
            own = [e for e in events if e["shop"] == shop and begin <= e["at"] < MIDNIGHT + hour * HOUR]
            if own:
                truth[shop, begin, MIDNIGHT + hour * HOUR] = [sum(e["cents"] for e in own), len(own)]
    with closing(sqlite3.connect(folder / "takings.db")) as db:
        columns = "shop, window_start, window_end, cents, sales"
        found = db.execute(f"SELECT {columns} FROM so_far WHERE shop <> 'end'").fetchall()
    assert {(shop, instant(begin), instant(end)): values for shop, begin, end, *values in found} == truth


def readings() -> list[list[Event]]:
    """Device b is away from the first hour to the fourth, and sends it all in the third batch."""
    rng = random.Random(5)

    def sent(device: str, first: int, last: int) -> list[Event]:
        at = [MIDNIGHT + t for t in range(first, last, 90) if rng.random() < 0.8 and not 600 <= t % 7200 < 1800]
        return [{"device": device, "at": t, "celsius": rng.randrange(400) / 16} for t in at]

    def tick(t: int) -> Event:
        return {"tick": MIDNIGHT + t}

    return [
        [*sent("a", 0, HOUR), *sent("b", 0, HOUR), tick(HOUR)],
        [*sent("a", HOUR, 4 * HOUR), tick(4 * HOUR)],
        [*sent("b", HOUR, 4 * HOUR), *sent("a", 4 * HOUR, 5 * HOUR), tick(GONE)],
    ]


def check_readings(spark: SparkSession, newest: Callable[[SparkSession], DataFrame], folder: Path) -> None:
    of: dict[Any, list[float]] = defaultdict(list)
    for e in (e for events in readings() for e in events if e.get("device")):
        last = e["at"] // 300 * 300
        for start in (last, last - 300):
            of[e["device"], start, start + 600].append(e["celsius"])
    found = {
        (row.device, seconds(row.window_start), seconds(row.window_end)): (row.celsius, row.highest, row.readings)
        for row in newest(spark).collect()
    }
    equal(found, {place: (sum(them) / len(them), max(them), len(them)) for place, them in of.items()})
    panes = spark.read.parquet(str(folder / "smooth"))
    late = panes.where("late_events > 0")
    assert late.count() and {row.device for row in late.select("device").distinct().collect()} == {"b"}
    assert not panes.where("kind = 'dropped'").count()


def clicks() -> list[list[Event]]:
    """The last batch joins visits that came out before; no two clicks are of one instant."""
    rng = random.Random(8)
    pool = [t for t in range(0, 20 * HOUR, 7) if t % (2 * HOUR) < 50 * MINUTE]
    times = sorted(rng.sample(pool, 80))
    all_of_them = [{"user": rng.choice("xyz"), "at": MIDNIGHT + t, "page": f"/{rng.choice('abcd')}"} for t in times]
    soon = [e for e in all_of_them if e["at"] < MIDNIGHT + 3 * HOUR]
    back = rng.sample(soon, len(soon) // 3)
    return [
        [e for e in soon if e not in back],
        [e for e in all_of_them if soon[-1]["at"] < e["at"] < MIDNIGHT + 5 * HOUR],
        [*back, *(e for e in all_of_them if e["at"] >= MIDNIGHT + 5 * HOUR), AFTER],
    ]


AFTER: Event = {"user": "end", "at": MIDNIGHT + GONE, "page": "/"}


def check_clicks(folder: Path) -> None:
    events = [e for batch in clicks() for e in batch if e is not AFTER]
    truth: Counter[Any] = Counter()

    def told(user: str, what: str, begins: float, ends: float, inside: list[Event]) -> None:
        first, *_ = sorted(inside, key=lambda e: e["at"])
        stamps = (time.strftime("%Y-%m-%d %H:%M:%S.000000", time.gmtime(t)) for t in (begins, ends))
        truth[user, what, *stamps, len(inside), len({e["page"] for e in inside}), first["page"]] += 1

    for user in "xyz":
        own = [e for e in events if e["user"] == user]
        for _, begins, ends in visits(own, 30 * MINUTE, "at"):
            told(user, "visit", begins, ends, [e for e in own if begins <= e["at"] < ends])
        told(user, "day", day(0), day(1), own)
    with closing(sqlite3.connect(folder / "visits.db")) as db:
        columns = "user, window, window_start, window_end, clicks, pages, landing"
        found = db.execute(f"SELECT {columns} FROM visits WHERE user <> 'end'").fetchall()
    assert Counter(found) == truth


def payments() -> list[list[Event]]:
    """Twelve shops have six payments a minute, and one has three from the second batch on.

    Of those of the last hour, a third comes a batch later.
    """

    def sent(begin: int, end: int) -> tuple[list[Event], list[Event]]:
        in_time: list[Event] = []
        later: list[Event] = []
        for minute in range(begin, end, MINUTE):
            for number in range(6):
                to = later if number % 3 == 2 and minute >= end - HOUR else in_time
                shops = [shop for shop in SHOPS if shop != QUIET or not begin or number < 3]
                to += [{"shop": shop, "at": MIDNIGHT + minute + number * 9.0, "cents": 100} for shop in shops]
        return in_time, later

    hours = ((0, 3), (3, 5), (5, 6), (6, 7))
    parts = [sent(first * HOUR, last * HOUR) for first, last in hours]
    return [[*late, *now] for (_, late), (now, _) in zip([([], []), *parts], parts, strict=False)]


SHOPS, QUIET = "abcdefghijklm", "m"


def check_alerts(spark: SparkSession, folder: Path) -> None:
    alerts = spark.read.parquet(str(folder / "alerts")).collect()
    assert alerts and {row.shop for row in alerts} == {QUIET}, "rows of others are low as well, but not complete enough"
    assert {row.payments for row in alerts} == {3}, "what is known of a row with two payments is that one is missing"
    minutes = {(seconds(row.window_start) - MIDNIGHT) // MINUTE for row in alerts}
    # Windows from 3:00 are over when they first run. Of those from 4:00, all rows came before anything was known. Of
    # those from 5:00, first rows lack a third, and second ones are complete. Those from 6:00 have only first rows.
    assert minutes == set(range(180, 239)) | set(range(300, 359))
    assert all(row.completeness_low >= 0.9 for row in alerts)


def readings_of_meters(now: int) -> list[Event]:
    """All that there is, an hour of it from a clock that is an hour ahead."""
    rng = random.Random(13)

    def sent(meter: str, ahead_s: int) -> list[Event]:
        return [{"meter": meter, "at": now + ahead_s - t, "watts": rng.randrange(400) / 4} for t in range(1, 30, 2)]

    return [*sent("a", 0), *sent("b", 0), *sent("fast", HOUR)]


def check_meters(spark: SparkSession, given: list[Event], folder: Path) -> None:
    truth: dict[Any, list[float]] = defaultdict(list)
    for e in given:
        if e["meter"] != "fast":
            truth[e["meter"], e["at"] // 10 * 10].append(e["watts"])

    def rows(table: str) -> dict[Any, Any]:
        with closing(sqlite3.connect(folder / "meters.db")) as db:
            found = db.execute(f"SELECT meter, window_start, watts, readings FROM {table}").fetchall()
        return {(meter, instant(begin)): values for meter, begin, *values in found}

    for table in ("by_clocks", "by_arrival"):
        wait_until(lambda table=table: len(rows(table)) == len(truth), 120)  # type: ignore[misc]
        equal(rows(table), {place: [sum(them) / len(them), len(them)] for place, them in truth.items()})
    wrong = spark.read.parquet(str(folder / "wrong")).groupBy("meter", "reason").agg(F.sum("events").alias("n"))
    assert [tuple(row) for row in wrong.collect()] == [("fast", "the event time is ahead of the clock", 15)]


def sales() -> list[list[Event]]:
    """The terminals of shop b send all of it twice, some of it late, and most of it in another batch."""
    rng = random.Random(17)
    once = [
        {
            "shop": rng.choice("ab"),
            "at": MIDNIGHT + rng.randrange(6 * HOUR),
            "sale": str(n),
            "cents": rng.randrange(999),
        }
        for n in range(80)
    ]
    again = [e for e in once if e["shop"] == "b"]
    last = {"shop": "end", "at": MIDNIGHT + 20 * HOUR, "sale": "end", "cents": 0}
    return [[*once[:50], *again[:5]], [*once[50:], last], again]


def check_sales(folder: Path) -> None:
    truth: dict[Any, list[int]] = defaultdict(lambda: [0, 0])
    for e in {e["sale"]: e for batch in sales() for e in batch if e["shop"] != "end"}.values():
        total = truth[e["shop"], e["at"] // HOUR * HOUR]
        total[:] = total[0] + e["cents"], total[1] + 1
    with closing(sqlite3.connect(folder / "sales.db")) as db:
        found = db.execute("SELECT shop, window_start, cents, sales FROM hours WHERE shop <> 'end'").fetchall()
    assert {(shop, instant(begin)): values for shop, begin, *values in found} == truth


def check_trips(given: list[Event], folder: Path) -> None:
    with closing(sqlite3.connect(folder / "trips.db")) as db:
        found = db.execute("SELECT city, window_start, kind, km, trips FROM days ORDER BY window_start").fetchall()
    kinds = ["on_time", "on_time", "early"]
    days = sorted({e["at"] // DAY * DAY for e in given})
    assert [(city, instant(begin), *values) for city, begin, *values in found] == [
        ("x", begin, kind, 3.0, 3) for begin, kind in zip(days, kinds, strict=True)
    ]


@pytest.mark.proof
def test_the_recipes(alone: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    streams = {"usage": (usage(), USAGE), "readings": (readings(), READINGS), "clicks": (clicks(), CLICKS)}
    streams["payments"] = (payments(), PAYMENTS)
    streams["sales"] = (sales(), SALES)
    streams["takings"] = (takings(), PAYMENTS)
    for name, (batches, schema) in streams.items():
        write(tmp_path / name, batches[0], schema)
    now = int(time.time())
    meters = readings_of_meters(now)
    write(tmp_path / "meters", meters, METERS)
    trips = [
        {"city": "x", "at": now // DAY * DAY + n * HOUR, "km": 1.0}
        for day in (0, -24, -48)
        for n in range(day, day + 3)
    ]
    write(tmp_path / "trips", trips, TRIPS)
    names = {name: value for recipe in RECIPES for name, value in run_python(recipe, {}, tmp_path, {}).items()}
    settle(alone)
    assert len(alone.streams.active) == len(streams) + 2
    check_meters(alone, meters, tmp_path)
    check_trips(trips, tmp_path)
    for number in range(1, max(len(batches) for batches, _ in streams.values())):
        for name, (batches, schema) in streams.items():
            if number < len(batches):
                write(tmp_path / name, batches[number], schema)
        settle(alone)
    for query in alone.streams.active:
        query.stop()
    check_bills(alone, tmp_path)
    check_readings(alone, names["newest"], tmp_path)
    check_clicks(tmp_path)
    check_alerts(alone, tmp_path)
    check_sales(tmp_path)
    check_takings(tmp_path)
