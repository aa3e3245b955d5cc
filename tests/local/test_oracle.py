"""LocalOperator against an oracle that knows no slices, stores or blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion.config import Policy
from tests.durations import us
from tests.examples import some
from tests.local.scenarios import (
    AGGREGATES,
    COLLECTED,
    FOREVER,
    POLICIES,
    Scenario,
    aggregated,
    collected,
    collecting,
    drops_of,
    expected_drops,
    expected_panes,
    in_order,
    panes_of,
    policy,
    rows_of,
    run,
    scenarios,
    table,
    truth,
    validate,
)
from tests.oracle import Definition, Dropped, Event


@pytest.mark.slow
@pytest.mark.parametrize("name", ["standard", "tiny"])
@given(scenario=scenarios())
def test_aggregates_are_what_the_oracle_says(name: str, scenario: Scenario) -> None:
    calls, counters = run(scenario, policy(name, scenario.bound), aggregates=AGGREGATES)
    for rows, (panes, dropped) in zip(calls, truth(scenario, aggregated), strict=True):
        assert panes_of(rows, scenario, list(AGGREGATES)) == expected_panes(panes)
        assert drops_of(rows, scenario) == expected_drops(dropped)
    assert_counted(counters, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["standard", "tiny"])
@given(scenario=scenarios())
def test_functions_see_what_the_oracle_says(name: str, scenario: Scenario) -> None:
    calls, counters = run(
        scenario,
        policy(name, scenario.bound),
        apply=aion.Apply(collected, COLLECTED),
    )
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


@some(1 / 2)
@given(scenario=scenarios())
def test_every_policy_gives_the_same_panes(scenario: Scenario) -> None:
    for definition in (
        {"aggregates": AGGREGATES},
        {"apply": aion.Apply(collected, COLLECTED)},
    ):
        found = {}
        for name in POLICIES:
            calls, _ = run(scenario, policy(name, scenario.bound), **definition)
            outputs = [n for n in ("ids", *AGGREGATES) if n in {k for rows in calls for row in rows for k in row}]
            found[name] = [(panes_of(rows, scenario, outputs), drops_of(rows, scenario)) for rows in calls]
        for name, calls_of in found.items():
            assert calls_of == found["memory_only"], name


@some(1 / 2)
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


@some(1 / 2)
@given(scenario=scenarios(), data=st.data())
def test_how_a_table_is_chunked_makes_no_difference(scenario: Scenario, data: st.DataObject) -> None:
    scenario = replace(scenario, final_only=False)
    with aion.LocalOperator(
        windows=scenario.windows(), time="ts", key=scenario.key, aggregates=AGGREGATES,
        policy=policy("standard", scenario.bound),
    ) as operator:  # fmt: skip
        events = [e for e in scenario.events if e["ts"] is not None]
        cut = data.draw(st.integers(0, len(events)))
        pieces = [table(events[:cut]), table([]), table(events[cut:])]
        operator.process(pa.concat_tables(pieces))
        found = panes_of(rows_of(operator.advance(FOREVER)), scenario, list(AGGREGATES))
    once = replace(scenario, steps=([*events], FOREVER))
    assert found == expected_panes([p for panes, _ in truth(once, aggregated) for p in panes])


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
        windows=aion.Tumbling(us(1_000)),
        time="ts",
        key="k",
        apply=aion.Apply(digest, "value bigint, n bigint"),
        policy=policy,
    ) as operator:
        for i, batch in enumerate(batches):
            rows += operator.process(batch).to_pylist()
            stats = operator.store.stats()
            memory, disk = max(memory, stats.m_bucket_bytes), max(disk, stats.disk_only_bytes)
            rows += operator.advance((i + 1) * 1_000).to_pylist()
        validate(operator)
        rows += operator.advance(FOREVER).to_pylist() + operator.close().to_pylist()
    return sorted(map(repr, rows)), memory, disk


@pytest.mark.slow
def test_state_far_larger_than_memory_gives_the_same_panes() -> None:
    batches = payload_events(10_000)
    wanted, _, disk = run_large(policy("memory_only", 5_000), batches)
    assert disk == 0
    assert any("'late'" in row for row in wanted) and any("'dropped'" in row for row in wanted)
    for small in ("demo", "disk_only"):
        found, memory, disk = run_large(policy(small, 5_000), batches)
        assert found == wanted
        assert disk > 4 * 256 * 1024, "most of the state is on disk"
        if small == "demo":
            assert memory <= 256 * 1024 + 40_000, "the budget, and one block"
