"""Windows that nothing comes to leave memory, whatever is computed of them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import aion
from aion import aggregates as A
from aion.local import LocalOperator

SECOND = 1_000_000
MINUTE = 60 * SECOND
WHAT: dict[str, dict[str, Any]] = {
    "aggregates": {"windows": aion.Tumbling("1 minute"), "aggregates": {"n": A.count(), "m": A.median("x")}},
    "apply": {
        "windows": aion.Tumbling("1 minute"),
        "apply": aion.Apply(lambda key, window, events: {"n": sum(b.num_rows for b in events)}, "n long"),
    },
    "sessions": {"windows": aion.Session("1 minute"), "aggregates": {"n": A.count()}},
}


def events(second: int) -> pa.Table:
    at = pa.array([second * SECOND + n for n in range(1000)], pa.timestamp("us", "UTC"))
    return pa.table({"k": pa.array([0] * 1000), "ts": at, "x": pa.array(range(1000), pa.float64())})


@pytest.mark.parametrize("what", WHAT)
def test_a_multiple_of_an_execution_is_known_once_there_was_one(what: str) -> None:
    """The open window got its events before the other was executed, which took longer than a tenth of that."""
    policy = {"destage": {"idle_after": "0.1x"}}
    with LocalOperator(key="k", time="ts", policy=policy, **WHAT[what]) as operator:
        operator.process(pa.concat_tables([events(0), events(600)]))
        assert operator.store.views(), "no execution yet: nothing says what idle means"
        operator.advance(5 * MINUTE)
        assert operator.counters["executions"]["on_time"] == 1
        operator.store.persist()
        assert {view["name"] // MINUTE for view in operator.store.views()}.isdisjoint({10}), "it is on disk"
        assert operator.store.processing_bytes_per_s is not None, "what sizing needs"
        assert operator.advance(20 * MINUTE).num_rows == 1
