"""Sessions of clicks that come late, out of order and more than once, in a table that always has the newest of each."""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

import aion
from aion import aggregates as A

Click = dict[str, Any]
START, GAP = datetime(2026, 1, 1, tzinfo=UTC), timedelta(minutes=30)
USERS, SESSIONS, BATCHES = 200, 4, 8
SCHEMA = pa.schema(
    [("id", pa.int64()), ("user", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("page", pa.string())]
)


def main(out: Path, database: str) -> int:
    clicks = made(random.Random(1))
    events = write(clicks, out / "clicks")
    if database.startswith("sqlite:"):
        print("sessions go to SQLite; into PostgreSQL with --database postgresql://USER@HOST/DATABASE")
    print(f"{len(clicks):,} clicks of {USERS} users; with those that came again, {events:,} events")
    builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    spark = aion.configure(builder, state_dir=str(out / "state")).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    stream = spark.readStream.schema("id bigint, user string, ts timestamp, page string")
    panes = aion.windowed(
        stream.option("maxFilesPerTrigger", 1).parquet(str(out / "clicks")).withWatermark("ts", "10 minutes"),
        key="user",
        time="ts",
        windows=aion.Session("30 minutes"),
        aggregates={"clicks": A.count(), "pages": A.count_distinct("page")},
        unique="id",
        bound="2 days",
        trigger="every_batch",
    )
    # A late click can join two sessions. Then the row of one is deleted.
    writer = panes.writeStream.option("checkpointLocation", str(out / "checkpoint"))
    query = writer.foreachBatch(aion.sinks.upsert(database, "sessions")).trigger(availableNow=True).start()
    query.awaitTermination()
    return compare(kept(database), clicks)


def made(rng: random.Random) -> list[Click]:
    """Returns clicks in sessions, hours apart."""
    clicks: list[Click] = []
    for user in range(USERS):
        at = START + timedelta(minutes=rng.randrange(600))
        for _ in range(SESSIONS):
            for _ in range(rng.randrange(1, 12)):
                clicks.append({"id": len(clicks), "user": f"user-{user}", "ts": at, "page": f"/{rng.randrange(9)}"})
                at += timedelta(seconds=rng.randrange(1, 1700))
            at += timedelta(hours=1 + rng.randrange(5))
    return clicks


def write(clicks: list[Click], folder: Path) -> int:
    """Writes the clicks as they come: some hours late, and one in ten twice. Returns how many events these are.

    At last comes a click of nobody, days later, by which all sessions end.
    """
    rng = random.Random(2)
    coming = [(click["ts"] + timedelta(minutes=rng.choice([0, 0, 0, 5, 240])), click) for click in clicks]
    coming += [(at + timedelta(minutes=20), click) for at, click in coming if rng.random() < 0.1]
    events = [click for _, click in sorted(coming, key=lambda pair: (pair[0], pair[1]["id"]))]
    batches = [events[len(events) * n // BATCHES : len(events) * (n + 1) // BATCHES] for n in range(BATCHES)]
    last = max(click["ts"] for click in clicks) + timedelta(days=4)
    batches += [[{"id": -n, "user": None, "ts": last + n * GAP, "page": None}] for n in (1, 2)]
    folder.mkdir(parents=True, exist_ok=True)
    for number, batch in enumerate(batches):
        path = folder / f"{number:03d}.parquet"
        pq.write_table(pa.Table.from_pylist(batch, SCHEMA), path)
        os.utime(path, (1_700_000_000 + number,) * 2)  # Spark reads them in this order
    return len(events)


def sessions(clicks: list[Click]) -> Iterator[tuple[str, datetime, int, int]]:
    """Yields each session, computed from all clicks."""
    by_user: dict[str, list[Click]] = {}
    for click in sorted(clicks, key=lambda c: c["ts"]):
        of = by_user.setdefault(click["user"], [])
        if of and click["ts"] - of[-1]["ts"] > GAP:
            yield click["user"], of[0]["ts"], len(of), len({c["page"] for c in of})
            of.clear()
        of.append(click)
    for user, of in by_user.items():
        yield user, of[0]["ts"], len(of), len({c["page"] for c in of})


def kept(database: str) -> set[tuple[str, datetime, int, int]]:
    """Returns the rows of the table."""
    text = 'SELECT "user", window_start, clicks, pages FROM sessions WHERE "user" IS NOT NULL'
    if database.startswith("sqlite:///"):
        import sqlite3

        with closing(sqlite3.connect(database.removeprefix("sqlite:///"))) as db:
            rows = db.execute(text).fetchall()
        return {(user, datetime.fromisoformat(at).replace(tzinfo=UTC), n, pages) for user, at, n, pages in rows}
    from adbc_driver_postgresql import dbapi

    with dbapi.connect(database) as connection, connection.cursor() as cursor:
        cursor.execute(text)
        return {(user, at.astimezone(UTC), n, pages) for user, at, n, pages in cursor.fetchall()}


def compare(found: set[tuple[str, datetime, int, int]], clicks: list[Click]) -> int:
    right = set(sessions(clicks))
    wrong = found ^ right
    print(f"{len(right):,} sessions, {len(wrong)} differ from a computation over all clicks")
    return int(bool(wrong))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a folder for data, state and results; a second run goes on with them")
    parser.add_argument("--database", help="e.g. postgresql://me@localhost/shop. Default: a SQLite file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.out or Path(temporary)).absolute()
        raise SystemExit(main(folder, given.database or f"sqlite:///{folder / 'shop.db'}"))
