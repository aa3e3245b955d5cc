"""The query of ``aion experiment hosts``, in a process of its own: ``python -m experiments.hosts.query REQUEST``.

Tumbling windows and sessions over the files in ``folder/in``, on executors outside this process. It prints a line of
JSON after each batch, so that the experiment can remove a host at that point. In the end it prints the differences from
what stock Spark computes over all events at once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

SCHEMA = "ts timestamp, k bigint"
SIZE = "20 seconds"
GAP = "5 seconds"
NOBODY = -1
"""The key of one event after all others, which completes the windows of all others."""
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Request:
    """``folder``: contains ``in``; the query adds ``checkpoint`` and ``state``. All hosts must be able to read it.

    ``executors``: how many executors to wait for.
    """

    folder: str
    master: str
    executors: int
    settings: Mapping[str, str]


def main(request: Request) -> None:
    from pyspark.sql import SparkSession

    import aion

    builder = SparkSession.builder.master(request.master).appName("aion experiment hosts")
    for key, value in request.settings.items():
        builder = builder.config(key, value)
    policy = {
        "state": {"dir": str(Path(request.folder) / "state")},
        "lateness": {"initial_bound": "1 hour", "coverage": None},
        "trigger": {"kind": "every_batch"},
    }
    spark = aion.configure(builder, policy=policy).getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        wait_for(spark, request.executors)
        streamed(spark, Path(request.folder))
    finally:
        spark.stop()


def streamed(spark: SparkSession, folder: Path) -> None:
    """Runs the query to its end. Prints a line for each batch, and one for the comparison."""
    import aion
    from aion import aggregates as A

    began = time.monotonic()
    table: dict[tuple[Any, ...], int] = {}
    dropped = 0

    def upsert(batch: DataFrame, number: int) -> None:
        nonlocal dropped
        for row in batch.collect():
            place = (row.window, row.k, row.window_start, row.window_end)
            if row.kind == "dropped":
                dropped += row.events
            elif row.kind == "retracted":
                table.pop(place, None)
            else:
                table[place] = row.n
        report(batch=number, seconds=time.monotonic() - began, places=places(spark))

    events = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(folder / "in"))
    panes = aion.windowed(
        events.withWatermark("ts", "0 seconds"),
        key="k",
        time="ts",
        windows={"tumbling": aion.Tumbling(SIZE), "session": aion.Session(GAP)},
        aggregates={"n": A.count()},
    )
    query = panes.writeStream.foreachBatch(upsert).option("checkpointLocation", str(folder / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()
    wanted = truth(spark, folder)
    differ = sorted(map(str, wanted.items() ^ table.items()))
    report(panes=len(wanted), dropped=dropped, differences=differ)


def truth(spark: SparkSession, folder: Path) -> dict[tuple[Any, ...], int]:
    """The windows of all events, computed with Spark's own batch operators."""
    from pyspark.sql import functions as F

    events = spark.read.schema(SCHEMA).parquet(str(folder / "in")).where(F.col("k") != NOBODY)
    windows: dict[str, Column] = {"tumbling": F.window("ts", SIZE), "session": F.session_window("ts", GAP)}
    return {
        (name, row.k, row.w.start, row.w.end): row.n
        for name, window in windows.items()
        for row in events.groupBy("k", window.alias("w")).agg(F.count(F.lit(1)).alias("n")).collect()
    }


def places(spark: SparkSession) -> list[str]:
    """``host:port`` of the driver and of the executors that Spark currently has."""
    infos = spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()
    return sorted(f"{info.host()}:{info.port()}" for info in infos)


def wait_for(spark: SparkSession, count: int) -> None:
    """Waits for ``count`` executors. Raises RuntimeError after ``PATIENCE_S``."""
    deadline = time.monotonic() + PATIENCE_S
    while len(places(spark)) < 1 + count:
        if time.monotonic() > deadline:
            raise RuntimeError(f"fewer than {count} executors after {PATIENCE_S:.0f} s")
        time.sleep(0.2)


def report(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    main(Request(**json.loads(sys.argv[1])))
