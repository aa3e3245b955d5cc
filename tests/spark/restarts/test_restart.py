"""What a query finds when it is restarted: other settings, other places; and what it must not find."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.sql import SparkSession

import aion
from aion.errors import ForeignState
from tests.server.conftest import wait_until
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink, last_panes
from tests.spark.windows.test_windowed import ALL, BOUND

pytestmark = pytest.mark.proof


@pytest.fixture
def conf(spark: SparkSession) -> Iterator[Callable[[str, str], None]]:
    """Sets what is set back afterwards."""
    before: dict[str, str] = {}

    def set_(key: str, value: str) -> None:
        before.setdefault(key, spark.conf.get(key) or "")
        spark.conf.set(key, value)

    yield set_
    for key, value in before.items():
        spark.conf.set(key, value)


def counted(stream: FileStream, **policy: Any) -> Any:
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    return aion.windowed(
        events, key="k", time="ts", windows=aion.Tumbling("10 seconds"), aggregates=ALL, policy={**BOUND, **policy}
    )


def test_partitions_may_change_where_the_shards_stay(
    stream: FileStream, sink: Sink, conf: Callable[[str, str], None]
) -> None:
    """Spark takes those of the checkpoint, whatever the session says."""
    stream.put([(key, 1001, 1.0) for key in "abcdefgh"])
    sink.run(counted(stream, state={"shards": 4}))
    conf("spark.sql.shuffle.partitions", "3")
    stream.put([(key, 1002, 1.0) for key in "abcdefgh"] + [("end", 1500, 1.0)])
    stream.put([("end", 1501, 1.0)])
    rows = last_panes(sink.run(counted(stream, state={"shards": 4})), "k")
    assert {row["n"] for (key, *_), row in rows.items() if key != "end"} == {2}


def test_another_number_of_shards_is_refused_by_name(stream: FileStream, sink: Sink) -> None:
    """Also by shards that are new, and have no state that could tell."""
    stream.put([("a", 1001, 1.0)])
    sink.run(counted(stream, state={"shards": 1}))
    stream.put([(key, 1002, 1.0) for key in "abcdefgh"])
    with pytest.raises(ForeignState, match="belongs to shards 1, not 64"):
        sink.run(counted(stream, state={"shards": 64}))


def test_on_a_cluster_a_place_that_all_executors_see_must_be_named(tmp_path: Path) -> None:
    """With the master of a real cluster, which has no workers: the query is refused before it needs one."""
    program = """
import os, sys, aion
from aion import aggregates as A
from pyspark.sql import SparkSession

spark = aion.configure(SparkSession.builder.master(sys.argv[1]).config("spark.ui.enabled", "false")).getOrCreate()
stream = spark.readStream.format("rate").load().withWatermark("timestamp", "1 second")
for conf in ({}, {"checkpointLocation": "/cp"}, {"checkpointLocation": "file:///cp"}, {"dir": "/mnt/state"}):
    for name, value in conf.items():
        spark.conf.set("spark.aion.state.dir" if name == "dir" else "spark.sql.streaming." + name, value)
    try:
        aion.windowed(stream, time="timestamp", windows=aion.Tumbling("1 minute"), aggregates={"n": A.count()})
    except aion.errors.ConfigError as error:
        print("refused:", error)
    else:
        print("taken")
sys.stdout.flush()
os._exit(0)
"""
    log = tmp_path / "master.log"
    spark_class = Path(pyspark.__file__).parent / "bin" / "spark-class"
    with log.open("wb") as out:
        master = subprocess.Popen(
            [spark_class, "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0"],
            stdout=out, stderr=out, env={**os.environ, "SPARK_NO_DAEMONIZE": "1"},
        )  # fmt: skip
    try:
        wait_until(lambda: re.search(r"Starting Spark master at (spark://\S+)", log.read_text()))
        found = re.search(r"Starting Spark master at (spark://\S+)", log.read_text())
        assert found
        command = [sys.executable, "-c", program, found[1]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    finally:
        master.terminate()
        master.wait(60)
    said = [line for line in done.stdout.splitlines() if line.startswith(("refused:", "taken"))]
    assert len(said) == 4, (done.stdout, done.stderr[-2000:])
    assert said[0].startswith(f"refused: state.dir: it is not set, and on the cluster {found[1]} each executor")
    assert said[1].startswith("refused: state.dir: it is not set"), "a path is on each host another one"
    assert said[2:] == ["taken", "taken"]
