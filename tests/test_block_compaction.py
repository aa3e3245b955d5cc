"""Compaction of blocks: the same panes as without it, through crashes; how little is read and kept."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import Phase, event, example, given, settings
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.config import Policy, load_policy
from aion.core.compaction.blocks import Compact
from aion.core.ingest.block import Block
from aion.core.ingest.hashing import ShardOfKeys
from aion.core.ingest.key_ranges import row_hashes
from aion.core.operator.operator import Operator
from aion.core.plan import Plan, make_plan
from aion.execute.assembly import make_bound, make_builder, make_executor, make_operator, make_trigger
from aion.execute.block_compactor import BlockCompactor
from aion.execute.contents import RowContents
from aion.execute.executor import Executor
from state_backends.files.storage import LocalStorage
from state_backends.store.backends import STORES
from state_backends.store.codec_pool import CodecPool
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.protocol import Only, StoredBlock
from state_backends.versions.manifest import Identity
from state_backends.versions.shard import Shard
from tests.examples import some

SECOND = 1_000_000
few = some(1 / 5)

# -- the same panes, compacted and not -------------------------------------------------------------------------

SCHEMA = pa.schema([("ts", pa.timestamp("us")), ("k", pa.string()), ("v", pa.int64()), ("f", pa.float64())])
AGGREGATES = {
    "n": A.count(), "s": A.sum("v"), "lo": A.min("v"), "list": A.collect_list("v"), "first": A.first("v"),
    "d": A.count_distinct("f"), "m": A.median("v"), "top": A.top_k("v", 2),
}  # fmt: skip
WINDOWS = {"ten": aion.Tumbling(10 * SECOND), "slide": aion.Sliding(20 * SECOND, 5 * SECOND)}
OF_EVENTS: dict[str, Any] = {
    "aggregates": None,
    "apply": lambda key, window, events: {"list": [v for batch in events for v in batch.column("v").to_pylist()]},
    "outputs": "list array<bigint>",
}
OF_PARTIALS: dict[str, Any] = {"aggregates": AGGREGATES, "apply": None, "outputs": None}
OF_NUMBERS: dict[str, Any] = {**OF_PARTIALS, "aggregates": {name: AGGREGATES[name] for name in ("n", "s", "lo")}}
DEFINITIONS = {
    "events": (OF_EVENTS, "k"), "partials": (OF_PARTIALS, "k"), "without a key": (OF_PARTIALS, None),
    "numbers": (OF_NUMBERS, "k"),
    "two keys": (OF_PARTIALS, ("v", "k")),
}  # fmt: skip


def plan_of(name: str, windows: Any = WINDOWS) -> Plan:
    how, key = DEFINITIONS[name]
    return make_plan(SCHEMA, key=key, time="ts", windows=windows, **how)


def policy_of(**more: Any) -> Policy:
    told = {"lateness": {"initial_bound": "25s", "coverage": None}, "trigger": {"kind": "every_batch"}}
    return load_policy(told | more)


TINY = {"blocks": {"target": "64B"}, "state": {"compression": "zstd"}, "apply": {"memory": "2KiB"}}


def table_of(events: Sequence[tuple[int, str | None, int]]) -> pa.RecordBatch:
    times, keys, values = zip(*events, strict=True) if events else ((), (), ())
    floats = [float(v % 3) for v in values]
    return pa.record_batch([[t * SECOND for t in times], keys, values, floats], schema=SCHEMA)


class AsTheyCame:
    """An attempt that keeps blocks as they came. With compaction, the output must be the same."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}

    def append(self, blocks: Any) -> None:
        self.blocks |= {seq: block for seq, _, block in blocks}

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        assert only is None
        found = [StoredBlock(seq, block) for seq, block in self.blocks.items() if block.header.slice_us in slices]
        return iter(sorted(found, key=lambda b: (b.block.header.slice_us, b.seq)))

    def prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        pass

    def replace(self, spans: Any, below: int) -> None:
        raise AssertionError("nothing is compacted here")

    abandon = replace  # type: ignore[assignment]

    def release(self, destage: Any, purge: Any) -> None:
        self.blocks = {seq: b for seq, b in self.blocks.items() if b.header.slice_us not in purge}


class OfShard:
    """An attempt on a shard, which counts what is read."""

    def __init__(self, shard: Shard, attempt: str) -> None:
        self.shard, self.attempt = shard, attempt
        self.read_bytes = self.replacings = 0

    def append(self, blocks: Any) -> None:
        self.shard.append(self.attempt, list(blocks))

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        for stored in self.shard.read(self.attempt, slices, blocking=blocking, only=only):
            self.read_bytes += stored.block.size_bytes
            yield stored

    def prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        self.shard.prestage(self.attempt, slices, only)

    def replace(self, spans: Any, below: int) -> None:
        self.replacings += 1
        self.shard.replace(self.attempt, spans, below)

    def abandon(self, from_seq: int) -> None:
        pass

    def release(self, destage: Any, purge: Any) -> None:
        self.shard.release(self.attempt, destage, purge)


class Rig:
    """A shard's host: batches as attempts, each of which may fail and be made again."""

    def __init__(self, plan: Plan, policy: Policy, *, kind: str = "tiered", budget: int = 1 << 20) -> None:
        self.plan, self.policy, self.kind, self.budget = plan, policy, kind, budget
        # In memory where there is such a folder: thousands of commits, which say nothing of devices.
        shared = Path("/dev/shm")
        usable = shared.is_dir() and os.access(shared, os.W_OK)
        self.temporary = tempfile.TemporaryDirectory(prefix="aion-test-", dir=shared if usable else None)
        self.folder = Path(self.temporary.name)
        self.token: str | None = None
        self.attempts = 0
        self.pool = CodecPool(0)
        self.start()

    def start(self) -> None:
        self.io = IoThread()
        self.memory = MemoryBudget(self.budget)
        self.shard = Shard(
            Identity("q", "o", 0, 1, {}), LocalStorage(self.folder / "state"), self.folder / "live",
            lambda p: STORES[self.kind](p, self.io, self.memory, bucket_limit_bytes=self.budget // 2), retain=3,
        )  # fmt: skip

    def stop(self) -> None:
        self.shard.close()
        self.io.close()

    def close(self) -> None:
        self.stop()
        self.temporary.cleanup()

    def crash(self) -> None:
        self.stop()
        self.start()

    def batch(self, events: pa.RecordBatch | None, watermark: int | None, *, commits: bool = True) -> list[Any]:
        """The panes of a batch, as rows; of an attempt that does not commit, they are nobody's."""
        self.attempts += 1
        attempt = f"{self.attempts:010d}-0"
        snapshot = self.shard.open(self.token, attempt, self.shard.identity)
        self.operator = make_operator(self.plan, self.policy, snapshot)
        self.attempt = OfShard(self.shard, attempt)
        executor = make_executor(self.plan, self.operator, self.attempt, self.pool, self.policy)
        executor.load()
        rows = run_batch(executor, self.policy, events, watermark)
        self.operator.validate()
        executor.save()
        if commits:
            self.shard.commit(attempt, self.operator.snapshot())
            self.token = attempt
        return rows


def run_batch(executor: Executor, policy: Policy, events: pa.RecordBatch | None, watermark: int | None) -> list[Any]:
    pool = CodecPool(0)
    batches = list(executor.advance(watermark * SECOND)) if watermark is not None else []
    if events is not None and events.num_rows:
        builder = make_builder(executor.plan, policy, pool, ShardOfKeys([0]))
        batches += executor.arrive([b.block for b in [*builder.add(events), *builder.finish()]])
    batches += executor.end_batch()
    rows = pa.Table.from_batches(batches, executor.plan.result_schema).to_pylist()
    return sorted(rows, key=repr)


def comparable(rows: list[Any]) -> list[Any]:
    """A list over several slices is in the order of slices, which compaction keeps. All else is the same, too."""
    return [{name: repr(value) for name, value in row.items()} for row in rows]


def check_compacted(
    rig: Rig, oracle: Executor, policy: Policy, batches: Sequence[tuple[pa.RecordBatch, int, Sequence[str]]]
) -> None:
    """Checks that the rig, which compacts, yields the same as the oracle, which does not, through all mishaps.

    ``batches``: events, the watermark before them, and what goes wrong before the batch is carried out.
    """
    replacings = 0
    try:
        for events, watermark, mishaps in batches:
            expected = run_batch(oracle, policy, events, watermark)
            for mishap in mishaps:
                assert comparable(rig.batch(events, watermark, commits=False)) == comparable(expected)
                if mishap == "crashes":
                    rig.crash()
            assert comparable(rig.batch(events, watermark)) == comparable(expected)
            replacings += rig.attempt.replacings
        event(f"{min(replacings, 3)} batches compacted, or more")
        rig.crash()
        expected = run_batch(oracle, policy, None, 10_000)
        assert comparable(rig.batch(None, 10_000)) == comparable(expected)
    finally:
        rig.close()


def uncompacted(plan: Plan, policy: Policy) -> Executor:
    keyed = make_operator(plan, policy, None).keyed
    operator = Operator(plan.grid, bound=make_bound(plan, policy, None), trigger=make_trigger(policy), keyed=keyed)
    return Executor(plan, operator, AsTheyCame(), RowContents(plan, CodecPool(0)))


an_event = st.tuples(st.integers(0, 30), st.sampled_from([*"abcd", None]), st.integers(0, 9))
a_batch = st.tuples(
    st.lists(an_event, max_size=12),
    st.integers(0, 4),  # by how much the watermark advances
    st.lists(st.sampled_from(["fails", "crashes"]), max_size=1),
)


@few
@pytest.mark.parametrize(
    "name", ["events", "partials", *(pytest.param(n, marks=pytest.mark.proof) for n in ("without a key", "two keys"))]
)
@given(batches=st.lists(a_batch, min_size=4, max_size=11), tiny=st.booleans(), kind=st.sampled_from([*STORES]))
@example(batches=[([(3, k, n) for k in "abcd"], n >= 8, ["fails"] * (n % 3 == 1)) for n in range(14)], tiny=True, kind="tiered")  # fmt: skip # noqa: E501
def test_panes_are_the_same_compacted_or_not_whatever_fails(
    name: str, batches: list[Any], tiny: bool, kind: str
) -> None:
    """Exactly once: an attempt that fails, before or after its compactions, changes nothing."""
    plan, policy = plan_of(name), policy_of(**TINY if tiny else {})
    rig = Rig(plan, policy, kind=kind, budget=2048 if tiny else 1 << 20)
    oracle = uncompacted(plan, policy)
    watermark, told = 0, []
    for events, step, mishaps in batches:
        watermark += 3 * step
        told.append((table_of([(t + watermark - 20, k, v) for t, k, v in events]), watermark, mishaps))
    check_compacted(rig, oracle, policy, told)


SESSIONS = {
    "session": {"session": aion.Session(50 * SECOND)},
    "two": {"short": aion.Session(20 * SECOND), "long": aion.Session(130 * SECOND)},
    "beside": {"session": aion.Session(50 * SECOND), "minutes": aion.Sliding(120 * SECOND, 60 * SECOND)},
}
at_times = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([*"abcd", None]), st.integers(0, 9)), max_size=12)
session_batches = st.lists(
    st.tuples(at_times, st.integers(0, 8), st.lists(st.sampled_from(["fails", "crashes"]), max_size=1)),
    min_size=4, max_size=9,
)  # fmt: skip
each_at_20 = [([(20, k, n) for k in "abcd"], 2, ["fails"] * (n % 4 == 1)) for n in range(9)]
each_at_40 = [([(40, k, n) for k in "abcd"], 8, ["crashes"] * (n % 4 == 1)) for n in range(9)]


@settings(few, phases=[Phase.explicit, Phase.generate])
@pytest.mark.parametrize(
    "name", ["events", "partials", "numbers", pytest.param("without a key", marks=pytest.mark.proof)]
)
@given(
    windows=st.sampled_from([*SESSIONS]),
    batches=session_batches, tiny=st.booleans(), endless=st.booleans(), bound=st.sampled_from([0, 30, 200]),
)  # fmt: skip
@example(windows="two", batches=each_at_20, tiny=True, endless=True, bound=0)
@example(windows="beside", batches=each_at_40, tiny=False, endless=True, bound=30)
def test_sessions_are_the_same_compacted_or_not_whatever_fails(
    name: str, windows: str, batches: list[Any], tiny: bool, endless: bool, bound: int
) -> None:
    """Also those that grow to both sides, are joined, or are retracted; and what is too late for some of them."""
    policy = policy_of(lateness={"initial_bound": f"{bound}s", "coverage": None}, **TINY if tiny else {})
    plan = plan_of(name, SESSIONS[windows])
    rig, oracle = Rig(plan, policy, budget=2048 if tiny else 1 << 20), uncompacted(plan, policy)
    watermark, told = 0, []
    for events, step, mishaps in batches:
        watermark += 6 * step
        always = [(watermark, "z", 1)] if endless else []
        told.append((table_of([(5 * t + watermark - 150, k, v) for t, k, v in events] + always), watermark, mishaps))
    check_compacted(rig, oracle, policy, told)


# -- how much is kept, and how much is read -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "tiered", "rocksdb"])
@pytest.mark.parametrize("aggregates", [{"n": A.count(), "m": A.mean("f")}, {"d": A.count_distinct("f")}], ids=repr)
def test_a_window_that_many_batches_feed_takes_at_most_twice_its_compacted_size(kind: str, aggregates: Any) -> None:
    how = {"aggregates": aggregates, "apply": None, "outputs": None}
    plan = make_plan(SCHEMA, key="k", time="ts", windows=aion.Tumbling(60 * SECOND), **how)
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


def test_a_slice_that_a_session_spans_without_an_event_in_it_is_emptied() -> None:
    """The long session goes on over slices that hold events of others only; late ones may come there yet."""
    windows = {"short": aion.Session(20 * SECOND), "long": aion.Session(130 * SECOND)}
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
    from aion.execute.applying import decode_all

    decoded = list(decode_all(plan, [StoredBlock(n, b) for n, b in enumerate(blocks)], None))
    compactor = BlockCompactor(plan, target_bytes=1 << 20)
    compactions = {s: Compact(s, -1, len(blocks), 1, False) for s in {b.header.slice_us for b in blocks}}
    return sum(block.size_bytes for _, block in compactor.compact(compactions, decoded))


@pytest.mark.parametrize(
    "beside",
    [pytest.param({}, marks=pytest.mark.proof), {"hours": aion.Tumbling("1 hour")}],
    ids=["alone", "beside others"],
)
def test_sessions_that_a_thousand_batches_feed_take_at_most_twice_their_compacted_size(beside: Any) -> None:
    windows = {"visit": aion.Session("10 minutes"), **beside}
    aggregates = {"n": A.count(), "s": A.sum("v"), "m": A.mean("f")}
    plan = make_plan(SCHEMA, key="k", time="ts", windows=windows, aggregates=aggregates, apply=None, outputs=None)
    draw = np.random.default_rng(3)
    slices = [600 * SECOND * n for n in range(6)]
    with aion.LocalOperator(windows=windows, time="ts", key="k", aggregates=aggregates, policy=policy_of()) as operator:
        for batch in range(1000):
            numbers = draw.integers(0, 100, 40)
            # Each key comes often enough for its session to go on; all of it over an hour.
            events = [(int(3.5 * batch + draw.integers(0, 100)), f"key-{n}", int(n)) for n in numbers]
            operator.process(pa.Table.from_batches([table_of(events)]))
            if batch % 50 == 49:
                operator.advance(0)  # the batch has ended
                kept = [stored.block for stored in operator.store.read(slices)]
                stats, compacted = operator.store.stats(), compacted_bytes(plan, kept)
                assert max(stats.m_bucket_bytes, stats.p_bucket_bytes) <= 2 * compacted
                assert sum(b.size_bytes for b in kept) <= 2 * compacted
                assert sum(b.header.events for b in kept) == 40 * (batch + 1)
        rows = operator.advance(10_000 * SECOND).to_pylist()
    assert sum(r["n"] for r in rows if r["window"] == "visit") == 40_000
    assert stats.blocks < 60


@pytest.mark.parametrize("name", ["numbers", "events"])
def test_a_session_that_never_ends_keeps_no_rows_of_others(name: str) -> None:
    """One key goes on for hours, others come once: what is kept is of that key, of late ones too, through crashes."""
    plan = plan_of(name, aion.Session(60 * SECOND))
    rig = Rig(plan, policy_of(lateness={"initial_bound": "60s", "coverage": None}), kind="memory")
    draw = np.random.default_rng(5)
    kept, endless, others = [], 0, 0
    try:
        for minute in range(60):
            now = 60 * minute
            events = [(now + int(t), f"key-{minute}-{n}", 1) for n, t in enumerate(draw.integers(0, 60, 40))]
            # The endless one gets events that are late by hours too: of it nothing is closed.
            times = [now, now + 30, int(draw.integers(0, now + 30))]
            if minute % 20 == 10:
                rig.crash()
            rows = rig.batch(table_of([*events, *((t, "endless", 1) for t in times)]), now - 60)
            endless += len(times)
            others += sum(r["events"] for r in rows)
            assert {r["kind"] for r in rows} <= {"on_time"} and not [r for r in rows if r["k"] == "endless"]
            assert rig.shard.store is not None
            blocks = [s.block for s in rig.shard.store.read([60 * SECOND * n for n in range(minute + 1)])]
            kept.append(sum(b.header.events for b in blocks))
            live = sum(w.index["events"].sum() for w in rig.operator.keyed.windows)
            assert kept[-1] <= endless + 6 * 40, "the endless session's, and those of the last minutes"
            assert kept[-1] <= 2 * live + 40
        rows = rig.batch(None, 100_000)
        (row,) = [r for r in rows if r["k"] == "endless"]
        assert row["events"] == endless == 180
        assert others + sum(r["events"] for r in rows) - endless == 60 * 40
        assert rig.shard.store is not None
        assert not list(rig.shard.store.read([60 * SECOND * n for n in range(62)]))
    finally:
        rig.close()


@pytest.mark.parametrize("name", ["events", "partials"])
def test_a_late_event_costs_what_its_key_costs_and_not_what_its_window_holds(name: str) -> None:
    costs = {}
    for keys in (2_000, 40_000):
        rig = Rig(plan_of(name, aion.Tumbling(60 * SECOND)), policy_of(blocks={"target": "8KiB"}))
        try:
            for part in range(4):
                every_fourth = range(part, keys, 4)
                rig.batch(table_of([(5, f"key-{n}", n) for n in every_fourth]), None)
            rig.batch(None, 60)
            assert rig.shard.store is not None
            window = sum(s.block.size_bytes for s in rig.shard.store.read([0]))
            rig.crash()  # nothing is in memory
            rows = rig.batch(table_of([(7, "key-77", 1)]), None)
            assert [(r["k"], r["events"], r["late_events"], r["kind"]) for r in rows] == [("key-77", 2, 1, "late")]
            assert list(rows[0]["list"]) == [77, 1]
            costs[keys] = rig.attempt.read_bytes, window
            rows = rig.batch(table_of([(8, "key-77", 2), (8, "new", 3)]), None)
            assert [(r["k"], r["events"]) for r in rows] == [("key-77", 3), ("new", 1)]
            assert rig.attempt.read_bytes < 8 * (8 << 10), "two keys, each in few blocks of 8 KiB"
            # The final execution says what the late ones said.
            assert rig.batch(None, 10_000) == []
        finally:
            rig.close()
    (small, small_window), (large, large_window) = costs.values()
    assert large_window > 10 * small_window
    assert large < 2 * small and large < large_window / 20


def test_late_events_stage_the_blocks_of_their_keys_only() -> None:
    windows = aion.Tumbling(60 * SECOND)
    rig = Rig(
        plan_of("partials", windows),
        policy_of(blocks={"target": "8KiB"}, trigger={"kind": "count", "count": 3}),
    )
    try:
        rig.batch(table_of([(5, f"key-{n}", n) for n in range(20_000)]), None)
        rig.batch(table_of([(5, f"key-{n}", n) for n in range(20_000)]), None)
        rig.batch(table_of([(5, f"key-{n}", n) for n in range(20_000)]), 60)
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
    """What is compacted at once is bounded; the run is sorted and whole all the same."""
    policy = policy_of(blocks={"target": "4KiB"}, apply={"memory": "64KiB"})
    plan = plan_of(name, aion.Tumbling(60 * SECOND))
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
    """Without versions: new blocks are in place before the old ones go."""
    windows = aion.Tumbling(60 * SECOND)
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
