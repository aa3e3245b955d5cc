"""Counts cars for each minute and segment: Parquet files in one folder become panes in another.

    spark-submit job.py EVENTS PANES

Where state and checkpoint are, and everything else that differs between clusters, comes from Spark's settings.
"""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

import aion
from aion import aggregates as A


def main(events_at: str, panes_at: str) -> None:
    spark = aion.configure(SparkSession.builder.appName("tolls")).getOrCreate()
    events = spark.readStream.schema("ts timestamp, segment int, speed double").parquet(events_at)
    panes = aion.windowed(
        events.withWatermark("ts", "20 seconds"),
        key="segment",
        time="ts",
        windows=aion.Tumbling("1 minute"),
        aggregates={"cars": A.count(), "speed": A.mean("speed")},
        name="tolls",
    )
    panes.writeStream.format("parquet").queryName("tolls").option("path", panes_at).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
