"""LocalOperator against the oracle: any events, any order, any policy, the same panes and nothing lost."""

from __future__ import annotations

import math
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.builder import BlockBuilder
from aion.config import Policy, load_policy
from aion.errors import AionError, ApplyError, ConfigError, IntegerOverflow, PolicyError, SchemaError, WindowError
from aion.executor import Executor
from aion.plan import make_plan
from aion.runtime import make_operator
from state_backends.block import Block
from state_backends.store import StoredBlock
from tests import oracle
from tests.oracle import Definition, Dropped, Event, OracleOperator, Pane

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("ts", pa.timestamp("us", "UTC")),
        ("k", pa.string()),
        ("g", pa.int32()),
        ("v", pa.int64()),
        ("f", pa.float64()),
    ]
)
FOREVER = 10**9

TINY: dict[str, Any] = {
    "memory": {"budget": "2KiB", "bucket_limit": "700B"},
    "blocks": {"target": "64B"},
    "state": {"compression": "zstd"},
}
POLICIES: dict[str, Any] = {
    "standard": "standard", "memory_only": "memory_only", "disk_only": "disk_only", "demo": "demo", "tiny": TINY,
}  # fmt: skip

AGGREGATES = {
    "n": A.count(), "c": A.count("v"), "s": A.sum("v"), "m": A.mean("v"), "lo": A.min("f"), "hi": A.max("f"),
    "last": A.max("id"),
}  # fmt: skip


def policy(name: str, bound: int) -> Policy:
    return load_policy(
        POLICIES[name], {"lateness.initial_bound": bound, "lateness.coverage": None, "trigger.kind": "every_batch"}
    )


# -- what is run ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A definition, and what happens: a list of events arrives, or (an int) the watermark advances."""

    definitions: tuple[Definition, ...]
    bound: int
    key: tuple[str, ...]
    steps: tuple[list[Event] | int, ...]

    @property
    def events(self) -> list[Event]:
        return [event for step in self.steps if isinstance(step, list) for event in step]

    def windows(self) -> dict[str, Any]:
        return {f"w{i}": aion.Sliding(d.size, d.slide, d.offset) for i, d in enumerate(self.definitions)}


def aggregated(events: Sequence[Event]) -> dict[str, Any]:
    values, floats = [e["v"] for e in events], [e["f"] for e in events]
    return {
        "n": len(events),
        "c": oracle.spark_count(values),
        "s": oracle.spark_sum(values),
        "m": oracle.spark_mean(values),
        "lo": oracle.spark_min(floats),
        "hi": oracle.spark_max(floats),
        "last": oracle.spark_max([e["id"] for e in events]),
    }


def collected(key: tuple[Any, ...], window: aion.Window, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    """What a function sees: its key and window, and its events in their order."""
    ids, values = [], []
    for batch in batches:
        ids += batch.column("id").to_pylist()
        values += batch.column("v").to_pylist()
        assert batch.schema.equals(SCHEMA), "events are as the user gave them"
    return {"ids": ids, "total": sum(v or 0 for v in values), "where": f"{key} {window.start} {window.end}"}


def collecting(scenario: Scenario) -> Callable[[list[Event]], dict[str, Any]]:
    """The oracle's side of :func:`collected`: events by slice, and in the order of arrival in each."""

    def result(events: list[Event]) -> dict[str, Any]:
        ordered = sorted(events, key=lambda e: (oracle.slice_of(scenario.definitions, e["ts"]), e["id"]))
        return {"ids": [e["id"] for e in ordered], "total": sum(e["v"] or 0 for e in events)}

    return result


COLLECTED = "ids array<bigint>, total bigint, where string"


def table(events: Sequence[Event]) -> pa.Table:
    columns = {f.name: [e.get(f.name) for e in events] for f in SCHEMA if f.name != "ts"}
    times = pa.array([e["ts"] for e in events], pa.int64()).cast(SCHEMA.field("ts").type)
    return pa.table([times if f.name == "ts" else pa.array(columns[f.name], f.type) for f in SCHEMA], schema=SCHEMA)


def rows_of(found: pa.Table) -> list[dict[str, Any]]:
    """Rows with times as plain microseconds."""
    for name in ("window_start", "window_end", "event_time"):
        if name in found.column_names:
            at = found.column_names.index(name)
            found = found.set_column(at, name, found.column(name).cast(pa.int64()))
    return found.to_pylist()  # type: ignore[no-any-return]


def run(
    scenario: Scenario, policy: Policy | str, **definition: Any
) -> tuple[list[list[dict[str, Any]]], dict[str, Any]]:
    """The rows of each call, the last one being ``close``, and the counters."""
    calls = []
    with aion.LocalOperator(
        windows=scenario.windows(), key=scenario.key, time="ts", policy=policy, **definition
    ) as operator:
        for step in scenario.steps:
            found = operator.process(table(step)) if isinstance(step, list) else operator.advance(step)
            calls.append(rows_of(found))
            validate(operator)
        counters = operator.counters
        calls.append(rows_of(operator.close()))
    return calls, counters


def validate(operator: aion.LocalOperator) -> None:
    operator.store.validate()  # type: ignore[attr-defined]


def truth(scenario: Scenario, result: Callable[[list[Event]], Any]) -> list[tuple[list[Pane], list[Dropped]]]:
    """What the oracle says of each call."""
    judge = OracleOperator(scenario.definitions, bound=scenario.bound, key=scenario.key, result=result)
    said = [judge.process(s) if isinstance(s, list) else (judge.advance(s), []) for s in scenario.steps]
    return [*said, (judge.close(), [])]


# -- how it is compared -------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Values that compare and sort whatever they are: NaN equals itself, and null is no obstacle."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [*map(plain, value)]
    return "NaN" if oracle.is_nan(value) else value


def in_order(things: list[Any]) -> list[Any]:
    return sorted(map(plain, things), key=repr)


def panes_of(rows: list[dict[str, Any]], scenario: Scenario, outputs: Sequence[str]) -> list[Any]:
    return in_order(
        [
            {
                "window": (row["window"], row["window_start"], row["window_end"]),
                "key": [row[k] for k in scenario.key],
                "pane": (row["pane"], row["kind"], row["events"], row["late_events"]),
                "result": {name: row[name] for name in outputs},
            }
            for row in rows
            if row["kind"] != "dropped"
        ]
    )


def expected_panes(panes: list[Pane]) -> list[Any]:
    return in_order(
        [
            {
                "window": (f"w{p.definition}", p.start, p.end),
                "key": list(p.key),
                "pane": (p.pane, p.kind, p.events, p.late_events),
                "result": p.result,
            }
            for p in panes
        ]
    )


def drops_of(rows: list[dict[str, Any]], scenario: Scenario) -> Counter[Any]:
    """Dropped events per key, window, lateness: rows stand for one event each, or for several."""
    drops: Counter[Any] = Counter()
    for row in rows:
        if row["kind"] == "dropped":
            assert row["reason"] and row["pane"] is None
            where = (row["window"], row["window_start"], row["window_end"])
            drops[(*(row[k] for k in scenario.key), *where, row["lateness_us"])] += row["events"]
    return drops


def expected_drops(dropped: list[Dropped]) -> Counter[Any]:
    return Counter(
        (*d.key, None if d.definition is None else f"w{d.definition}", d.start, d.end, d.lateness) for d in dropped
    )


# -- scenarios ----------------------------------------------------------------------------------------------

definitions = st.sampled_from(
    [
        (Definition(10, 10),),
        (Definition(10, 10, 3),),
        (Definition(20, 10),),
        (Definition(25, 10, 2),),
        (Definition(10, 10), Definition(30, 10), Definition(40, 40, 5)),
    ]
)
events = st.fixed_dictionaries(
    {
        "ts": st.one_of(*[st.integers(-12, 30)] * 7, st.integers(-100, 100), st.none()),
        "k": st.sampled_from(["a", "b", "", None]),
        "g": st.sampled_from([0, 1, None]),
        "v": st.none() | st.integers(-100, 100),
        "f": st.none() | st.sampled_from([0.0, -1.5, 2.0, math.inf, math.nan]),
    }
)
steps = st.lists(st.lists(events, max_size=8) | st.integers(-10, 70), min_size=1, max_size=12)


@st.composite
def scenarios(draw: st.DrawFn, windows: st.SearchStrategy[Any] = definitions) -> Scenario:
    key = draw(st.sampled_from([(), ("k",), ("k", "g")]))
    done: list[list[Event] | int] = []
    number = 0
    for step in draw(steps):
        if isinstance(step, list):
            step = [{**event, "id": number + i} for i, event in enumerate(step)]
            number += len(step)
        done.append(step)
    return Scenario(draw(windows), draw(st.sampled_from([0, 5, 30])), key, (*done, FOREVER))


few = settings(max_examples=max(settings.default.max_examples // 2, 1))


# -- against the oracle -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["standard", "tiny"])
@given(scenario=scenarios())
def test_aggregates_are_what_the_oracle_says(name: str, scenario: Scenario) -> None:
    calls, counters = run(scenario, policy(name, scenario.bound), aggregates=AGGREGATES)
    for rows, (panes, dropped) in zip(calls, truth(scenario, aggregated), strict=True):
        assert panes_of(rows, scenario, list(AGGREGATES)) == expected_panes(panes)
        assert drops_of(rows, scenario) == expected_drops(dropped)
    assert_counted(counters, scenario)


@pytest.mark.parametrize("name", ["standard", "tiny"])
@given(scenario=scenarios())
def test_functions_see_what_the_oracle_says(name: str, scenario: Scenario) -> None:
    calls, counters = run(scenario, policy(name, scenario.bound), apply=collected, schema=COLLECTED)
    for rows, (panes, dropped) in zip(calls, truth(scenario, collecting(scenario)), strict=True):
        assert panes_of(rows, scenario, ["ids", "total"]) == expected_panes(panes)
        assert drops_of(rows, scenario) == expected_drops(dropped)
        for row in rows:
            if row["kind"] != "dropped":
                key = tuple(row[k] for k in scenario.key)
                assert row["where"] == f"{key} {row['window_start']} {row['window_end']}"
        assert_dropped_events_are_told(rows, dropped)
    assert_counted(counters, scenario)


def assert_counted(counters: Mapping[str, Any], scenario: Scenario) -> None:
    if not counters:
        assert not any(isinstance(step, list) for step in scenario.steps)
        return
    gone = {d.event["id"] for _, dropped in truth(scenario, len) for d in dropped}
    assert counters["events"] == len(scenario.events)
    assert counters["dropped"] == len(gone)


def assert_dropped_events_are_told(rows: list[dict[str, Any]], dropped: list[Dropped]) -> None:
    """Kept events come out one by one, with their time and themselves as JSON."""
    rows = [row for row in rows if row["kind"] == "dropped"]
    assert all(row["events"] == 1 for row in rows)
    found = [(row["event_time"], row["window_start"], orjson.loads(row["event"])["id"]) for row in rows]
    assert in_order(found) == in_order([(d.event["ts"], d.start, d.event["id"]) for d in dropped])


def too_late(scenario: Scenario) -> Iterator[tuple[Event, Definition, int, int, bool]]:
    """(event, definition, window start, end, whether it came too late for it): from the definition alone."""
    watermark = -math.inf
    for step in scenario.steps:
        if isinstance(step, int):
            watermark = max(watermark, step)
            continue
        for event in step:
            for definition in scenario.definitions if event["ts"] is not None else ():
                for start, end in definition.containing(event["ts"]):
                    yield event, definition, start, end, watermark >= end + scenario.bound


@given(scenario=scenarios())
@pytest.mark.parametrize("name", ["demo"])
def test_the_last_pane_of_a_window_is_the_truth_of_all_its_events(name: str, scenario: Scenario) -> None:
    """Not step by step, but in the end: as a batch query would compute it, and every event is somewhere."""
    calls, _ = run(scenario, policy(name, scenario.bound), aggregates=AGGREGATES)
    last: dict[Any, dict[str, Any]] = {}
    dropped: Counter[Any] = Counter()
    for row in (row for rows in calls for row in rows):
        where = (row["window"], row["window_start"], *(row[k] for k in scenario.key))
        if row["kind"] == "dropped":
            dropped[where] += row["events"]
        elif where not in last or row["pane"] > last[where]["pane"]:
            last[where] = row
    groups: dict[Any, list[Event]] = defaultdict(list)
    all_of: Counter[Any] = Counter()
    for event, definition, start, _, late in too_late(scenario):
        where = (f"w{scenario.definitions.index(definition)}", start, *(event[k] for k in scenario.key))
        all_of[where] += 1
        if not late:
            groups[where].append(event)
    assert last.keys() == groups.keys()
    for where, rows in groups.items():
        assert plain({name: last[where][name] for name in AGGREGATES}) == plain(aggregated(rows))
    in_panes = Counter({where: row["events"] for where, row in last.items()})
    timeless = Counter({w: n for w, n in dropped.items() if w[0] is None})
    assert in_panes + dropped - timeless == all_of, "in a pane or dropped, and never both"
    assert timeless.total() == sum(e["ts"] is None for e in scenario.events)


@few
@given(scenario=scenarios())
def test_every_policy_gives_the_same_panes(scenario: Scenario) -> None:
    for definition in ({"aggregates": AGGREGATES}, {"apply": collected, "schema": COLLECTED}):
        found = {}
        for name in POLICIES:
            calls, _ = run(scenario, policy(name, scenario.bound), **definition)
            outputs = [n for n in ("ids", *AGGREGATES) if n in {k for rows in calls for row in rows for k in row}]
            found[name] = [(panes_of(rows, scenario, outputs), drops_of(rows, scenario)) for rows in calls]
        for name, calls_of in found.items():
            assert calls_of == found["memory_only"], name


@few
@given(scenario=scenarios(st.sampled_from([(Definition(10, 10),), (Definition(10, 10, 3),)])))
def test_dropped_partials_carry_the_aggregates_of_just_those_events(scenario: Scenario) -> None:
    calls, _ = run(scenario, policy("standard", scenario.bound), aggregates=AGGREGATES)
    for rows, (_, dropped) in zip(calls, truth(scenario, aggregated), strict=True):
        groups: dict[Any, list[Event]] = defaultdict(list)
        for drop in dropped:
            groups[drop.key, drop.start].append(drop.event)
        found = [
            ([row[k] for k in scenario.key], row["window_start"], {name: row[name] for name in AGGREGATES})
            for row in rows
            if row["kind"] == "dropped"
        ]
        assert in_order(found) == in_order([(list(k), start, aggregated(es)) for (k, start), es in groups.items()])


@few
@given(scenario=scenarios(), data=st.data())
def test_how_a_table_is_chunked_makes_no_difference(scenario: Scenario, data: st.DataObject) -> None:
    with aion.LocalOperator(windows=scenario.windows(), time="ts", key=scenario.key, aggregates=AGGREGATES) as operator:
        events = [e for e in scenario.events if e["ts"] is not None]
        cut = data.draw(st.integers(0, len(events)))
        pieces = [table(events[:cut]), table([]), table(events[cut:])]
        operator.process(pa.concat_tables(pieces))
        found = panes_of(rows_of(operator.advance(FOREVER)), scenario, list(AGGREGATES))
    once = replace(scenario, steps=([*events], FOREVER))
    assert found == expected_panes([p for panes, _ in truth(once, aggregated) for p in panes])


# -- larger than memory -------------------------------------------------------------------------------------


def payload_events(count: int) -> list[pa.Table]:
    """Batches of events of about 250 bytes, every tenth of them late by one to eight windows of 1000."""
    random = np.random.default_rng(7)
    ids = np.arange(count)
    times = ids - np.where(random.random(count) < 0.1, random.integers(1_000, 8_000, count), 0)
    whole = pa.table(
        {
            "ts": pa.array(times).cast(pa.timestamp("us", "UTC")),
            "k": pa.array(random.integers(0, 20, count).astype(str)),
            "id": ids,
            "payload": pa.array([f"{i:>240}" for i in ids]),
        }
    )
    return [whole.slice(start, 1_000) for start in range(0, count, 1_000)]


def digest(key: tuple[Any, ...], window: aion.Window, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    value, n = 0, 0
    for batch in batches:
        for payload, number in zip(batch.column("payload").to_pylist(), batch.column("id").to_pylist(), strict=True):
            assert int(payload) == number
            value, n = (value * 31 + number) % (2**61 - 1), n + 1
    return {"value": value, "n": n}


def run_large(policy: Policy, batches: Sequence[pa.Table]) -> tuple[list[str], int, int]:
    """All rows in an order of their own, and the peaks of bytes in memory and on disk only."""
    rows, memory, disk = [], 0, 0
    with aion.LocalOperator(
        windows=aion.Tumbling(1_000), time="ts", key="k", apply=digest, schema="value bigint, n bigint", policy=policy
    ) as operator:
        for i, batch in enumerate(batches):
            rows += operator.process(batch).to_pylist()
            stats = operator.store.stats()
            memory, disk = max(memory, stats.m_bucket_bytes), max(disk, stats.disk_only_bytes)
            rows += operator.advance((i + 1) * 1_000).to_pylist()
        validate(operator)
        rows += operator.advance(FOREVER).to_pylist() + operator.close().to_pylist()
    return sorted(map(repr, rows)), memory, disk


def test_state_far_larger_than_memory_gives_the_same_panes() -> None:
    batches = payload_events(20_000)
    wanted, _, disk = run_large(policy("memory_only", 5_000), batches)
    assert disk == 0
    assert any("'late'" in row for row in wanted) and any("'dropped'" in row for row in wanted)
    for small in ("demo", "disk_only"):
        found, memory, disk = run_large(policy(small, 5_000), batches)
        assert found == wanted
        assert disk > 4 * 256 * 1024, "most of the state is on disk"
        if small == "demo":
            assert memory <= 256 * 1024 + 40_000, "the budget, and one block"


# -- what calls say -----------------------------------------------------------------------------------------


def at(*seconds: float | None) -> pa.Array:
    return pa.array([None if s is None else round(s * 1_000_000) for s in seconds], pa.int64()).cast(
        pa.timestamp("us", "UTC")
    )


EVENTS = pa.table({"ts": at(1), "k": ["a"], "v": [1], "l": [[1]]})


def seconds_operator(**options: Any) -> aion.LocalOperator:
    defaults: dict[str, Any] = {"windows": aion.Tumbling("10 s"), "time": "ts", "aggregates": {"n": A.count()}}
    return aion.LocalOperator(**(defaults | options))


def test_the_columns_of_a_result() -> None:
    with seconds_operator(key=["k"]) as operator:
        operator.process(pa.table({"ts": at(1), "k": ["a"]}))
        (row,) = operator.advance(datetime(1970, 1, 1, 0, 0, 10, tzinfo=UTC)).to_pylist()
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert row == {
        "k": "a", "window": "tumbling 10 seconds", "window_start": epoch, "window_end": epoch + timedelta(seconds=10),
        "n": 1, "pane": 0, "kind": "on_time", "events": 1, "late_events": 0,
        "event_time": None, "lateness_us": None, "reason": None, "event": None,
    }  # fmt: skip


def test_what_late_events_trigger_comes_out_of_the_next_call() -> None:
    with seconds_operator(policy={"trigger": {"kind": "every_batch"}}) as operator:
        operator.process(pa.table({"ts": at(1)}))
        assert operator.advance(10_000_000)["kind"].to_pylist() == ["on_time"]
        assert operator.process(pa.table({"ts": at(2)})).num_rows == 0
        assert operator.process(pa.table({"ts": at(3)}))["events"].to_pylist() == [2]
        assert operator.advance(10_000_001)["events"].to_pylist() == [3]
        operator.process(pa.table({"ts": at(4)}))
        assert operator.close()["events"].to_pylist() == [4]
        assert operator.close().num_rows == 0, "closing again says nothing"


def test_a_watermark_may_come_before_the_first_events() -> None:
    with seconds_operator(policy={"lateness": {"initial_bound": 0}}) as operator:
        operator.advance(20_000_000)
        operator.advance(10_000_000)
        rows = operator.process(pa.table({"ts": at(9, 25)})).to_pylist()
    assert [(r["kind"], r["lateness_us"], r["events"]) for r in rows] == [("dropped", 10_000_000, 1)]


def test_times_keep_the_zone_that_they_have() -> None:
    naive = pa.array([1_000_000], pa.int64()).cast(pa.timestamp("us"))
    for times, zone in [(naive, None), (at(1), "UTC"), (at(1).cast(pa.timestamp("ms", "Europe/Paris")), "UTC")]:
        with seconds_operator() as operator:
            operator.process(pa.table({"ts": times}))
            start = operator.advance(FOREVER)["window_start"]
        assert start.type == pa.timestamp("us", zone)
        assert start.cast(pa.int64()).to_pylist() == [0]


def test_keys_and_values_may_be_dictionaries() -> None:
    encoded = pa.array(["a", "b", "a", None]).dictionary_encode()
    with seconds_operator(key="k", aggregates={"hi": A.max("v")}) as operator:
        operator.process(pa.table({"ts": at(1, 2, 3, 4), "k": encoded, "v": encoded}))
        rows = operator.advance(FOREVER).select(["k", "hi"]).to_pylist()
    assert in_order(rows) == in_order([{"k": v, "hi": v} for v in ("a", "b", None)])


@pytest.mark.parametrize("definition", [{"aggregates": {"n": A.count()}}, {"apply": len, "schema": "n bigint"}])
def test_keys_that_spark_takes_for_one_are_one(definition: dict[str, Any]) -> None:
    """Spark's groups: 0.0 and -0.0 are the same key, and so is every NaN."""
    if "apply" in definition:
        definition = {**definition, "apply": lambda key, window, events: {"n": sum(b.num_rows for b in events)}}
    keys = [0.0, -0.0, math.nan, math.nan, None, None]
    with seconds_operator(key="k", **{"aggregates": None, **definition}) as operator:
        operator.process(pa.table({"ts": at(*range(6)), "k": pa.array(keys, pa.float64(), from_pandas=False)}))
        rows = operator.advance(FOREVER).select(["k", "n"]).to_pylist()
    assert in_order([plain(r) for r in rows]) == in_order([{"k": k, "n": 2} for k in (0.0, "NaN", None)])


def test_only_keys_that_changed_are_yielded_again() -> None:
    called = []

    def seen(key: tuple[Any, ...], window: aion.Window, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        called.append(key[0])
        return {"n": sum(b.num_rows for b in batches)}

    for definition in ({"aggregates": {"n": A.count()}}, {"aggregates": None, "apply": seen, "schema": "n bigint"}):
        with seconds_operator(key="k", **definition) as operator:
            operator.process(pa.table({"ts": at(1, 2), "k": ["a", "b"]}))
            operator.advance(10_000_000)
            operator.process(pa.table({"ts": at(3), "k": ["b"]}))
            rows = operator.close().select(["k", "n", "events", "late_events", "pane"]).to_pylist()
        assert rows == [{"k": "b", "n": 2, "events": 2, "late_events": 1, "pane": 1}]
    assert sorted(called) == ["a", "b", "b"]


def test_the_events_of_a_key_stay_in_the_order_of_arrival() -> None:
    count = 5_000
    keys = np.random.default_rng(3).integers(0, 3, count)
    events = pa.table({"ts": at(*[1] * count), "k": keys, "id": np.arange(count)})
    listed = {"apply": lambda key, window, batches: {"ids": [i for b in batches for i in b["id"].to_pylist()]}}
    small = {"blocks": {"target": "4KiB"}}
    with seconds_operator(key="k", aggregates=None, schema="ids array<bigint>", policy=small, **listed) as operator:
        operator.process(events)
        rows = operator.advance(FOREVER).to_pylist()
    assert {row["k"]: row["ids"] for row in rows} == {k: np.flatnonzero(keys == k).tolist() for k in range(3)}


def test_many_keys_with_many_values_are_kept_apart() -> None:
    """Their combinations are more than 64 bits can number."""
    values = [*range(1024)]
    columns: dict[str, Any] = {f"k{i}": [*values, *[0] * 1023] for i in range(7)}
    columns["k0"] = [*values, *values[1:]]
    counted = {"apply": lambda key, window, batches: {"n": sum(b.num_rows for b in batches)}, "schema": "n bigint"}
    with seconds_operator(key=list(columns), aggregates=None, **counted) as operator:
        operator.process(pa.table({"ts": at(*[1] * 2047), **columns}))
        rows = operator.advance(FOREVER).to_pylist()
    assert Counter(row["n"] for row in rows) == Counter({1: 2047})


# -- functions ----------------------------------------------------------------------------------------------


def applying(function: Any, schema: Any = "n bigint", **options: Any) -> aion.LocalOperator:
    return seconds_operator(aggregates=None, apply=function, schema=schema, **options)


def one_window(operator: aion.LocalOperator, **columns: Any) -> list[dict[str, Any]]:
    with operator:
        operator.process(pa.table({"ts": at(1, 2), **columns}))
        return operator.advance(FOREVER).to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [
        ({"n": 1}, [1]),
        ([{"n": 1}, {"n": 2}], [1, 2]),
        (({"n": i} for i in range(3)), [0, 1, 2]),
        ({}, [None]),
        ([], []),
        (pa.record_batch({"n": [5, 6]}), [5, 6]),
        (pa.record_batch({"other": ["x"], "n": pa.array([5], pa.int8())}), [5]),
        (pa.table({"n": pa.chunked_array([[1], [2]])}), [1, 2]),
        (pa.table({"n": pa.array([], pa.int64())}), []),
    ],
    ids=["a mapping", "a list", "a generator", "an empty mapping", "nothing", "a batch", "a cast", "a table", "empty"],
)
def test_what_a_function_may_return(returned: Any, wanted: list[Any]) -> None:
    rows = one_window(applying(lambda key, window, batches: returned))
    assert [row["n"] for row in rows] == wanted
    assert all((row["events"], row["kind"]) == (2, "on_time") for row in rows)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda key, window, events: 1 / 0, "ZeroDivisionError"),
        (lambda key, window, events: None, "NoneType"),
        (lambda key, window, events: {"m": 1}, "'m'"),
        (lambda key, window, events: {"n": "many"}, "schema"),
        (lambda key, window, events: ["n"], "'n'"),
        (lambda key, window, events: pa.record_batch({"m": [1]}), "m"),
        (lambda key, window, events: pa.record_batch({"n": ["x"]}), "x"),
        (lambda key, window, events: ({"n": 1 // i} for i in (1, 0)), "ZeroDivisionError"),
    ],
)
def test_a_function_that_fails_is_told_with_its_key_and_window(function: Any, said: str) -> None:
    with applying(function, key="k") as operator:
        operator.process(pa.table({"ts": at(11), "k": ["berlin"]}))
        with pytest.raises(ApplyError) as caught:
            operator.advance(FOREVER)
    text = str(caught.value)
    assert "berlin" in text and "1970-01-01T00:00:10Z" in text and "1970-01-01T00:00:20Z" in text
    assert said in text


def test_a_second_row_that_does_not_fit_is_told_too() -> None:
    with applying(lambda key, window, events: [{"n": 1}, {"n": "two"}], key="k") as operator:
        operator.process(pa.table({"ts": at(11), "k": ["berlin"]}))
        with pytest.raises(ApplyError, match="schema"):
            operator.advance(FOREVER)


def test_a_function_need_not_read_its_events() -> None:
    for name in ("memory_only", "disk_only", "tiny"):
        with applying(lambda key, window, events: {"n": 7}, policy=policy(name, 60_000_000)) as operator:
            for _ in range(20):
                operator.process(pa.table({"ts": at(1, 2), "x": ["x" * 100] * 2}))
            assert operator.advance(10_000_000)["n"].to_pylist() == [7]
            operator.process(pa.table({"ts": at(1), "x": [""]}))
            assert operator.close()["n"].to_pylist() == [7]


class ListSession:
    """The blocks of a shard in a list; notes how many were asked for."""

    def __init__(self) -> None:
        self.blocks: list[StoredBlock] = []
        self.read_blocks = 0

    def append(self, blocks: Iterable[tuple[int, bool, Block]]) -> None:
        self.blocks += [StoredBlock(seq, block) for seq, _, block in blocks]

    def read(self, slices: Sequence[int], **_: Any) -> Iterator[StoredBlock]:
        for block in self.blocks:
            self.read_blocks += 1
            yield block

    def release(self, destage: Sequence[int], purge: Sequence[int]) -> None:
        pass

    def prestage(self, slices: Sequence[int]) -> None:
        pass


def test_events_come_lazily_without_a_key() -> None:
    """A window is not read before the function asks, and not beyond what it asks for."""
    plan = make_plan(
        EVENTS.schema,
        key=None,
        time="ts",
        windows=aion.Tumbling("10 s"),
        aggregates=None,
        apply=lambda key, window, events: {"n": next(events).num_rows},
        outputs="n bigint",
    )
    session = ListSession()
    executor = Executor(plan, make_operator(plan, load_policy("standard"), None), session)
    for _ in range(100):
        builder = BlockBuilder(plan)
        blocks = [*builder.add(EVENTS.to_batches()[0], pa.array([0], pa.int32())), *builder.finish()]
        assert [*executor.arrive([b.block for b in blocks])] == []
    (batch,) = executor.advance(10_000_000)
    assert (batch.column("n").to_pylist(), batch.column("events").to_pylist()) == ([1], [100])
    assert session.read_blocks == 1


def test_a_window_has_the_name_of_its_definition() -> None:
    windows = {"short": aion.Tumbling("10 s"), "long": aion.Tumbling("20 s")}
    rows = one_window(applying(lambda key, window, events: {"w": window.name}, "w string", windows=windows))
    assert sorted((row["window"], row["w"]) for row in rows) == [("long", "long"), ("short", "short")]


def test_more_rows_than_fit_a_batch() -> None:
    rows = one_window(applying(lambda key, window, events: [{"n": i} for i in range(5000)], key="k"), k=["a", "b"])
    assert Counter(row["n"] for row in rows) == Counter(dict.fromkeys(range(5000), 2))
    assert Counter(row["k"] for row in rows) == {"a": 5000, "b": 5000}


# -- what is dropped ----------------------------------------------------------------------------------------


def dropped_event(value: Any, type_: pa.DataType) -> Any:
    """A value of an event that comes too late, as the JSON that the user gets."""
    policy = {"lateness": {"initial_bound": 0}}
    with applying(lambda key, window, events: {"n": 0}, policy=policy) as operator:
        operator.process(pa.table({"ts": at(100), "x": pa.array([None], type_)}))
        operator.advance(50_000_000)
        (row,) = operator.process(pa.table({"ts": at(1), "x": pa.array([value], type_)})).to_pylist()
    assert (row["kind"], row["event_time"].timestamp(), row["lateness_us"]) == ("dropped", 1.0, 40_000_000)
    return orjson.loads(row["event"])["x"]


@pytest.mark.parametrize(
    ("value", "type_", "wanted"),
    [
        ('ü"\n', pa.string(), 'ü"\n'),
        (b"\xff\x00", pa.binary(), "/wA="),
        (Decimal("1.50"), pa.decimal128(5, 2), "1.50"),
        (math.nan, pa.float64(), None),
        (2**63 - 1, pa.int64(), 2**63 - 1),
        (True, pa.bool_(), True),
        ([1, None], pa.list_(pa.int32()), [1, None]),
        ({"a": {"b": b"x"}}, pa.struct([("a", pa.struct([("b", pa.binary())]))]), {"a": {"b": "eA=="}}),
        ([("k", 1)], pa.map_(pa.string(), pa.int32()), [["k", 1]]),
        (timedelta(seconds=1), pa.duration("us"), "0:00:01"),
    ],
)
def test_a_dropped_event_is_told_as_json_whatever_its_type(value: Any, type_: pa.DataType, wanted: Any) -> None:
    assert dropped_event(value, type_) == wanted


@pytest.mark.parametrize("year", [-5_000, -1, 12_000])
@pytest.mark.parametrize("definition", [{}, {"aggregates": None, "apply": lambda *_: {"n": 0}, "schema": "n bigint"}])
def test_a_time_that_no_calendar_has_harms_nobody(year: int, definition: dict[str, Any]) -> None:
    """A broken clock's event is a late one, or an early one; in either case it is just an event."""
    broken = at((year - 1970) * 365.25 * 86_400)
    with seconds_operator(policy={"lateness": {"initial_bound": 0}}, **definition) as operator:
        operator.process(pa.table({"ts": at(1)}))
        operator.advance(50_000_000)
        found = operator.process(pa.table({"ts": pa.concat_arrays([broken, at(51)])}))
        found = pa.concat_tables([found, operator.advance(60_000_000)])
    assert found["kind"].to_pylist() == (["dropped"] if year < 1970 else []) + ["on_time"]


def test_an_event_without_time_is_dropped_with_the_reason() -> None:
    with seconds_operator(key="k") as operator:
        rows = operator.process(pa.table({"ts": at(None, 1, None), "k": ["a", "b", "a"]})).to_pylist()
    (row,) = rows
    assert (row["k"], row["n"], row["events"], row["window"], row["lateness_us"]) == ("a", 2, 2, None, None)
    assert "null" in row["reason"]


# -- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"time": "when"}, SchemaError, "'when'.*ts, k, v"),
        ({"time": "v"}, SchemaError, "'v'.*int64.*timestamp"),
        ({"key": "segment"}, SchemaError, "'segment'.*ts, k, v"),
        ({"key": ["k", "k"]}, SchemaError, "twice"),
        ({"key": "l"}, SchemaError, "'l'.*list"),
        ({"aggregates": {"n": A.sum("speed")}}, SchemaError, "speed"),
        ({"aggregates": {"n": A.sum("k")}}, SchemaError, "string"),
        ({"aggregates": {}}, ConfigError, "none given"),
        ({"aggregates": None}, ConfigError, "aggregates=.*apply="),
        ({"apply": len, "schema": "n bigint"}, ConfigError, "not both"),
        ({"aggregates": None, "apply": len}, ConfigError, "schema"),
        ({"aggregates": None, "apply": 5, "schema": "n int"}, ConfigError, "5"),
        ({"aggregates": None, "apply": len, "schema": "n dubble"}, SchemaError, "dubble"),
        ({"aggregates": None, "apply": len, "schema": "kind int"}, SchemaError, "'kind'"),
        ({"schema": "n int"}, ConfigError, "apply="),
        ({"aggregates": {"pane": A.count()}}, SchemaError, "'pane'"),
        ({"aggregates": {"k": A.count()}, "key": "k"}, SchemaError, "'k'"),
        ({"windows": []}, WindowError, "none"),
        ({"windows": "1 minute"}, WindowError, "no window"),
        ({"windows": [aion.Tumbling(5), aion.Tumbling(5)]}, WindowError, "twice"),
    ],
)
def test_a_definition_that_cannot_be(options: dict[str, Any], error: type[AionError], said: str) -> None:
    with pytest.raises(error, match=said), seconds_operator(**options) as operator:
        operator.process(EVENTS)


@pytest.mark.parametrize("policy", ["nowhere", {"memory": {"budjet": 1}}, {"lateness": {"initial_bound": "-5m"}}])
def test_a_policy_that_cannot_be_leaves_nothing_behind(policy: Any) -> None:
    with pytest.raises(PolicyError):
        seconds_operator(policy=policy)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (EVENTS.drop_columns(["v"]), "'v'"),
        (EVENTS.set_column(2, "v", pa.array(["x"])), "x"),
        (EVENTS.set_column(2, "v", pa.array([[1]])), "list"),
        (EVENTS.set_column(0, "ts", pa.array([[1]])), "list"),
    ],
    ids=["missing", "no number", "a list", "no time"],
)
def test_a_later_table_that_does_not_fit_is_refused(wrong: pa.Table, said: str) -> None:
    with seconds_operator(aggregates={"s": A.sum("v")}) as operator:
        operator.process(EVENTS)
        with pytest.raises(SchemaError, match=said):
            operator.process(wrong)
        operator.process(EVENTS)
        assert operator.advance(FOREVER)["s"].to_pylist() == [2], "and nothing has happened"


def test_a_watermark_that_is_no_instant() -> None:
    with seconds_operator() as operator, pytest.raises(ConfigError, match="'soon'"):
        operator.advance("soon")  # type: ignore[arg-type]


def test_a_sum_beyond_64_bits_is_an_error() -> None:
    with seconds_operator(aggregates={"s": A.sum("v")}) as operator:
        operator.process(pa.table({"ts": at(1, 2), "v": [2**63 - 1, 0]}))
        operator.process(pa.table({"ts": at(1), "v": [1]}))
        with pytest.raises(IntegerOverflow, match="9223372036854775808"):
            operator.advance(FOREVER)


# -- what is left behind --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where LocalOperator puts its files in this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def files(folder: Path) -> list[Path]:
    return [p for p in folder.rglob("*.sst") if p.is_file()]


def eventually(condition: Callable[[], bool], seconds: float = 3.0) -> bool:
    """Whether what the I/O thread does in its own time comes about."""
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.002)
    return condition()


def test_closing_leaves_nothing(folder: Path) -> None:
    with seconds_operator(policy="disk_only") as operator:
        operator.process(pa.table({"ts": at(1, 11)}))
        assert eventually(lambda: bool(files(folder))), "it was on disk"
    assert list(folder.iterdir()) == []


def test_an_error_in_the_last_execution_leaves_nothing_either(folder: Path) -> None:
    def fails_later(key: tuple[Any, ...], window: aion.Window, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        if sum(batch.num_rows for batch in events) > 1:
            raise ValueError("not that many")
        return {"n": 1}

    operator = applying(fails_later)
    operator.process(pa.table({"ts": at(1)}))
    operator.advance(10_000_000)
    operator.process(pa.table({"ts": at(2)}))
    with pytest.raises(ApplyError, match="not that many"):
        operator.close()
    assert list(folder.iterdir()) == []


def test_state_that_nobody_needs_leaves_the_disk(folder: Path) -> None:
    with applying(
        lambda key, window, events: {"n": 0},
        policy={"state": {"backend": "rocksdb"}, "lateness": {"initial_bound": 0}},
    ) as operator:
        for i in range(10):
            operator.process(pa.table({"ts": at(10 * i + 1), "x": ["x" * 100_000]}))
            assert eventually(lambda: operator.store.stats().m_bucket_bytes == 0)
            operator.advance(10_000_000 * (i + 1))
        assert operator.store.stats().blocks == 0
        assert eventually(lambda: files(folder) == []), "files go while the operator runs"


def test_it_is_a_context_manager_that_closes_on_errors(folder: Path) -> None:
    with pytest.raises(ZeroDivisionError), seconds_operator() as operator:
        operator.process(pa.table({"ts": at(1)}))
        raise ZeroDivisionError
    assert list(folder.iterdir()) == []
