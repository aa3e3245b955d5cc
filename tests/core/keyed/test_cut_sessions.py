"""Sessions with a maximal duration and with gaps from a column: where they are cut, what is dropped, what is kept."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.core.keyed.cut_sessions import cut
from aion.errors import SchemaError
from state_backends.store.attempt import StoreAttempt
from tests.core.keyed.test_keyed_windows import KINDS, Sink, check, policy, run, table
from tests.durations import us
from tests.keyed_oracle import Event, windows_of

SECOND = 1_000_000
HOUR = 3600 * SECOND

events = st.lists(st.tuples(st.integers(0, 2), st.integers(-20, 60), st.integers(1, 40)), max_size=40).map(sorted)


def brute(events: Sequence[tuple[int, int, int]], most: int | None) -> list[tuple[int, int, int]]:
    """The first row, the row after the last, and the end of each session, one event after the other."""
    found: list[tuple[int, int, int]] = []
    key, start, reach = -1, 0, 0
    for n, (k, t, gap) in enumerate(events):
        if k == key and t <= reach and (most is None or t < start + most):
            reach = max(reach, t + gap)
            begin = found.pop()[0]
        else:
            key, start, reach, begin = k, t, t + gap, n
        found.append((begin, n + 1, reach if most is None else min(reach, start + most)))
    return found


@given(events, st.sampled_from([None, 1, 7, 20, 10**6]), st.booleans())
def test_all_keys_are_cut_at_once_as_one_after_the_other(
    events: list[tuple[int, int, int]], most: int | None, same: bool
) -> None:
    events = [(k, t, 6 if same else gap) for k, t, gap in events]
    cuts = cut(*np.array(events, np.int64).reshape(-1, 3).T, most)
    assert list(zip(*(column.tolist() for column in cuts), strict=True)) == brute(events, most)


some_events = st.builds(Event, st.integers(0, 2), st.integers(0, 80), st.integers(0, 9), st.just(False), st.just(5))
scripts = st.lists(
    st.lists(some_events, min_size=1, max_size=8) | st.integers(0, 90),
    max_size=12,
)


@given(scripts)
def test_a_session_that_is_not_too_long_is_never_cut(script: list[Any]) -> None:
    """With a maximal duration that no session reaches, all rows are those without one, in the same batches."""
    plain, _ = run(aion.Session(us(5)), script, 1000, "events")
    capped, _ = run(aion.Session(us(5), max_duration=us(10_000)), script, 1000, "events")
    assert rows_of(capped) == rows_of(plain)


def rows_of(sink: Sink) -> list[str]:
    """All rows that came out, in an order of their own, and without what differs anyway."""
    return sorted(str({**row, "window": "", "values": sorted(row["values"] or [])}) for row in sink.all)


@given(scripts, st.randoms(use_true_random=False))
def test_what_comes_late_ends_as_it_would_have_in_order(script: list[Any], how: random.Random) -> None:
    session = aion.Session(us(5), max_duration=us(12))
    all_events = [e for step in script if not isinstance(step, int) for e in step]
    late, oracle = run(session, [*script, 200], 1000, "lists")
    check(late, oracle, "lists")
    in_order, _ = run(session, [sorted(all_events, key=lambda e: e.t), 200] if all_events else [200], 1000, "lists")
    assert values(late) == values(in_order)
    expected = {
        (k, w.start, w.end) for k in range(3) for w in windows_of(session, [e for e in all_events if e.key == k])
    }
    assert set(late.rows) == expected
    assert all(end - start <= 12 for _, start, end in expected)


def values(sink: Sink) -> dict[Any, list[int]]:
    return {place: sorted(row["values"]) for place, [row] in sink.rows.items()}


@pytest.mark.parametrize("hours", [8, pytest.param(7 * 24, marks=pytest.mark.proof)])
def test_a_session_that_never_ends_keeps_no_old_slices(hours: int) -> None:
    """A heartbeat each second: what is kept does not grow after the first hours."""
    blocks, sizes, panes = [], [], 0
    with aion.LocalOperator(
        windows=aion.Session("30 seconds", max_duration="1 hour"),
        time="t",
        key="key",
        aggregates={"n": A.count()},
        policy={"lateness": {"initial_bound": "10 minutes", "coverage": None}},
    ) as operator:
        times = np.arange(3600) * SECOND
        for hour in range(hours):
            batch = {"key": pa.array(np.zeros(3600, np.int64)), "t": pa.array(times + hour * HOUR, pa.timestamp("us"))}
            found = operator.process(pa.table(batch), hour * HOUR)
            assert all(n == 3600 for n in found.column("n").to_pylist())
            panes += found.num_rows
            blocks.append(operator.store.stats().blocks)
            sizes.append(operator.store.stats().m_bucket_bytes)
    assert panes == hours - 1
    assert max(blocks[3:]) <= max(blocks[:3])
    # Blocks leave memory when they are on disk, so an hour more may be there.
    assert max(sizes[3:]) <= 2 * max(sizes[:3])


@pytest.mark.parametrize("most", [None, 50])
def test_an_event_reaches_as_far_as_its_own_gap(most: int | None) -> None:
    """One with a long gap keeps the session open over events with short ones. An event exactly at its reach belongs."""
    batch = [Event(0, 0, 1, gap=20), Event(0, 3, 2, gap=1), Event(0, 20, 4, gap=2), Event(0, 23, 8, gap=2)]
    session = aion.Session(gap_column="gap", max_duration=us(most))
    sink, oracle = run(session, [batch, 22, 100], 0, "partials")
    check(sink, oracle, "partials")
    assert {place: row["total"] for place, [row] in sink.rows.items()} == {(0, 0, 22): 7, (0, 23, 25): 8}


BAD = {
    "the gap is null": [None],
    "the gap is not positive": [0, -5],
    "the gap is not a duration like '30 minutes'": ["soon", ""],
    "the gap is longer than 26,700,000 days": ["30000000 days"],
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_gap_that_cannot_be_used_is_dropped_with_the_reason(kind: str) -> None:
    """Only for the sessions: other windows take the event. It is not late."""
    usable = ["5 microseconds", "interval 5 Microseconds"]
    gaps = [*(("ok", gap) for gap in usable), *((reason, gap) for reason, some in BAD.items() for gap in some)]
    texts = [gap if gap is None or isinstance(gap, str) else f"{gap} us" for _, gap in gaps]
    batch = table([Event(0, 10, n) for n in range(len(gaps))]).set_column(4, "gap", pa.array(texts))
    windows = {"visit": aion.Session(gap_column="gap"), "ten": aion.Tumbling(us(20)), "plain": aion.Session(us(5))}
    with aion.LocalOperator(windows=windows, key="key", time="t", policy=policy(0), **KINDS[kind]) as operator:
        rows = [*operator.process(batch).to_pylist(), *operator.advance(100).to_pylist()]
        assert operator.counters["late_events"] == 0
        assert operator.counters["dropped"] == len(gaps) - len(usable)
    dropped = [row for row in rows if row["kind"] == "dropped"]
    assert sorted(row["reason"] for row in dropped) == sorted(reason for reason, _ in gaps if reason != "ok")
    assert {row["window"] for row in dropped} == {"visit"}
    assert all(row["window_start"] == row["window_end"] and row["lateness_us"] is None for row in dropped)
    assert [row["late_events"] for row in dropped] == [0] * len(dropped)
    events = {row["window"]: row["events"] for row in rows if row["kind"] == "on_time"}
    assert events == {"visit": len(usable), "ten": len(gaps), "plain": len(gaps)}


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_durations_of_all_units(unit: str) -> None:
    of = {"s": 1, "ms": 1_000, "us": SECOND, "ns": 1000 * SECOND}[unit]
    batch = table([Event(0, 0, 1), Event(0, 2 * SECOND, 1), Event(0, 5 * SECOND, 1)])
    batch = batch.set_column(4, "gap", pa.array([2 * of, of, of], pa.duration(unit)))
    with aion.LocalOperator(
        windows=aion.Session(gap_column="gap"), key="key", time="t", policy=policy(0), aggregates={"n": A.count()}
    ) as operator:
        operator.process(batch)
        assert operator.advance(HOUR).column("n").to_pylist() == [2, 1]


@pytest.mark.parametrize(
    ("column", "shown"),
    [
        ("nothing", "'nothing' for the gap; the columns are key, t"),
        ("value", "'value' is of type int64; give an interval"),
    ],
)
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_column_that_says_no_gap_is_refused(kind: str, column: str, shown: str) -> None:
    with (
        pytest.raises(SchemaError, match=shown),
        aion.LocalOperator(windows=aion.Session(gap_column=column), key="key", time="t", **KINDS[kind]) as operator,
    ):
        operator.process(table([]))


def test_late_events_are_those_that_change_what_has_ended() -> None:
    """One that prolongs a session that had ended is late; one behind it that does so in time is not."""
    session = aion.Session(us(5), max_duration=us(100))
    sink, _ = run(session, [[Event(0, 0, 1)], 6, [Event(0, 4, 1), Event(0, 8, 1)], 50], 1000, "partials")
    [[row]] = sink.rows.values()
    assert (row["events"], row["late_events"]) == (3, 1)


far = st.lists(
    st.lists(
        st.builds(
            Event,
            st.integers(0, 1),
            st.integers(0, 120).map(lambda t: t * 10 * SECOND),
            st.integers(0, 99),
            st.just(False),
            st.sampled_from([5, 30, 90, 400]).map(lambda gap: gap * SECOND),
        ),
        min_size=1,
        max_size=5,
    )
    | st.integers(0, 150).map(lambda t: t * 10 * SECOND),
    max_size=14,
)


@pytest.mark.parametrize(
    "session",
    [
        aion.Session("45 seconds", max_duration="200 seconds"),
        aion.Session(gap_column="gap"),
        aion.Session(gap_column="gap", max_duration="200 seconds"),
    ],
    ids=str,
)
@given(script=far, bound=st.sampled_from([0, 100 * SECOND]))
# The last event's session is not closed, but its slice is gone.
@example(
    script=[
        [Event(0, 0, 1, gap=5 * SECOND), Event(0, 130 * SECOND, 2, gap=5 * SECOND)],
        130 * SECOND,
        [Event(0, 10 * SECOND, 4, gap=400 * SECOND)],
    ],
    bound=0,
)
def test_slices_that_are_gone_are_neither_read_nor_filled_again(
    session: aion.Session, script: list[Any], bound: int
) -> None:
    """Over many slices, which are a minute long. The store would not bring back a slice that was purged."""
    purged: set[int] = set()
    append, release = StoreAttempt.append, StoreAttempt.release

    def appended(attempt: StoreAttempt, stored: Any) -> None:
        assert not purged & {block.header.slice_us for _, _, block in stored}
        append(attempt, stored)

    def released(attempt: StoreAttempt, destage: Sequence[int], purge: Sequence[int]) -> None:
        purged.update(purge)
        release(attempt, destage, purge)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreAttempt, "append", appended)
        patch.setattr(StoreAttempt, "release", released)
        check(*run(session, script, bound, "partials"), "partials")
