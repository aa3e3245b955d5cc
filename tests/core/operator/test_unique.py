"""Events that a source delivers more than once count once: for all kinds of windows, aggregates and functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.core.operator.unique import Unique
from aion.errors import SchemaError
from state_backends.format.ordered_map import MemoryMap

SECOND = 1_000_000
SECRET = bytes(16)
SCHEMA = pa.schema([("key", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("id", pa.int64()), ("value", pa.int64())])
WINDOWS = {
    "tumbling": aion.Tumbling("5 seconds"),
    "sliding": aion.Sliding("6 seconds", "4 seconds"),
    "cumulative": aion.Cumulative("2 seconds", "6 seconds"),
    "session": aion.Session("3 seconds"),
    "cut": aion.Session("3 seconds", max_duration="7 seconds"),
    "count": aion.Count(3),
    "record": aion.PerRecord("4 seconds"),
    "mixed": [aion.Tumbling("5 seconds"), aion.Count(2)],
}


def count(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    table = pa.Table.from_batches(list(events))
    return {"n": table.num_rows, "total": sum(table.column("value").to_pylist())}


CONTENTS: dict[str, dict[str, Any]] = {
    "aggregates": {"aggregates": {"n": A.count(), "total": A.sum("value")}},
    "apply": {"apply": aion.Apply(count, "n long, total long")},
}
event = st.tuples(st.sampled_from("ab"), st.integers(0, 40), st.integers(0, 3))
steps = st.lists(st.lists(event, max_size=6) | st.integers(-10, 45), max_size=8)


def table(events: list[tuple[str, int, int]]) -> pa.Table:
    keys, seconds, ids = zip(*events, strict=True) if events else ((), (), ())
    times = [SECOND * second for second in seconds]
    # The value follows from what identifies the event, as in an event that is delivered again.
    values = [second * 10 + id_ for second, id_ in zip(seconds, ids, strict=True)]
    return pa.table([list(keys), pa.array(times, SCHEMA.field("ts").type), list(ids), values], schema=SCHEMA)


def panes(script: list[Any], windows: Any, content: dict[str, Any], unique: str | None) -> list[dict[str, Any]]:
    policy = {"lateness": {"initial_bound": "20 seconds", "coverage": None}, "trigger": {"kind": "every_batch"}}
    found: list[dict[str, Any]] = []
    with aion.LocalOperator(
        windows=windows, key="key", time="ts", policy=policy, unique=unique, input_schema=SCHEMA, **content
    ) as operator:
        for step in script:
            result = operator.advance(step * SECOND) if isinstance(step, int) else operator.process(table(step))
            found += result.to_pylist()
        found += operator.close().to_pylist()
    return [row for row in found if row["kind"] != "dropped"]


def without_repeats(script: list[Any]) -> list[Any]:
    """The same script, each event only where it comes first."""
    seen: set[Any] = set()
    return [
        step if isinstance(step, int) else [e for e in dict.fromkeys(step) if not (e in seen or seen.add(e))]
        for step in script
    ]


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("kind", WINDOWS)
@given(script=steps)
def test_repeats_change_nothing(kind: str, content: str, script: list[Any]) -> None:
    repeated = panes(script, WINDOWS[kind], CONTENTS[content], "id")
    assert repeated == panes(without_repeats(script), WINDOWS[kind], CONTENTS[content], None)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(-4, 4), st.integers(0, 30)), max_size=40), max_size=8),
    st.lists(st.integers(-3, 3), max_size=3),
)
def test_it_keeps_the_first_of_each(batches: list[list[tuple[int, int, int]]], gone: list[int]) -> None:
    """Whatever the bins and pages; and what is forgotten may come again."""
    values, seen = MemoryMap(), set()
    unique = Unique(["id", "key"], "ts", SECRET)
    for number, batch in enumerate(batches):
        keys, seconds, ids = (list(column) for column in zip(*batch, strict=True)) if batch else ([], [], [])
        times = pa.array([second * SECOND for second in seconds], pa.timestamp("us", "UTC"))
        fresh = unique.of(
            pa.record_batch([pa.array(keys, pa.int32()), times, pa.array(ids, pa.int64())], ["key", "ts", "id"]), values
        )
        expected = [event for event in dict.fromkeys(batch) if event not in seen]
        came = list(zip(*(fresh.column(n).to_pylist() for n in ("key", "ts", "id")), strict=True))
        assert [(k, round(t.timestamp()), i) for k, t, i in came] == expected
        seen |= set(batch)
        if number < len(gone):
            unique.forget(gone[number] * SECOND, values)
            seen = {event for event in seen if event[1] >= gone[number]}
    unique.forget(100 * SECOND, values)
    assert not values.values


def test_nulls_are_values_and_untimed_events_stay() -> None:
    values = MemoryMap()
    times = pa.array([1, 1, None, None, 1], pa.timestamp("us"))
    batch = pa.record_batch([times, pa.array([None, None, 1, 1, 2])], ["ts", "id"])
    assert Unique(["id"], "ts", SECRET).of(batch, values).num_rows == 4
    assert Unique(["id"], "ts", SECRET).of(batch, values).num_rows == 2


@pytest.mark.slow
def test_state_goes_with_the_windows() -> None:
    policy = {"lateness": {"initial_bound": "20 seconds", "coverage": None}}
    with aion.LocalOperator(
        windows=aion.Tumbling("5 seconds"),
        key="key",
        time="ts",
        aggregates={"n": A.count()},
        policy=policy,
        unique="id",
    ) as operator:
        for second in range(0, 500, 5):
            operator.process(table([("a", second, 0), ("a", second, 0)]), second * SECOND)
        stored = sum(1 for _ in operator._values.store.scan(b"u", b"v"))
        assert 2 <= stored <= 2 * (20 + 2 * 5) // 5 + 2
        # An event that came before its window was closed, and comes again afterwards, is too late as any other.
        assert [row["kind"] for row in operator.process(table([("a", 5, 0)])).to_pylist()] == ["dropped"]


@pytest.mark.parametrize(
    ("unique", "message"),
    [
        ("nothing", "unique: there is no column 'nothing'; the columns are key, ts, id, value, list"),
        ([], "unique: no column is named; give e.g. unique='event_id'"),
        (["id", "id"], "unique: ['id', 'id'] names a column twice"),
        (5, "unique: 5 is neither the name of a column nor a list of names; give e.g. unique='event_id'"),
        ("list", "unique: column 'list' is of type list<item: int64>; events are recognised by numbers"),
    ],
)
def test_wrong_columns(unique: Any, message: str) -> None:
    schema = SCHEMA.append(pa.field("list", pa.list_(pa.int64())))
    counts = {"aggregates": {"n": A.count()}, "windows": aion.Tumbling("5 seconds")}
    with pytest.raises(SchemaError) as caught:
        aion.LocalOperator(key="key", time="ts", unique=unique, input_schema=schema, **counts)
    assert message in str(caught.value)


def test_many_events_of_one_time() -> None:
    """They need more pages than one, again and again."""
    values, unique = MemoryMap(), Unique(["id"], "ts", SECRET)
    draw = np.random.default_rng(1)
    for begin in range(0, 20_000, 1000):
        ids = np.concatenate((np.arange(begin, begin + 1000), draw.integers(0, begin + 1, 1000)))
        times = pa.array(np.full(2000, 5), pa.timestamp("us"))
        fresh = unique.of(pa.record_batch([times, pa.array(ids)], ["ts", "id"]), values)
        assert sorted(fresh.column("id").to_pylist()) == list(range(begin, begin + 1000))
