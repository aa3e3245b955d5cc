"""Streams for LocalOperator, and how what comes out is compared with the oracle."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.config import Policy, load_policy
from aion.core.periodic import Periodic
from tests import oracle
from tests.durations import us
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
        POLICIES[name], {"lateness.initial_bound": us(bound), "lateness.coverage": None, "trigger.kind": "every_batch"}
    )


@dataclass(frozen=True)
class Scenario:
    """A definition, and what happens: a list of events arrives, or (an int) the watermark advances."""

    definitions: tuple[Definition, ...]
    bound: int
    key: tuple[str, ...]
    steps: tuple[list[Event] | int, ...]
    final_only: bool = False

    @property
    def events(self) -> list[Event]:
        return [event for step in self.steps if isinstance(step, list) for event in step]

    def windows(self) -> dict[str, Any]:
        return {f"w{i}": window_of(d, early=us(d.early), bound=us(d.bound)) for i, d in enumerate(self.definitions)}


def window_of(d: Definition, **when: Any) -> Periodic:
    if d.grows:
        return aion.Cumulative(us(d.slide), us(d.size), us(d.offset), **when)
    return aion.Sliding(us(d.size), us(d.slide), us(d.offset), **when)


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
    for name in ("window_start", "window_end", "event_time", "closes_at"):
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
        windows=scenario.windows(), key=scenario.key, time="ts", policy=policy,
        emit="final" if scenario.final_only else "all", **definition,
    ) as operator:  # fmt: skip
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
    judge = OracleOperator(
        scenario.definitions, bound=scenario.bound, key=scenario.key, result=result, final_only=scenario.final_only
    )
    said = [judge.process(s) if isinstance(s, list) else (judge.advance(s), []) for s in scenario.steps]
    return [*said, (judge.close(), [])]


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
                "pane": (row["pane"], row["kind"], row["events"], row["late_events"], row["closes_at"]),
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
                "pane": (p.pane, p.kind, p.events, p.late_events, p.closes),
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
            assert row["reason"] and row["pane"] is None and row["closes_at"] is None
            where = (row["window"], row["window_start"], row["window_end"])
            drops[(*(row[k] for k in scenario.key), *where, row["lateness_us"])] += row["events"]
    return drops


def expected_drops(dropped: list[Dropped]) -> Counter[Any]:
    return Counter(
        (*d.key, None if d.definition is None else f"w{d.definition}", d.start, d.end, d.lateness) for d in dropped
    )


definitions = st.sampled_from(
    [
        (Definition(10, 10),),
        (Definition(10, 10, 3),),
        (Definition(20, 10),),
        (Definition(25, 10, 2),),
        (Definition(10, 10), Definition(30, 10), Definition(40, 40, 5)),
        (Definition(20, 20, early=5),),
        (Definition(40, 10, 3, grows=True),),
        (Definition(30, 10, grows=True), Definition(30, 10), Definition(12, 6, 1, early=5, grows=True)),
        (Definition(10, 10, bound=0), Definition(40, 10, early=7, bound=50), Definition(30, 30, early=1)),
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
    chosen = draw(windows)
    final_only = all(d.early is None for d in chosen) and draw(st.booleans())
    return Scenario(chosen, draw(st.sampled_from([0, 5, 30])), key, (*done, FOREVER), final_only)
