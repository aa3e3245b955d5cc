"""Levels between child and root on Spark: the same panes for any tree, and what is told of it."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import aion
from aion import aggregates as A
from aion.core.ingest.fragments import fragment_bytes
from aion.errors import ConfigError
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink, last_panes, plain
from tests.spark.windows.test_windowed import BOUND, batches, locally, naive

MIXED = {"n": A.count(), "total": A.sum("v"), "middle": A.median("v"), "distinct": A.count_distinct("v")}
KEPT: dict[str, Any] = {
    "apply": aion.Apply(
        lambda key, window, events: {"s": sum(v or 0.0 for b in events for v in b.column("v").to_pylist())}, "s double"
    ),
}


def split(stream: FileStream, spark: SparkSession, partitions: int) -> Any:
    """The stream with its events strewn over so many partitions, as from so many sources."""
    return stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds").repartition(partitions)


@pytest.mark.proof
@pytest.mark.parametrize(
    ("how", "trees"),
    [({"aggregates": MIXED}, (0, 1, 2)), (KEPT, (0, 2))],
    ids=["partials and values", "events"],
)
def test_any_number_of_levels_gives_the_same_panes(
    stream: FileStream, spark: SparkSession, tmp_path: Path, how: dict[str, Any], trees: tuple[int, ...]
) -> None:
    for rows in batches(7, count=2, size=150):
        stream.put(rows)
    results = {}
    for levels in trees:
        tree = {"children": 4, "merge_levels": levels, "fan_in": 2}
        result = aion.windowed(
            split(stream, spark, 5),
            key="k",
            time="ts",
            windows=[aion.Tumbling("10 seconds"), aion.Sliding("25 seconds", "10 seconds")],
            policy={**BOUND, "blocks": {"target": "512B"}, "distribution": tree},
            **how,
        )
        results[levels] = plain(Sink(tmp_path / str(levels)).run(result))
    assert all(result == results[0] for result in results.values())
    assert len(results[0]) > 50


WIDE = pa.schema([("k", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("payload", pa.binary())])
WIDE_DDL = "k string, ts timestamp, payload binary"


@pytest.mark.proof
def test_blocks_larger_than_a_row_of_spark_may_be_arrive_whole(spark: SparkSession, tmp_path: Path) -> None:
    """Events of up to 40 KB, where as many rows are allowed in a batch as make a kilobyte the limit of one."""
    mine = spark.newSession()  # settings of its own
    mine.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100000")
    assert fragment_bytes(100_000) == 1024
    stream = FileStream(mine, tmp_path / "input", WIDE)
    draw = random.Random(11)
    truth: dict[tuple[str, int], list[str]] = {}
    for batch in range(3):
        rows = []
        for _ in range(30):
            key, at = draw.choice("abc"), 10 * batch + draw.randrange(10)
            payload = draw.randbytes(draw.randrange(40_000))
            rows.append((key, at, payload))
            truth.setdefault((key, at // 10), []).append(hashlib.sha256(payload).hexdigest())
        stream.put(rows)
    result = aion.windowed(
        stream.read(WIDE_DDL).withWatermark("ts", "0 seconds"),
        key="k",
        time="ts",
        windows=aion.Tumbling("10 seconds"),
        apply=aion.Apply(_digests, "digests array<string>"),
        policy={**BOUND, "distribution": {"merge_levels": 1}},
    )
    last = last_panes(Sink(tmp_path).run(result), "k")
    got = {(k, int(start.timestamp()) // 10): sorted(row["digests"]) for (k, _, start), row in last.items()}
    # The last of the three windows has not ended yet.
    assert got == {(k, at): sorted(digests) for (k, at), digests in truth.items() if at < 2}


def _digests(key: Any, window: Any, events: Any) -> dict[str, Any]:
    return {"digests": [hashlib.sha256(p).hexdigest() for batch in events for p in batch.column("payload").to_pylist()]}


def test_explain_tells_what_windowed_would_do_and_starts_nothing(
    stream: FileStream, spark: SparkSession, tmp_path: Path
) -> None:
    definition: dict[str, Any] = {
        "key": "k",
        "time": "ts",
        "windows": [aion.Tumbling("10 seconds"), aion.Sliding("25 seconds", "10 seconds")],
        "aggregates": MIXED,
    }
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    tree = {"children": 8, "merge_levels": 2}
    told = aion.explain(events, **definition, policy={"distribution": {**tree, "fan_in": 2}})
    assert "child -> level 1 -> level 2 -> root: 3 shuffles" in told
    assert "4 nodes in 4 tasks, each of up to 2 of 8 source partitions" in told
    assert "2 shards in 2 tasks" in told
    assert "merged as context-free" in told
    traced = {"distribution": {**tree, "fan_in": 2}, "trace": {"folder": tmp_path / "trace"}}
    assert aion.explain(events, **definition, policy=traced) == told
    assert not (tmp_path / "trace").exists()
    alone = aion.explain(events, **definition, policy={"distribution": {**tree, "keys_disjoint": True}})
    assert "merged as unique" in alone
    assert "child -> root: 1 shuffle" in alone
    assert not spark.streams.active


def test_what_makes_no_tree_is_refused(stream: FileStream) -> None:
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    definition: dict[str, Any] = {"time": "ts", "windows": aion.Tumbling("10 seconds"), "aggregates": MIXED}
    for wrong, said in (
        ({"merge_levels": -1}, "merge_levels: -1 is not possible; write an integer from 0 to 64"),
        ({"fan_in": 1}, "fan_in: 1 is not possible; write an integer from 2 to 1,000,000"),
        ({"keys_disjoint": 2}, "keys_disjoint: 2 is not possible; write true or false"),
    ):
        with pytest.raises(ConfigError, match=said):
            aion.windowed(events, **definition, policy={"distribution": wrong})


@pytest.mark.proof
def test_disjoint_keys_skip_the_levels_and_have_the_same_panes(stream: FileStream, sink: Sink) -> None:
    """Every source partition has keys of its own. There is nothing to merge, so the levels are left out."""
    definition: dict[str, Any] = {
        "key": "k",
        "time": "ts",
        "windows": {"slide": aion.Sliding("20 seconds", "10 seconds"), "visit": aion.Session("2 seconds")},
        "aggregates": MIXED,
    }
    tables = [stream.put(rows) for rows in batches(11, count=2)]
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds").repartition(3, "k")
    policy = {**BOUND, "state": {"shards": 1}}
    levels: dict[str, Any] = {"policy": {**policy, "distribution": {"keys_disjoint": True, "merge_levels": 2}}}
    assert "child -> root: 1 shuffle" in aion.explain(events, **definition, **levels)
    got = sink.run(aion.windowed(events, **definition, **levels))
    assert plain(got) == plain(naive(locally(tables, **definition, policy=policy)))
    assert {"on_time", "late", "retracted"} <= {row["kind"] for row in got}


@pytest.mark.proof
def test_levels_may_change_between_two_starts(stream: FileStream, sink: Sink) -> None:
    definition: dict[str, Any] = {
        "key": "k",
        "time": "ts",
        "windows": aion.Tumbling("10 seconds"),
        "aggregates": MIXED,
    }
    policy = {**BOUND, "state": {"shards": 1}}
    tables, got = [], []
    for levels, rows in enumerate(batches(9, count=2)):
        tables.append(stream.put(rows))
        events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
        tree = {"distribution": {"merge_levels": levels}}
        got = sink.run(aion.windowed(events, **definition, policy={**policy, **tree}))
    assert plain(got) == plain(naive(locally(tables, **definition, policy=policy)))
    assert {row["kind"] for row in got} >= {"on_time", "late"}
