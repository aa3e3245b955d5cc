"""Windows give the same panes with compacted blocks, through crashes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import aion
from state_backends.backends import STORES
from tests.compaction_rig import SECOND, TINY, Rig, check_compacted, few, plan_of, policy_of, table_of, uncompacted
from tests.durations import us

an_event = st.tuples(st.integers(0, 30), st.sampled_from([*"abcd", None]), st.integers(0, 9))
a_batch = st.tuples(
    st.lists(an_event, max_size=12),
    st.integers(0, 4),  # how far the watermark advances
    st.lists(st.sampled_from(["fails", "crashes"]), max_size=1),
)


@pytest.mark.slow
@few
@pytest.mark.parametrize(
    "name", ["events", "partials", *(pytest.param(n, marks=pytest.mark.proof) for n in ("without a key", "two keys"))]
)
@given(batches=st.lists(a_batch, min_size=4, max_size=11), tiny=st.booleans(), kind=st.sampled_from([*STORES]))
@example(batches=[([(3, k, n) for k in "abcd"], n >= 8, ["fails"] * (n % 3 == 1)) for n in range(14)], tiny=True, kind="tiered")  # fmt: skip # noqa: E501
def test_panes_are_the_same_compacted_or_not_whatever_fails(
    name: str, batches: list[Any], tiny: bool, kind: str
) -> None:
    """An attempt that fails, before or after its compactions, changes nothing."""
    plan, policy = plan_of(name), policy_of(**TINY if tiny else {})
    rig = Rig(plan, policy, kind=kind, budget=2048 if tiny else 1 << 20)
    oracle = uncompacted(plan, policy)
    watermark, told = 0, []
    for events, step, mishaps in batches:
        watermark += 3 * step
        told.append((table_of([(t + watermark - 20, k, v) for t, k, v in events]), watermark, mishaps))
    check_compacted(rig, oracle, policy, told)


SESSIONS = {
    "session": {"session": aion.Session(us(50 * SECOND))},
    "two": {"short": aion.Session(us(20 * SECOND)), "long": aion.Session(us(130 * SECOND))},
    "beside": {"session": aion.Session(us(50 * SECOND)), "minutes": aion.Sliding(us(120 * SECOND), us(60 * SECOND))},
}
at_times = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([*"abcd", None]), st.integers(0, 9)), max_size=12)
session_batches = st.lists(
    st.tuples(at_times, st.integers(0, 8), st.lists(st.sampled_from(["fails", "crashes"]), max_size=1)),
    min_size=4, max_size=9,
)  # fmt: skip
each_at_20 = [([(20, k, n) for k in "abcd"], 2, ["fails"] * (n % 4 == 1)) for n in range(9)]
each_at_40 = [([(40, k, n) for k in "abcd"], 8, ["crashes"] * (n % 4 == 1)) for n in range(9)]


@pytest.mark.slow
@settings(few, phases=[Phase.explicit, Phase.generate])
@pytest.mark.parametrize(
    "name", ["events", "partials", "numbers", pytest.param("without a key", marks=pytest.mark.proof)]
)
@given(
    windows=st.sampled_from([*SESSIONS]),
    batches=session_batches, tiny=st.booleans(), endless=st.booleans(), bound=st.sampled_from([0, 30, 200]),
)  # fmt: skip
@example(windows="two", batches=each_at_20, tiny=True, endless=True, bound=0)
@example(windows="beside", batches=each_at_40, tiny=False, endless=True, bound=30)
def test_sessions_are_the_same_compacted_or_not_whatever_fails(
    name: str, windows: str, batches: list[Any], tiny: bool, endless: bool, bound: int
) -> None:
    """Sessions grow on both sides, merge and are retracted, and some events come too late."""
    policy = policy_of(lateness={"initial_bound": f"{bound}s", "coverage": None}, **TINY if tiny else {})
    plan = plan_of(name, SESSIONS[windows])
    rig, oracle = Rig(plan, policy, budget=2048 if tiny else 1 << 20), uncompacted(plan, policy)
    watermark, told = 0, []
    for events, step, mishaps in batches:
        watermark += 6 * step
        always = [(watermark, "z", 1)] if endless else []
        told.append((table_of([(5 * t + watermark - 150, k, v) for t, k, v in events] + always), watermark, mishaps))
    check_compacted(rig, oracle, policy, told)
