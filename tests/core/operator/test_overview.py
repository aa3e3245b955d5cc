"""What is shown of each window that is kept: its bound, why, what is still to come, and when it will run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from aion.cli import app
from aion.core.compaction import BlockFact
from aion.core.lateness.bound import AdaptiveBound, Expected
from aion.core.life.actions import Arrived, BatchEnded, Execute, PaneKind, WatermarkAdvanced
from aion.core.life.rules import PolicyRules, Rules
from aion.core.operator.operator import GridWindows, Operator
from aion.core.operator.overview import REASONS, WindowOutlook, trigger_from_json, windows
from aion.core.periodic import Tumbling
from aion.core.slicing.grid import SliceGrid
from aion.core.trigger.staleness import StalenessTrigger
from aion.core.trigger.triggers import CountTrigger, EveryBatchTrigger, IntervalTrigger, Trigger
from policies.cleanup import Cleanup, Reason
from state_backends.backends import Stores
from state_backends.files.storage import LocalStorage
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.versions.manifest import Identity
from state_backends.versions.shard import Shard
from tests.late import DAY, MINUTE, SECOND, drawn, exponential
from tests.operators import operator_of

MINUTES = Tumbling("1 minute")
DEFINITION = {"windows": [["minutes", MINUTES.spec()]]}
AT = 240 * MINUTE


def operator(
    trigger: type[Trigger] | Trigger = StalenessTrigger,
    *,
    learnt: bool = True,
    judged: tuple[int, int] = (0, 0),
    final_only: bool = False,
    **asked: Any,
) -> Operator:
    """It has seen four hours of minutes with late events, a minute late on average.

    ``judged``: by how many late events bounds were judged, and how many of these came too late.
    """
    bound = AdaptiveBound(Cleanup(15 * MINUTE, **{"coverage": 0.9, **asked}), half_life_us=DAY, model="empirical")
    if bound.conformal is not None:
        bound.conformal.late, bound.conformal.missed = judged
    if learnt:
        bound.lateness.merge(drawn(exponential(60), windows=240, per_window=100, half_life_us=DAY)[0])
    made = StalenessTrigger(0.05, forecast=Expected(bound)) if isinstance(trigger, type) else trigger
    rules = Rules(PolicyRules(bound, made), {}, 1, final_only=final_only)
    found = Operator([GridWindows(SliceGrid((MINUTES,)))], rules)
    found.watermark.at_us = AT - SECOND
    return found


def shown(of: Operator) -> list[WindowOutlook]:
    return windows(orjson.loads(orjson.dumps(of.snapshot())), DEFINITION)


def arrive(to: Operator, minute: int, events: int) -> None:
    to.handle(Arrived([BlockFact(minute * MINUTE, events, 100)]))


def test_each_window_has_its_bound_and_says_why() -> None:
    op = operator()
    arrive(op, 241, 80)
    op.handle(WatermarkAdvanced(AT + SECOND))
    arrive(op, 242, 80)
    first, second = shown(op)
    assert (first.bound_us, first.reason, first.start_us) == (15 * MINUTE, Reason.NO_HISTORY, 241 * MINUTE)
    assert second.reason is Reason.LEARNT and 2 * MINUTE < second.bound_us < 3 * MINUTE
    assert second.purged_us == second.end_us + second.bound_us
    # Of 100 events 20 are late, and 10 % of these come after the bound.
    assert second.to_come == pytest.approx(0.18, abs=0.01)
    assert first.to_come == pytest.approx(0.2, abs=0.01), "what is known now, also of a window that was made before"
    op.handle(WatermarkAdvanced(243 * MINUTE + 42 * SECOND))
    first, second = shown(op)
    assert (second.status, second.events, second.late_events) == ("late", 80, 0)
    assert second.to_come == pytest.approx(0.2 * (0.5 - 0.1), abs=0.01), "half of them come in the first 42 seconds"


@pytest.mark.parametrize(
    ("asked", "learnt", "reason"),
    [
        ({"coverage": None}, True, Reason.FIXED),
        ({"coverage": 0.9999}, True, Reason.UNSUPPORTED),
        ({"coverage": 0.99, "max_bound_us": 15 * MINUTE, "initial_bound_us": MINUTE}, True, Reason.LEARNT),
        ({"max_bound_us": MINUTE, "initial_bound_us": MINUTE}, True, Reason.MAX_BOUND),
        ({}, False, Reason.NO_HISTORY),
    ],
)
def test_every_reason_reaches_the_window(asked: dict[str, Any], learnt: bool, reason: Reason) -> None:
    initial = asked.pop("initial_bound_us", 15 * MINUTE)
    bound = AdaptiveBound(Cleanup(initial, **{"coverage": 0.9, **asked}), half_life_us=DAY, model="empirical")
    if learnt:
        bound.lateness.merge(drawn(exponential(60), windows=240, per_window=100, half_life_us=DAY)[0])
    op = operator_of(SliceGrid((MINUTES,)), bound)
    op.watermark.at_us = AT - SECOND
    op.handle(WatermarkAdvanced(AT))
    arrive(op, 241, 1)
    (window,) = shown(op)
    assert window.reason is reason and REASONS[reason]
    assert window.reason is bound.decision.reason and window.bound_us == bound.decision.bound_us


def test_what_is_planned_is_what_happens() -> None:
    """The first late execution is when it was said to be; and with it the others are planned anew."""
    op = operator()
    op.handle(WatermarkAdvanced(AT))
    arrive(op, 241, 80)
    (active,) = shown(op)
    end = active.end_us
    assert active.executions_us[0] == end, "on time"
    assert len(active.executions_us) > 3 and list(active.executions_us) == sorted(set(active.executions_us))
    assert active.executions_us[-1] < active.purged_us
    op.handle(WatermarkAdvanced(end))
    op.watermark.step_us = 0  # it moves evenly
    arrive(op, 241, 3)
    assert not op.handle(BatchEnded())
    (late,) = shown(op)
    due = op.next_due_us
    assert late.executions_us[0] == due
    assert late.executions_us[0] == pytest.approx(active.executions_us[1], abs=20 * SECOND), "not all came as expected"
    assert due is not None
    ran = []
    for at in (due - 1, due):
        op.watermark.at_us = at - 1
        op.handle(WatermarkAdvanced(at))
        op.watermark.step_us = 0
        ran += [(at, e.kind) for a in op.handle(BatchEnded()) if isinstance(a, Execute) for e in a]
    assert ran == [(due, PaneKind.LATE)]
    (late,) = shown(op)
    assert min(late.executions_us) > due
    # Of all that came late all were stale for as long as that.
    assert late.staleness == pytest.approx((due - end) / late.bound_us)
    assert active.staleness == 0


def test_a_window_that_runs_once_runs_at_last() -> None:
    """With ``emit="final"``, late events wait until the bound has passed."""
    op = operator(final_only=True)
    op.handle(WatermarkAdvanced(AT))
    arrive(op, 241, 80)
    end = 242 * MINUTE
    op.handle(WatermarkAdvanced(end + SECOND))
    arrive(op, 241, 3)
    op.handle(BatchEnded())
    op.handle(WatermarkAdvanced(end + 2 * SECOND))
    (window,) = windows(orjson.loads(orjson.dumps(op.snapshot())), {**DEFINITION, "emit": "final"})
    assert (window.events, window.late_events, window.executions_us, window.staleness) == (83, 3, (), 0.0)
    op.watermark.at_us = window.purged_us - 1
    orders = [*op.handle(WatermarkAdvanced(window.purged_us)), *op.handle(BatchEnded())]
    assert [e.kind for a in orders if isinstance(a, Execute) for e in a] == [PaneKind.FINAL]


@pytest.mark.parametrize(
    ("trigger", "planned"),
    [
        (EveryBatchTrigger(), []),
        (CountTrigger(7), []),
        (IntervalTrigger(5 * MINUTE), [5 * MINUTE, 10 * MINUTE]),
        (StalenessTrigger(0.3), None),
        (StalenessTrigger(executions=1), []),
        (StalenessTrigger(executions=3), None),
    ],
)
def test_triggers_come_back_and_plan_the_same(trigger: Trigger, planned: list[int] | None) -> None:
    op = operator(trigger, learnt=False)
    arrive(op, 241, 1)
    (window,) = shown(op)
    later = [us - window.end_us for us in window.executions_us[1:]]
    if planned is None:
        assert later and later == sorted(set(later))
    else:
        assert later == planned
    again = trigger_from_json(orjson.loads(orjson.dumps(trigger.to_json())))
    assert again.to_json() == trigger.to_json() and type(again) is type(trigger)


def test_a_trigger_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="unknown trigger 'moon'"):
        trigger_from_json({"kind": "moon"})


def test_inspect_shows_the_windows(tmp_path: Path) -> None:
    op = operator(judged=(10_000, 800))
    arrive(op, 241, 80)
    op.handle(WatermarkAdvanced(AT + SECOND))
    for minute in range(242, 247):
        arrive(op, minute, 80)
    identity = Identity("query", "tolls", 3, 4, DEFINITION)
    io = IoThread()
    shard = Shard(
        identity,
        LocalStorage(tmp_path / "state" / "query" / "tolls" / "shard-00003"),
        tmp_path / "live",
        lambda p: Stores.of("tiered", p, io, MemoryBudget(1 << 20), StoreOptions(bucket_limit_bytes=1 << 20)),
        retain=10,
    )
    try:
        shard.open(None, "0000000000-a", identity)
        shard.commit("0000000000-a", op.snapshot())
    finally:
        shard.close()
        io.close()

    def run(*options: str) -> str:
        found = CliRunner().invoke(app, ["inspect", str(tmp_path / "state"), *options], env={"COLUMNS": "220"})
        assert found.exit_code == 0, found.output
        return " ".join(found.output.replace("│", " ").split())

    said = run()
    assert "tolls: new windows are kept for 2." in said and "covers 0.9 of late events with confidence 0.95" in said
    assert "tolls: 92.00% of 10,000 late events came within learned bounds" in said
    assert "initial_bound: nothing was known" in said and "learnt: the shortest for coverage" in said
    assert "of its events, late" in said and "1970-01-01T04:02:00Z active" in said and " at last" in said
    assert "windows of tolls; " not in said
    assert "windows of tolls; the first 2 of 6 to end" in run("--windows", "2")
    assert "windows of tolls" not in run("--windows", "0")
