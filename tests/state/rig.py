"""Operators that leave versions in a state folder, and a checkpoint that says which batches are complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from aion.base.hashing import ShardOfKeys
from aion.config import load_policy
from aion.core.join.plan import JoinPlan
from aion.execute.assembly import make_builder, make_contents
from aion.execute.joining import Joined
from aion.execute.windows import Windows
from aion.spec import Spec
from state_backends.backends import StoreConfig, Stores
from state_backends.files.location import locate
from state_backends.format.block import Block
from state_backends.server.client import StateClient
from state_backends.store.codec_pool import CodecPool
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.store.protocol import Only, StoredBlock
from state_backends.versions.manifest import Identity
from state_backends.versions.shard import Shard
from tests.versions.keyed_attempt import LocalKeyedAttempt

QUERY, NAME = "query", "traffic"


class ShardAttemptHere(LocalKeyedAttempt):
    """An attempt on a shard of this process: blocks, and the map."""

    def append(self, blocks: Iterable[tuple[int, bool, Block]]) -> None:
        self._shard.append(self._attempt, list(blocks))

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        return self._shard.read(self._attempt, slices, blocking=blocking, only=only)

    def prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        self._shard.prestage(self._attempt, slices, only)

    def replace(self, spans: Any, below: int) -> None:
        self._shard.replace(self._attempt, spans, below)

    def abandon(self, from_seq: int) -> None:
        raise AssertionError("no test lets a compaction fail")

    def release(self, destage: Sequence[int], purge: Sequence[int]) -> None:
        self._shard.release(self._attempt, destage, purge)


class Running:
    """A query with one operator. Each :meth:`batch` makes a version of each of its shards, and is complete then."""

    def __init__(self, folder: Path, place: str, definition: Any, shards: int, retain: int = 100) -> None:
        self.place, self.ids = place, tuple(range(shards))
        self._checkpoint = folder / "checkpoint"
        (self._checkpoint / "commits").mkdir(parents=True)
        (self._checkpoint / "metadata").write_text('{"id":"query"}')
        self._location = locate(place)
        self._io = IoThread()
        self.tokens: list[str | None] = [None] * shards
        self.batches = 0
        self.identities = [
            Identity(
                QUERY,
                NAME,
                n,
                shards,
                definition,
                ids=self.ids,
                key_types=("int64",),
                checkpoint=f"file:{self._checkpoint}",
            )
            for n in self.ids
        ]
        self.shards = [
            Shard(
                identity,
                self._location.storage(
                    (QUERY, NAME, f"shard-{identity.shard:05d}"), folder / "copies" / f"{n}", "first"
                ),
                folder / "live" / f"{n}",
                lambda p: Stores.of(
                    "tiered", p, self._io, MemoryBudget(8 << 20), StoreOptions(bucket_limit_bytes=1 << 20)
                ),
                retain=retain,
            )
            for n, identity in enumerate(self.identities)
        ]

    def attempt(self, n: int, name: str = "a") -> tuple[str, ShardAttemptHere, Any]:
        """Opens a shard for this batch. Returns the attempt, its work, and the snapshot."""
        token = f"{self.batches:010d}-{name}{n}"
        snapshot = self.shards[n].open(self.tokens[n], token, self.identities[n])
        return token, ShardAttemptHere(self.shards[n], token), snapshot

    def commit(self, n: int, token: str, snapshot: Any) -> None:
        self.tokens[n] = self.shards[n].commit(token, snapshot)

    def complete(self) -> None:
        """Notes that the batch is complete."""
        (self._checkpoint / "commits" / str(self.batches)).write_text("v1")
        self.batches += 1

    def close(self) -> None:
        for shard in self.shards:
            shard.close()
        self._io.close()
        self._location.close()


class RunningWindows(Running):
    """Windows in a state folder. Events have the columns of ``schema``; the key is an int64."""

    def __init__(
        self, folder: Path, place: str, spec: Spec, schema: pa.Schema, shards: int = 2, retain: int = 100
    ) -> None:
        self.plan = spec.plan(schema)
        self.policy = load_policy("standard", spec.policy_overrides)
        self._codec = CodecPool(0)
        super().__init__(folder, place, self.plan.definition, shards, retain)

    def batch(self, events: pa.RecordBatch, watermark_us: int | None, *, complete: bool = True) -> list[pa.RecordBatch]:
        """Runs a batch, and returns its panes."""
        panes: list[pa.RecordBatch] = []
        shard_of = (
            ShardOfKeys(self.ids)([events.column(self.plan.key[0])], events.num_rows)
            if events.num_rows
            else np.empty(0)
        )
        for n in self.ids:
            token, attempt, snapshot = self.attempt(n)
            windows = Windows(
                self.plan, self.policy, attempt, snapshot, make_contents(self.plan, self._codec, self.policy)
            )
            panes += windows.advance(watermark_us)
            builder = make_builder(self.plan, self.policy, self._codec, ShardOfKeys([0]))
            own = events.filter(pa.array(shard_of == n))
            panes += windows.arrive([b.block for b in builder.add(own)] if own.num_rows else [])
            panes += windows.arrive([b.block for b in builder.finish()])
            panes += windows.end_batch(batch_follows=True)
            self.commit(n, token, windows.save().snapshot)
        if complete:
            self.complete()
        return panes

    def close(self) -> None:
        super().close()
        self._codec.close()


class ServedWindows(RunningWindows):
    """Windows whose shards are on a state server. ``store``: its settings."""

    def __init__(self, *arguments: Any, client: StateClient, store: StoreConfig, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.client, self._store = client, store

    def attempt(self, n: int, name: str = "a") -> tuple[str, Any, Any]:
        token = f"{self.batches:010d}-{name}{n}"
        self._at_work = self.client.open(
            self.identities[n],
            token=self.tokens[n],
            makes=token,
            run="run",
            operator_uid="uid",
            state_dir=self.place,
            store=self._store,
        )
        return token, self._at_work, self._at_work.snapshot

    def commit(self, n: int, token: str, snapshot: Any) -> None:
        self._at_work.commit(snapshot)
        self.tokens[n] = token


class RunningJoin(Running):
    """A join in a state folder."""

    def __init__(self, folder: Path, place: str, plan: JoinPlan) -> None:
        self.plan = plan
        super().__init__(folder, place, plan.definition, 1)

    def batch(self, left: pa.Table, right: pa.Table, watermark_us: int | None) -> None:
        token, attempt, snapshot = self.attempt(0)
        joined = Joined(self.plan, load_policy("standard", {}), attempt, snapshot)
        for results in (joined.advance(watermark_us), joined.arrive((0, left)), joined.arrive((1, right))):
            list(results)
        list(joined.end_batch())
        self.commit(0, token, joined.save().snapshot)
        self.complete()


@contextmanager
def running(query: Running) -> Iterator[Any]:
    try:
        yield query
    finally:
        query.close()
