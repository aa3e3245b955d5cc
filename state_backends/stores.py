"""One option chooses the store."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from state_backends.io_thread import IoThread
from state_backends.memory import MemoryStore
from state_backends.p_bucket import PBucket
from state_backends.rocksdb import RocksStore
from state_backends.store import BlockStore
from state_backends.tiered import MemoryBudget, TieredStore

STORES: dict[str, type[TieredStore]] = {"memory": MemoryStore, "rocksdb": RocksStore, "tiered": TieredStore}


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The part of a policy that a store needs; sizes in bytes."""

    backend: str
    budget_bytes: int
    bucket_limit_bytes: int
    retain_versions: int = 100

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make_store(config: StoreConfig, p_bucket: PBucket, io: IoThread, budget: MemoryBudget) -> BlockStore:
    return STORES[config.backend](p_bucket, io, budget, bucket_limit_bytes=config.bucket_limit_bytes)
