"""Orders for windows of keys that come for some pages at a time are carried out together, also through files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.core.keyed.orders import ExecuteKeyed, Members, together
from aion.core.keyed.table import Table
from aion.core.life.actions import PaneKind
from aion.execute.panes import keyed
from aion.execute.spill.spilling import FILES, Room, file_of
from aion.execute.spill.waiting import WaitingOrders
from state_backends.store.attempt import StoreAttempt
from tests.core.keyed.test_keyed_paging import sizes

names = [f"k{number}" for number in range(40)]
batches = st.lists(
    st.lists(st.tuples(st.sampled_from(names), st.integers(0, 60), st.integers(0, 1)), min_size=1, max_size=30),
    min_size=1,
    max_size=4,
)


def table(rows: list[tuple[str, int, int]]) -> pa.Table:
    keys, times, marks = ([row[at] for row in rows] for at in range(3))
    times = pa.array([time * 1_000_000 for time in times], pa.timestamp("us", "UTC"))
    gaps = pa.array([3_000_000 + mark for mark in marks], pa.duration("us"))
    return pa.table({"key": keys, "ts": times, "end": [mark > 0 for mark in marks], "gap": gaps})


def listed(_: Any, window: aion.Window, events: Iterator[pa.RecordBatch]) -> Mapping[str, Any]:
    times = [time for batch in events for time in batch.column("ts").cast(pa.int64()).to_pylist()]
    return {"times": repr(times)}


WINDOWS: dict[str, Any] = {
    "session": aion.Session("5 seconds"),
    "cut": aion.Session("5 seconds", max_duration="12 seconds"),
    "count": aion.Count(3),
    "record": aion.PerRecord("4 seconds", on_arrival="emit"),
    "punctuation": aion.Punctuated("end"),
}
FORMS: dict[str, dict[str, Any]] = {
    "aggregates": {"aggregates": {"n": A.count(), "last": A.last("ts")}},
    "events": {"apply": aion.Apply(listed, "times string")},
}


def panes(form: Mapping[str, Any], windows: Any, script: list[list[tuple[str, int, int]]], memory: str) -> list[str]:
    found = []
    policy = {"apply": {"memory": memory}, "lateness": {"max_bound": "1 hour", "initial_bound": "1 hour"}}
    with aion.LocalOperator(windows=windows, key="key", time="ts", policy=policy, **form) as operator:
        for number, rows in enumerate(script):
            found += operator.process(table(rows)).to_pylist()
            found += operator.advance((number + 1) * 20_000_000).to_pylist()
        found += operator.advance(10_000_000_000).to_pylist()
    return sorted(repr({name: value for name, value in row.items() if name != "pane_seq"}) for row in found)


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("kind", WINDOWS)
@pytest.mark.parametrize("form", FORMS)
@given(script=batches)
def test_panes_are_the_same_through_files(form: str, kind: str, script: list[list[tuple[str, int, int]]]) -> None:
    at_once = panes(FORMS[form], WINDOWS[kind], script, "1 GiB")
    with sizes(rows=2, at_once=2):
        assert panes(FORMS[form], WINDOWS[kind], script, "1 KiB") == at_once


def test_blocks_are_read_once_for_windows_of_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the panes have one number, though the orders come for eight pages at a time and lie in a file."""
    reads, computed = [], []
    read, compute = StoreAttempt.read, keyed.panes

    def noted(self: StoreAttempt, slices: Any, **options: Any) -> Any:
        reads.append(slices)
        return read(self, slices, **options)

    def counted(plan: Any, order: ExecuteKeyed, *rest: Any) -> Any:
        computed.append(len(order))
        return compute(plan, order, *rest)

    monkeypatch.setattr(StoreAttempt, "read", noted)
    monkeypatch.setattr(keyed, "panes", counted)
    rows = [(f"k{number}", 1, 0) for number in range(2000)]
    policy = {"apply": {"memory": "64 KiB"}}
    with sizes(rows=4, at_once=8), aion.LocalOperator(
        windows=aion.Session("5 seconds"), key="key", time="ts", aggregates={"n": A.count()}, policy=policy
    ) as operator:  # fmt: skip
        operator.process(table(rows))
        reads.clear()
        found = operator.advance(100_000_000)
    assert len(reads) == 1
    assert found.num_rows == 2000 and len(set(found.column("pane_seq").to_pylist())) == 1
    assert len(computed) > FILES // 2 and max(computed) < 2000 // 16, "some of the windows at a time"


@given(data=st.data(), limit_bytes=st.sampled_from([0, 500, 1 << 20]))
def test_windows_of_a_file_have_their_own_members(data: st.DataObject, limit_bytes: int) -> None:
    """Windows may share rows, and some rows are in no window."""
    parts = data.draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=6), min_size=1, max_size=4))
    waiting, expected = WaitingOrders(Room(limit_bytes)), set()
    for number, counts in enumerate(parts):
        keys, begins, lengths = [], [], []
        for at, count in enumerate(counts):
            first = sum(counts[:at])
            for begin in range(first, first + count):
                keys.append(f"{number}-{at}")
                begins.append(begin)
                lengths.append(data.draw(st.integers(1, first + count - begin)))
        rows = np.arange(sum(counts)) + 100 * number
        members = Members(np.array(begins), np.array(lengths), rows, -rows)
        columns = {"start": np.array(begins), "last": np.array(begins)}
        waiting.add(ExecuteKeyed(0, PaneKind.LATE, Table([pa.array(keys)], columns), members, (number,)))
        expected |= {
            (key, *rows[begin : begin + length].tolist())
            for key, begin, length in zip(keys, begins, lengths, strict=True)
        }
    assert waiting.slices == tuple(range(len(parts)))
    found = []
    for file in range(FILES) if waiting.in_memory is None else [None]:
        order = waiting.of(() if file is None else (file,))
        assert order.members is not None
        for at, key in enumerate(order.windows.keys[0].to_pylist()):
            begin, length = order.members.begins[at], order.members.lengths[at]
            seqs = order.members.seqs[begin : begin + length].tolist()
            assert order.members.rows[begin : begin + length].tolist() == [-seq for seq in seqs]
            found.append((key, *seqs))
        if file is not None and len(order):
            assert set(file_of(order.windows.keys, len(order), 0).tolist()) == {file}
    assert sorted(found) == sorted(expected, key=lambda row: row) and len(found) == len(expected)


def test_orders_of_one_kind_are_one() -> None:
    one = ExecuteKeyed(0, PaneKind.LATE, Table([pa.array(["a"])], {"start": np.array([1])}), None, (3, 1))
    assert together([one]) is one
    both = together([one, one])
    assert both.windows["start"].tolist() == [1, 1] and both.slices == (1, 3)
