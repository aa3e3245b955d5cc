"""Tasks that lose their state server in the middle, on Spark; the long and random version is tests/chaos."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import aion
from aion import errors
from aion.spark.session.settings import task_failures
from aion.spark.tasks.root import Root
from aion.spark.tasks.windows import WindowsDefinition
from state_backends.server.client import runtime_dir
from tests.spark.conftest import FileStream, Sink

DDL = "ts timestamp, id bigint, payload binary"
SCHEMA = pa.schema([("ts", pa.timestamp("us", "UTC")), ("id", pa.int64()), ("payload", pa.binary())])


@pytest.mark.slow
def test_a_function_goes_on_behind_what_it_has_read_and_runs_once(spark: SparkSession, tmp_path: Path) -> None:
    """The server is killed while a function is in the middle of its window."""
    stream = FileStream(spark, tmp_path / "input", SCHEMA)
    rows = 1000
    for file in range(3):
        stream.put([(1000 + file, file * rows + i, os.urandom(1000)) for i in range(rows)])
    stream.put([(1020, -1, b"")])
    stream.put([(1021, -2, b"")])
    folder, calls, killed = runtime_dir(spark.sparkContext.applicationId), tmp_path / "calls", tmp_path / "killed"

    def seen(key: Any, window: Any, events: Any) -> dict[str, Any]:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        with calls.open("a") as out:
            out.write(f"{window.start} {context.attemptNumber()}\n")
        ids: list[int] = []
        for batch in events:
            ids += batch.column("id").to_pylist()
            if window.start == 1_000_000_000 and len(ids) < 2 * rows and not killed.exists():
                os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
                killed.touch()
        return {"n": len(ids), "total": sum(ids)}

    events = stream.read(DDL).withWatermark("ts", "0 seconds")
    policy = {"blocks": {"target": "256KiB"}, "io": {"codec_threads": 0}}
    result = aion.windowed(
        events,
        time="ts",
        windows=aion.Tumbling("10 seconds"),
        apply=aion.Apply(seen, "n bigint, total bigint", blocking=False),
        policy=policy,
    )
    got = Sink(tmp_path).run(result)
    first = next(row for row in got if row["window_start"].minute == 16 and row["window_start"].second == 40)
    assert killed.exists()
    assert (first["n"], first["total"]) == (3 * rows, sum(range(3 * rows)))
    assert (first["pane"], first["kind"]) == (0, "on_time")
    # Once, in a task that was never run again.
    assert calls.read_text() == "1000000000 0\n"


@pytest.mark.parametrize(
    ("master", "failures"),
    [
        ("local", 1), ("local[4]", 1), ("local[*]", 1), ("local[2,4]", 4), ("local[*, 3]", 3),
        ("local-cluster[2,1,1024]", 7), ("yarn", 7), ("k8s://https://host:443", 7), ("spark://host:7077", 7),
    ],
)  # fmt: skip
def test_how_often_a_task_may_fail(master: str, failures: int) -> None:
    conf = SimpleNamespace(get=lambda key, default: {"spark.task.maxFailures": "7"}.get(key, default))
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(master=master), conf=conf)
    assert task_failures(spark) == failures


@pytest.mark.parametrize(
    ("failures", "said"), [(1, r"local mode .* local\[n, 4\], or start the query again"), (4, "up to 4 times in all")]
)
def test_a_task_that_cannot_go_on_says_what_spark_does_now(failures: int, said: str) -> None:
    config: Any = SimpleNamespace(task_failures=failures)
    root = Root(WindowsDefinition(config))
    with pytest.raises(errors.ServerUnreachable, match=rf"^gone\. .*{said}"), root._failing_cleanly():
        raise errors.ServerUnreachable("gone")
    with pytest.raises(errors.ApplyError, match=r"^mine$"), root._failing_cleanly():
        raise errors.ApplyError("mine")
