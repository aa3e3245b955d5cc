"""Windows of keys in pages: a version costs what changed, and restarts change nothing; named cases of the slicer."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion.core.keyed.cut_sessions import assigner_of
from aion.core.keyed.in_memory import WindowsInMemory
from aion.core.keyed.page_store import ROWS
from aion.core.keyed.table import Table, hashes_of
from aion.core.keyed.windows import KeyedWindows
from aion.core.lateness.observe import Lateness
from aion.core.life.actions import Forget
from aion.core.life.definition import Turn
from aion.core.life.late_work import LateWork
from aion.core.life.rules import OfDefinition
from aion.core.slicing.grid import SliceGrid
from aion.core.trigger.triggers import EveryBatchTrigger
from state_backends.format.ordered_map import Change, MemoryMap
from tests.durations import us

DEFINITIONS = [
    aion.Session(us(5)),
    aion.Count(3, 2),
    aion.PerRecord(us(4)),
    aion.PerRecord(us(4), on_arrival="emit"),
    aion.Punctuated("mark"),
    aion.Session(us(5), max_duration=us(12)),
    aion.Session(gap_column="gap"),
]
arrivals = st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(-30, 60), st.integers(0, 1)), max_size=6)
steps = st.lists(arrivals | st.integers(-20, 120), max_size=20)


class Fixed:
    """A bound that learns nothing."""

    def __init__(self, bound_us: int) -> None:
        self.bound_us = bound_us
        self.lateness = Lateness()

    def bound_for_new_window(self) -> int:
        return self.bound_us

    def observe(self, end_us: int, at_us: int, events: int) -> None: ...
    def observe_on_time(self, end_us: int, events: int) -> None: ...
    def observe_state(self, slice_us: int, at_us: int, size_bytes: int) -> None: ...
    def advance(self, from_us: int | None, to_us: int) -> None: ...
    def to_json(self) -> dict[str, Any]:
        return {}


def make(definition: Any, bound_us: int, snapshot: dict[str, Any] | None = None) -> KeyedWindows:
    rules = OfDefinition(Fixed(bound_us), EveryBatchTrigger())
    bins = SliceGrid([definition]).bins
    memory = WindowsInMemory(0, assigner_of(definition), [pa.string()], rules, bins, snapshot)
    on_arrival = isinstance(definition, aion.PerRecord) and definition.on_arrival == "emit"
    return KeyedWindows(memory, snapshot, on_arrival=on_arrival)


class CountedValues(MemoryMap):
    """Counts the pages that are read, and the bytes that are written."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written_bytes = 0

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.read += len(keys)
        return super().get(keys)

    def put(self, values: Sequence[Change]) -> None:
        self.written_bytes += sum(len(key) + len(value or b"") for key, value, _ in values)
        super().put(values)


class WithDeleted(MemoryMap):
    """Keeps what was deleted, as runs do until they are merged.

    ``found``: the entries that scans have found. ``passed``: those that they have passed, also deleted ones.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known: set[bytes] = set()
        self.found = self.passed = 0

    def put(self, values: Sequence[Change]) -> None:
        self.known.update(key for key, *_ in values)
        super().put(values)

    def scan(self, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        keys = sorted(self.known)
        for key in keys[bisect_left(keys, begin) : None if end is None else bisect_left(keys, end)]:
            self.passed += 1
            if key in self.values:
                self.found += 1
                yield key, self.values[key]


class Shard:
    """One definition's windows, and the map that they are kept in."""

    def __init__(self, definition: Any, bound_us: int) -> None:
        self.definition, self.bound_us = definition, bound_us
        self.windows = make(definition, bound_us)
        self.values = CountedValues()
        self.windows.memory.kept.values = self.values
        self.watermark: int | None = None
        self.seq = 0

    def do(self, step: Sequence[tuple[str | None, int, int]] | int) -> list[Any]:
        if isinstance(step, int):
            before = self.watermark
            if before is not None and step <= before:
                return []
            self.watermark = step
            return self._panes(self.windows.advance(self.turn(before)))
        rows = self._rows(step)
        taken = self.windows.arriving.accepted(rows)
        if taken.any():
            self.windows.arriving.add(rows.take(taken), np.full(int(taken.sum()), self.seq))
            self.seq += 1
        self.windows.join(self.turn())
        return self._panes(self.windows.end_batch(self.turn()))

    def turn(self, before: int | None = None) -> Turn:
        return Turn(self.watermark, 0, self.seq, LateWork(), before)

    @staticmethod
    def _panes(orders: list[Any]) -> list[Any]:
        return [order for order in orders if not isinstance(order, Forget)]

    def _rows(self, step: Sequence[tuple[str | None, int, int]]) -> Table:
        times, marks = (np.array([e[i] for e in step], np.int64) for i in (1, 2))
        if isinstance(self.definition, aion.Session) and self.definition.gap_column is not None:
            marks = np.where(marks > 0, 40, 3)  # the gaps of the events
        columns = {"first": times, "last": times, "events": np.ones_like(times), "row": np.arange(len(step))}
        rows = Table([pa.array([e[0] for e in step], pa.string())], {**columns, "mark": marks})
        return rows.replaced(hash=hashes_of(rows))

    def restart(self) -> None:
        """As from a checkpoint: of this object nothing is left but the map and a snapshot."""
        self.windows.write()
        self.windows = make(self.definition, self.bound_us, json.loads(json.dumps(self.windows.snapshot())))
        self.windows.memory.kept.values = self.values


def told(orders: Sequence[Any]) -> dict[Any, list[str]]:
    """Orders as plain values, those of one kind together, because they come for some pages at a time."""
    found: dict[Any, list[str]] = {}
    for order in orders:
        columns = [key.to_pylist() for key in order.windows.keys]
        columns += [column.tolist() for name, column in sorted(order.windows.columns.items()) if name != "id"]
        rows = found.setdefault((type(order).__name__, getattr(order, "kind", None)), [])
        rows += map(repr, zip(*columns, strict=True))
    return {kind: sorted(rows) for kind, rows in found.items()}


@pytest.mark.parametrize("definition", DEFINITIONS, ids=str)
@given(script=steps, bound_us=st.sampled_from([0, 10, 1000]), every=st.integers(1, 3))
def test_a_restart_changes_nothing(definition: Any, script: list[Any], bound_us: int, every: int) -> None:
    straight, restarted = Shard(definition, bound_us), Shard(definition, bound_us)
    for i, step in enumerate(script):
        assert told(straight.do(step)) == told(restarted.do(step))
        if i % every == 0:
            restarted.restart()
        elif i % 2:
            restarted.windows.write()


@pytest.mark.parametrize("definition", DEFINITIONS, ids=str)
@given(script=steps, bound_us=st.sampled_from([0, 10, 1000]))
def test_sums_over_pages_are_those_of_their_rows(definition: Any, script: list[Any], bound_us: int) -> None:
    """What is not in memory is only known by sums. They never drift from what the pages hold."""
    shard = Shard(definition, bound_us)
    for step in script:
        shard.do(step)
        shard.windows.write()
        sums = json.loads(json.dumps(shard.windows.memory.kept.rest.to_json()))
        shard.windows.memory.read(np.arange(shard.windows.memory.kept.pages))
        assert not any(shard.windows.memory.kept.rest.sums.values()) and not shard.windows.memory.kept.rest.waiting
        for bins in (
            shard.windows.memory.kept.rest.firsts,
            shard.windows.memory.kept.rest.lasts,
            shard.windows.memory.kept.rest.opens,
        ):
            assert not bins
        shard.windows.write()
        assert shard.windows.memory.kept.rest.to_json() == sums


@pytest.mark.slow(if_tiny=True)
def test_pages_follow_the_rows() -> None:
    """They are split as keys come, and put together as keys go. Nothing is left of what is gone."""
    shard = Shard(aion.Session(us(5)), 0)
    for begin in range(0, 3000, 500):
        shard.do([(f"k{i}", begin, 0) for i in range(begin, begin + 500)])
        shard.windows.write()
    kept = shard.windows.memory.kept
    assert 3000 // (2 * ROWS) <= kept.pages <= 3000 // ROWS
    for at in range(2010, 8000, 500):
        shard.do(at)
        shard.windows.write()
    for at in range(8000, 80_000, 10):
        if kept.pages > 1:
            shard.do([("one", at, 0)])
            shard.do(at + 6)
            shard.windows.write()
    assert kept.pages == 1 and not shard.values.values and not kept.rest.sums["rows"]


@pytest.mark.usual_sizes
def test_a_version_costs_what_changed() -> None:
    """Many open sessions, of which a few change in each version: neither read nor written are the others."""
    shard = Shard(aion.Session(us(1000)), 10_000)
    shard.do([(f"k{i}", 0, 0) for i in range(20_000)])
    shard.windows.write()
    all_bytes, shard.values.read, shard.values.written_bytes = shard.values.written_bytes, 0, 0
    for i in range(20):
        shard.do([(f"k{j}", i, 0) for j in range(50)])
        shard.windows.write()
    assert shard.values.read <= 20 * 50
    assert shard.values.written_bytes < 20 * all_bytes * (50 / (20_000 / ROWS)) * 1.5


@pytest.mark.usual_sizes
def test_a_watermark_costs_what_is_due() -> None:
    shard = Shard(aion.Session(us(10)), 0)
    shard.do([(f"k{i}", i, 0) for i in range(20_000)])
    shard.windows.write()
    shard.do(5)
    shard.windows.write()
    shard.values.read = 0
    assert len(panes(shard.do(10 + 50))) == 51
    assert shard.values.read <= 51


@pytest.mark.slow
@pytest.mark.usual_sizes
@pytest.mark.parametrize("restarts", [False, True])
def test_what_is_due_is_found_without_what_was_deleted_before(restarts: bool) -> None:
    """An entry that went is passed once more, when the first one that is left is looked for."""
    shard, batches = Shard(aion.Session(us(10)), 0), 200
    shard.values = values = WithDeleted()  # type: ignore[assignment]
    shard.windows.memory.kept.values = shard.values
    for batch in range(batches):
        shard.do([(f"{batch} {key}", 10 * batch + key % 10, 0) for key in range(500)])
        shard.do(10 * batch)
        shard.windows.write()
        if restarts:
            shard.restart()
    assert values.found > 10 * batches
    assert values.passed <= 3 * values.found


@pytest.mark.usual_sizes
def test_sessions_that_go_on_leave_the_due_index_alone() -> None:
    """Their entry stays where it was. When its time comes, each page is read once, and then at the end."""
    shard = Shard(aion.Session(us(1000)), 0)
    keys = [f"k{i}" for i in range(2000)]
    shard.do([(key, 0, 0) for key in keys])
    shard.windows.write()
    before = set(shard.values.values)
    for at in range(100, 900, 100):
        shard.do([(key, at, 0) for key in keys])
        shard.do(at - 50)
        shard.windows.write()
    assert set(shard.values.values) == before
    shard.values.read = 0
    for at in range(900, 1800, 10):
        assert not panes(shard.do(at))
        shard.windows.write()
    assert shard.values.read == shard.windows.memory.kept.pages
    assert len(panes(shard.do(1900))) == 2000


# -- where the original slicer goes wrong -----------------------------------------------------------


def sessions(shard: Shard) -> list[tuple[int, int]]:
    return sorted(
        zip(shard.windows.memory.index["first"].tolist(), shard.windows.memory.index["last"].tolist(), strict=True)
    )


def panes(orders: Sequence[Any]) -> list[tuple[str, int, int]]:
    return [
        (getattr(order, "kind", "retract"), start, end)
        for order in orders
        for start, end in zip(order.windows["start"].tolist(), order.windows["end"].tolist(), strict=True)
    ]


def test_an_event_exactly_a_gap_before_a_session_belongs_to_it() -> None:
    shard = Shard(aion.Session(us(5)), 100)
    shard.do([("a", 10, 0)])
    shard.do([("a", 5, 0)])
    assert sessions(shard) == [(5, 10)]


def test_an_event_exactly_a_gap_after_a_session_belongs_to_it() -> None:
    shard = Shard(aion.Session(us(5)), 100)
    shard.do([("a", 10, 0)])
    shard.do([("a", 15, 0)])
    assert sessions(shard) == [(10, 15)]


def test_one_more_microsecond_makes_two_sessions() -> None:
    shard = Shard(aion.Session(us(5)), 100)
    shard.do([("a", 10, 0), ("a", 16, 0)])
    assert sessions(shard) == [(10, 10), (16, 16)]


def test_the_first_watermark_skips_no_old_window() -> None:
    shard = Shard(aion.Session(us(5)), 100)
    shard.do([("a", 10, 0), ("a", 30, 0), ("b", 50, 0)])
    assert panes(shard.do(90)) == [("on_time", 10, 15), ("on_time", 30, 35), ("on_time", 50, 55)]


def test_a_watermark_without_an_open_session_is_fine() -> None:
    shard = Shard(aion.Session(us(5)), 100)
    assert shard.do(10) == []
    shard.do([("a", 20, 0)])
    assert panes(shard.do(30)) == [("on_time", 20, 25)]
    assert shard.do(1000) == []


def test_a_late_event_makes_no_second_session_of_one_that_it_joins() -> None:
    shard = Shard(aion.Session(us(5)), 100)
    shard.do([("a", 10, 0)])
    assert panes(shard.do(20)) == [("on_time", 10, 15)]
    assert panes(shard.do([("a", 12, 0)])) == [("retract", 10, 15), ("late", 10, 17)]


def test_a_late_event_that_joins_two_sessions_retracts_both() -> None:
    shard = Shard(aion.Session(us(5)), 100)
    shard.do([("a", 10, 0), ("a", 20, 0)])
    shard.do(30)
    found = panes(shard.do([("a", 15, 0)]))
    assert sorted(found[:2]) == [("retract", 10, 15), ("retract", 20, 25)]
    assert found[2:] == [("late", 10, 25)]


def test_a_session_that_goes_on_is_retracted_when_it_is_executed_again() -> None:
    """Until then the sink keeps what it has."""
    shard = Shard(aion.Session(us(5)), 100)
    shard.do([("a", 10, 0)])
    shard.do(16)
    assert shard.do([("a", 13, 0)]) == [], "it is open again"
    assert panes(shard.do(18)) == [("retract", 10, 15), ("on_time", 10, 18)]


def test_the_pane_of_a_session_that_goes_on_is_retracted_before_it_would_be_closed() -> None:
    shard = Shard(aion.Session(us(5)), 10)
    shard.do([("a", 10, 0)])
    assert panes(shard.do(16)) == [("on_time", 10, 15)]
    assert shard.do([("a", t, 0) for t in (14, 18, 22, 26)]) == []
    assert shard.do(24) == [] and panes(shard.do(25)) == [("retract", 10, 15)]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_pane_keeps_its_promise_when_bounds_get_longer(restarts: bool) -> None:
    shard = Shard(aion.Session(us(5)), 10)
    shard.do([("a", 10, 0)])
    (order,) = shard.do(20)
    assert order.windows["closes"].tolist() == [25]
    shard.bound_us = 1000
    if restarts:
        shard.restart()
    else:
        shard.windows._bound = Fixed(1000)
    shard.do(25)
    assert not shard.windows.arriving.accepted(shard._rows([("a", 10, 0)]))[0]


def test_bound_zero_does_not_lose_the_first_emission() -> None:
    shard = Shard(aion.Session(us(5)), 0)
    shard.do([("a", 10, 0)])
    assert panes(shard.do(100)) == [("on_time", 10, 15)]
    assert not len(shard.windows.memory.index) and not len(shard.windows.memory.yielded)


def test_count_windows_of_equal_instants_do_not_collapse() -> None:
    shard = Shard(aion.Count(2), 100)
    shard.do([("a", 10, 0)] * 5)
    assert panes(shard.do(20)) == [("on_time", 10, 11)] * 2


def test_a_late_event_shifts_the_count_windows_behind_it() -> None:
    shard = Shard(aion.Count(2), 100)
    shard.do([("a", t, 0) for t in (10, 20, 30, 40)])
    assert panes(shard.do(50)) == [("on_time", 10, 21), ("on_time", 30, 41)]
    found = panes(shard.do([("a", 15, 0)]))
    assert sorted(found) == [("late", 10, 16), ("late", 20, 31), ("retract", 10, 21), ("retract", 30, 41)]


def test_what_is_gone_does_not_come_back() -> None:
    shard = Shard(aion.Session(us(5)), 10)
    shard.do([("a", 10, 0)])
    shard.do(25)
    assert not shard.windows.arriving.accepted(shard._rows([("a", 10, 0)]))[0]
    assert shard.windows.arriving.accepted(shard._rows([("a", 11, 0)]))[0]


def test_an_event_inside_a_session_that_is_there_is_never_too_late() -> None:
    """However long ago: its window has not ended."""
    shard = Shard(aion.Session(us(5)), 0)
    shard.do([("a", t, 0) for t in range(0, 100, 4)])
    shard.do(98)
    assert shard.windows.arriving.accepted(shard._rows([("a", 2, 0), ("b", 2, 0)])).tolist() == [True, False]
