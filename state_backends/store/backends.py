"""What a policy means for the stores of a host: the kind of store, its I/O, its budget and its memory policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from policies.destage import DestagePolicy, StandardDestage
from policies.plugins import build
from policies.prestage import JustInTimePrestage, PrestagePolicy
from state_backends.store.io import BlockFiles, Io
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget, Stretches
from state_backends.store.tiered import TieredStore


def memory_only(p_bucket: BlockFiles, io: Io, budget: MemoryBudget, **options: Any) -> TieredStore:
    """Keeps all blocks in memory, whatever the budget: the baseline that Flink's heap state is.

    Commits still reach the disk.
    """
    return TieredStore(p_bucket, io, budget, **{**options, "keeps_all": True})


def disk_only(p_bucket: BlockFiles, io: Io, budget: MemoryBudget, **options: Any) -> TieredStore:
    """Keeps nothing in memory except what is on its way to the disk: the baseline that Flink's RocksDB state is."""
    return TieredStore(p_bucket, io, budget, **{**options, "bucket_limit_bytes": 0})


STORES: dict[str, Callable[..., TieredStore]] = {"memory": memory_only, "rocksdb": disk_only, "tiered": TieredStore}


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The part of a policy that stores need. Plain values, because it travels to the state server as JSON.

    The budget is ``budget_bytes``, or else ``budget_share`` (0 to 1) of what the host's processes may use.
    ``destage``: the arguments of StandardDestage, or of ``destage_class`` if one is named; likewise ``prestage``.
    ``windows``: size, slide and offset in µs of the windows with edges that are known without events. The m-bucket of
    a window is the slices that it spans. ``metrics_port``: see
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
        """The budget on a host whose processes may use ``limit_bytes``."""
        if self.budget_bytes is not None:
            return self.budget_bytes
        return max(1, int(self.budget_share * limit_bytes))

    def make_io(self) -> IoThread:
        return IoThread(threads=self.io_threads, rate_limit=self.rate_limit_bytes_per_s)

    def make_destage(self) -> DestagePolicy:
        """Raises ValueError for a class that cannot be used."""
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
