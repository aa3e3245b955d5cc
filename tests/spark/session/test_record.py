"""A trace recorded on Spark: what came is in it, once, and a replay executes what the query executed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import aion
from aion.config import load_policy
from aion.execute.record.trace import read_trace
from aion.tools.tune.disk import Machine
from aion.tools.tune.simulator import simulate
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink


def how_many(key: Any, window: Any, events: Any) -> dict[str, int]:
    return {"n": sum(batch.num_rows for batch in events)}


@pytest.mark.proof
def test_a_replay_executes_what_the_query_executed(stream: FileStream, sink: Sink, tmp_path: Path) -> None:
    policy = {"lateness": {"initial_bound": "100 seconds", "coverage": None}, "trigger": {"bound": 0.3}}
    for batch in range(4):
        now = 1000 + 20 * batch
        stream.put([("a", now, 1.0), ("b", now - 15, 1.0), ("c", now - 45, 1.0)])
    events = stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds")
    panes = aion.windowed(
        events,
        time="ts",
        windows=aion.Tumbling("20 seconds"),
        apply=aion.Apply(how_many, "n bigint"),
        policy={**policy, "trace": {"folder": tmp_path / "trace"}},
    )
    got = Counter(row["kind"] for row in sink.run(panes) if row["kind"] != "dropped")
    trace = read_trace(tmp_path / "trace")
    assert trace.events == 12
    assert trace.definition.commits
    # What the state server knows of its files came with an opening.
    assert trace.writing is not None and trace.writing.bytes_per_s > 0
    found = simulate(trace, load_policy(policy), Machine(1e9, 1e-5, 1e9, 1e-3, 1e9))
    assert {kind: n for kind, n in found.executions.items() if n} == dict(got)
    assert found.executions["on_time"] > 0 and found.executions["late"] + found.executions["final"] > 0
