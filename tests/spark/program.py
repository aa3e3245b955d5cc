"""A program of a user, in a process and with a JVM of its own: its queries succeed and fail, and it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

QUERIES = """
import json
import shutil
import sys
from pyspark.sql import SparkSession, functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import aion
from aion import aggregates as A

builder = SparkSession.builder.master("local[2,3]").config("spark.sql.shuffle.partitions", "2")
builder = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
builder = builder.config("spark.sql.codegen.wholeStage", "false").config("spark.sql.codegen.factoryMode", "NO_CODEGEN")
spark = aion.configure(builder).getOrCreate()
spark.range(100).select(F.timestamp_seconds(F.col("id")).alias("ts"), F.col("id")).write.parquet("events")
events = spark.readStream.schema("ts timestamp, id long").parquet("events").withWatermark("ts", "1 second")
said = {}


def run(name, result, **options):
    query = result.writeStream.format("noop").options(**options).trigger(availableNow=True).start()
    try:
        query.awaitTermination()
    except Exception as error:
        said[name] = str(error)
        said[name + ", asked later"] = str(query.exception())


def looks_up(names, event):
    return names[event.num_rows]


def names_of(key, window, rows):
    return [{"n": looks_up({}, event) for event in rows}]


def wrong(batches):
    raise ValueError("no function of Aion")
    yield


class Talks(StatefulProcessor):
    def init(self, handle):
        print("the user prints")  # where an error would end the process, Spark may lose what it has printed

    def handleInputRows(self, key, rows, times):
        raise ValueError("the user's error")

    def close(self):
        pass


windows = {"key": "id", "time": "ts", "windows": aion.Tumbling("10 seconds")}
run("apply", aion.windowed(events, **windows, apply=aion.Apply(names_of, "n long")))
kept = aion.windowed(events, **windows, aggregates={"n": A.count()})
run("begun", kept, checkpointLocation="checkpoint")
shutil.rmtree("aion-state")
spark.range(1).select(F.timestamp_seconds(F.col("id")).alias("ts"), F.col("id")).write.mode("append").parquet("events")
run("state deleted", kept, checkpointLocation="checkpoint")
print("-- now stock Spark", file=sys.stderr, flush=True)
run("stock", events.mapInPandas(wrong, "n long"))
talks = events.groupBy("ts").transformWithStateInPandas(Talks(), "ts timestamp", "Append", "None")
run("talks", talks)
print(said["talks"], file=sys.stderr)
json.dump(said, open("said.json", "w"))
"""


class Program:
    """What the program has said.

    ``said``: the errors that its queries raised. ``lines``: its standard error. ``log`` and ``stock_log``: the lines of
    Aion's queries, and those of stock Spark's.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        (folder / "queries.py").write_text(QUERIES)
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text("import sys; print('the user customizes', file=sys.stderr)")
        paths = str(folder / "site"), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")
        done = subprocess.run(
            [sys.executable, "queries.py"], cwd=folder, capture_output=True, text=True, check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        self.said: dict[str, str] = json.loads((folder / "said.json").read_text())
        self.lines = done.stderr.splitlines()
        ours, stock = done.stderr.split("-- now stock Spark")
        self.log, self.stock_log = ours.splitlines(), stock.splitlines()
