"""Events that come more than once, on Spark: over batches, restarts and files, late ones, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import aion
from aion import aggregates as A
from tests.spark.conftest import EVENTS, EVENTS_DDL, FileStream, Sink

POLICY = {"lateness": {"initial_bound": "1 hour", "coverage": None}, "trigger": {"kind": "every_batch"}}
BATCHES = [
    [("a", 10, 1.0), ("b", 20, 2.0), ("a", 10, 1.0), ("a", 10, 3.0), (None, 10, 1.0)],
    [("a", 10, 1.0), ("b", 200, 4.0), ("b", 200, 4.0)],
    [("b", 20, 2.0), ("a", 11, 5.0), ("a", 190, 6.0), (None, 10, 1.0), ("a", None, 1.0), ("a", None, 1.0)],
    [("a", 11, 5.0), ("a", 300, 7.0), ("a", 190, 6.0), ("b", 201, 8.0)],
    [("a", 300, 7.0), ("b", 400, 9.0), ("b", 20, 2.0)],
]


def total(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    table = pa.Table.from_batches(list(events))
    return {"n": table.num_rows, "total": sum(table.column("v").to_pylist())}


CONTENTS: dict[str, dict[str, Any]] = {
    "aggregates": {"aggregates": {"n": A.count(), "total": A.sum("v")}},
    "apply": {"apply": aion.Apply(total, "n long, total double")},
}


TUMBLING, COUNT, SESSION = aion.Tumbling("1 minute"), aion.Count(2), aion.Session("30 seconds")


@pytest.mark.parametrize(
    ("window", "content"),
    [
        (TUMBLING, "aggregates"),
        *(
            pytest.param(window, content, marks=pytest.mark.proof)
            for window, content in (
                (TUMBLING, "apply"),
                (SESSION, "aggregates"),
                (SESSION, "apply"),
                (COUNT, "aggregates"),
                (COUNT, "apply"),
            )
        ),
    ],
    ids=str,
)
def test_each_event_counts_once(stream: FileStream, sink: Sink, window: Any, content: str) -> None:
    """The panes are those of a run in which each event comes once. The query starts again after two of the batches."""
    definition: dict[str, Any] = {"key": "k", "time": "ts", "windows": window, "policy": POLICY, **CONTENTS[content]}
    seen: set[Any] = set()
    expected: list[dict[str, Any]] = []
    with aion.LocalOperator(input_schema=EVENTS, **definition) as once:
        latest = None
        for number, batch in enumerate(BATCHES):
            stream.put(batch)
            if number in (0, 2, len(BATCHES) - 1):
                events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
                rows = sink.run(aion.windowed(events, unique="v", name="once", **definition))
            new = [e for e in dict.fromkeys(batch) if not (e in seen or seen.add(e))]
            new += [e for e in batch if e[1] is None and e not in new]
            times = [None if t is None else t * 1_000_000 for _, t, _ in new]
            columns = [[k for k, _, _ in new], pa.array(times, EVENTS.field("ts").type), [v for *_, v in new]]
            expected += once.process(pa.table(columns, schema=EVENTS), latest).to_pylist()
            latest = max(filter(None, [latest, *(t for t in times if t is not None)]))
            expected += once.advance(latest).to_pylist()
    assert newest(rows) == newest(expected)
    assert sum(row["events"] for row in rows if row["kind"] == "dropped") == 2  # without a time


def newest(rows: list[dict[str, Any]]) -> dict[Any, Any]:
    """The last pane of each window, without those that were retracted."""
    found: dict[Any, Any] = {}
    for row in sorted(rows, key=lambda row: (row["pane"] or 0, row["kind"] == "retracted")):
        if row["kind"] != "dropped":
            place = row["k"], row["window_start"].timestamp(), row["window_end"].timestamp()
            if row["kind"] == "retracted":
                del found[place]
            else:
                found[place] = row["n"], row["total"], row["events"]
    return found


@pytest.mark.proof
@pytest.mark.parametrize("levels", [0, 1])
def test_files_and_merging_levels(spark: SparkSession, stream: FileStream, sink: Sink, levels: int) -> None:
    """Once by Aion's reader, with merging levels or without, and once by Spark's."""
    definition: dict[str, Any] = {
        "key": "k", "time": "ts", "windows": aion.Tumbling("1 minute"), "unique": "v",
        "policy": {**POLICY, "distribution": {"merge_levels": levels}}, **CONTENTS["aggregates"],
    }  # fmt: skip
    for batch in BATCHES:
        stream.put(batch)
    files = aion.read_files(
        spark, f"{stream.folder}/*.parquet", schema=EVENTS_DDL, watermark=("ts", "0 seconds"), max_files_per_trigger=1
    )
    rows = sink.run(aion.windowed(files, **definition))
    other = Sink(sink.folder / "rows")
    of_rows = other.run(aion.windowed(stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"), **definition))
    assert newest(rows) == newest(of_rows)
    different = {event for batch in BATCHES for event in batch if event[1] is not None}
    assert sum(n for n, *_ in newest(rows).values()) == len(different) - 1  # the last window has not ended
