"""A job with windows, which a test starts in different ways: each makes its session as a user would."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import aion
from aion import aggregates as A
from tests.connect.events import DDL

ENABLED = {"spark.aion.stateful.enabled": "true"}
REQUIRED = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "2",
}


def session(way: str, url: str, folder: Path) -> SparkSession:
    """``plain`` and ``connect``: with ``aion.configure``. ``stateful``: which also runs Spark's processors on Aion.
    ``run``: as ``plain``, started by ``aion.run``. ``conf``: Spark's settings say all.
    """
    builder: Any = SparkSession.builder
    state = str(folder / "state")
    if way == "connect":
        return aion.configure(builder.remote(url), state_dir=state, trigger_kind="every_batch").getOrCreate()
    builder = builder.master("local[2,3]").config("spark.ui.enabled", "false")
    for name, value in {"spark.sql.shuffle.partitions": "2", **(ENABLED if way in ("run", "conf") else {})}.items():
        builder = builder.config(name, value)
    if way != "conf":
        stateful = way == "stateful"
        return aion.configure(builder, stateful=stateful, state_dir=state, trigger_kind="every_batch").getOrCreate()
    own = {"spark.aion.state.dir": state, "spark.aion.trigger.kind": "every_batch"}
    for name, value in {**REQUIRED, **own}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def main(way: str, url: str, folder: str) -> None:
    """Runs what is there, and prints all panes that were ever written, or why the query was refused."""
    place = Path(folder)
    spark = session(way, url, place)
    events = spark.readStream.schema(DDL).option("maxFilesPerTrigger", 1).parquet(str(place / "in"))
    panes = aion.panes(
        aion.windowed(
            events.withWatermark("ts", "0 seconds"), key="k", time="ts", windows=aion.Tumbling("1 minute"),
            aggregates={"n": A.count()}, bound="2 hours",
        )
    )  # fmt: skip
    writer = panes.writeStream.format("parquet").option("path", str(place / "out"))
    writer.option("checkpointLocation", str(place / "checkpoint")).trigger(availableNow=True).start().awaitTermination()
    rows = spark.read.parquet(str(place / "out")).select("k", "window_start", "pane", "kind", "n").toArrow()
    print(json.dumps(sorted([str(value) for value in row.values()] for row in rows.to_pylist())))


if __name__ == "__main__":
    main(*sys.argv[1:])
