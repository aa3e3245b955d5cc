"""Late work does not delay on-time results: a batch does a limited share of it, the rest waits for a bounded time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.config import load_policy
from aion.core.compaction import BlockFact
from aion.core.life.actions import Arrived, BatchEnded, Execute, PaneKind, Prestage, WatermarkAdvanced
from aion.core.life.late_work import FLOOR, LateWork
from aion.core.operator.operator import Operator
from aion.core.periodic import Tumbling
from aion.core.slicing.grid import SliceGrid
from aion.core.trigger.staleness import StalenessTrigger
from aion.errors import PolicyError
from tests.durations import us
from tests.operators import bound_of, operator_of

SHARE, BATCHES = 2.0, 3


def counted(key: Any, window: Any, batches: Any) -> dict[str, int]:
    return {"n": sum(batch.num_rows for batch in batches)}


many = st.integers(0, 3 * FLOOR)
arrivals = st.lists(st.tuples(st.integers(0, 12), many), max_size=5)
batches = st.lists(st.tuples(st.integers(0, 25), arrivals), max_size=14)


def made(bound: int, snapshot: Any = None) -> Operator:
    grid, work = SliceGrid((Tumbling(us(10)),), segmented=False), LateWork(SHARE, BATCHES)
    return operator_of(grid, bound_of(bound, snapshot), late_work=work, snapshot=snapshot)


def run(operator: Operator, watermark: int, slices: list[tuple[int, int]]) -> list[Execute]:
    """One batch. ``slices``: how long before the watermark events come, and how many."""
    actions = operator.handle(WatermarkAdvanced(watermark))
    blocks = [BlockFact((watermark + 5 - 10 * back) // 10 * 10, events + 1, 64) for back, events in slices]
    if blocks:
        actions += operator.handle(Arrived(blocks))
    actions += operator.handle(BatchEnded())
    operator.validate()
    return [action for action in actions if isinstance(action, Execute)]


@given(batches, st.sampled_from([0, 20, 100]))
def test_late_work_is_limited_ordered_and_done_in_time(moves: list[Any], bound: int) -> None:
    """A window that is due runs within so many batches, older and final ones first, and a restart changes nothing."""
    operator, watermark = made(bound), 0
    owed: dict[int, int] = {}  # the end of each window that is due, and for how many batches it has waited
    for step, slices in moves:
        watermark += step
        ran = run(operator, watermark, slices)
        rows = [(e.kind, e.window.end_us, e.events) for order in ran for e in order]
        on_time = sum(events for kind, _, events in rows if kind is PaneKind.ON_TIME)
        late = [(kind, end, events) for kind, end, events in rows if kind is not PaneKind.ON_TIME]
        forced = sum(events for _, end, events in late if owed.get(end, 0) >= BATCHES)
        if slices:
            assert sum(events for *_, events in late) - forced <= SHARE * on_time + FLOOR
        assert [end for kind, end, _ in late if kind is PaneKind.LATE] == sorted(
            end for kind, end, _ in late if kind is PaneKind.LATE
        )
        table = operator.windows
        waits = np.flatnonzero(table["owed"] > 0)
        assert slices or not len(waits), "a batch without data does all that waits"
        assert (table["owed"][waits] <= BATCHES + 1).all()
        if len(waits):
            assert operator.next_due_us is not None and operator.next_due_us <= watermark + 1
        owed = {int(table["end_us"][row]): int(table["owed"][row]) - 1 for row in waits}
        again = made(bound, operator.snapshot())
        assert again.snapshot() == operator.snapshot()
        operator = again


def test_what_is_final_goes_before_what_is_older_and_late() -> None:
    work = LateWork(0.0, 5)
    work.arrived()
    assert work.take(np.array([FLOOR, 1]), np.array([1, 1])).tolist() == [True, False]
    assert work.take(np.array([1]), np.array([6])).tolist() == [True], "it has waited long enough"
    work.end_batch()
    assert work.is_idle and work.take(np.array([9 * FLOOR]), np.array([1]), all_=True).tolist() == [True]


def test_what_takes_more_than_a_batch_allows_waits_for_so_many_batches() -> None:
    operator = made(1000)
    run(operator, 10, [])
    came = [Arrived([BlockFact(0, 3 * FLOOR, 64), BlockFact(100, 1, 64)]), BatchEnded()]
    later = [Arrived([BlockFact(100, 1, 64)]), BatchEnded()]
    kinds = []
    for events in (came, *[later] * BATCHES):
        orders = [order for event in events for order in operator.handle(event) if isinstance(order, Execute)]
        kinds.append([order.kind for order in orders])
    assert kinds == [*[[]] * BATCHES, [PaneKind.LATE]]


def test_events_that_come_while_a_final_execution_waits_are_too_late() -> None:
    operator = made(20)
    operator.handle(WatermarkAdvanced(10))
    operator.handle(Arrived([BlockFact(0, 3 * FLOOR, 64)]))
    operator.handle(BatchEnded())
    operator.handle(WatermarkAdvanced(25))
    operator.handle(Arrived([BlockFact(0, 3 * FLOOR, 64), BlockFact(100, 1, 64)]))
    waits = operator.handle(BatchEnded())
    assert not any(isinstance(action, Execute) for action in waits)
    assert not any(isinstance(a, Execute) for a in operator.handle(WatermarkAdvanced(30)))
    arrived = operator.handle(Arrived([BlockFact(0, 5, 64)]))
    assert [type(action).__name__ for action in arrived] == ["EmitDropped"]
    operator.handle(Arrived([BlockFact(100, 1, 64)]))
    operator.handle(BatchEnded())
    [final] = [a for a in operator.handle(BatchEnded()) if isinstance(a, Execute)]
    assert final.kind is PaneKind.FINAL and final.events.tolist() == [6 * FLOOR]
    operator.validate()
    assert len(operator.windows) == 1


@pytest.mark.slow
@pytest.mark.parametrize("window", [aion.Tumbling(us(10)), aion.Session(us(5))], ids=str)
def test_panes_are_the_same_in_the_end(window: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With no share at all, only when late panes come differs. Early, late and final work of all windows waits."""
    monkeypatch.setattr("aion.core.life.late_work.FLOOR", 0)
    found, executions = [], []
    for share in (0, None):
        policy = {
            "lateness": {"initial_bound": "40 microseconds", "coverage": None},
            "trigger": {"kind": "every_batch", "early": "2 microseconds"},
            "execution": {"late_share": share},
        }
        last: dict[Any, Any] = {}
        with aion.LocalOperator(
            windows=window, time="t", key="k", aggregates={"n": A.sum("n")}, policy=policy
        ) as operator:
            for batch in range(30):
                times = [(batch * 7 + i * 13) % 90 + batch for i in range(6)]
                events = pa.table(
                    {"t": pa.array(times, pa.timestamp("us")), "k": [t % 2 for t in times], "n": [1] * len(times)}
                )
                rows = operator.process(events, batch * 5).to_pylist()
                rows += operator.advance(10**6).to_pylist() if batch == 29 else []
                for row in rows:
                    place = row["k"], row["window_start"], row["window_end"]
                    if row["kind"] == "retracted":
                        del last[place]
                    elif row["kind"] != "dropped":
                        last[place] = row["n"]
            executions.append(operator.counters["executions"])
        found.append(last)
    assert found[0] == found[1] and found[0]
    assert executions[0]["late"] < executions[1]["late"] and executions[0]["early"] < executions[1]["early"]


@pytest.mark.parametrize(
    "how",
    [
        {"aggregates": {"n": A.count()}},
        {"apply": aion.Apply(counted, "n bigint")},
    ],
    ids=list,
)
@pytest.mark.parametrize("key", ["k", None])
def test_a_final_pane_that_waited_has_no_event_that_was_dropped(
    key: str | None, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows that overlap share slices. So what is too late for one of them is kept for the next."""
    monkeypatch.setattr("aion.core.life.late_work.FLOOR", 0)

    def at(*times: int) -> pa.Table:
        return pa.table({"t": pa.array(times, pa.timestamp("us")), "k": [1] * len(times)})

    policy = {
        "lateness": {"initial_bound": "20 microseconds", "coverage": None},
        "trigger": {"kind": "count", "count": 100},
        "execution": {"late_share": 0},
    }
    with aion.LocalOperator(windows=aion.Sliding(us(10), us(5)), time="t", key=key, policy=policy, **how) as operator:
        operator.process(at(17), 20)
        operator.process(at(16), 25)
        [dropped] = operator.process(at(18), 40).to_pylist()
        assert (dropped["kind"], dropped["window_end"].microsecond) == ("dropped", 20)
        operator.process(at(19))
        rows = operator.advance(41).to_pylist()
        assert [(r["kind"], r["window_end"].microsecond, r["n"], r["events"]) for r in rows] == [("final", 20, 2, 2)]
        rows = operator.advance(50).to_pylist()
        assert [(r["kind"], r["window_end"].microsecond, r["n"], r["events"]) for r in rows] == [("final", 25, 4, 4)]


@pytest.mark.parametrize(("key", "value"), [("late_share", -1), ("late_share", "much")])
def test_a_wrong_policy_is_refused(key: str, value: Any) -> None:
    with pytest.raises(PolicyError, match=rf"execution\.{key}: {value!r} is not"):
        load_policy({"execution": {key: value}})


def test_a_late_event_announces_what_will_run_in_the_same_batch_and_no_later_one() -> None:
    grid = SliceGrid((Tumbling(us(100)),))

    def announced(bound: float, due_only: bool, step_us: int) -> list[Prestage]:
        op = operator_of(grid, bound_of(1000), StalenessTrigger(bound), stages_due=due_only)
        op.handle(WatermarkAdvanced(1))
        op.handle(Arrived([BlockFact(0, 10, 1)]))
        op.handle(WatermarkAdvanced(201))
        op.watermark.step_us = step_us
        found = [a for a in op.handle(Arrived([BlockFact(0, 5, 1)])) if isinstance(a, Prestage)]
        ran = bool(op.handle(BatchEnded()))
        assert not due_only or ran == bool(found)
        return found

    # 101 of 1000 have gone by; of all late events all are new, which is a staleness of 0.1: not yet.
    assert announced(0.3, False, 0) == [Prestage((0,))] and announced(0.3, True, 0) == []
    assert announced(0.05, True, 200) == [Prestage((0,))]
