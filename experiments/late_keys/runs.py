"""The runs of `late_keys`: one shard at work, as in Spark's root, with and without compaction."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import aion
from aion import aggregates as A
from aion.base.hashing import ShardOfKeys
from aion.config import Policy, load_policy
from aion.core.compaction import Compact
from aion.core.life.rules import PolicyRules, Rules
from aion.core.operator.operator import GridWindows, Operator
from aion.core.query.plan import Plan, make_plan
from aion.execute.assembly import make_bound, make_builder, make_contents, make_operator, make_trigger
from aion.execute.executor import Executor
from aion.execute.panes.applying import decode_all
from aion.execute.panes.block_compactor import BlockCompactor
from aion.execute.panes.contents import RowContents
from state_backends.backends import Stores
from state_backends.files.storage import LocalStorage
from state_backends.format.block import Block
from state_backends.store.codec_pool import CodecPool
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.store.protocol import BlockStore, Only, StoredBlock
from state_backends.versions.manifest import Identity
from state_backends.versions.shard import Shard

SECOND = 1_000_000
WINDOW = aion.Tumbling("1 minute")
ROWS_AT_ONCE = 1_000_000
SCHEMA = pa.schema([("ts", pa.timestamp("us")), ("key", pa.int64()), ("value", pa.float64())])


def largest(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, float]:
    """The function of the windows of kept events."""
    return {"largest": max(value for batch in events for value in batch.column("value").to_pylist())}


def plan_of(kind: str) -> Plan:
    """The plan for ``kind``: ``partials`` or ``events``."""
    if kind == "events":
        how: dict[str, Any] = {"aggregates": None, "apply": largest, "outputs": "largest double"}
    else:
        how = {"aggregates": {"n": A.count(), "mean": A.mean("value")}, "apply": None, "outputs": None}
    return make_plan(SCHEMA, key="key", time="ts", windows=WINDOW, **how)


def policy() -> Policy:
    """Every batch with late events has a late execution; no window reaches its bound."""
    return load_policy({"lateness": {"initial_bound": "1h", "coverage": None}, "trigger": {"kind": "every_batch"}})


def events_of(keys: np.ndarray[Any, Any], second: int) -> pa.RecordBatch:
    times = np.full(len(keys), second * SECOND)
    return pa.record_batch([pa.array(times, SCHEMA.field("ts").type), keys, keys % 1000 / 8], schema=SCHEMA)


class CountedAttempt:
    """An attempt on the shard that counts the bytes it reads and appends."""

    def __init__(self, shard: Shard, attempt: str) -> None:
        self.shard, self.attempt = shard, attempt
        self.read_bytes = self.read_blocks = self.appended_bytes = 0

    def append(self, blocks: Any) -> None:
        kept = list(blocks)
        self.appended_bytes += sum(block.size_bytes for _, _, block in kept)
        self.shard.append(self.attempt, kept)

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        for stored in self.shard.read(self.attempt, slices, blocking=blocking, only=only):
            self.read_bytes += stored.block.size_bytes
            self.read_blocks += 1
            yield stored

    def prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        pass  # so that an execution reads from disk

    def replace(self, spans: Any, below: int) -> None:
        self.shard.replace(self.attempt, spans, below)

    def abandon(self, from_seq: int) -> None:
        pass

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [value for page in self.shard.get(self.attempt, keys) for value in page]

    def put(self, values: Sequence[tuple[bytes, bytes | None, int | None]]) -> None:
        self.shard.put(self.attempt, values)

    def scan(self, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        return self.shard.scan(self.attempt, begin, end)

    def release(self, destage: Any, purge: Any) -> None:
        self.shard.release(self.attempt, destage, purge)


class OneShard:
    """A shard in a folder of its own, which :meth:`close` removes. ``compactions``: whether it compacts blocks."""

    def __init__(
        self, folder: Path, kind: str, *, compactions: bool, store: str = "tiered", budget: int = 256 << 20
    ) -> None:
        self.plan, self.policy, self.compactions = plan_of(kind), policy(), compactions
        self._folder, self._store, self._budget = folder, store, budget
        self._pool = CodecPool(2)
        self._token: str | None = None
        self._attempts = 0
        self._start()

    def _start(self) -> None:
        self._io = IoThread()
        memory = MemoryBudget(self._budget)
        options = StoreOptions(bucket_limit_bytes=self._budget // 2)
        self.shard = Shard(
            Identity("late-keys", "o", 0, 1, {}), LocalStorage(self._folder / "state"), self._folder / "live",
            lambda p: Stores.of(self._store, p, self._io, memory, options), retain=2,
        )  # fmt: skip

    def restart(self) -> None:
        """Closes the shard and opens it again, with nothing in memory."""
        self._stop()
        self._start()

    def _stop(self) -> None:
        self.shard.close()
        self._io.close()

    def close(self) -> None:
        self._stop()
        self._pool.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def store(self) -> BlockStore:
        assert self.shard.store is not None
        return self.shard.store

    def disk_bytes(self) -> int:
        return sum(f.stat().st_size for f in (self._folder / "state" / "files").iterdir())

    @contextmanager
    def batch(self) -> Iterator[tuple[Executor, CountedAttempt]]:
        """The executor of one batch. Commits the batch when the block ends."""
        self._attempts += 1
        name = f"{self._attempts:010d}-0"
        snapshot = self.shard.open(self._token, name, self.shard.identity)
        attempt = CountedAttempt(self.shard, name)
        if self.compactions:
            operator = make_operator(self.plan, self.policy, snapshot)
            executor = Executor(self.plan, operator, attempt, make_contents(self.plan, self._pool, self.policy))
        else:
            bound = make_bound(self.plan, self.policy, snapshot)
            rules = Rules(PolicyRules(bound, make_trigger(self.policy)), {}, len(self.plan.windows))
            operator = Operator([GridWindows(self.plan.grid)], rules, snapshot=snapshot)
            executor = Executor(self.plan, operator, attempt, RowContents(self.plan, self._pool))
        yield executor, attempt
        self.shard.commit(name, operator.snapshot())
        self._token = name

    def blocks_of(self, events: pa.RecordBatch) -> list[Block]:
        builder = make_builder(self.plan, self.policy, self._pool, ShardOfKeys([0]))
        return [b.block for b in [*builder.add(events), *builder.finish()]]


def late_event(folder: Path, kind: str, keys: int, runs: int, *, compactions: bool) -> dict[str, Any]:
    """Medians over late executions, each for one late event of one key, in a window of ``keys`` keys."""
    with closing(OneShard(folder, kind, compactions=compactions)) as one:
        begin = time.perf_counter()
        for first in range(0, keys, ROWS_AT_ONCE):
            with one.batch() as (executor, _):
                events = events_of(np.arange(first, min(first + ROWS_AT_ONCE, keys)), 5)
                for _ in executor.arrive(one.blocks_of(events)):
                    raise AssertionError("nothing is dropped")
                assert sum(rows.num_rows for rows in executor.end_batch()) == 0
        fed_s = time.perf_counter() - begin
        begin = time.perf_counter()
        with one.batch() as (executor, _):
            assert sum(rows.num_rows for rows in executor.advance(60 * SECOND)) == keys
            list(executor.end_batch())
        on_time_s = time.perf_counter() - begin
        one.restart()
        found: dict[str, list[float]] = {"bytes": [], "blocks": [], "seconds": [], "batch_seconds": []}
        for run in range(runs):
            key = (run * 7919 + 1) % keys
            begin = time.perf_counter()
            with one.batch() as (executor, attempt):
                list(executor.arrive(one.blocks_of(events_of(np.array([key]), 30))))
                before = time.perf_counter()
                panes = executor.end_batch()
                rows = next(rows for rows in panes if rows.num_rows)
                if not compactions:  # the window is read in parts, and only one has the key
                    assert sum(more.num_rows for more in panes) == 0
                # Stop measuring here: the compactions that follow only matter for later batches.
                found["seconds"].append(time.perf_counter() - before)
                found["bytes"].append(attempt.read_bytes)
                found["blocks"].append(attempt.read_blocks)
                assert rows.column("key").to_pylist() == [key] and rows.column("events").to_pylist() == [2]
                assert sum(more.num_rows for more in panes) == 0
            found["batch_seconds"].append(time.perf_counter() - begin)
        window = one.store.stats()
        return {
            "window_bytes": window.p_bucket_bytes,
            "window_blocks": window.blocks,
            "fed_s": fed_s,
            "on_time_s": on_time_s,
            **{name: statistics.median(values) for name, values in found.items()},
            "all": found,
        }


def many_batches(
    folder: Path, store: str, batches: int, events: int, keys: int, *, compactions: bool
) -> dict[str, Any]:
    """Feeds a window with many batches: the largest ratios of its size to its compacted size, and the costs."""
    draw = np.random.default_rng(11)
    ratios: dict[str, list[float]] = {"memory": [], "disk": [], "folder": []}
    came = appended = 0
    with closing(OneShard(folder, "partials", compactions=compactions, store=store)) as one:
        begin = time.perf_counter()
        for number in range(1, batches + 1):
            with one.batch() as (executor, attempt):
                blocks = one.blocks_of(events_of(draw.integers(0, keys, events), 5))
                list(executor.arrive(blocks))
                list(executor.end_batch())
            came += sum(block.size_bytes for block in blocks)
            appended += attempt.appended_bytes
            if number % max(batches // 100, 1) == 0 or number == batches:
                compacted = compacted_bytes(one.plan, [s.block for s in one.store.read([0])])
                stats = one.store.stats()
                sizes = {"memory": stats.m_bucket_bytes, "disk": stats.p_bucket_bytes, "folder": one.disk_bytes()}
                for name, size in sizes.items():
                    ratios[name].append(size / compacted)
        return {
            "seconds": time.perf_counter() - begin,
            "compacted_bytes": compacted,
            "came_bytes": came,
            "blocks": stats.blocks,
            "written_again": (appended - came) / came,
            **{f"{name}_ratio": max(values) for name, values in ratios.items()},
        }


def compacted_bytes(plan: Plan, blocks: Sequence[Block]) -> int:
    """The size of the blocks of one slice, compacted into one run."""
    decoded = list(decode_all(plan, [StoredBlock(n, block) for n, block in enumerate(blocks)], None))
    compactor = BlockCompactor(plan, target_bytes=1 << 20)
    compactions = {0: Compact(0, -1, len(blocks), 1, False)}
    return sum(block.size_bytes for _, block in compactor.compact(compactions, decoded))
