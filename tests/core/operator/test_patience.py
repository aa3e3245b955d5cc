"""Late windows wait until their blocks are in memory if their own event makes them run. The wait is bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion.config import load_policy
from aion.core.compaction import BlockFact
from aion.core.life.actions import Arrived, BatchEnded, Execute, PaneKind, WatermarkAdvanced
from aion.core.life.late_work import LEAST_AWAITED_BYTES
from aion.core.operator.operator import Operator
from aion.core.periodic import Tumbling
from aion.core.slicing.grid import SliceGrid
from aion.core.trigger.triggers import CountTrigger, Trigger
from aion.errors import PolicyError
from tests.durations import us
from tests.operators import bound_of, operator_of

MUCH = LEAST_AWAITED_BYTES
EVERY_BATCH = {"kind": "every_batch"}


def made(patience: int, snapshot: Any = None, bound: int = 100, trigger: Trigger | None = None) -> Operator:
    grid = SliceGrid((Tumbling(us(10)),), segmented=False)
    return operator_of(grid, bound_of(bound, snapshot), trigger, patience=patience, snapshot=snapshot)


def run(
    operator: Operator,
    watermark: int,
    slices: list[tuple[int, int]],
    *,
    batch_follows: bool = True,
    ends_run: bool = False,
) -> list[tuple[PaneKind, int, int]]:
    """One batch of events ``(slice, bytes)``. Returns the panes: kind, end and events."""
    actions = operator.handle(WatermarkAdvanced(watermark))
    if slices:
        actions += operator.handle(Arrived([BlockFact(at, 1, size) for at, size in slices]))
    actions += operator.handle(BatchEnded(ends_run, batch_follows))
    operator.validate()
    operator.plan(watermark + 10)
    orders = [action for action in actions if isinstance(action, Execute)]
    return [(e.kind, e.window.end_us, e.events) for order in orders for e in order]


def late_window(patience: int, size: int = MUCH) -> Operator:
    """An operator whose window [0, 10) has run on time, and is far."""
    operator = made(patience)
    run(operator, 0, [(0, size)])
    assert run(operator, 10, [(10, 1)]) == [(PaneKind.ON_TIME, 10, 1)]
    return operator


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_a_far_window_waits_and_then_runs_with_all_that_came(patience: int) -> None:
    operator = late_window(patience)
    for batch in range(patience):
        assert run(operator, 11 + batch, [(0, 1)]) == [], f"batch {batch} stages it"
        assert operator.next_due_us is not None and operator.next_due_us <= 12 + batch, "another batch is asked for"
    assert run(operator, 19, [(0, 1)]) == [(PaneKind.LATE, 10, 2 + patience)]
    assert run(operator, 19, [(0, 1)]) == [], "it left memory, so it waits again"


def test_what_waits_is_staged_in_the_gap() -> None:
    operator = late_window(1)
    operator.handle(WatermarkAdvanced(12))
    operator.handle(Arrived([BlockFact(0, 1, 1)]))
    operator.handle(BatchEnded(batch_follows=True))
    prestage = operator.plan(13)
    assert prestage is not None and 0 in prestage.slices


def test_windows_on_time_never_wait() -> None:
    operator = late_window(1)
    run(operator, 12, [(0, MUCH), (10, MUCH), (20, MUCH)])
    assert run(operator, 20, [(0, 1), (20, 1)]) == [(PaneKind.ON_TIME, 20, 2), (PaneKind.LATE, 10, 3)]


@pytest.mark.parametrize(
    ("why", "kwargs"),
    [
        ("no batch is sure to come", {"batch_follows": False}),
        ("the run ends", {"ends_run": True}),
    ],
)
def test_nothing_waits_for_a_batch_that_may_not_come(why: str, kwargs: dict[str, bool]) -> None:
    assert run(late_window(1), 12, [(0, 1)], **kwargs) == [(PaneKind.LATE, 10, 2)], why


def test_a_batch_without_data_runs_what_waits() -> None:
    operator = late_window(5)
    assert run(operator, 12, [(0, 1)]) == []
    assert run(operator, 13, []) == [(PaneKind.LATE, 10, 2)]


def test_with_no_patience_and_with_little_state_nothing_waits() -> None:
    assert run(late_window(0), 12, [(0, 1)]) == [(PaneKind.LATE, 10, 2)]
    assert run(late_window(1, size=MUCH // 4), 12, [(0, 1)]) == [(PaneKind.LATE, 10, 2)]


def test_a_window_that_was_executed_in_this_batch_is_near() -> None:
    operator = made(1)
    run(operator, 0, [(0, MUCH)])
    assert run(operator, 10, [(0, 1)]) == [(PaneKind.ON_TIME, 10, 1), (PaneKind.LATE, 10, 2)]


moves = st.lists(
    st.tuples(
        st.integers(0, 25),
        st.lists(st.tuples(st.integers(0, 12), st.sampled_from([1, MUCH])), max_size=4),
        st.booleans(),
    ),
    max_size=16,
)


@given(moves, st.integers(0, 3), st.sampled_from([0, 30, 100]))
def test_any_stream_waits_for_a_bounded_time_and_loses_nothing(moves: list[Any], patience: int, bound: int) -> None:
    """Each late event is in a pane within ``patience`` batches with data; a restart at any moment changes nothing."""
    operator, watermark = made(patience, bound=bound), 0
    waited: dict[int, int] = {}
    for step, events, batch_follows in moves:
        watermark += step
        slices = [((watermark + 5 - 10 * back) // 10 * 10, size) for back, size in events]
        before = operator.snapshot()
        panes = run(operator, watermark, slices, batch_follows=batch_follows)
        again = made(patience, before, bound)
        assert (
            run(again, watermark, slices, batch_follows=batch_follows) == panes
            and again.snapshot() == operator.snapshot()
        )
        table = operator.windows
        pending = {int(end) for end in table["end_us"][table["pending"] > 0] if end <= watermark}
        assert not pending or (batch_follows and slices), "nothing waits for a batch that may not come"
        waited = {end: waited.get(end, 0) + 1 for end in pending}
        assert all(batches <= patience for batches in waited.values())
        assert [kind for kind, *_ in panes if kind is PaneKind.ON_TIME] == [
            PaneKind.ON_TIME for end in sorted({end for kind, end, _ in panes if kind is PaneKind.ON_TIME})
        ]
        operator = again


def total(_key: Any, _window: Any, batches: Any) -> dict[str, int]:
    return {"n": sum(batch.num_rows for batch in batches)}


def events(*times: int, size: int = 1000) -> pa.Table:
    payload = [bytes([t % 251]) * size for t in times]
    return pa.table({"t": pa.array(times, pa.timestamp("us")), "k": [t % 2 for t in times], "payload": payload})


@pytest.mark.slow
@pytest.mark.parametrize("key", ["k", pytest.param(None, marks=pytest.mark.proof)])
def test_panes_are_the_same_in_the_end(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With patience late panes are fewer and come later, and the last one of each window is the same."""
    monkeypatch.setattr("aion.core.timed.windows.LEAST_AWAITED_BYTES", 1)
    dice = np.random.default_rng(5)
    batches = [dice.integers(max(0, 5 * b - 60), 5 * b + 10, 12).tolist() for b in range(30)]
    found, late = [], []
    for patience in (0, 1, 3):
        policy = {
            "memory": {"budget": "64KiB", "bucket_limit": "16KiB"},
            "lateness": {"initial_bound": "80 microseconds", "coverage": None},
            "trigger": {**EVERY_BATCH, "patience": patience},
        }
        last: dict[Any, int] = {}
        spec: dict[str, Any] = {"windows": aion.Tumbling(us(10)), "time": "t", "key": key}
        with aion.LocalOperator(**spec, apply=aion.Apply(total, "n bigint"), policy=policy) as operator:
            for number, times in enumerate(batches):
                rows = operator.process(events(*times), 5 * number).to_pylist()
                last |= {(r.get("k"), r["window_start"]): r["n"] for r in rows if r["kind"] != "dropped"}
            rows = operator.close().to_pylist()
            last |= {(r.get("k"), r["window_start"]): r["n"] for r in rows if r["kind"] != "dropped"}
            late.append(operator.counters["executions"]["late"])
        found.append(last)
    assert found[0] == found[1] == found[2] and len(found[0]) > 10
    assert late[0] > late[1] > late[2]


def test_a_definition_has_its_own_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aion.core.timed.windows.LEAST_AWAITED_BYTES", 1)
    windows = {
        "waits": aion.Tumbling(us(10), trigger=EVERY_BATCH),
        "never": aion.Tumbling(us(10), trigger={**EVERY_BATCH, "patience": 0}),
    }
    policy = {"lateness": {"initial_bound": "80 microseconds", "coverage": None}, "trigger": {"patience": 2}}
    with aion.LocalOperator(windows=windows, time="t", apply=aion.Apply(total, "n bigint"), policy=policy) as operator:
        operator.process(events(1, 2))
        operator.process(events(11), 10)
        operator.process(events(12), 11)
        kinds = [[(r["window"], r["kind"]) for r in operator.process(events(5), 12 + n).to_pylist()] for n in range(3)]
    assert kinds == [[("never", "late")], [("never", "late")], [("waits", "late"), ("never", "late")]]


@pytest.mark.parametrize("backend", ["memory", "rocksdb"])
def test_nothing_waits_where_nothing_is_staged(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aion.core.timed.windows.LEAST_AWAITED_BYTES", 1)
    policy = {
        "state": {"backend": backend},
        "lateness": {"initial_bound": "80 microseconds", "coverage": None},
        "trigger": EVERY_BATCH,
    }
    spec: dict[str, Any] = {"windows": aion.Tumbling(us(10)), "time": "t", "apply": aion.Apply(total, "n bigint")}
    with aion.LocalOperator(**spec, policy=policy) as operator:
        operator.process(events(1, 2))
        operator.process(events(11), 10)
        operator.process(events(12), 11)
        assert [r["kind"] for r in operator.process(events(5), 12).to_pylist()] == ["late"]


@pytest.mark.parametrize("value", [-1, "much", 1.5])
def test_a_wrong_patience_is_refused(value: Any) -> None:
    with pytest.raises(PolicyError, match=rf"trigger\.patience: {value!r}"):
        load_policy({"trigger": {"patience": value}})


def test_what_later_batches_run_is_planned_in_its_order() -> None:
    """The watermark moves by 10 in each batch. Final executions are known exactly, so that they can be staged early."""
    never = CountTrigger(10)
    operator = made(1, bound=30, trigger=never)
    for watermark in (0, 10, 20, 30):
        run(operator, watermark, [(watermark, 1), *([(watermark - 10, 1)] if watermark else [])])
    prestage = operator.plan(40)
    assert prestage is not None and [*prestage.slices] == [30, 0], "[30, 40) ends, and [0, 10) is over"
    assert [s for s in operator.plan_ahead(40) if s not in prestage.slices] == [10, 20], "each is over a batch later"
    again = made(1, operator.snapshot(), bound=30, trigger=never)
    assert again.plan_ahead(40) == operator.plan_ahead(40)


@pytest.mark.parametrize("surely", [None, 25, 40, 70])
def test_what_is_due_soonest_is_staged_first_where_the_watermark_may_get_less_far(surely: int | None) -> None:
    """It is expected to pass the ends of two windows, and it may pass that of one only."""
    operator = made(1, bound=30, trigger=CountTrigger(10))
    for watermark in (0, 10, 20, 30):
        run(operator, watermark, [(watermark + 10, 1), (watermark, 1), *([(watermark - 10, 1)] if watermark else [])])
    prestage = operator.plan(50, surely)
    assert prestage is not None
    if surely == 70:
        assert [*prestage.slices] == [30, 40, 0, 10], "it surely gets there, so the order is that of the executions"
    else:
        assert [*prestage.slices] == [30, 0, 40, 10]
