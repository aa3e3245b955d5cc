"""What is left when a Python process has stopped Spark and goes on: nothing, and it can start Spark again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from state_backends.server import server_folder
from state_backends.server.client import runtime_dir
from tests.server.conftest import is_over, wait_until

pytestmark = pytest.mark.proof

PROGRAM = """
import sys
from pathlib import Path

import aion
import pyarrow as pa
import pyarrow.parquet as pq
from aion import aggregates as A
from pyspark.sql import SparkSession

folder = Path(sys.argv[1])
rows = {"k": ["a"], "ts": pa.array([1_000_000], pa.timestamp("us", "UTC"))}
(folder / "in").mkdir()
pq.write_table(pa.table(rows), folder / "in" / "a.parquet")
for number in range(2):
    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    spark = aion.configure(builder.config("spark.sql.shuffle.partitions", "1")).getOrCreate()
    events = spark.readStream.schema("k string, ts timestamp").parquet(str(folder / "in")).withWatermark("ts", "0 seconds")
    panes = aion.windowed(events, key="k", time="ts", windows=aion.Tumbling("1 second"), aggregates={"n": A.count()})
    writer = panes.writeStream.format("noop").option("checkpointLocation", str(folder / f"checkpoint-{number}"))
    writer.trigger(availableNow=True).start().awaitTermination()
    print("ran", spark.sparkContext.applicationId, aion.metrics.state(spark).shards, flush=True)
    sys.stdin.readline()
    spark.stop()
print("stopped", flush=True)
sys.stdin.readline()
"""  # noqa: E501


def test_the_state_server_ends_when_spark_is_stopped_and_python_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    servers = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as python:
        assert python.stdin is not None
        assert python.stdout is not None
        try:
            for _ in range(2):
                ran, application, shards = python.stdout.readline().split()
                assert (ran, shards) == ("ran", "1")
                servers.append(server_folder.occupant(runtime_dir(application)))
                print(file=python.stdin, flush=True)
            assert python.stdout.readline() == "stopped\n"
            assert None not in servers
            wait_until(lambda: all(server is not None and is_over(server) for server in servers))
            assert python.poll() is None, "this is without the end of Python and Java"
        finally:
            python.kill()
