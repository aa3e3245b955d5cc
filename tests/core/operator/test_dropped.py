"""Events that came too late: the same rows, however Spark's tasks made blocks of them."""

from __future__ import annotations

import pyarrow as pa
import pytest

import aion
from aion import aggregates as A
from aion.base.hashing import ShardOfKeys
from aion.execute.assembly import make_builder
from tests.durations import us


def table(times_us: list[int], values: list[int], key: str = "a") -> pa.Table:
    n = len(times_us)
    return pa.table({"k": [key] * n, "ts": pa.array(times_us, pa.timestamp("us")), "v": values})


@pytest.mark.parametrize("key", ["k", None])
def test_partials_of_several_tasks_that_come_too_late_are_one_row_for_each_key_and_window(key: str | None) -> None:
    policy = {"lateness": {"initial_bound": "0 s", "coverage": None}}
    aggregates = {"n": A.count(), "total": A.sum("v"), "values": A.collect_list("v")}
    with aion.LocalOperator(
        windows=aion.Tumbling(us(10)), key=key, time="ts", aggregates=aggregates, policy=policy
    ) as op:
        op.process(table([100], [0]))
        op.advance(50)
        windows = op._windows
        assert windows is not None
        blocks = []
        for times, values in (([1, 2], [5, 6]), ([3], [7]), ([12], [8])):  # each a task of its own
            builder = make_builder(windows.plan, op.policy, op._codec, ShardOfKeys([0]))
            for batch in table(times, values).select(windows.plan.schema.names).cast(windows.plan.schema).to_batches():
                blocks += [b.block for b in builder.add(batch)]
            blocks += [b.block for b in builder.finish()]
        rows = [row for batch in windows.arrive(blocks) for row in batch.to_pylist()]
    found = [(r["kind"], r["n"], r["total"], sorted(r["values"]), r["events"], r["lateness_us"]) for r in rows]
    assert found == [("dropped", 3, 18, [5, 6, 7], 3, 40), ("dropped", 1, 8, [8], 1, 30)]


def test_an_event_that_is_too_late_for_two_kinds_of_windows_is_counted_once() -> None:
    policy = {"lateness": {"initial_bound": "0 s", "coverage": None}}
    windows = {"fixed": aion.Tumbling(us(10)), "session": aion.Session(us(5))}
    with aion.LocalOperator(windows=windows, key="k", time="ts", aggregates={"n": A.count()}, policy=policy) as op:
        op.process(table([100], [0]))
        op.advance(50)
        found = op.process(table([1, 2, 3], [0, 0, 0])).to_pylist()
        assert [(row["kind"], row["events"]) for row in found] == [("dropped", 3)] * 2
        assert op.counters["dropped"] == op.counters["late_events"] == 3
