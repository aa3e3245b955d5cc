"""Runs batches on a shard with and without compaction, and compares the panes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import event

import aion
from aion import aggregates as A
from aion.base.hashing import ShardOfKeys
from aion.config import Policy, load_policy
from aion.core.life.rules import PolicyRules, Rules
from aion.core.operator.operator import GridWindows, Operator
from aion.core.query.plan import Plan, make_plan
from aion.execute.assembly import make_bound, make_builder, make_operator, make_trigger
from aion.execute.executor import Executor
from aion.execute.panes.contents import RowContents
from state_backends.backends import Stores
from state_backends.files.storage import LocalStorage
from state_backends.format.block import Block
from state_backends.format.ordered_map import MemoryMap
from state_backends.store.codec_pool import CodecPool
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.store.protocol import Only, StoredBlock
from state_backends.versions.manifest import Identity
from state_backends.versions.shard import Shard
from tests.durations import us
from tests.examples import some
from tests.operators import make_executor
from tests.versions.keyed_attempt import LocalKeyedAttempt

SECOND = 1_000_000
few = some(1 / 5)


SCHEMA = pa.schema([("ts", pa.timestamp("us")), ("k", pa.string()), ("v", pa.int64()), ("f", pa.float64())])
AGGREGATES = {
    "n": A.count(), "s": A.sum("v"), "lo": A.min("v"), "list": A.collect_list("v"), "first": A.first("v"),
    "d": A.count_distinct("f"), "m": A.median("v"), "top": A.top_k("v", 2),
}  # fmt: skip
WINDOWS = {"ten": aion.Tumbling(us(10 * SECOND)), "slide": aion.Sliding(us(20 * SECOND), us(5 * SECOND))}
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


class AsTheyCame(MemoryMap):
    """An attempt that keeps blocks as they came. Compaction must not change the output."""

    def __init__(self) -> None:
        super().__init__()
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

    def abandon(self, from_seq: int) -> None:
        raise AssertionError("nothing is compacted here")

    def release(self, destage: Any, purge: Any) -> None:
        self.blocks = {seq: b for seq, b in self.blocks.items() if b.header.slice_us not in purge}


class OfShard(LocalKeyedAttempt):
    """An attempt on a shard. It counts what is read."""

    def __init__(self, shard: Shard, attempt: str) -> None:
        super().__init__(shard, attempt)
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
    """The host of a shard. Each batch is an attempt, which may fail and run again."""

    def __init__(self, plan: Plan, policy: Policy, *, kind: str = "tiered", budget: int = 1 << 20) -> None:
        self.plan, self.policy, self.kind, self.budget = plan, policy, kind, budget
        # Use a folder in memory if there is one: the test makes thousands of commits, and devices are not its subject.
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
        options = StoreOptions(bucket_limit_bytes=self.budget // 2)
        self.shard = Shard(
            Identity("q", "o", 0, 1, {}), LocalStorage(self.folder / "state"), self.folder / "live",
            lambda p: Stores.of(self.kind, p, self.io, self.memory, options), retain=3,
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
        """Returns the panes of a batch, as rows. Nobody gets those of an attempt that does not commit."""
        self.attempts += 1
        attempt = f"{self.attempts:010d}-0"
        snapshot = self.shard.open(self.token, attempt, self.shard.identity)
        self.operator = make_operator(self.plan, self.policy, snapshot)
        self.attempt = OfShard(self.shard, attempt)
        executor = make_executor(self.plan, self.operator, self.attempt, self.pool, self.policy)
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
    """Writes values as text, to compare them. A list follows the order of slices, which compaction keeps."""
    return [{name: repr(value) for name, value in row.items()} for row in rows]


def check_compacted(
    rig: Rig, oracle: Executor, policy: Policy, batches: Sequence[tuple[pa.RecordBatch, int, Sequence[str]]]
) -> None:
    """Checks that the rig, which compacts, yields what the oracle yields, which does not, whatever goes wrong.

    ``batches``: events, the watermark before them, and what goes wrong before the batch runs.
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
    shared = PolicyRules(make_bound(plan, policy, None), make_trigger(policy))
    parts = [GridWindows(plan.grid, make_operator(plan, policy, None).keyed)]
    operator = Operator(parts, Rules(shared, {}, len(plan.windows)))
    return Executor(plan, operator, AsTheyCame(), RowContents(plan, CodecPool(0)))
