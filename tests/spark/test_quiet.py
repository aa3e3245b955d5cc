"""What a query writes to the standard error of its program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

QUERIES = """
import sys
from pyspark.sql import SparkSession, functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import aion
from aion import aggregates as A

builder = SparkSession.builder.master("local[1]").config("spark.sql.shuffle.partitions", "2")
builder = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
spark = aion.configure(builder).getOrCreate()
spark.range(100).select(F.timestamp_seconds(F.col("id")).alias("ts")).write.parquet("events")
events = spark.readStream.schema("ts timestamp").parquet("events").withWatermark("ts", "1 second")


def run(result):
    result.writeStream.format("noop").trigger(availableNow=True).start().awaitTermination()


run(aion.windowed(events, time="ts", windows=aion.Tumbling("1 minute"), aggregates={"n": A.count()}))


class Talks(StatefulProcessor):
    def init(self, handle):
        print("the user prints")  # where an error would end the process, Spark may lose what it has printed

    def handleInputRows(self, key, rows, times):
        raise ValueError("the user's error")

    def close(self):
        pass


try:
    run(events.groupBy("ts").transformWithStateInPandas(Talks(), "ts timestamp", "Append", "None"))
except Exception as error:
    print(error, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The lines on the standard error of a program with a query of windows, and a query that fails."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("import sys; print('the user customizes', file=sys.stderr)")
    paths = str(folder / "site"), str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", QUERIES], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_spark_says_nothing_of_its_workers(said: list[str]) -> None:
    assert [line for line in said if "TransformWithStateInPandas Python worker" in line or "StateServer" in line] == []


def test_what_the_user_prints_and_errors_still_show(said: list[str]) -> None:
    assert "the user prints" in said
    assert any("the user's error" in line for line in said)


def test_the_users_own_customization_runs_in_each_python(said: list[str]) -> None:
    # The program, the two processes in which Spark makes the operators, and the daemon of the workers.
    assert said.count("the user customizes") >= 4
