"""A query whose versions lie in an object store, stopped and restarted from its checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import aion
from aion.errors import StorageError
from state_backends.files.location import scratch
from state_backends.versions.audit import StateFolder
from tests.object_store import ObjectStore
from tests.spark import test_hand_over as hand_over
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink, last_panes, plain
from tests.spark.test_windowed import ALL, BOUND, batches, locally, naive, server_pid, strip


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
    stream = FileStream(spark, tmp_path / "input", hand_over.SCHEMA)
    sinks = {limit: Sink(tmp_path / str(limit)) for limit in (None, "1")}
    place(bucket.uri("handed"))
    found: dict[Any, Any] = {}
    for files in (range(3), range(3, 5)):
        for file in files:
            stream.put(hand_over.rows(file, 60, 300))
        for limit, sink in sinks.items():
            events = stream.read(hand_over.DDL)
            definition = hand_over.DEFINITIONS["with a key"]
            found[limit] = sink.run(hand_over.panes(events, definition, distribution={"hand_over": limit}))
            bodies = [path for path in bucket.objects() if path.endswith(".bodies") and sink.query_id in path]
            kept = [path for path in bodies if "/files/" in path]
            assert bool(kept) == (limit is not None)
            left = {path.rpartition("/")[2][:21] for path in bodies if path not in kept}
            assert len(left) <= 1, "what children left is deleted with the next commit"
        os.kill(server_pid(spark), signal.SIGKILL)
        for path in scratch().rglob("*.bodies"):
            path.unlink()
    assert plain(found["1"]) == plain(found[None])
    assert {row["kind"] for row in found["1"]} >= {"on_time", "late", "dropped"}
    with closing(StateFolder(bucket.uri("handed"))) as folder:
        findings = [folder.check(shard) for shard in folder.shards()]
    assert findings and not any(problem for finding in findings for problem in finding.files.values())
    assert any(name.endswith(".bodies") for finding in findings for name in finding.files)
