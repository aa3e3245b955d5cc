"""Compaction keeps few bytes, and few are read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import aion
from aion import aggregates as A
from aion.core.compaction import Compact
from aion.core.ingest.key_ranges import row_hashes
from aion.core.query.plan import Plan, make_plan
from aion.execute.panes.block_compactor import BlockCompactor
from state_backends.format.block import Block
from state_backends.store.protocol import StoredBlock
from tests.compaction_rig import SCHEMA, SECOND, Rig, comparable, plan_of, policy_of, run_batch, table_of, uncompacted
from tests.durations import us

pytestmark = pytest.mark.usual_sizes


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("kind", ["memory", "tiered", "rocksdb"])
@pytest.mark.parametrize("aggregates", [{"n": A.count(), "m": A.mean("f")}, {"d": A.count_distinct("f")}], ids=repr)
def test_a_window_that_many_batches_feed_takes_at_most_twice_its_compacted_size(kind: str, aggregates: Any) -> None:
    how = {"aggregates": aggregates, "apply": None, "outputs": None}
    plan = make_plan(SCHEMA, key="k", time="ts", windows=aion.Tumbling(us(60 * SECOND)), **how)
    rig = Rig(plan, policy_of(), kind=kind)
    draw = np.random.default_rng(7)
    came = 0
    try:
        for _ in range(60):
            keys = [f"key-{k}" for k in draw.integers(0, 400, 150)]
            rig.batch(table_of([(5, k, int(k[4:])) for k in keys]), None)
            came += 150
            store = rig.shard.store
            assert store is not None
            kept = [s.block for s in store.read([0])]
            compacted = compacted_bytes(plan, kept)
            stats = store.stats()
            assert stats.m_bucket_bytes <= 2 * compacted
            assert stats.p_bucket_bytes == sum(b.size_bytes for b in kept) <= 2 * compacted, "nothing else is alive"
            assert sum(b.header.events for b in kept) == came
        assert stats.blocks <= 12
    finally:
        rig.close()


@pytest.mark.slow
def test_a_slice_that_a_session_spans_without_an_event_in_it_is_emptied() -> None:
    """The long session covers slices that hold only events of others. Late events may still come to these slices."""
    windows = {"short": aion.Session(us(20 * SECOND)), "long": aion.Session(us(130 * SECOND))}
    plan, policy = plan_of("partials", windows), policy_of()
    rig, oracle = Rig(plan, policy), uncompacted(plan, policy)
    try:
        for n in range(24):
            events = [(120 * n, "endless", n), *((120 * n + t, f"key-{n}-{t}", t) for t in range(10, 120, 10))]
            if n == 20:
                events.append((120 * 3 + 70, "endless", 99))
            batch = table_of(events)
            assert comparable(rig.batch(batch, 120 * n)) == comparable(run_batch(oracle, policy, batch, 120 * n))
            if n == 18:
                assert rig.shard.store is not None
                kept = [b.block.header for b in rig.shard.store.read([60 * SECOND * m for m in range(2, 24)])]
                assert {h.slice_us // SECOND % 120 for h in kept} == {0} and {h.events for h in kept} == {1}
        rows = rig.batch(None, 100_000)
        assert comparable(rows) == comparable(run_batch(oracle, policy, None, 100_000))
        assert [r["n"] for r in rows if (r["k"], r["window"]) == ("endless", "long")] == [25]
    finally:
        rig.close()


def compacted_bytes(plan: Plan, blocks: Sequence[Block]) -> int:
    from aion.execute.panes.applying import decode_all

    decoded = list(decode_all(plan, [StoredBlock(n, b) for n, b in enumerate(blocks)], None))
    compactor = BlockCompactor(plan, target_bytes=1 << 20)
    compactions = {s: Compact(s, -1, len(blocks), 1, False) for s in {b.header.slice_us for b in blocks}}
    return sum(block.size_bytes for _, block in compactor.compact(compactions, decoded))


@pytest.mark.slow
@pytest.mark.parametrize(
    "beside",
    [pytest.param({}, marks=pytest.mark.proof), {"hours": aion.Tumbling("1 hour")}],
    ids=["alone", "beside others"],
)
def test_sessions_that_hundreds_of_batches_feed_take_at_most_twice_their_compacted_size(beside: Any) -> None:
    windows = {"visit": aion.Session("10 minutes"), **beside}
    aggregates = {"n": A.count(), "s": A.sum("v"), "m": A.mean("f")}
    plan = make_plan(SCHEMA, key="k", time="ts", windows=windows, aggregates=aggregates, apply=None, outputs=None)
    draw = np.random.default_rng(3)
    slices = [600 * SECOND * n for n in range(6)]
    with aion.LocalOperator(windows=windows, time="ts", key="k", aggregates=aggregates, policy=policy_of()) as operator:
        for batch in range(400):
            numbers = draw.integers(0, 100, 40)
            # Each key comes often enough to keep its session open, for more than an hour in all.
            events = [(int(8.75 * batch + draw.integers(0, 100)), f"key-{n}", int(n)) for n in numbers]
            operator.process(pa.Table.from_batches([table_of(events)]))
            if batch % 50 == 49:
                operator.advance(0)  # the batch has ended
                kept = [stored.block for stored in operator.store.read(slices)]
                stats, compacted = operator.store.stats(), compacted_bytes(plan, kept)
                assert max(stats.m_bucket_bytes, stats.p_bucket_bytes) <= 2 * compacted
                assert sum(b.size_bytes for b in kept) <= 2 * compacted
                assert sum(b.header.events for b in kept) == 40 * (batch + 1)
        rows = operator.advance(10_000 * SECOND).to_pylist()
    assert sum(r["n"] for r in rows if r["window"] == "visit") == 16_000
    assert stats.blocks < 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["numbers", "events"])
def test_a_session_that_never_ends_keeps_no_rows_of_others(name: str) -> None:
    """One session lasts for hours, others are short. The state keeps only rows of the long one, even after crashes."""
    plan = plan_of(name, aion.Session(us(60 * SECOND)))
    rig = Rig(plan, policy_of(lateness={"initial_bound": "60s", "coverage": None}), kind="memory")
    draw = np.random.default_rng(5)
    kept, endless, others = [], 0, 0
    try:
        for minute in range(30):
            now = 60 * minute
            events = [(now + int(t), f"key-{minute}-{n}", 1) for n, t in enumerate(draw.integers(0, 60, 40))]
            # The endless session also gets events that are hours late: no part of it is closed.
            times = [now, now + 30, int(draw.integers(0, now + 30))]
            if minute % 10 == 5:
                rig.crash()
            rows = rig.batch(table_of([*events, *((t, "endless", 1) for t in times)]), now - 60)
            endless += len(times)
            others += sum(r["events"] for r in rows)
            assert {r["kind"] for r in rows} <= {"on_time"} and not [r for r in rows if r["k"] == "endless"]
            assert rig.shard.store is not None
            blocks = [s.block for s in rig.shard.store.read([60 * SECOND * n for n in range(minute + 1)])]
            kept.append(sum(b.header.events for b in blocks))
            live = sum(w.memory.kept.rest.sums["events"] for w in rig.operator.keyed)
            assert kept[-1] <= endless + 6 * 40, "the endless session's, and those of the last minutes"
            assert kept[-1] <= 2 * live + 40
        rows = rig.batch(None, 100_000)
        (row,) = [r for r in rows if r["k"] == "endless"]
        assert row["events"] == endless == 90
        assert others + sum(r["events"] for r in rows) - endless == 30 * 40
        assert rig.shard.store is not None
        assert not list(rig.shard.store.read([60 * SECOND * n for n in range(32)]))
    finally:
        rig.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["events", "partials"])
def test_a_late_event_costs_what_its_key_costs_and_not_what_its_window_holds(name: str) -> None:
    costs = {}
    for keys in (1_000, 20_000):
        rig = Rig(plan_of(name, aion.Tumbling(us(60 * SECOND))), policy_of(blocks={"target": "8KiB"}))
        try:
            for part in range(4):
                every_fourth = range(part, keys, 4)
                rig.batch(table_of([(5, f"key-{n}", n) for n in every_fourth]), None)
            rig.batch(None, 60)
            assert rig.shard.store is not None
            window = sum(s.block.size_bytes for s in rig.shard.store.read([0]))
            rig.crash()  # empties the memory
            rows = rig.batch(table_of([(7, "key-77", 1)]), None)
            assert [(r["k"], r["events"], r["late_events"], r["kind"]) for r in rows] == [("key-77", 2, 1, "late")]
            assert list(rows[0]["list"]) == [77, 1]
            costs[keys] = rig.attempt.read_bytes, window
            rows = rig.batch(table_of([(8, "key-77", 2), (8, "new", 3)]), None)
            assert [(r["k"], r["events"]) for r in rows] == [("key-77", 3), ("new", 1)]
            assert rig.attempt.read_bytes < 8 * (8 << 10), "two keys, each in few blocks of 8 KiB"
            # The final execution yields the same as the late ones.
            assert rig.batch(None, 10_000) == []
        finally:
            rig.close()
    (small, small_window), (large, large_window) = costs.values()
    assert large_window > 10 * small_window
    assert large < 2 * small and large < large_window / 20


def test_late_events_stage_the_blocks_of_their_keys_only() -> None:
    windows = aion.Tumbling(us(60 * SECOND))
    rig = Rig(
        plan_of("partials", windows),
        policy_of(blocks={"target": "8KiB"}, trigger={"kind": "count", "count": 3}),
    )
    try:
        rig.batch(table_of([(5, f"key-{n}", n) for n in range(8_000)]), None)
        rig.batch(table_of([(5, f"key-{n}", n) for n in range(8_000)]), None)
        rig.batch(table_of([(5, f"key-{n}", n) for n in range(8_000)]), 60)
        rig.crash()
        assert rig.batch(table_of([(7, "key-77", 1)]), None) == []
        store = rig.shard.store
        assert store is not None
        while store.stats().staging.staged_bytes == 0:
            store.read([99])
        assert store.stats().m_bucket_bytes < 4 * (8 << 10) < store.stats().p_bucket_bytes / 10
        assert rig.operator.plan(10**15) is None, "nor does the gap before the last execution"
    finally:
        rig.close()


@pytest.mark.parametrize("name", ["events", "partials"])
def test_runs_larger_than_memory_are_compacted_range_by_range(name: str) -> None:
    """A compaction reads a bounded number of bytes at once. Its run is still complete and sorted."""
    policy = policy_of(blocks={"target": "4KiB"}, apply={"memory": "64KiB"})
    plan = plan_of(name, aion.Tumbling(us(60 * SECOND)))
    rig = Rig(plan, policy)
    largest = 0
    compact = BlockCompactor.compact

    def watched(self: BlockCompactor, compactions: Any, blocks: Any, *more: Any) -> Any:
        nonlocal largest
        largest = max(largest, sum(d.batch.nbytes for d in blocks))
        return compact(self, compactions, blocks, *more)

    try:
        BlockCompactor.compact = watched  # type: ignore[method-assign]
        for part in range(8):
            rig.batch(table_of([(5, f"key-{n}", n) for n in range(part, 3000, 8)]), None)
        rows = rig.batch(None, 60)
        assert sorted(r["k"] for r in rows) == sorted(f"key-{n}" for n in range(3000))
        assert rig.shard.store is not None
        kept = [s for s in rig.shard.store.read([0]) if s.block.header.compacted]
        by_run: dict[int, list[Any]] = {}
        for stored in kept:
            by_run.setdefault(stored.arrival, []).append(stored.block.header.compacted)
        for ranges in by_run.values():
            assert all(before.high <= after.low for before, after in itertools.pairwise(ranges))
        assert sum(s.block.size_bytes for s in kept) > 4 * (64 << 10) // 4
        assert largest < 3 * (64 << 10), "rows of a part, and of the blocks at its edges"
    finally:
        BlockCompactor.compact = compact  # type: ignore[method-assign]
        rig.close()


def test_a_compaction_that_fails_on_the_way_loses_nothing_in_one_process() -> None:
    """New blocks are in place before the old ones go, so it needs no version."""
    windows = aion.Tumbling(us(60 * SECOND))
    with aion.LocalOperator(windows=windows, time="ts", key="k", aggregates={"s": A.sum("v")}) as operator:
        for n in range(3):
            operator.process(pa.Table.from_batches([table_of([(5, "a", n)])]))
        append, store = operator.store.append, operator.store
        operator.process(pa.Table.from_batches([table_of([(5, "a", 3)])]))

        def failing(seq: int, block: Block, *, late: bool) -> None:
            if block.header.compacted is not None:
                raise OSError("no room")
            append(seq, block, late=late)

        store.append = failing  # type: ignore[method-assign]
        with pytest.raises(OSError, match="no room"):
            for n in range(4, 8):
                operator.process(pa.Table.from_batches([table_of([(5, "a", n)])]))
        store.append = append  # type: ignore[method-assign]
        (row,) = operator.advance(60 * SECOND).to_pylist()
    assert row["s"] == sum(range(row["events"])) and row["events"] >= 4
    assert row_hashes(plan_of("without a key"), table_of([(1, "a", 1)])).tolist() == [0]
