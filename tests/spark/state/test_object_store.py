"""A query whose versions lie in an object store, stopped and restarted from its checkpoint."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import aion
from aion.errors import StorageError
from state_backends.files.punching import can_punch
from state_backends.versions.audit import StateFolder
from tests.object_store import ObjectStore
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink, last_panes, plain
from tests.spark.state import test_hand_over as handed
from tests.spark.windows.test_windowed import ALL, BOUND, batches, locally, naive, server_pid, strip


def test_a_query_goes_on_with_its_state_in_an_object_store(
    stream: FileStream, spark: SparkSession, tmp_path: Path, bucket: ObjectStore, place: Callable[[str], None]
) -> None:
    """Restarted with another backend and budget, when the state has moved, and the state server is another one."""

    definition: dict[str, Any] = {
        "key": "k",
        "time": "ts",
        "windows": aion.Tumbling("10 seconds"),
        "aggregates": ALL,
    }

    def result(policy: dict[str, Any]) -> Any:
        events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
        return aion.windowed(events, **definition, policy={**BOUND, **policy})

    tables: list[pa.Table] = []
    first, *second = batches(4, count=3)
    stopped = Sink(tmp_path / "stopped")
    tables.append(stream.put(first))
    place(bucket.uri("state"))
    stopped.run(result({"memory": {"budget": "4KiB", "bucket_limit": "1KiB"}}))
    for path, data in bucket.objects().items():
        bucket.put(path.replace("state/", "elsewhere/", 1), data)
        bucket.fs.delete_file(f"{bucket.bucket}/{path}")
    os.kill(server_pid(spark), signal.SIGKILL)
    tables += [stream.put(rows) for rows in second]
    place(bucket.uri("elsewhere"))
    got = stopped.run(result({"state": {"backend": "rocksdb", "compression": "zstd"}}))
    state = aion.metrics.state(spark)
    assert state is not None
    (operators,) = (known for query, known in state.queries.items() if query == stopped.query_id)
    (asked,) = (known["requests_total"] for known in operators.values())
    assert asked["put"] > 0 and asked["get"] > 0 and asked["read_bytes"] > 0, "this server has opened the shards"
    assert {path.split("/")[0] for path in bucket.objects()} == {"elsewhere"}
    assert {path.split("/")[1] for path in bucket.objects()} == {stopped.query_id}
    undisturbed = naive(locally(tables, **definition, policy=BOUND))
    # The run that stopped had one batch more, without data, so it executed some windows earlier.
    assert plain(strip(last_panes(got, "k").values())) == plain(strip(last_panes(undisturbed, "k").values()))
    assert sum(r["events"] for r in got if r["kind"] == "dropped") == sum(
        r["events"] for r in undisturbed if r["kind"] == "dropped"
    )


@pytest.mark.proof
def test_a_bucket_that_is_not_there_is_named(
    stream: FileStream, sink: Sink, bucket: ObjectStore, place: Callable[[str], None]
) -> None:
    stream.put([("a", 1001, 1.0)])
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    place(bucket.uri("state", bucket="no-such-bucket"))
    result = aion.windowed(events, key="k", time="ts", windows=aion.Tumbling("10 seconds"), aggregates=ALL)
    with pytest.raises(StorageError, match=r"^state\.dir s3://no-such-bucket.*there is no bucket"):
        sink.run(result)


@pytest.mark.proof
def test_events_that_children_hand_over_lie_in_the_object_store(
    spark: SparkSession, tmp_path: Path, bucket: ObjectStore, place: Callable[[str], None]
) -> None:
    """The same panes as with rows, also after this host has lost its copies."""
    stream = FileStream(spark, tmp_path / "input", handed.SCHEMA)
    sinks = {limit: Sink(tmp_path / str(limit)) for limit in (None, "1")}
    place(bucket.uri("handed"))
    found: dict[Any, Any] = {}
    for files in (range(3), range(3, 5)):
        for file in files:
            stream.put(handed.rows(file, 60, 300))
        for limit, sink in sinks.items():
            events = stream.read(handed.DDL)
            definition = handed.DEFINITIONS["with a key"]
            found[limit] = sink.run(handed.panes(events, definition, distribution={"hand_over": limit}))
            bodies = [path for path in bucket.objects() if path.endswith(".bodies") and sink.query_id in path]
            kept = [path for path in bodies if "/files/" in path]
            assert bool(kept) == (limit is not None)
            left = {path.rpartition("/")[2][:21] for path in bodies if path not in kept}
            assert len(left) <= 1, "what children left is deleted with the next commit"
        os.kill(server_pid(spark), signal.SIGKILL)
        for path in copies(spark):
            path.unlink()
    assert plain(found["1"]) == plain(found[None])
    assert {row["kind"] for row in found["1"]} >= {"on_time", "late", "dropped"}
    with closing(StateFolder(bucket.uri("handed"))) as folder:
        findings = [folder.check(shard) for shard in folder.shards()]
    assert findings and not any(problem for finding in findings for problem in finding.files.values())
    assert any(name.endswith(".bodies") for finding in findings for name in finding.files)


LOCAL_COPIES = 4 << 20
SLACK = 8 << 20
"""For what a batch writes, 4 MB, a merged file that no version names yet, and what RocksDB needs of each file."""


@pytest.mark.proof
@pytest.mark.skipif(not can_punch(Path(tempfile.gettempdir())), reason="no holes in files here")
@pytest.mark.parametrize("hand_over", [None, "1"], ids=["rows", "handed over"])
def test_a_state_several_times_larger_than_the_copies_that_a_host_keeps(
    spark: SparkSession, tmp_path: Path, bucket: ObjectStore, place: Callable[[str], None], hand_over: str | None
) -> None:
    """``state.local_copies``: late events need all of it again, after the last batch and after a server has been
    killed. What the copies take is looked at after each batch.
    """
    stream = FileStream(spark, tmp_path / "input", handed.SCHEMA)
    place(bucket.uri("far"))
    largest: list[int] = []

    class Looking(Sink):
        def keep(self, batch: DataFrame, number: int) -> None:
            super().keep(batch, number)
            largest.append(sum({said.st_ino: 512 * said.st_blocks for said in copies(spark).values()}.values()))

    sink = Looking(tmp_path)
    policy: dict[str, Any] = {
        "lateness": {"initial_bound": "1 hour", "coverage": None},
        "trigger": {"kind": "every_batch"},
        "memory": {"budget": "1MiB", "bucket_limit": "64KiB"},
        "state": {"shards": 2, "local_copies": LOCAL_COPIES},
        "distribution": {"hand_over": hand_over},
    }
    definition = handed.DEFINITIONS["with a key"]
    draw = random.Random(1)
    all_rows: list[tuple[Any, ...]] = []

    def put(times: Sequence[float], payload: int) -> None:
        some = [(draw.choice("abcdefgh"), at, len(all_rows) + i, draw.randbytes(payload)) for i, at in enumerate(times)]
        all_rows.extend(some)
        stream.put(some)

    for file in range(8):
        put([1000.0 + 10 * file + 9 * draw.random() for _ in range(2000)], 2000)
    put([1100.0], 1)  # the watermark passes all of them
    sink.run(handed.panes(stream.read(handed.DDL), definition, **policy))
    stored = sum(len(data) for path, data in bucket.objects().items() if path.endswith((".sst", ".bodies")))
    assert stored > 6 * LOCAL_COPIES
    for _ in range(2):
        put([1000.0 + 10 * window + draw.random() for window in range(8) for _ in range(30)], 10)
        got = sink.run(handed.panes(stream.read(handed.DDL), definition, **policy))
        os.kill(server_pid(spark), signal.SIGKILL)
    expected: dict[tuple[str, int], list[tuple[Any, ...]]] = {}
    for row in all_rows:
        expected.setdefault((row[0], int(row[1] // 10) * 10), []).append(row)
    panes = last_panes([row for row in got if row["kind"] == "late"], "k")
    assert len(panes) == 64
    for (key, _, start), pane in panes.items():
        rows = expected[key, int(start.timestamp())]
        assert pane["n"] == len(rows) and pane["values"] == str(sorted(row[2] for row in rows))
        assert pane["payload"] == sum(sum(row[3]) for row in rows)
    assert max(largest) <= LOCAL_COPIES + SLACK, largest


def copies(spark: SparkSession) -> dict[Path, os.stat_result]:
    """The copies of remote files on this host. The state server's folder is on the first local disk of Spark's JVM."""
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    folder = Path(jvm.java.lang.System.getProperty("java.io.tmpdir")) / f"aion-{os.getuid()}"
    found = {}
    for path in folder.rglob("*"):
        if path.suffix in (".sst", ".bodies"):
            with contextlib.suppress(FileNotFoundError):
                found[path] = path.stat()
    return found
