"""Aggregates of windows: holistic and mixed ones through LocalOperator, in memory, in files, and from disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.base.hashing import ShardOfKeys
from aion.config import load_policy
from aion.core.ingest.builder import BlockBuilder
from aion.core.ingest.encoding import BlockSettings, decode
from aion.core.life.actions import Execute, Execution, PaneKind, WindowRef
from aion.core.query.plan import Plan, make_plan
from aion.execute.executor import Executor
from aion.execute.panes.contents import RowContents
from aion.execute.spill.grouping import Piece
from aion.execute.spill.spilling import Room, partitions_by_key
from state_backends.format.block import Block, Codec
from state_backends.store.protocol import Only, StoredBlock
from tests import aggregate_oracle as o
from tests.durations import us
from tests.examples import some
from tests.local.scenarios import POLICIES, Scenario, expected_panes, panes_of, policy, run, scenarios, truth
from tests.oracle import Definition, Event

# An operator with all these aggregates does a lot in each of its calls.
few = some(1 / 4)


def extremes_and_their_distance() -> A.Aggregate:
    return A.aggregate(
        "v",
        lift=lambda v: [v, v],
        combine=lambda a, b: [pc.min_element_wise(a[0], b[0]), pc.max_element_wise(a[1], b[1])],
        lower=lambda low, high: pc.subtract(high, low),
        partial="low bigint, high bigint",
        result=pa.int64(),
        name="spread",
        commutative=True,
    )


MIXED = {
    "n": A.count(), "s": A.sum("v"), "sd": A.stddev_pop("v"), "med": A.median("v"),
    "p": A.percentile("v", [0.25, 0.75]), "ap": A.approx_percentile("f", 0.5),
    "d": A.count_distinct("f"), "ds": A.count_distinct("v", "g"),
    "ad": A.approx_count_distinct("v"), "list": A.collect_list("v"), "set": A.collect_set("k"), "top": A.top_k("v", 2),
    "first": A.first("id"), "last": A.last("f", ignorenulls=True), "by": A.max_by("id", "v"),
    "spread": extremes_and_their_distance(),
}  # fmt: skip


def mixed(events: Sequence[Event]) -> dict[str, Any]:
    several = [o.percentile(events, "v", share) for share in (0.25, 0.75)]
    numbers = o.there(events, "v")
    # Ids are in the order of arrival; of windows of several slices collected lists are by slice first.
    return {
        "n": len(events),
        "s": o.total(events, "v"),
        "sd": rounded(o.variance(events, "v", sample=False, root=True)),
        "med": o.percentile(events, "v", 0.5),
        "p": None if None in several else several,
        "ap": o.nth(events, "f", 0.5),
        "d": len(o.distinct(events, "f")),
        "ds": len(o.distinct(events, "v", "g")),
        "ad": len(o.distinct(events, "v")),
        "list": sorted(numbers),
        "set": sorted(set(o.there(events, "k"))),
        "top": sorted(numbers, reverse=True)[:2],
        "first": o.first(events, "id"),
        "last": o.last(events, "f", ignorenulls=True),
        "by": max(numbers) if numbers else None,
        "spread": max(numbers) - min(numbers) if numbers else None,
    }


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def comparable(rows: list[dict[str, Any]], scenario: Scenario) -> list[dict[str, Any]]:
    values = {e["id"]: e["v"] for e in scenario.events}
    for row in rows:
        row.update(list=sorted(row["list"]), set=sorted(row["set"]), sd=rounded(row["sd"]))
        row["by"] = None if row["by"] is None else values[row["by"]]  # which of equal ones is told elsewhere
    return rows


@few
@pytest.mark.parametrize("name", ["standard", "tiny"])
@given(scenario=scenarios())
def test_holistic_and_other_aggregates_together(name: str, scenario: Scenario) -> None:
    calls, _ = run(scenario, policy(name, scenario.bound), aggregates=MIXED)
    for rows, (panes, _) in zip(calls, truth(scenario, mixed), strict=True):
        assert panes_of(comparable(rows, scenario), scenario, list(MIXED)) == expected_panes(panes)


@few
@given(scenario=scenarios(st.sampled_from([(Definition(10, 10),), (Definition(10, 10, 3),)])))
def test_lists_are_in_the_order_of_arrival(scenario: Scenario) -> None:
    """In windows of one slice, late events and compacted blocks included."""
    calls, _ = run(scenario, policy("tiny", scenario.bound), aggregates={"ids": A.collect_list("id")})

    def ids(events: Sequence[Event]) -> dict[str, Any]:
        return {"ids": [e["id"] for e in events]}

    for rows, (panes, _) in zip(calls, truth(scenario, ids), strict=True):
        assert panes_of(rows, scenario, ["ids"]) == expected_panes(panes)


@few
@given(scenario=scenarios())
def test_every_store_and_codec_gives_the_same_panes(scenario: Scenario) -> None:
    found = []
    for name, codec in [("memory_only", "arrow"), ("disk_only", "json"), ("tiny", "json")]:
        used = load_policy(POLICIES[name], {"lateness.initial_bound": us(scenario.bound), "state.codec": codec})
        calls, _ = run(scenario, used, aggregates=MIXED)
        found.append([panes_of(comparable(rows, scenario), scenario, list(MIXED)) for rows in calls])
    assert found[0] == found[1] == found[2]


# -- larger than memory -------------------------------------------------------------------------------------


class ListSession:
    """A session of blocks in a list; knows which slices were read."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = sorted(enumerate(blocks), key=lambda b: b[1].header.slice_us)
        self.reads: list[tuple[int, ...]] = []

    def append(self, blocks: Any) -> None:
        raise AssertionError("nothing arrives here")

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Any:
        assert only is None
        self.reads.append(tuple(slices))
        return (StoredBlock(seq, block) for seq, block in self.blocks if block.header.slice_us in set(slices))

    def prestage(self, slices: Sequence[int]) -> None:
        """Nothing to do."""

    def release(self, destage: Sequence[int], purge: Sequence[int]) -> None:
        """Nothing to do."""


class Orders:
    """In the place of an operator: these executions are due when a batch ends."""

    keyed = ()

    def __init__(self, executions: Sequence[Execution], slices: Sequence[int]) -> None:
        self._order = Execute.of(executions, tuple(slices))

    def actions(self, event: Any) -> Iterator[Execute]:
        yield self._order

    def number_panes(self) -> int:
        return 0


def plan_of(windows: Any = None, key: Any = "k", **aggregates: A.Aggregate) -> Plan:
    schema = pa.schema([("k", pa.int64()), ("ts", pa.timestamp("us")), ("x", pa.float64()), ("p", pa.string())])
    windows = windows or aion.Tumbling(us(1000))
    return make_plan(schema, key=key, time="ts", windows=windows, aggregates=aggregates, apply=None, outputs=None)


def events_of(keys: np.ndarray[Any, Any], values: np.ndarray[Any, Any], times: Any = None) -> pa.Table:
    times = np.zeros(len(keys), np.int64) if times is None else times
    texts = pa.array(np.char.add("payload of ", keys.astype(str)).tolist())
    return pa.table({"k": keys, "ts": pa.array(times).cast(pa.timestamp("us")), "x": values, "p": texts})


def blocks_of(plan: Plan, events: pa.Table, **options: Any) -> list[Block]:
    builder = BlockBuilder(plan, BlockSettings(**options), shard_of=ShardOfKeys([0]))
    some = [b for batch in events.select(plan.schema.names).to_batches() for b in builder.add(batch)]
    return [b.block for b in [*some, *builder.finish()]]


def execute(start: int, *, events: int = 1, end: int = 1000, changed_since: int = -1) -> Execution:
    return Execution(WindowRef(0, start, end), PaneKind.ON_TIME, 0, changed_since, 2**63 - 1, events, 0)


def carried_out(
    plan: Plan, session: ListSession, executions: Sequence[Execution], **options: Any
) -> list[dict[str, Any]]:
    slices = sorted({block.header.slice_us for _, block in session.blocks})
    executor = Executor(plan, Orders(executions, slices), session, RowContents(plan, **options))  # type: ignore[arg-type]
    return [row for batch in executor.end_batch() for row in batch.to_pylist()]


@pytest.mark.slow
@pytest.mark.usual_sizes
def test_windows_larger_than_the_limit_go_by_way_of_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    keys, values = rng.integers(0, 300, 40_000), rng.normal(size=40_000)
    keys[:9000] = 7  # one key that is larger than the limit by itself
    plan = plan_of(m=A.median("x"), n=A.count(), s=A.stddev("x"), l=A.last("x"))
    blocks = [b for i in range(8) for b in blocks_of(plan, events_of(keys[i::8], values[i::8]), target_bytes=4096)]

    def rows(limit: int, folder: str) -> dict[int, Any]:
        found = carried_out(plan, ListSession(blocks), [execute(0)], room=Room(limit, folder))
        by_key = {row["k"]: (row["m"], row["n"], row["s"], row["l"], row["events"]) for row in found}
        assert len(by_key) == len(found)
        return by_key

    in_memory = rows(1 << 30, str(tmp_path / "nowhere"))
    assert {k: v[0] for k, v in in_memory.items()} == {k: np.median(values[keys == k]) for k in range(300)}
    assert rows(20_000, str(tmp_path)) == in_memory
    with pytest.raises(FileNotFoundError):
        rows(20_000, str(tmp_path / "nowhere"))


@given(st.lists(st.lists(st.integers(0, 5), max_size=9), max_size=6), st.integers(1, 300))
def test_parts_of_keys_are_whole_and_in_order(batches: list[list[int]], limit: int) -> None:
    schema = pa.schema([("k", pa.int64()), ("i", pa.int64())])
    begins = np.cumsum([0, *map(len, batches)])
    made = [pa.record_batch([b, range(n, n + len(b))], schema) for b, n in zip(batches, begins, strict=False)]
    pieces = (Piece(batch, True, False) for batch in made)
    parts = [
        pa.Table.from_batches(p.batches, schema) for p in partitions_by_key(["k"], pieces, Room(limit)) if p.batches
    ]
    found: dict[int, list[int]] = {}
    for part in parts:
        rows = part.to_pylist()
        assert not {row["k"] for row in rows} & found.keys(), "a key in two parts"
        for row in rows:
            found.setdefault(row["k"], []).append(row["i"])
    wanted: dict[int, list[int]] = {}
    for row in (row for batch in made for row in batch.to_pylist()):
        wanted.setdefault(row["k"], []).append(row["i"])
    assert found == wanted


@pytest.mark.usual_sizes
def test_slices_are_read_once_for_overlapping_windows_and_in_the_limit() -> None:
    rng = np.random.default_rng(2)
    times, keys = np.sort(rng.integers(0, 40, 20_000)) * 1000, rng.integers(0, 9, 20_000)
    values = rng.normal(size=20_000)
    plan = plan_of(aion.Sliding(us(20_000), us(1000)), m=A.median("x"), s=A.sum("x"))
    blocks = blocks_of(plan, events_of(keys, values, times))
    assert len(blocks) == 40
    executes = []
    for start in range(-19_000, 40_000, 1000):
        slices = [s for s in range(0, 40_000, 1000) if start <= s < start + 20_000]
        window = WindowRef(0, start, start + 20_000)
        executes.append(Execution(window, PaneKind.ON_TIME, 0, -1, 2**63 - 1, 500 * len(slices), 0))
    expected = []
    for e in executes:
        inside = (times >= e.window.start_us) & (times < e.window.end_us)
        for k in np.unique(keys[inside]).tolist():
            mine = values[inside & (keys == k)]
            expected.append((e.window.start_us, k, np.median(mine), len(mine)))
    for limit in (1 << 30, 1 << 19):  # the second for a few windows at a time
        session = ListSession(blocks)
        rows = carried_out(plan, session, executes, room=Room(limit))
        found = [(pa.scalar(r["window_start"]).value, r["k"], r["m"], r["events"]) for r in rows]
        assert sorted(found) == sorted(expected)
        assert session.reads == [tuple(range(0, 40_000, 1000))]


def test_windows_of_many_events_are_not_loaded_together() -> None:
    plan = plan_of(m=A.median("x"))
    session = ListSession(blocks_of(plan, events_of(np.array([1, 2, 1]), np.ones(3), np.array([0, 1000, 2000]))))
    executes = [execute(s, events=700_000, end=s + 1000) for s in (0, 1000, 2000)]
    assert [r["m"] for r in carried_out(plan, session, executes)] == [1.0] * 3
    assert session.reads == [(0,), (1000,), (2000,)]
    decomposable = plan_of(m=A.mean("x"))
    blocks = blocks_of(decomposable, events_of(np.array([1, 2, 1]), np.ones(3), np.array([0, 1000, 2000])))
    together = ListSession(blocks)
    carried_out(decomposable, together, executes)
    assert together.reads == [(0, 1000, 2000)]


@pytest.mark.usual_sizes
def test_only_changed_keys_are_computed_again() -> None:
    seen: list[int] = []

    def lower(values: pa.Array) -> pa.Array:
        seen.append(len(values))
        return values

    def add(left: list[pa.Array], right: list[pa.Array]) -> pa.Array:
        return pc.add(left[0], right[0])

    mine = A.aggregate(
        "x", lift=lambda x: x, combine=add, lower=lower, partial="x double", result="double", name="mine"
    )
    plan = plan_of(a=mine, m=A.median("x"))
    first = blocks_of(plan, events_of(np.arange(1000), np.ones(1000)))
    late = blocks_of(plan, events_of(np.array([3, 77]), np.array([9.0, 5.0])))
    rows = carried_out(plan, ListSession([*first, *late]), [execute(0, changed_since=len(first) - 1)])
    assert sorted((r["k"], r["a"], r["m"], r["events"]) for r in rows) == [(3, 10.0, 5.0, 2), (77, 6.0, 3.0, 2)]
    assert seen == [2]


# -- blocks ---------------------------------------------------------------------------------------------------


def values_in(plan: Plan, blocks: Sequence[Block]) -> dict[Any, list[float]]:
    found: dict[Any, list[float]] = {}
    for block in blocks:
        rows = decode(block, plan.block_schema)
        assert block.header.events == pc.sum(rows.column("p0")).as_py()
        for row in rows.to_pylist():
            assert len(row["p1"]) == row["p0"]
            found.setdefault((block.header.slice_us, row.get("k0")), []).extend(row["p1"])
    return found


@pytest.mark.usual_sizes
@pytest.mark.parametrize("key", ["k", None])
@pytest.mark.parametrize("codec", list(Codec))
def test_kept_values_are_in_blocks_of_the_target_size(key: str | None, codec: Codec) -> None:
    """Also those of one key, or of none at all, and from one large batch as from many small ones."""
    rng = np.random.default_rng(9)
    keys, values = rng.integers(0, 5, 30_000), np.arange(30_000.0)
    times = rng.integers(0, 2, 30_000) * 1000
    plan = plan_of(key=key, l=A.collect_list("x"))
    events = events_of(keys, values, times)
    for chunks in (1, 50):
        pieces = pa.concat_tables([events.slice(i * 30_000 // chunks, 30_000 // chunks) for i in range(chunks)])
        blocks = blocks_of(plan, pieces, target_bytes=16_384, codec=codec)
        assert max(b.header.raw_bytes for b in blocks) < 6 * 16_384, "no row that is a block too large by itself"
        assert len(blocks) < 80
        found = values_in(plan, blocks)
        for slice_us in (0, 1000):
            for k in range(5) if key else [None]:
                mine = (times == slice_us) & ((keys == k) if key else True)
                assert found[slice_us, k] == values[mine].tolist(), "every value once, in the order of arrival"


def test_what_waits_to_become_blocks_is_bounded() -> None:
    plan = plan_of(l=A.collect_list("p"))
    builder = BlockBuilder(plan, BlockSettings(50_000), None, ShardOfKeys([0]), buffer_bytes=200_000)
    batch = events_of(np.arange(500), np.ones(500)).select(plan.schema.names).to_batches()[0]
    made = sum(b.block.header.events for _ in range(200) for b in builder.add(batch))
    assert made > 90_000
    assert made + sum(b.block.header.events for b in builder.finish()) == 100_000


def test_values_kept_are_smaller_than_events_kept() -> None:
    """Neither the key nor the time is repeated for each of them, nor columns that nobody asked for."""
    rng = np.random.default_rng(4)
    keys, values = rng.integers(0, 100, 50_000), rng.normal(size=50_000)
    events = events_of(keys, values)
    plan = plan_of(m=A.median("x"), n=A.count("p"))
    as_lists = sum(b.size_bytes for b in blocks_of(plan, events))
    rows = make_plan(
        pa.schema([("k", pa.int64()), ("ts", pa.timestamp("us")), ("x", pa.float64())]),
        key="k", time="ts", windows=aion.Tumbling(us(1000)), aggregates=None, apply=len, outputs="m double",
    )  # fmt: skip
    as_events = sum(b.size_bytes for b in blocks_of(rows, events))
    assert as_lists < 0.4 * as_events
