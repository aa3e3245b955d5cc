"""Makes what the stores of a host need from a policy: the kind of store, I/O, memory budget and memory policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from policies.destage import DestagePolicy, StandardDestage
from policies.prestage import JustInTimePrestage, PrestagePolicy
from state_backends.plugins import build
from state_backends.store.io import BlockFiles, Io
from state_backends.store.io_thread import IoThread
from state_backends.store.keyed.run_files import RunFiles
from state_backends.store.keyed.store import KeyedStore
from state_backends.store.m_bucket import MemoryBudget, Stretches
from state_backends.store.tiered import TieredStore


def memory_only(p_bucket: BlockFiles, io: Io, budget: MemoryBudget, **options: Any) -> TieredStore:
    """Keeps all blocks in memory, even beyond the budget. The same idea as Flink's heap state backend.

    Commits are still written to disk.
    """
    return TieredStore(p_bucket, io, budget, **{**options, "keeps_all": True})


def disk_only(p_bucket: BlockFiles, io: Io, budget: MemoryBudget, **options: Any) -> TieredStore:
    """Keeps no block in memory after it has been written. The same idea as Flink's RocksDB state backend."""
    return TieredStore(p_bucket, io, budget, **{**options, "bucket_limit_bytes": 0})


STORES: dict[str, Callable[..., TieredStore]] = {"memory": memory_only, "rocksdb": disk_only, "tiered": TieredStore}


def keyed_store(backend: str, files: RunFiles, io: Io, budget: MemoryBudget) -> KeyedStore:
    """Keyed values beside the blocks of the store ``backend``, a key of STORES."""
    return KeyedStore(files, io, budget, keeps_all=backend == "memory", keeps_none=backend == "rocksdb")


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The part of a policy that stores need. It has plain values only, because it is sent to the state server as JSON.

    The memory budget is ``budget_bytes``. If that is None, it is ``budget_share`` (0 to 1) of the memory that the
    host's processes may use. ``destage``: arguments of ``destage_class``, or of StandardDestage if that is None.
    ``prestage``: likewise. ``windows``: (size, slide, offset) in µs of the tumbling and sliding windows. The m-bucket
    of such a window is the slices that it spans. ``metrics_port``: see
    :class:`state_backends.server.endpoint.MetricsEndpoint`.
    """

    backend: str = "tiered"
    budget_bytes: int | None = None
    budget_share: float = 0.25
    bucket_limit_bytes: int = 64 << 20
    windows: tuple[tuple[int, int, int], ...] = ()
    keep_fraction: float = 0.0
    prestages: bool = True
    blocking: bool = True
    io_threads: int = 1
    rate_limit_bytes_per_s: int | None = None
    retain_versions: int = 100
    destage: Mapping[str, Any] = field(default_factory=dict)
    destage_class: str | None = None
    prestage: Mapping[str, Any] = field(default_factory=dict)
    prestage_class: str | None = None
    metrics_port: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def budget(self, limit_bytes: int) -> int:
        """Returns the memory budget in bytes, on a host whose processes may use ``limit_bytes``."""
        if self.budget_bytes is not None:
            return self.budget_bytes
        return max(1, int(self.budget_share * limit_bytes))

    def make_io(self) -> IoThread:
        return IoThread(threads=self.io_threads, rate_limit=self.rate_limit_bytes_per_s)

    def make_destage(self) -> DestagePolicy:
        """Raises PolicyError for a class that cannot be used."""
        if self.destage_class is not None:
            return cast(DestagePolicy, build(self.destage_class, self.destage, methods=["suggest"]))
        return StandardDestage(**self.destage)

    def make_prestage(self) -> PrestagePolicy:
        if self.prestage_class is not None:
            made = build(self.prestage_class, self.prestage, methods=["start_at_s", "observe"])
            return cast(PrestagePolicy, made)
        return JustInTimePrestage(**self.prestage)

    def make_store(self, p_bucket: BlockFiles, io: Io, budget: MemoryBudget) -> TieredStore:
        return STORES[self.backend](
            p_bucket,
            io,
            budget,
            bucket_limit_bytes=min(self.bucket_limit_bytes, budget.limit_bytes),
            windows=[Stretches(*window) for window in self.windows],
            keep_fraction=self.keep_fraction,
            prestages=self.prestages,
            blocking=self.blocking,
        )

    def make_keyed(self, files: RunFiles, io: Io, budget: MemoryBudget) -> KeyedStore:
        return keyed_store(self.backend, files, io, budget)
