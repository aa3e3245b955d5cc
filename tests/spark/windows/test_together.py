"""On Spark: all shards of a query learn lateness together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.sql import SparkSession

import aion
from aion import aggregates as A
from aion.core.lateness.observe import Lateness
from state_backends.versions.audit import StateFolder
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink

BATCHES, MINUTES = 8, 4


def put(stream: FileStream) -> int:
    """Minutes of 10 events in time for each of 40 keys, and of key 0 40 late ones, 20 seconds late on average."""
    rng = np.random.default_rng(1)
    coming: list[tuple[float, float]] = []
    late = 0
    for batch in range(BATCHES):
        begin = 1000.0 + 60 * MINUTES * batch
        end = begin + 60 * MINUTES
        rows = [(str(k), float(ts), 1.0) for ts in np.arange(begin, end, 6.0) for k in range(40)]
        for minute in np.arange(begin, end, 10.0):
            coming += [(minute + 10 + float(us), minute) for us in rng.exponential(20, 7)]
        now = [ts for at, ts in coming if at < begin]  # a batch goes by the watermark of the one before
        coming = [(at, ts) for at, ts in coming if at >= begin]
        stream.put(rows + [("0", ts, 1.0) for ts in now])
        late += len(now)
    return late


def standings(state: Path, query: str) -> list[dict[str, Any]]:
    """What each shard's newest version says."""
    folder = StateFolder(str(state))
    try:
        found = [folder.check(s, contents=False, progress=lambda size: None) for s in folder.shards()]
        newest = [f.newest for f in found if f.query == query]
        return [v.manifest.snapshot["lateness"] for v in newest if v is not None and v.manifest is not None]
    finally:
        folder.close()


@pytest.mark.proof
def test_shards_learn_lateness_together(spark: SparkSession, stream: FileStream, sink: Sink) -> None:
    late = put(stream)
    policy = {
        "lateness": {"initial_bound": "60s", "coverage": 0.8, "confidence": 0.8, "model": "empirical"},
        "state": {"shards": 4},
    }
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    definition = {"key": "k", "windows": aion.Tumbling("10 seconds"), "aggregates": {"n": A.count()}}
    sink.run(aion.windowed(events, time="ts", policy=policy, **definition))
    found = standings(Path(spark.conf.get("spark.aion.state.dir") or ""), sink.query_id)
    seen = sorted(sum(Lateness.from_json(shard["lateness"]).counts.values()) for shard in found)
    assert seen[:3] == [0, 0, 0] and 0 < seen[3] <= late, "each keeps what itself has seen"
    standing = found[0]["learnt_bound"]
    assert [shard["learnt_bound"]["decision"] for shard in found] == [standing["decision"]] * 4
    assert standing["shards"] == 4 and standing["decision"]["reason"] == "learnt"
