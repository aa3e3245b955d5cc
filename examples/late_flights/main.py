"""Counts real flights by the hour in which they should depart. Each comes when it does depart, so many are late."""

from __future__ import annotations

import argparse
import sqlite3
import tempfile
from pathlib import Path

import pandas as pd
from pyspark.sql import SparkSession

import aion
from aion import aggregates as A
from aion.demo.flights import departures, load_flights, write_stream

FLIGHTS, STRETCH_US = 5_000, 4 * 3_600_000_000  # a file for each four hours


def main(out: Path) -> int:
    flights = load_flights().table.slice(0, FLIGHTS)
    files = write_stream(flights, out / "flights", stretch_us=STRETCH_US)
    print(f"{FLIGHTS:,} flights in {files} files, in the order in which they departed")
    builder = SparkSession.builder.master("local[2]").config("spark.sql.shuffle.partitions", 2)
    builder = builder.config("spark.ui.showConsoleProgress", "false")
    spark = aion.configure(builder, state_dir=str(out / "state")).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    panes = aion.windowed(
        departures(spark, out / "flights"),  # its watermark is the latest departure
        key="carrier",
        time="scheduled",
        windows=aion.Tumbling("1 hour"),
        aggregates={"flights": A.count(), "delay": A.mean("dep_delay")},
        bound="2 days",
        trigger="every_batch",  # each late flight corrects its hour at once
    )
    kinds: dict[str, int] = {}
    keep = aion.sinks.upsert(f"sqlite:///{out / 'delays.db'}", "delays")

    def take(batch, number):  # type: ignore[no-untyped-def]
        batch.persist()
        for row in batch.groupBy("kind").count().collect():
            kinds[row["kind"]] = kinds.get(row["kind"], 0) + row["count"]
        keep(batch, number)
        batch.unpersist()

    writer = panes.writeStream.option("checkpointLocation", str(out / "checkpoint")).foreachBatch(take)
    writer.trigger(availableNow=True).start().awaitTermination()
    print("rows:", ", ".join(f"{count:,} {kind}" for kind, count in sorted(kinds.items())) or "none that are new")
    return compare(out / "delays.db", flights.to_pandas())


def compare(database: Path, flights: pd.DataFrame) -> int:
    """Compares the table with the mean delay of all flights of each carrier and hour."""
    hours = flights["scheduled"].dt.tz_convert("UTC").dt.floor("h")
    whole = flights.groupby(["carrier", hours])["dep_delay"].agg(["count", "mean"])
    with sqlite3.connect(database) as db:
        kept = pd.read_sql("SELECT carrier, window_start, flights, delay FROM delays", db)
    kept["scheduled"] = pd.to_datetime(kept["window_start"], utc=True)
    both = whole.join(kept.set_index(["carrier", "scheduled"]), how="outer")
    wrong = both[(both["count"] != both["flights"]) | ((both["mean"] - both["delay"]).abs() > 1e-9)]
    print(f"{len(both):,} hours of carriers, {len(wrong)} differ from a computation over all flights")
    return int(len(wrong) > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a folder for data, state and results; a second run goes on with them")
    given = parser.parse_args().out
    with tempfile.TemporaryDirectory() as temporary:
        raise SystemExit(main((given or Path(temporary)).absolute()))
