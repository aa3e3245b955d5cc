"""Triggers at work: whichever says when late windows run, nothing is lost, and staleness is what it was asked to be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.core.compaction import BlockCompaction
from aion.core.life.rules import Rules
from aion.core.operator.operator import GridWindows
from tests.examples import some

BOUND_US = 1_000_000
WINDOW_US = 100_000
TRIGGERS: list[dict[str, Any]] = [
    {"kind": "every_batch"},
    {"kind": "interval", "interval": "100ms"},
    {"kind": "count", "count": 7},
    {"kind": "staleness", "bound": 0.1},
    {"kind": "staleness", "executions": 3},
]


def operator(trigger: dict[str, Any]) -> aion.LocalOperator:
    policy = {"lateness": {"initial_bound": "1s"}, "trigger": trigger}
    windows = aion.Tumbling("100ms")
    return aion.LocalOperator(windows=windows, time="ts", key="k", aggregates={"n": A.count()}, policy=policy)


def events(times_us: Any, keys: Any) -> pa.Table:
    return pa.table({"ts": pa.array(times_us, pa.timestamp("us")), "k": pa.array(keys, pa.int64())})


def play(trigger: dict[str, Any], batches: list[tuple[int, list[int]]], to_us: int | None) -> tuple[list[Any], Any]:
    """Batches of (watermark, late or early event times); the panes, and the counters."""
    rows: list[dict[str, Any]] = []
    with operator(trigger) as op:
        for watermark_us, times in batches:
            rows += op.advance(watermark_us).to_pylist()
            rows += op.process(events(times, [t % 2 for t in times])).to_pylist()
        if to_us is not None:
            rows += op.advance(to_us).to_pylist()
        rows += op.close().to_pylist()
        return rows, op.counters


def last(rows: list[dict[str, Any]]) -> dict[Any, int]:
    panes = [row for row in rows if row["kind"] != "dropped"]
    return {(row["k"], row["window_start"]): row["n"] for row in sorted(panes, key=lambda r: r["pane"])}


STEP_US = 20_000
batches = st.lists(st.lists(st.integers(0, 6 * WINDOW_US - 1), max_size=6), max_size=40).map(
    lambda lists: [(i * STEP_US, times) for i, times in enumerate(lists)]
)


@some(1 / 6)
@given(stream=batches)
def test_the_last_panes_are_the_same_whatever_triggers(stream: list[tuple[int, list[int]]]) -> None:
    for to_us in (None, 10 * BOUND_US):
        eager, _ = play(TRIGGERS[0], stream, to_us)
        for trigger in TRIGGERS[1:]:
            rows, counters = play(trigger, stream, to_us)
            assert last(rows) == last(eager)
            assert sum(row["kind"] == "dropped" for row in rows) == sum(row["kind"] == "dropped" for row in eager)
            if to_us is not None and counters:
                assert counters["purged_windows"] == counters["windows"]


def late_stream(seed: int, count: int = 200, step_us: int = 10_000) -> list[tuple[int, list[int]]]:
    """One window: its events on time, then many late ones, exponentially distributed over the bound."""
    rng = np.random.default_rng(seed)
    lateness = np.sort(rng.exponential(BOUND_US / 5, count))
    lateness = lateness[lateness < BOUND_US]
    ends = WINDOW_US + np.arange(0, BOUND_US, step_us)
    batch = np.searchsorted(ends, WINDOW_US + lateness)
    stream = [(0, [1, 2, 3])]
    stream += [(int(end), [5] * int((batch == i + 1).sum())) for i, end in enumerate(ends)]
    return stream


@pytest.mark.slow
@pytest.mark.parametrize("bound", [0.2, 0.05])
def test_staleness_is_kept_and_takes_fewer_executions_than_every_batch(bound: float) -> None:
    late = {}
    for trigger in ({"kind": "staleness", "bound": bound}, {"kind": "every_batch"}):
        _, counters = play(trigger, late_stream(1), 3 * BOUND_US)
        late[trigger["kind"]] = counters["executions"]["late"]
        kept = counters["staleness"]
        assert kept["windows"] == 1
        assert 0 < kept["largest"] == kept["total"]
        if trigger["kind"] == "staleness":
            assert kept["kept"] == 1 and kept["largest"] <= bound, kept
    assert late["staleness"] * 4 < late["every_batch"]


@pytest.mark.proof
def test_a_tighter_bound_takes_more_executions() -> None:
    counts = [
        play({"kind": "staleness", "bound": bound}, late_stream(2, step_us=5_000), 3 * BOUND_US)[1]["executions"][
            "late"
        ]
        for bound in (0.4, 0.02)
    ]
    assert counts == sorted(set(counts))


@pytest.mark.slow
def test_so_many_executions_and_no_more() -> None:
    for executions in (1, 2, 4):
        _, counters = play({"kind": "staleness", "executions": executions}, late_stream(3), 3 * BOUND_US)
        made = counters["executions"]
        assert made["late"] + made["final"] <= executions
        assert made["on_time"] == 1
        kept = counters["staleness"]
        assert (kept["windows"], kept["kept"], kept["missed_between_looks"], kept["missed_otherwise"]) == (1, 0, 0, 0)


def test_why_a_bound_was_not_kept() -> None:
    """All late events in one batch, a third of the bound after the last look: no trigger could have kept 0.05."""
    stream = [(0, [1]), (WINDOW_US, []), (WINDOW_US + BOUND_US // 3, [5] * 50)]
    _, counters = play({"kind": "staleness", "bound": 0.05}, stream, 3 * BOUND_US)
    kept = counters["staleness"]
    assert (kept["windows"], kept["kept"], kept["missed_between_looks"], kept["missed_otherwise"]) == (1, 0, 1, 0)
    assert kept["largest"] == pytest.approx(1 / 3)


def test_a_window_runs_when_it_is_due_though_nothing_comes() -> None:
    """The trigger says at which watermark to look again; with Spark that is a timer."""
    with operator({"kind": "interval", "interval": "300ms"}) as op:
        op.process(events([1], [0]))
        assert op.advance(WINDOW_US)["kind"].to_pylist() == ["on_time"]
        assert op.process(events([2], [0])).num_rows == 0
        assert op.advance(WINDOW_US + 100_000).num_rows == 0, "not due yet"
        windows = op._windows
        assert windows is not None
        assert windows.operator.next_due_us == WINDOW_US + 300_000
        assert op.advance(WINDOW_US + 300_000)["kind"].to_pylist() == ["late"]
        assert windows.operator.next_due_us == WINDOW_US + BOUND_US


def test_what_is_planned_is_prestaged() -> None:
    """A late window with news is staged for the batch in which its trigger will want it."""
    with operator({"kind": "interval", "interval": "300ms"}) as op:
        op.process(events([1], [0]))
        op.advance(WINDOW_US)
        op.process(events([2], [0]))
        op.advance(WINDOW_US + 1)
        windows = op._windows
        assert windows is not None
        assert windows.executor.due_next(WINDOW_US + 299_999) == ()
        assert windows.executor.due_next(WINDOW_US + 300_000) == (0,)


def test_of_few_late_events_only_their_keys_are_staged_and_when_they_come() -> None:
    """More would be staged in vain: the execution reads only the blocks that may hold them."""
    with operator({"kind": "interval", "interval": "300ms"}) as op:
        op.process(events(range(100), range(100)))
        op.advance(WINDOW_US)
        op.process(events([2], [0]))
        op.advance(WINDOW_US + 1)
        windows = op._windows
        assert windows is not None
        assert windows.executor.due_next(WINDOW_US + 300_000) == ()


@pytest.mark.slow
def test_a_restart_changes_nothing() -> None:
    stream = late_stream(4)
    with operator({"kind": "staleness", "bound": 0.05}) as op, operator({"kind": "staleness", "bound": 0.05}) as other:
        rows: list[list[dict[str, Any]]] = [[], []]
        for n, (watermark_us, times) in enumerate(stream):
            for found, o in zip(rows, (op, other), strict=True):
                found += o.advance(watermark_us).to_pylist()
                found += o.process(events(times, [0] * len(times))).to_pylist()
            if n % 10 == 9:
                windows = other._windows
                assert windows is not None
                snapshot = windows.operator.snapshot()
                rules = windows.operator._rules
                windows.operator.__init__(  # type: ignore[misc]
                    [GridWindows(windows.operator._segments[0].grid)],
                    Rules(rules.shared, {}, 1),
                    compaction=BlockCompaction(open_too=True, snapshot=snapshot["runs"]),
                    snapshot=snapshot,
                )
                assert windows.operator.snapshot() == snapshot
        assert rows[0] == rows[1]
