"""A query on two executors that are processes of their own, one of which is killed on the way. Prints what came out.

``python -m tests.spark.two_executors FOLDER``: reads FOLDER/in, prints JSON. A process, because a session in which all
runs in one JVM cannot become one with executors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
from pyspark.sql import SparkSession

import aion
from aion import aggregates as A

EXECUTOR = "CoarseGrainedExecutorBackend"
KILLED_AFTER = 2
"""The batch after which an executor is killed."""


def executors() -> list[psutil.Process]:
    below = psutil.Process().children(recursive=True)
    return [p for p in below if p.name() == "java" and any(EXECUTOR in word for word in p.cmdline())]


def main(folder: Path) -> None:
    builder = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .appName("two executors")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.executor.memory", "1g")
        .config("spark.executorEnv.PYTHONPATH", str(Path.cwd()))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
    )
    policy = {
        "state": {"dir": str(folder / "state")},
        "lateness": {"initial_bound": "1 hour", "coverage": None},
        "trigger": {"kind": "every_batch"},
    }
    spark = aion.configure(builder, policy=policy).getOrCreate()
    table: dict[tuple[Any, ...], int] = {}
    told: dict[str, Any] = {"dropped": 0, "executors": []}

    def upsert(batch: Any, number: int) -> None:
        for row in batch.collect():
            place = (row.k, row.window, int(row.window_start.timestamp()), int(row.window_end.timestamp()))
            if row.kind == "dropped":
                told["dropped"] += 1
            elif row.kind == "retracted":
                table.pop(place, None)
            else:
                table[place] = row.n
        found = executors()
        told["executors"].append(sorted(p.pid for p in found))
        if number == KILLED_AFTER:
            found[0].kill()
            told["killed"] = found[0].pid

    events = (
        spark.readStream.schema("ts timestamp, k bigint").option("maxFilesPerTrigger", 1).parquet(str(folder / "in"))
    )
    panes = aion.windowed(
        events.withWatermark("ts", "0 seconds"),
        key="k",
        time="ts",
        windows={"tumbling": aion.Tumbling("20 seconds"), "session": aion.Session("5 seconds")},
        aggregates={"n": A.count()},
    )
    query = panes.writeStream.foreachBatch(upsert).option("checkpointLocation", str(folder / "checkpoint"))
    query.trigger(availableNow=True).start().awaitTermination()
    print(json.dumps({**told, "panes": [[*place, n] for place, n in table.items()]}))
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
