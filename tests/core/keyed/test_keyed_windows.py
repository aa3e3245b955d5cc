"""Sessions, counts, windows per record and punctuated ones, through LocalOperator, against the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from tests.durations import us
from tests.examples import some
from tests.keyed_oracle import Event, Oracle

DEFINITIONS = [
    aion.Session(us(5)),
    aion.Session(us(1)),
    aion.Count(3),
    aion.Count(3, 2),
    aion.Count(1),
    aion.PerRecord(us(4)),
    aion.PerRecord(us(4), on_arrival="emit"),
    aion.Punctuated("mark"),
    aion.Session(us(5), max_duration=us(12)),
    aion.Session(us(2), max_duration=us(3)),
    aion.Session(gap_column="gap"),
    aion.Session(gap_column="gap", max_duration=us(9)),
]

gaps = st.integers(1, 6) | st.sampled_from([None, -1, 0, 1, 15, 40])
events = st.builds(Event, st.integers(0, 2), st.integers(-30, 60), st.integers(0, 99), st.booleans(), gaps)
steps = st.lists(st.lists(events, max_size=8) | st.integers(-20, 90), max_size=14)
Step = list[Event] | int


def policy(bound: int, trigger: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "lateness": {"initial_bound": f"{bound} microseconds", "coverage": None},
        "trigger": trigger or {"kind": "every_batch"},
    }


def table(batch: Sequence[Event]) -> pa.Table:
    return pa.table(
        {
            "key": pa.array([e.key for e in batch], pa.int64()),
            "t": pa.array([e.t for e in batch], pa.timestamp("us")),
            "value": pa.array([e.value for e in batch], pa.int64()),
            "mark": pa.array([e.mark for e in batch], pa.bool_()),
            "gap": pa.array([e.gap for e in batch], pa.duration("us")),
        }
    )


def values(key: Any, window: Any, batches: Any) -> dict[str, Any]:
    return {"values": [v for b in batches for v in b.column("value").to_pylist()]}


KINDS = {
    "partials": {"aggregates": {"n": A.count(), "total": A.sum("value")}},
    "lists": {"aggregates": {"values": A.collect_list("value")}},
    "events": {"apply": aion.Apply(values, "values array<bigint>")},
}


class Sink:
    """Keyed by key and window: later panes replace, retractions delete."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
        self.dropped: list[dict[str, Any]] = []
        self.all: list[dict[str, Any]] = []

    def take(self, panes: pa.Table) -> None:
        for name in ("window_start", "window_end"):
            if name in panes.schema.names:
                i = panes.schema.get_field_index(name)
                panes = panes.set_column(i, name, panes.column(name).cast(pa.int64()))
        for row in panes.to_pylist():
            self.all.append(row)
            if row["kind"] == "dropped":
                self.dropped.append(row)
                continue
            place = (row["key"], row["window_start"], row["window_end"])
            if row["kind"] == "retracted":
                assert place in self.rows, "what is retracted was there"
                del self.rows[place]
            else:
                self.rows[place] = [row]


def run(definition: Any, script: Sequence[Step], bound: int, kind: str, **more: Any) -> tuple[Sink, Oracle]:
    sink, oracle = Sink(), Oracle(definition, bound, by_event=kind == "events")
    with aion.LocalOperator(
        windows=definition, key="key", time="t", policy=policy(bound, more.pop("trigger", None)), **KINDS[kind]
    ) as operator:
        for step in script:
            if isinstance(step, int):
                sink.take(operator.advance(step))
                oracle.advance(step)
            elif step:
                sink.take(operator.process(table(step)))
                oracle.process(step)
        sink.take(operator.close())
    return sink, oracle


def check(sink: Sink, oracle: Oracle, kind: str) -> None:
    ended = oracle.ended()
    # A row whose session goes on may stay until that session ends (docs/reference/panes.md).
    stale = {place for place in set(sink.rows) - set(ended) if oracle.goes_on(*place)}
    assert set(sink.rows) - stale == set(ended)
    for place in set(sink.rows) - stale:
        [row], possible = sink.rows[place], ended[place]
        if kind == "partials":
            assert (row["n"], row["total"]) in {(len(v), sum(v)) for v in possible}
        else:
            assert tuple(sorted(row["values"])) in possible
        assert row["events"] in {len(v) for v in possible}
        assert 0 <= row["late_events"] <= row["events"]
    assert sum(r["events"] for r in sink.dropped) == len(oracle.dropped)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("definition", DEFINITIONS, ids=str)
@settings(some(1 / 2), suppress_health_check=list(HealthCheck), report_multiple_bugs=False, phases=[Phase.generate])
@given(script=steps, bound=st.sampled_from([0, 1, 7, 30, 1000]))
def test_the_sink_ends_right(definition: Any, kind: str, script: list[Step], bound: int) -> None:
    check(*run(definition, script, bound, kind), kind)


@settings(some(1 / 2))
@given(script=steps, bound=st.sampled_from([7, 30, 1000]))
@example(script=[[Event(0, 1, 0), Event(0, 3, 0)], 9, [Event(0, 8, 0), Event(0, 13, 0)], 25], bound=60)
def test_both_kinds_of_sessions_count_the_same_events_as_late(script: list[Step], bound: int) -> None:
    """One looks at sessions, the other at each event. An event ahead of the watermark is not late in any session."""
    plain, cut = (
        run(definition, script, bound, "events")[0]
        for definition in (aion.Session(us(5)), aion.Session(us(5), max_duration=us(10**9)))
    )
    assert [row["late_events"] for row in plain.all] == [row["late_events"] for row in cut.all]


@pytest.mark.parametrize("trigger", [{"kind": "every_batch"}, {"kind": "count", "count": 1000}], ids=str)
@settings(some(1 / 2))
@given(script=steps, bound=st.sampled_from([0, 7, 1000]))
def test_no_record_waits_for_its_window(script: list[Step], bound: int, trigger: dict[str, Any]) -> None:
    """Each batch brings the windows of its own events, or drops them. Only a late change of a pane waits."""
    definition = aion.PerRecord(us(4), on_arrival="emit")
    so_far: list[Event] = []
    emitted: set[tuple[int, int]] = set()
    watermark = -1000
    with aion.LocalOperator(
        windows=definition, key="key", time="t", policy=policy(bound, trigger), **KINDS["lists"]
    ) as operator:
        for step in script:
            sink = Sink()
            if isinstance(step, int):
                watermark = max(step, watermark)
                sink.take(operator.advance(step))
                assert not [row for row in sink.all if row["kind"] == "on_time"], "it came when its events did"
                continue
            sink.take(operator.process(table(step)))
            own = {(e.key, e.t) for e in step}
            dropped = {(row["key"], row["window_end"]) for row in sink.dropped}
            panes = {(row["key"], row["window_end"]): row for [row] in sink.rows.values()}
            ended = {(key, end) for key, end in emitted if end < watermark}
            assert own - ended - dropped <= panes.keys()
            so_far += [e for e in step if (e.key, e.t) not in dropped]
            for (key, end), row in panes.items():
                inside = sorted(e.value for e in so_far if e.key == key and end - 4 <= e.t <= end)
                assert bound < 1000 or sorted(row["values"]) == inside
                assert row["kind"] == ("late" if end < watermark else "on_time")
            emitted |= panes.keys()


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_row_of_a_session_that_goes_on_stays_until_that_ends(kind: str) -> None:
    script: list[Step] = [17, [Event(2, 12, 66)], [Event(2, 17, 75)]]
    for more, rows in (([], {(2, 12, 17)}), ([21], {(2, 12, 17)}), ([22], {(2, 12, 22)})):
        sink, oracle = run(aion.Session(us(5)), [*script, *more], 1000, kind)
        check(sink, oracle, kind)
        assert set(sink.rows) == rows


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_begins_in_a_session_and_goes_on_behind_it_is_taken(kind: str) -> None:
    """Events of one batch and cell: the first is inside the session; the last is not closed, as that is not."""
    first = [Event(0, 4, 1), Event(0, 8, 2), Event(1, 50, 3)]
    script: list[Step] = [first, 12, [Event(0, 6, 10), Event(0, 9, 20), Event(1, 52, 4)], 60]
    sink, oracle = run(aion.Session(us(5)), script, 0, kind)
    check(sink, oracle, kind)
    assert [row["events"] for row in sink.all] == [4, 2] and not sink.dropped


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("then", [[], [40], [3], [1], [1, 1, 4]], ids=str)
def test_a_window_per_record_that_is_gone_does_not_come_back_with_what_is_left(kind: str, then: list[int]) -> None:
    """Of the window up to 2 an event is needed by later windows; the one before it is not kept any longer."""
    script: list[Step] = [[Event(0, -1, 49, False), Event(0, 2, 52, False)], 5, [Event(0, t, 50, False) for t in then]]
    sink, oracle = run(aion.PerRecord(us(4)), [*script, 6, [Event(0, 50, 1, False)], 7], 0, kind)
    check(sink, oracle, kind)
    assert [row["kind"] for row in sink.all if row["window_end"] == 2] == ["on_time"]
    assert sorted(row["window_end"] for row in sink.dropped) == [t for t in then if t < 5]
