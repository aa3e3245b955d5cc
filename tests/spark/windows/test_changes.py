"""``emit="changes"`` on Spark: what each batch changed, over restarts and a batch that runs again."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame

import aion
from aion import aggregates as A
from aion.errors import SchemaError
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink

BATCHES = [
    [("a", 10, 1.0), ("b", 20, 2.0)],
    [("a", 100, 1.0), ("b", 20, 0.0)],
    [("a", 30, 5.0), ("b", 110, 3.0)],
    [("a", 200, 1.0)],
    [("a", 201, 1.0)],
    [("a", 31, 2.0)],
]


def counted(stream: FileStream, **changes: Any) -> DataFrame:
    definition: dict[str, Any] = {"key": "k", "time": "ts", "windows": aion.Tumbling("1 minute"), "bound": "1 hour"}
    definition |= {"aggregates": {"n": A.count(), "total": A.sum("v")}, "trigger": "every_batch", "emit": "changes"}
    return aion.windowed(stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"), **(definition | changes))


def test_each_batch_says_what_was_before(stream: FileStream, sink: Sink) -> None:
    for number, batch in enumerate(BATCHES):
        stream.put(batch)
        if number in (1, 2, 5):
            rows = sink.run(aion.changes(counted(stream)))
    found = sorted(
        (r["k"], int(r["window_start"].timestamp()), r["old_n"] or 0, r["old_total"], r["n"], r["total"]) for r in rows
    )
    assert found == [
        ("a", 0, 0, None, 1, 1.0),
        ("a", 0, 1, 1.0, 2, 6.0),
        ("a", 0, 2, 6.0, 3, 8.0),
        ("a", 60, 0, None, 1, 1.0),
        ("b", 0, 0, None, 2, 2.0),
        ("b", 60, 0, None, 1, 3.0),
    ]
    assert not {"event", "reason"} & set(rows[0])


@pytest.mark.proof
def test_a_batch_that_runs_again_says_the_same(stream: FileStream, sink: Sink) -> None:
    """The sink fails once, after the state was committed."""
    seen: list[Any] = []
    fails = True

    def write(batch: DataFrame, number: int) -> None:
        rows = sorted((r["k"], r["old_n"], r["n"]) for r in batch.collect())
        seen.append((number, rows))
        if rows and fails:
            raise RuntimeError("the sink is broken")

    for batch in BATCHES:
        stream.put(batch)
    for again in (False, True):
        fails = not again
        query = (
            aion.changes(counted(stream))
            .writeStream.foreachBatch(write)
            .option("checkpointLocation", str(sink.folder / "cp"))
            .trigger(availableNow=True)
            .start()
        )
        if fails:
            with pytest.raises(StreamingQueryException, match="the sink is broken"):
                query.awaitTermination()
        else:
            query.awaitTermination()
    failed = next(entry for entry in seen if entry[1])
    assert seen.count(failed) == 2
    assert [row for _, rows in seen for row in rows if row[1] is not None] == [("a", 2, 3)]


def test_other_results_have_no_changes(stream: FileStream) -> None:
    with pytest.raises(SchemaError, match=r"the result has no old values; give aion\.windowed\(..., emit='changes'\)"):
        aion.changes(counted(stream, emit="all"))
