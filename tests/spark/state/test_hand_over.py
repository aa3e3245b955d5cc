"""Events that children hand over in files: the same panes as with rows, from fewer bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import aion
from tests.spark.conftest import FileStream, Sink, plain

SCHEMA = pa.schema([("k", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("v", pa.int64()), ("p", pa.binary())])
DDL = "k string, ts timestamp, v bigint, p binary"
POLICY: dict[str, Any] = {
    "lateness": {"initial_bound": "90 seconds", "coverage": None},
    "trigger": {"kind": "every_batch"},
    "state": {"shards": 4},
}
DEFINITIONS: dict[str, dict[str, Any]] = {
    "with a key": {"key": "k", "windows": aion.Tumbling("10 seconds")},
    "without a key": {"windows": {"wide": aion.Sliding("20 seconds", "10 seconds"), "gap": aion.Session("3 seconds")}},
}


def rows(file: int, count: int, payload: int) -> list[tuple[Any, ...]]:
    draw = random.Random(file)
    late = lambda: draw.choice([0, 0, 0, 15, 200])  # noqa: E731
    return [
        (draw.choice([None, *"abcdefgh"]), 1000.0 + 10 * file + draw.random() * 10 - late(), i, draw.randbytes(payload))
        for i in range(count)
    ]


def digest(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    """Depends on all rows, and not on their order."""
    batches = list(events)
    values = sorted(v for batch in batches for v in batch.column("v").to_pylist())
    payload = sum(sum(p) for batch in batches for p in batch.column("p").to_pylist())
    return {"n": len(values), "values": str(values), "payload": payload}


def panes(df: Any, definition: dict[str, Any], **policy: Any) -> Any:
    return aion.windowed(
        df.withWatermark("ts", "0 seconds"),
        time="ts",
        apply=aion.Apply(digest, "n bigint, values string, payload bigint"),
        policy={**POLICY, **policy},
        **definition,
    )


@pytest.mark.parametrize(
    ("definition", "restarts"),
    [
        pytest.param("with a key", False, marks=pytest.mark.proof),
        pytest.param("with a key", True, marks=pytest.mark.proof),
        pytest.param("without a key", True, marks=pytest.mark.proof),
    ],
)
def test_both_carriers_bring_the_same_panes(
    spark: SparkSession, tmp_path: Path, definition: str, restarts: bool
) -> None:
    stream = FileStream(spark, tmp_path / "input", SCHEMA)
    sinks = {limit: Sink(tmp_path / str(limit)) for limit in (None, "1")}
    for files in (range(3), range(3, 5)) if restarts else (range(4),):
        found = {}
        for file in files:
            stream.put(rows(file, 60, 300))
        for limit, sink in sinks.items():
            found[limit] = sink.run(panes(stream.read(DDL), DEFINITIONS[definition], distribution={"hand_over": limit}))
            assert bool(handed(spark, sink)) == (limit is not None)
        assert plain(found["1"]) == plain(found[None])
    assert {row["kind"] for row in found["1"]} >= {"on_time", "late", "dropped"}


def test_many_bytes_are_handed_over_and_few_are_not(spark: SparkSession, tmp_path: Path) -> None:
    """By the default limit, through a level that merges. Each byte is written once."""
    stream = FileStream(spark, tmp_path / "input", SCHEMA)
    for file in range(3):
        stream.put(rows(file, 3000, 1500))
    stream.put(rows(3, 5, 10))
    sink = Sink(tmp_path)
    tree = {"merge_levels": 1}
    got = sink.run(panes(stream.read(DDL), DEFINITIONS["with a key"], state={"shards": 2}, distribution=tree))
    assert sum(row["n"] for row in got if row["kind"] == "on_time") > 5000
    assert {int(path.name[11:21]) for path in handed(spark, sink)} == {0, 1, 2}, "the last batch was small"
    sst = sum(path.stat().st_size for path in state_of(spark, sink).rglob("*.sst"))
    bodies = sum({path.stat().st_ino: path.stat().st_size for path in handed(spark, sink)}.values())
    assert bodies > 9_000_000 and sst < 0.5 * bodies


def handed(spark: SparkSession, sink: Sink) -> list[Path]:
    """The files of bodies that versions of the sink's query have linked."""
    return list(state_of(spark, sink).rglob("shard-*/files/*.bodies"))


def state_of(spark: SparkSession, sink: Sink) -> Path:
    place = spark.conf.get("spark.aion.state.dir")
    assert place is not None
    return Path(place) / sink.query_id
