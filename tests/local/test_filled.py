"""Rows for windows without events: the table after the upserts is what a batch computation over all events gives."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import dataclass
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.base.hashing import ShardOfKeys
from aion.core.periodic import Periodic
from aion.errors import ConfigError, WindowError
from aion.execute.assembly import make_builder, make_contents
from aion.execute.windows import Windows
from tests.durations import us
from tests.examples import some
from tests.oracle import Definition

SCHEMA = pa.schema([("k", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("v", pa.int64())])
AGGREGATES = {
    "n": A.count(), "c": A.count("v"), "s": A.sum("v"), "d": A.count_distinct("v"), "m": A.mean("v"), "top": A.max("v"),
}  # fmt: skip
ZERO: dict[str, Any] = {"n": 0, "c": 0, "s": 0, "d": 0, "m": None, "top": None}
NULL: dict[str, Any] = dict.fromkeys(ZERO)
Row = dict[str, Any]
Place = tuple[int, str | None, int, int]
"""The number of a definition, a key, and the bounds of a window."""


@dataclass(frozen=True)
class Filled:
    """A definition, and for how long its keys have rows."""

    windows: Definition
    value: Any
    for_: int

    def made(self, emit: str) -> Periodic:
        d, how = self.windows, {"fill": self.value, "fill_for": us(self.for_)}
        early = {} if d.early is None or emit == "final" else {"early": us(d.early)}
        if d.grows:
            return aion.Cumulative(us(d.slide), us(d.size), us(d.offset), **how, **early)  # type: ignore[arg-type]
        if d.size == d.slide:
            return aion.Tumbling(us(d.size), us(d.offset), **how, **early)  # type: ignore[arg-type]
        return aion.Sliding(us(d.size), us(d.slide), us(d.offset), **how, **early)  # type: ignore[arg-type]


class Truth:
    """All events so far, and which windows took them. It knows windows only by :meth:`Definition.containing`."""

    def __init__(self, definitions: list[Filled], bound: int) -> None:
        self._definitions = [
            (f, sorted({w for t in range(-60, 400) for w in f.windows.containing(t)})) for f in definitions
        ]
        self._bound = bound
        self.watermark: int | None = None
        self._events: dict[Place, list[int | None]] = {}
        self._filled: set[Place] = set()

    def came(self, key: str | None, t: int, v: int | None) -> None:
        for number, (filled, windows) in enumerate(self._definitions):
            there = [w for w in windows if not self._is_gone(w[1])]
            taken = [w for w in there if w[0] <= t < w[1]]
            for window in taken:
                self._events.setdefault((number, key, *window), []).append(v)
            if taken:
                last = max(end for start, end in windows if start <= t < end) + filled.for_
                self._filled |= {(number, key, *w) for w in there if t < w[1] <= last}

    def advance(self, watermark: int | None) -> None:
        if watermark is not None:
            self.watermark = watermark if self.watermark is None else max(self.watermark, watermark)

    def _is_gone(self, end: int) -> bool:
        return self.watermark is not None and end + self._bound <= self.watermark

    def table(self, *, final: bool) -> dict[Place, Row]:
        if self.watermark is None:
            return {}
        by = self.watermark - self._bound if final else self.watermark
        found = {}
        for place in self._filled | self._events.keys():
            if place[3] > by:
                continue
            values = self._events.get(place)
            if values is None:
                found[place] = ZERO if self._definitions[place[0]][0].value == "zero" else NULL
                continue
            there = [v for v in values if v is not None]
            found[place] = {
                "n": len(values), "c": len(there), "s": sum(there) if there else None, "d": len(set(there)),
                "m": sum(there) / len(there) if there else None, "top": max(there, default=None),
            }  # fmt: skip
        return found


def table_of(events: list[Any]) -> pa.Table:
    times = pa.array([t for _, t, _ in events], pa.int64()).cast(SCHEMA.field("ts").type)
    return pa.table([pa.array([e[0] for e in events], pa.string()), times, [e[2] for e in events]], schema=SCHEMA)


def micros(instant: dt.datetime) -> int:
    return (instant - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)


def place_of(row: Row, keyed: bool) -> Place:
    number = int(row["window"].removeprefix("w"))
    return number, row["k"] if keyed else None, micros(row["window_start"]), micros(row["window_end"])


class Sink:
    """Follows the panes, and checks what holds for each of them."""

    def __init__(self, emit: str, bound: int, *, keyed: bool) -> None:
        self.rows: dict[Place, Row] = {}
        self._seqs: dict[Place, int] = {}
        self._emit, self._bound, self._keyed = emit, bound, keyed

    def take(self, rows: pa.Table) -> None:
        for row in rows.to_pylist():
            if row["kind"] == "dropped":
                continue
            place = place_of(row, self._keyed)
            assert row["kind"] in {"on_time": ("final",)}.get(self._emit, ("early", "on_time", "late", "final"))
            assert row["pane_seq"] > self._seqs.get(place, -1), "a later pane has a larger number"
            self._seqs[place] = row["pane_seq"]
            assert micros(row["closes_at"]) == place[3] + self._bound
            new = {name: row[name] for name in AGGREGATES}
            if row["events"] == 0:
                assert row["late_events"] == 0 and row["kind"] in ("on_time", "late", "final")
                assert place not in self.rows or self._emit == "changes", "it never takes the place of another"
            if self._emit == "changes":
                assert {name: row[f"old_{name}"] for name in AGGREGATES} == self.rows.get(place, NULL)
                assert new != self.rows.get(place) or place not in self.rows
            self.rows[place] = new

    def ended(self, by: int | None) -> dict[Place, Row]:
        return {} if by is None else {place: row for place, row in self.rows.items() if place[3] <= by}


def restart(operator: aion.LocalOperator) -> None:
    """Starts again from the snapshot, on the same store."""
    before, attempt = operator._windows, operator._attempt
    assert before is not None
    attempt.begin(before.operator.next_seq)
    saved = before.save()
    attempt.end()
    snapshot = json.loads(json.dumps(saved.snapshot))
    contents = make_contents(before.plan, operator._codec, operator.policy)
    operator._windows = Windows(before.plan, operator.policy, attempt, snapshot, contents)


def batch(operator: aion.LocalOperator, events: list[Any], watermark: int | None) -> pa.Table:
    """A batch of windows of windows: rows come before the watermark that they have led to."""
    windows, attempt = operator._windows, operator._attempt
    assert windows is not None
    attempt.begin(windows.operator.next_seq)
    builder = make_builder(windows.plan, operator.policy, operator._codec, ShardOfKeys([0]))
    blocks = [b.block for rows in table_of(events).to_batches() for b in builder.add(rows)]
    rows = [*windows.arrive([*blocks, *(b.block for b in builder.finish())])]
    rows += [*windows.advance(watermark), *windows.end_batch(batch_follows=True)]
    windows.executor.save()
    operator._values.settle()
    attempt.end()
    return pa.Table.from_batches(rows, windows.plan.result_schema)


def check(
    definitions: list[Filled],
    steps: list[Any],
    bound: int = 1000,
    emit: Any = "all",
    *,
    keyed: bool = True,
    restarts: bool = False,
    rows_first: bool = False,
    **policy: Any,
) -> None:
    """Runs steps: each is a batch of events, and a watermark that comes before it; with ``rows_first``, after it."""
    truth, sink = Truth(definitions, bound), Sink(emit, bound, keyed=keyed)
    windows = {f"w{number}": filled.made(emit) for number, filled in enumerate(definitions)}
    trigger = {} if emit == "final" else {"trigger": "every_batch"}
    with aion.LocalOperator(
        windows=windows, key="k" if keyed else None, time="ts", aggregates=AGGREGATES, bound=us(bound), emit=emit,
        input_schema=SCHEMA, policy=policy or None, **trigger,
    ) as operator:  # fmt: skip
        for events, watermark in [*steps, ([], 10_000)]:
            if not rows_first:
                truth.advance(watermark)
            for key, t, v in events:
                truth.came(key if keyed else None, t, v)
            truth.advance(watermark)
            if rows_first:
                sink.take(batch(operator, events, watermark))
            else:
                sink.take(operator.process(table_of(events), watermark))
            assert operator._windows is not None
            operator._windows.operator.validate()
            expected = truth.table(final=emit == "final")
            assert sink.ended(truth.watermark) == expected, truth.watermark
            if restarts:
                restart(operator)
        assert operator._windows.operator.next_due_us is None, "nothing is due for ever"
        kept = [key for key, _ in operator._attempt.scan(b"f", b"g")]
        assert not kept, "no key is kept for ever"


of_windows = st.sampled_from(
    [
        Definition(10, 10),
        Definition(10, 10, 3),
        Definition(20, 5),
        Definition(15, 10, 2),
        Definition(30, 10, grows=True),
        Definition(12, 4, 1, grows=True),
        Definition(20, 20, early=5),
    ]
)
filled = st.builds(Filled, of_windows, st.sampled_from(["zero", "null"]), st.sampled_from([1, 10, 25, 60]))
events = st.tuples(st.sampled_from(["a", "b", None]), st.integers(-20, 120), st.none() | st.integers(-5, 5))


@st.composite
def streams(draw: st.DrawFn) -> list[Any]:
    """Draws batches, each with a watermark that does not go back, and events on both sides of it."""
    steps: list[Any] = []
    watermark = draw(st.integers(-20, 20))
    for _ in range(draw(st.integers(1, 7))):
        batch = draw(st.lists(events, max_size=6))
        if draw(st.booleans()):
            batch = [(key, watermark + t // 4, v) for key, t, v in batch]
        steps.append((batch, draw(st.sampled_from([None, watermark]))))
        watermark += draw(st.sampled_from([0, 1, 5, 12, 40]))
    return steps


EMITS = st.sampled_from(["all", "changes", "final"])


@given(st.lists(filled, min_size=1, max_size=3), streams(), st.sampled_from([0, 15, 40, 1000]), EMITS, st.booleans())
@example([Filled(Definition(10, 10), "zero", 25)], [([("a", 3, 1)], None), ([("b", 1, 1)], 50)], 1000, "all", False)
def test_the_table_is_that_of_a_batch_computation(
    definitions: list[Filled], steps: list[Any], bound: int, emit: str, restarts: bool
) -> None:
    check(definitions, steps, bound, emit, restarts=restarts)


@some(1 / 4)
@given(st.lists(filled, min_size=1, max_size=2), streams(), st.sampled_from([15, 1000]), EMITS)
def test_without_a_key(definitions: list[Filled], steps: list[Any], bound: int, emit: str) -> None:
    check(definitions, steps, bound, emit, keyed=False)


@some(1 / 2)
@given(st.lists(filled, min_size=1, max_size=2), streams(), st.sampled_from([15, 1000]), EMITS, st.booleans())
@example([Filled(Definition(10, 10), "zero", 25)], [([("b", 1, 1)], 50), ([("a", 31, 1)], 70)], 15, "all", False)
def test_rows_that_come_before_their_watermark(
    definitions: list[Filled], steps: list[Any], bound: int, emit: str, restarts: bool
) -> None:
    check(definitions, steps, bound, emit, restarts=restarts, rows_first=True)


@some(1 / 4)
@given(st.lists(filled, min_size=1, max_size=2), streams(), st.sampled_from([15, 1000]))
def test_in_small_blocks_and_little_memory(definitions: list[Filled], steps: list[Any], bound: int) -> None:
    """Then a batch arrives in parts, and windows run some at a time."""
    tiny = {"memory": {"budget": "2KiB", "bucket_limit": "700B"}, "blocks": {"target": "64B"}}
    check(definitions, steps, bound, **tiny)


def rows(operator: aion.LocalOperator, events: list[Any], watermark: int) -> list[tuple[Any, ...]]:
    found = operator.process(table_of(events), watermark).to_pylist()
    return sorted(
        (r["k"], micros(r["window_start"]), r["kind"], r["n"], r["pane"]) for r in found if r["kind"] != "dropped"
    )


def due(operator: aion.LocalOperator) -> int | None:
    assert operator._windows is not None
    return operator._windows.operator.next_due_us


def tumbling(**how: Any) -> aion.LocalOperator:
    """An operator whose keys have rows for 30 µs, in windows of 10 µs."""
    definition: dict[str, Any] = {
        "windows": aion.Tumbling(us(10), fill="zero", fill_for=us(30)), "key": "k", "time": "ts",
        "aggregates": {"n": A.count()}, "bound": us(1000), "trigger": "every_batch",
    }  # fmt: skip
    return aion.LocalOperator(input_schema=SCHEMA, **definition | how)


def test_a_key_has_rows_from_its_first_event_on_and_is_forgotten_in_the_end() -> None:
    with tumbling() as operator:
        assert rows(operator, [("a", 12, 1)], 5) == []
        assert rows(operator, [], 45) == [
            ("a", 10, "on_time", 1, 0),
            ("a", 20, "on_time", 0, 0),
            ("a", 30, "on_time", 0, 0),
        ]
        assert due(operator) == 50, "also if no event comes"
        assert rows(operator, [], 90) == [("a", 40, "on_time", 0, 0)], "30 µs after the window of its event"
        assert due(operator) == 1020, "then the first window is gone"
        assert rows(operator, [("a", 95, 1)], 91) == []
        assert rows(operator, [], 111) == [("a", 90, "on_time", 1, 0), ("a", 100, "on_time", 0, 0)], "it begins anew"


def test_a_late_event_replaces_the_row_and_fills_what_lies_between() -> None:
    with tumbling() as operator:
        rows(operator, [("a", 42, 1), ("b", 1, 1)], 5)
        assert rows(operator, [], 60) == [
            ("a", 40, "on_time", 1, 0), ("a", 50, "on_time", 0, 0),
            ("b", 0, "on_time", 1, 0), *(("b", start, "on_time", 0, 0) for start in (10, 20, 30)),
        ]  # fmt: skip
        assert rows(operator, [("b", 25, 1), ("a", 11, 1)], 60) == [
            ("a", 10, "late", 1, 2),
            ("a", 20, "late", 0, 1),  # from its first event on
            ("a", 30, "late", 0, 1),
            ("b", 20, "late", 1, 2),
            ("b", 40, "late", 0, 1),  # for 30 µs after its last event
            ("b", 50, "late", 0, 1),
        ]


def test_a_late_event_before_all_others_reaches_no_further_than_any() -> None:
    with tumbling() as operator:
        rows(operator, [("a", 105, 1)], 5)
        assert rows(operator, [], 120) == [("a", 100, "on_time", 1, 0), ("a", 110, "on_time", 0, 0)]
        found = rows(operator, [("a", 3, 1)], 120)
        assert found == [("a", 0, "late", 1, 1), *(("a", start, "late", 0, 0) for start in (10, 20, 30))]


def test_days_have_rows_also_where_the_clocks_change() -> None:
    zone = ZoneInfo("Europe/Berlin")
    day = aion.Calendar("1 day", zone="Europe/Berlin", fill="null", fill_for="3 days")
    with tumbling(windows=day, bound="10 days") as operator:
        first = dt.datetime(2026, 3, 28, 12, tzinfo=zone)
        operator.process(table_of([("a", micros(first), 1)]), micros(first))
        found = operator.advance(dt.datetime(2026, 4, 20, tzinfo=dt.UTC)).to_pylist()
    starts = [row["window_start"].astimezone(zone).replace(tzinfo=None) for row in found]
    assert starts == [dt.datetime(2026, 3, 28) + dt.timedelta(days=n) for n in range(len(starts))]
    assert [row["n"] for row in found] == [1, *[None] * (len(starts) - 1)]
    hours = [(row["window_end"] - row["window_start"]) // dt.timedelta(hours=1) for row in found]
    assert hours == [24, 23, 24, 24], "3 days are 72 hours"


@pytest.mark.parametrize("type_", [pa.int8(), pa.float32(), pa.decimal128(10, 2), pa.decimal128(38, 38)], ids=str)
def test_the_sum_of_no_events_is_a_zero_of_its_type(type_: pa.DataType) -> None:
    window = aion.Tumbling(us(10), fill="zero", fill_for=us(10))
    with aion.LocalOperator(windows=window, time="ts", aggregates={"s": A.sum("v")}, bound=0) as operator:
        operator.process(pa.table({"ts": pa.array([1]).cast(pa.timestamp("us")), "v": pa.array([0], type_)}))
        rows = operator.advance(20)
    assert rows.column("events").to_pylist() == [1, 0]
    assert rows.column("s").to_pylist() == [0, 0]


@pytest.mark.slow
def test_a_row_without_events_says_nothing_of_how_complete_it_is() -> None:
    """And nothing is learned from it: all events of the others come in time, so their rows are complete."""
    window = aion.Tumbling(us(10), fill="zero", fill_for=us(10_000))
    with tumbling(windows=window, completeness=True, bound=us(20)) as operator:
        found = []
        for start in range(0, 600, 10):
            keys = [f"key {n}" for n in range(8)] + ["quiet"] * (start == 0)
            events = [(key, start + n, 1) for key in keys for n in range(3)]
            found += operator.process(table_of(events), max(start - 1, 0)).to_pylist()
        over = operator.advance(100_000).to_pylist()
    known = [row for row in found if row["completeness"] is not None]
    assert {row["k"] for row in known} == {f"key {n}" for n in range(8)}
    assert {row["completeness"] for row in known} == {1.0}
    assert [row["n"] for row in found if row["k"] == "quiet"][:3] == [3, 0, 0]
    assert {row["completeness"] for row in over} == {1.0}, "nothing can change them any more"


def test_a_key_that_is_silent_for_long_is_not_kept() -> None:
    with tumbling(bound=us(10)) as operator:
        operator.process(table_of([(f"key {n}", 1, 1) for n in range(2_000)]), 0)

        def kept_bytes() -> int:
            return sum(len(value) for _, value in operator._attempt.scan(b"f", b"g"))

        before = kept_bytes()
        for start in range(0, 100, 10):
            operator.process(table_of([("goes on", start, 1)]), start)
        assert 0 < kept_bytes() < before / 10


@pytest.mark.slow(if_tiny=True)
def test_a_batch_reads_and_writes_the_pages_of_its_keys() -> None:
    """Keys that do not come cost nothing until a window ends."""
    keys = [(f"key {n}", 1, 1) for n in range(20_000)]
    with tumbling(windows=aion.Tumbling(us(1000), fill="zero", fill_for=us(10_000))) as operator:
        operator.process(table_of(keys), 0)
        read: list[bytes] = []
        get = operator._attempt.get
        operator._attempt.get = lambda keys: (read.extend(keys), get(keys))[1]  # type: ignore[method-assign]
        operator.process(table_of([("key 5", 3, 1), ("new", 4, 1)]), 5)
        assert 0 < len([key for key in read if key[:1] == b"f"]) < 20
        assert operator.advance(2000).num_rows == 20_001 * 2


@pytest.mark.parametrize(
    ("how", "shown"),
    [
        ({"fill": "zero"}, "fill='zero' and fill_for=None; give both"),
        ({"fill_for": "1 day"}, "fill=None and fill_for='1 day'; give both"),
        ({"fill": "nothing", "fill_for": "1 day"}, "fill of 'nothing' is not known; give 'zero' or 'null'"),
        ({"fill": "null", "fill_for": 0}, "fill_for of 0 is not positive"),
    ],
)
def test_what_cannot_be_filled_is_refused(how: dict[str, Any], shown: str) -> None:
    makes: list[Any] = [
        lambda **fill: aion.Tumbling("1 minute", **fill),
        lambda **fill: aion.Sliding("1 minute", "30 seconds", **fill),
        lambda **fill: aion.Cumulative("30 seconds", "1 minute", **fill),
        lambda **fill: aion.Calendar("1 day", "UTC", **fill),
    ]
    for make in makes:
        with pytest.raises(WindowError) as caught:
            make(**how)
        assert shown in str(caught.value)


def test_a_key_cannot_have_rows_in_too_many_windows() -> None:
    with pytest.raises(WindowError, match=r"a key would have rows in 86,400,000 windows after its last event"):
        tumbling(windows=aion.Tumbling("1 ms", fill="zero", fill_for="1 day"))


def test_a_function_has_no_result_for_no_events() -> None:
    with pytest.raises(ConfigError, match="a function has no result for no events; give aggregates="):
        tumbling(aggregates=None, apply=aion.Apply(lambda key, window, events: {"n": 1}, "n bigint"))
