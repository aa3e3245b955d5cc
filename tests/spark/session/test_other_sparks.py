"""Queries on each version of Spark that Aion says it runs on, besides the one that the other tests have."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

from aion.spark import NEWEST, OLDEST, numbers

OTHERS = [f"4.{minor}" for minor in range(numbers(OLDEST)[1], numbers(NEWEST)[1])]

PROGRAM = """
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
from pyspark.sql import SparkSession, functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import LongType, StringType, StructField, StructType

import aion
from aion import aggregates as A

builder = SparkSession.builder.master("local[2,3]").config("spark.sql.shuffle.partitions", "2")
builder = builder.config("spark.ui.enabled", "false").config("spark.sql.session.timeZone", "UTC")
spark = aion.configure(builder, state_dir="state").getOrCreate()
plans = []


def put(folder, number, rows):
    Path(folder).mkdir(exist_ok=True)
    keys, seconds, values = zip(*rows)
    stamps = pa.array([second * 1_000_000 for second in seconds], pa.timestamp("us", "UTC"))
    path = f"{folder}/{number}.parquet"
    pq.write_table(pa.table({"k": keys, "ts": stamps, "v": values}), path)
    os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))  # Spark reads files in this order


def stream(folder):
    files = spark.readStream.schema("k string, ts timestamp, v double").option("maxFilesPerTrigger", 1)
    return files.parquet(folder)


def rows_of(result, *columns):
    found = []

    def keep(batch, number):
        plans.append(spark.streams.active[0]._jsq.explainInternal(False))
        found.extend(tuple(map(str, row)) for row in batch.select(*columns).collect())

    result.writeStream.foreachBatch(keep).trigger(availableNow=True).start().awaitTermination()
    return sorted(found)


class Count(StatefulProcessor):
    def init(self, handle):
        self.state = handle.getValueState("n", StructType([StructField("n", LongType())]))

    def handleInputRows(self, key, rows, times):
        import pandas as pd
        before = self.state.get()[0] if self.state.exists() else 0
        n = before + sum(len(frame) for frame in rows)
        self.state.update((n,))
        yield pd.DataFrame({"k": [key[0]], "n": [n]})

    def close(self):
        pass


for number in range(4):
    late = max(60 * number - 100, 0)
    put("events", number, [("a", 60 * number + 5, 0.1), ("b", 60 * number + 6, 1.5), ("a", late, 0.5)])
put("orders", 0, [("x", 10, 1.0), ("y", 20, 2.0)])
put("payments", 0, [("x", 15, 1.0)])
events = stream("events").withWatermark("ts", "0 seconds")
minutes = {"key": "k", "windows": aion.Tumbling("1 minute"), "bound": "1 hour", "trigger": "every_batch"}
said = {"version": pyspark.__version__}
windows = aion.windowed(events, **minutes, aggregates={"n": A.count(), "v": A.sum("v")})
said["windows"] = rows_of(windows, "k", "window_start", "n", "v", "kind")
said["grouped by Spark"] = sum("HashAggregate" in plan for plan in plans) > 0
functions = aion.windowed(events, **minutes, aggregates={"middle": A.median("v")})
said["functions"] = len(rows_of(functions, "k", "middle"))
orders = stream("orders").withColumnRenamed("ts", "ordered").withColumnRenamed("v", "price")
payments = stream("payments").withColumnRenamed("ts", "paid").withColumnRenamed("v", "amount")
joined = aion.join(
    orders.withWatermark("ordered", "0 seconds"), payments.withWatermark("paid", "0 seconds"), key="k",
    within=("0 seconds", "1 minute"), early="batch", how="left",
)
said["join"] = rows_of(joined, "k", "paid", "kind")
grouped = aion.group_by(events, "k").transformWithStateInPandas(
    Count(), StructType([StructField("k", StringType()), StructField("n", LongType())]), "Update", "None"
)
said["stateful"] = rows_of(grouped, "k", "n")[-1]
files = aion.read_files(spark, "events", schema="k string, ts timestamp, v double", watermark=("ts", "0 seconds"))
said["files"] = len(rows_of(aion.windowed(files, **minutes, aggregates={"n": A.count()}), "k", "n"))
try:
    aion.watermark(stream("events"), "ts", "0 seconds", idle_after="1 minute")
    said["heartbeat"] = "taken"
except Exception as error:
    said["heartbeat"] = str(error)
json.dump(said, open("said.json", "w"))
"""


def said(interpreter: Path | str, folder: Path, **environment: str) -> dict[str, object]:
    (folder / "queries.py").write_text(PROGRAM)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK"))}
    done = subprocess.run(
        [str(interpreter), "queries.py"], cwd=folder, capture_output=True, text=True, check=False,
        env=inherited | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, object] = json.loads((folder / "said.json").read_text())
    return found


@pytest.mark.proof
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", OTHERS)
def test_it_does_the_same_on_an_older_spark(version: str, tmp_path: Path) -> None:
    older, here = tmp_path / "older", tmp_path / "here"
    here.mkdir()
    subprocess.run([sys.executable, "-m", "venv", older], check=True)
    subprocess.run([older / "bin/pip", "install", "--quiet", f"pyspark=={version}.*"], check=True)
    (packages,) = (older / "lib").glob("python*/site-packages")
    # Behind its own: all other libraries of this environment.
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    root = str(Path(__file__).parents[3])
    found = said(older / "bin/python", older, PYTHONPATH=root, SPARK_HOME=str(packages / "pyspark"))
    expected = said(sys.executable, here, PYTHONPATH=root)
    assert str(found.pop("version")).startswith(version) and expected.pop("version") is not None
    heartbeat = found.pop("heartbeat")
    assert expected.pop("heartbeat") == "taken"
    assert (heartbeat == "taken") == (numbers(version) >= (4, 2))
    assert heartbeat == "taken" or f"need Spark 4.2, and this is Spark {version}" in str(heartbeat)
    assert found == expected and found["windows"] and found["join"] and found["grouped by Spark"]
