"""What users do to checkpoints: copy them, move them, restore them from a backup, change their partitions."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from typer.testing import CliRunner

import aion
from aion import aggregates as A
from aion.cli import app
from tests.spark.conftest import EVENTS_DDL, FileStream, last_panes

KEYS = "abcdefghijklmnop"


class Query:
    """A query that counts and sums, late events included; what each batch gave, a batch run again only once."""

    def __init__(self, spark: SparkSession, stream: FileStream, folder: Path, state_dir: Path, **policy: Any) -> None:
        self.checkpoint = folder / "checkpoint"
        self._spark, self._stream, self._state_dir, self._policy = spark, stream, state_dir, policy
        self.of_batch: dict[int, list[dict[str, Any]]] = {}
        self.fails = False

    def run(self) -> None:
        """Takes all that has come."""
        before = self._spark.conf.get("spark.aion.state.dir")
        self._spark.conf.set("spark.aion.state.dir", str(self._state_dir))
        try:
            panes = aion.windowed(
                self._stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"),
                key="k",
                time="ts",
                windows=aion.Tumbling("10 seconds"),
                aggregates={"n": A.count(), "total": A.sum("v")},
                policy={
                    "lateness": {"initial_bound": "1h"},
                    "trigger": {"kind": "every_batch"},
                    **self._policy,
                },
            )
        finally:
            self._spark.conf.set("spark.aion.state.dir", before or "")
        rows = panes.withColumn("window_start", F.unix_micros("window_start")).drop("window_end", "event_time")
        query = (
            rows.writeStream.foreachBatch(self._keep)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    def _keep(self, rows: DataFrame, batch: int) -> None:
        if self.fails:
            rows.collect()
            raise RuntimeError("the sink is out of order")
        self.of_batch[batch] = [row.asDict() for row in rows.collect()]

    def copy(self, folder: Path) -> Query:
        """A query with a copy of the checkpoint."""
        copy = Query(self._spark, self._stream, folder, self._state_dir, **self._policy)
        shutil.copytree(self.checkpoint, copy.checkpoint)
        copy.of_batch = dict(self.of_batch)
        return copy

    def check(self, events: list[Any]) -> None:
        """The last panes are those of a computation over all events."""
        truth: dict[tuple[str, int], list[float]] = defaultdict(list)
        for k, ts, v in events:
            truth[k, int(ts // 10) * 10_000_000].append(v)
        rows = last_panes([row for batch in sorted(self.of_batch) for row in self.of_batch[batch]], "k")
        newest = max(start for _, start in truth)
        found = {(k, start): (row["n"], row["total"]) for (k, _, start), row in rows.items()}
        assert found == {w: (len(values), sum(values)) for w, values in truth.items() if w[1] < newest}


@pytest.fixture
def retained(spark: SparkSession) -> Iterator[Any]:
    """Sets how many batches Spark keeps."""
    key = "spark.sql.streaming.minBatchesToRetain"
    before = spark.conf.get(key)
    yield lambda batches: spark.conf.set(key, str(batches))
    spark.conf.set(key, before or "100")


def batch(number: int) -> list[tuple[str, int, float]]:
    """Events on time, some late ones, and the end of what was before."""
    at = 1000 + 10 * number
    late = [(KEYS[(number * 3 + i) % 16], max(1000, at - 10 * i - 5), 1.0) for i in range(1, 4)]
    return [*((k, at + i % 10, float(i)) for i, k in enumerate(KEYS)), *late, ("end", at + 10, 0.0)]


def put(stream: FileStream, numbers: range, events: list[Any]) -> None:
    for number in numbers:
        rows = batch(number)
        stream.put(rows)
        events += rows


@pytest.mark.proof
@pytest.mark.parametrize("keeps", [2])
def test_a_copied_checkpoint_and_its_original_both_go_on(
    spark: SparkSession, stream: FileStream, tmp_path: Path, retained: Any, keeps: int
) -> None:
    """Whichever runs ahead, and however often they take turns."""
    retained(keeps)
    state, events = tmp_path / "state", list[Any]()
    original = Query(spark, stream, tmp_path / "original", state)
    put(stream, range(3), events)
    original.run()
    copy = original.copy(tmp_path / "copy")
    put(stream, range(3, 9), events)
    copy.run()
    copy.check(events)
    original.run()
    original.check(events)
    put(stream, range(9, 12), events)
    original.run()
    original.check(events)
    # Gone, but for what Spark itself reads of it for the copy: it notes the whole path of its files of schemas.
    (original.checkpoint / "metadata").unlink()
    copy.run()
    copy.check(events)
    listed = CliRunner().invoke(app, ["inspect", str(state), "--lineages"])
    assert listed.exit_code == 0, listed.output
    for checkpoint, is_there in ((original.checkpoint, "gone"), (copy.checkpoint, "exists")):
        assert f"for the checkpoint file:{checkpoint} ({is_there})" in listed.output
    refused = CliRunner().invoke(app, ["inspect", str(state), "--forget", _lineage(state)])
    assert refused.exit_code != 0 and "exists" in refused.output, refused.output
    forgotten = CliRunner().invoke(app, ["inspect", str(state), "--forget", "first"])
    assert forgotten.exit_code == 0, forgotten.output
    assert not list(state.glob("*/windowed/shard-*"))
    put(stream, range(12, 14), events)
    copy.run()
    copy.check(events)


def _lineage(state: Path) -> str:
    (folder,) = state.glob("*/windowed/lineage-*")
    return folder.name


@pytest.mark.proof
def test_a_moved_checkpoint_goes_on(spark: SparkSession, stream: FileStream, tmp_path: Path) -> None:
    events: list[Any] = []
    query = Query(spark, stream, tmp_path / "one", tmp_path / "state")
    put(stream, range(2), events)
    query.run()
    moved = query.copy(tmp_path / "two")
    (query.checkpoint / "metadata").unlink()  # see above
    put(stream, range(2, 4), events)
    moved.run()
    moved.check(events)


@pytest.mark.proof
def test_a_restored_backup_is_an_older_batch(
    spark: SparkSession, stream: FileStream, tmp_path: Path, retained: Any
) -> None:
    retained(3)
    events: list[Any] = []
    query = Query(spark, stream, tmp_path / "one", tmp_path / "state")
    put(stream, range(3), events)
    query.run()
    backups = [tmp_path / "old", tmp_path / "new"]
    shutil.copytree(query.checkpoint, backups[0])
    put(stream, range(3, 6), events)
    query.run()
    shutil.copytree(query.checkpoint, backups[1])
    put(stream, range(6, 8), events)
    query.run()
    for backup, works in ((backups[1], True), (backups[0], False)):
        shutil.rmtree(query.checkpoint)
        shutil.copytree(backup, query.checkpoint)
        if works:
            query.run()
            query.check(events)
        else:
            with pytest.raises(Exception, match="restored from a backup"):
                query.run()


@pytest.mark.proof
def test_a_batch_may_fail_after_its_commit_even_if_one_batch_is_kept(
    spark: SparkSession, stream: FileStream, tmp_path: Path, retained: Any
) -> None:
    retained(1)
    events: list[Any] = []
    query = Query(spark, stream, tmp_path / "one", tmp_path / "state")
    for number in range(4):
        put(stream, range(number, number + 1), events)
        query.fails = True
        with pytest.raises(Exception, match="out of order"):
            query.run()
        query.fails = False
        query.run()
    query.check(events)


@pytest.mark.proof
def test_partitions_that_spark_changed_offline_serve_the_same_shards(
    spark: SparkSession, stream: FileStream, tmp_path: Path
) -> None:
    manager = getattr(spark, "_streamingCheckpointManager", None)
    if manager is None:
        pytest.skip("Spark repartitions checkpoints from 4.2 on")
    before = spark.conf.get("spark.sql.shuffle.partitions")
    events: list[Any] = []
    query = Query(spark, stream, tmp_path / "one", tmp_path / "state", state={"shards": 16})
    try:
        spark.conf.set("spark.sql.shuffle.partitions", "4")
        put(stream, range(3), events)
        query.run()
        for number, partitions in enumerate((8, 3, 4)):
            manager.repartition(str(query.checkpoint), partitions)
            spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
            put(stream, range(3 + 2 * number, 5 + 2 * number), events)
            query.run()
            query.check(events)
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before or "2")
