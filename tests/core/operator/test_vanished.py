"""A key for which the function returns nothing any more is retracted: its old rows are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

import aion

SECOND = 1_000_000
POLICY: dict[str, Any] = {
    "lateness": {"initial_bound": "1 hour", "coverage": None},
    "trigger": {"kind": "every_batch"},
}
WINDOWS = {
    "tumbling": aion.Tumbling("10 seconds"),
    "sliding": aion.Sliding("10 seconds", "5 seconds"),
    "cumulative": aion.Cumulative("5 seconds", "10 seconds"),
    "session": aion.Session("20 seconds"),
    "count": aion.Count(100),
}


def few(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> list[dict[str, Any]]:
    """A row for each event, as long as they are few."""
    rows = sum(batch.num_rows for batch in events)
    return [{"n": rows}] * rows if rows <= 2 else []


def table(*events: tuple[str, int]) -> pa.Table:
    keys, seconds = zip(*events, strict=True)
    return pa.table({"k": list(keys), "ts": pa.array([s * SECOND for s in seconds], pa.timestamp("us", "UTC"))})


def told(rows: pa.Table) -> list[tuple[Any, ...]]:
    return sorted(
        (row.get("k"), row["window_start"].timestamp(), row["kind"], row["n"], row["pane"], row["events"])
        for row in rows.to_pylist()
    )


@pytest.mark.parametrize("memory", ["1 GiB", "1 MiB"])
def test_it_is_retracted_once(memory: str) -> None:
    policy = {**POLICY, "apply": {"memory": memory}}
    with aion.LocalOperator(
        windows=WINDOWS["tumbling"], key="k", time="ts", apply=aion.Apply(few, "n int"), policy=policy
    ) as operator:
        operator.process(table(("a", 1), ("b", 1), ("c", 1)))
        assert [kind for _, _, kind, *_ in told(operator.advance(20 * SECOND))] == ["on_time"] * 3
        found = operator.process(table(("a", 2), ("b", 2), ("b", 3), *[("d", 4)] * 3))
        # The function has nothing to say of d, and never had.
        assert told(found) == [("a", 0, "late", 2, 1, 2), ("a", 0, "late", 2, 1, 2), ("b", 0, "retracted", None, 1, 0)]
        assert found.schema == operator.process(table(("a", 30))).schema
        assert told(operator.process(table(("c", 2)))) == [("c", 0, "late", 2, 2, 2)] * 2


@pytest.mark.parametrize("key", ["k", None])
@pytest.mark.parametrize("kind", WINDOWS)
def test_all_kinds_of_windows(kind: str, key: str | None) -> None:
    with aion.LocalOperator(
        windows=WINDOWS[kind], key=key, time="ts", apply=aion.Apply(few, "n int"), policy=POLICY
    ) as operator:
        operator.process(table(("a", 11), ("a", 12)))
        first = operator.advance(100 * SECOND).to_pylist()
        shown = {(row["window_start"], row["window_end"]) for row in first}
        if kind == "count":  # it has no end before a hundred events
            assert not first
            return
        assert len(first) == 2 * len(shown)
        rows = operator.process(table(("a", 12))).to_pylist()
        assert {(row["window_start"], row["window_end"]) for row in rows} == shown
        assert {row["kind"] for row in rows} == {"retracted"}
