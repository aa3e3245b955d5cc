"""Makes what a host needs from a policy: the stores of its shards, I/O, memory budget and memory policies.

A user's own memory policy is made from the name of its class, which is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from typing import Annotated, Any, NamedTuple, cast

from pydantic import Field
from rocksdict import Cache

from policies.destage import DestagePolicy, StandardDestage
from policies.prestage import JustInTimePrestage, PrestagePolicy
from state_backends.format.errors import PolicyError
from state_backends.store.io import BlockFiles, Io
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget, PeriodicWindows
from state_backends.store.map.run_files import RunFiles
from state_backends.store.map.store import MapStore
from state_backends.store.options import StoreOptions
from state_backends.store.p_bucket import PBucket, cache_bytes
from state_backends.store.tiered import TieredStore


def build(class_path: str, arguments: Mapping[str, Any], *, methods: Sequence[str]) -> Any:
    """Imports ``package.module:Class`` and calls it with the arguments. The result must have these methods.

    Raises PolicyError if the class cannot be imported, refuses the arguments, or lacks a method. The message names the
    class, the problem, and what would be right.
    """
    module, _, name = class_path.partition(":")
    try:
        found: Any = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # the user's module may raise anything when it is imported
        advice = "write package.module:Class, and install it for the Python of every executor"
        raise PolicyError(f"{class_path} cannot be imported ({type(error).__name__}: {error}); {advice}") from error
    try:
        made = found(**arguments)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) or "no arguments"
        raise PolicyError(f"{class_path} cannot be made with {given} ({type(error).__name__}: {error})") from error
    missing = [method for method in methods if not callable(getattr(made, method, None))]
    if missing:
        raise PolicyError(f"{class_path} is no policy of this kind: it lacks {', '.join(missing)}()")
    return made


def memory_only(p_bucket: BlockFiles, io: Io, budget: MemoryBudget, options: StoreOptions) -> TieredStore:
    """Keeps all blocks in memory, even beyond the budget. The same idea as Flink's heap state backend.

    Commits are still written to disk.
    """
    return TieredStore(p_bucket, io, budget, replace(options, keeps_all=True))


def disk_only(p_bucket: BlockFiles, io: Io, budget: MemoryBudget, options: StoreOptions) -> TieredStore:
    """Keeps no block in memory after it has been written. The same idea as Flink's RocksDB state backend."""
    return TieredStore(p_bucket, io, budget, replace(options, bucket_limit_bytes=0))


STORES: dict[str, Callable[..., TieredStore]] = {"memory": memory_only, "rocksdb": disk_only, "tiered": TieredStore}


class Stores(NamedTuple):
    """All state of a shard: its blocks, and its map of values. They share files, the I/O thread and the budget."""

    p_bucket: PBucket
    blocks: TieredStore
    values: MapStore

    @classmethod
    def of(cls, backend: str, p_bucket: PBucket, io: Io, budget: MemoryBudget, options: StoreOptions) -> Stores:
        """Makes both stores, empty. ``backend``: a key of STORES. ``options``: for the blocks."""
        return cls(
            p_bucket,
            STORES[backend](p_bucket, io, budget, options),
            MapStore(
                RunFiles(p_bucket, p_bucket.live.with_name("keyed")),
                io,
                budget,
                keeps_all=backend == "memory",
                keeps_none=backend == "rocksdb",
            ),
        )

    def close(self) -> None:
        """Frees memory and removes RocksDB's own folders. Files that were published stay."""
        try:
            self.blocks.close()
        finally:
            self.values.close()


def make_cache(budget: MemoryBudget) -> Cache:
    """Returns RocksDB's block cache for a host's shards. It is part of the budget."""
    size = cache_bytes(budget.limit_bytes)
    budget.reserve(size)
    return Cache(size)


_Size = Annotated[int, Field(ge=1, le=2**63 - 1)]
_Room = Annotated[int, Field(ge=0, le=1 << 62)]
_Share = Annotated[float, Field(ge=0, le=1)]
_ClassName = Annotated[str, Field(max_length=1000)]


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """The part of a policy that stores need. It has plain values only, because it is sent to the state server as JSON.

    The server checks them by their types; the policies check their own arguments.

    The memory budget is ``budget_bytes``. If that is None, it is ``budget_share`` (0 to 1) of the memory that the
    host's processes may use. ``destage``: arguments of ``destage_class``, or of StandardDestage if that is None.
    ``prestage``: likewise. ``windows``: (size, slide, offset) in µs of the tumbling and sliding windows. The m-bucket
    of such a window is the slices that it spans. ``kept_copies_bytes``, ``local_copies_bytes``:
    see :meth:`state_backends.files.location.Location.keep_copies`. ``metrics_port``: see
    :class:`state_backends.server.metrics.MetricsEndpoint`.
    """

    backend: Annotated[str, Field(pattern="|".join(f"^{name}$" for name in STORES))] = "tiered"
    budget_bytes: _Size | None = None
    budget_share: _Share = 0.25
    bucket_limit_bytes: _Size = 64 << 20
    windows: Annotated[tuple[tuple[_Size, _Size, Annotated[int, Field(ge=0)]], ...], Field(max_length=1024)] = ()
    keep_fraction: _Share = 0.0
    prestages: bool = True
    blocking: bool = True
    rate_limit_bytes_per_s: _Size | None = None
    retain_versions: Annotated[int, Field(ge=1, le=1 << 31)] = 100
    kept_copies_bytes: _Room = 0
    local_copies_bytes: _Room | None = None
    destage: Mapping[str, Any] = field(default_factory=dict)
    destage_class: _ClassName | None = None
    prestage: Mapping[str, Any] = field(default_factory=dict)
    prestage_class: _ClassName | None = None
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def budget(self, limit_bytes: int) -> int:
        """Returns the memory budget in bytes, on a host whose processes may use ``limit_bytes``."""
        if self.budget_bytes is not None:
            return self.budget_bytes
        return max(1, int(self.budget_share * limit_bytes))

    def make_io(self) -> IoThread:
        return IoThread(rate_limit=self.rate_limit_bytes_per_s)

    def make_destage(self) -> DestagePolicy:
        """Raises PolicyError for a class that cannot be used."""
        if self.destage_class is not None:
            return cast(DestagePolicy, build(self.destage_class, self.destage, methods=["suggest"]))
        return StandardDestage(**self.destage)

    @property
    def staging_share(self) -> float:
        """The share of the budget that prestages fill at most, 0 to 1: where the destage policy frees memory.

        What a user's own class does is not known, so it counts as the built-in policy with its defaults.
        """
        policy = StandardDestage(**self.destage) if self.destage_class is None else StandardDestage()
        return policy.moderate

    def make_prestage(self) -> PrestagePolicy:
        if self.prestage_class is not None:
            made = build(self.prestage_class, self.prestage, methods=["start_at_s", "observe"])
            return cast(PrestagePolicy, made)
        return JustInTimePrestage(**self.prestage)

    def make_stores(self, p_bucket: PBucket, io: Io, budget: MemoryBudget) -> Stores:
        return Stores.of(self.backend, p_bucket, io, budget, self._options(budget))

    def make_blocks(self, files: BlockFiles, io: Io, budget: MemoryBudget) -> TieredStore:
        """The store of blocks alone, on files of any kind."""
        return STORES[self.backend](files, io, budget, self._options(budget))

    def _options(self, budget: MemoryBudget) -> StoreOptions:
        return StoreOptions(
            bucket_limit_bytes=min(self.bucket_limit_bytes, budget.limit_bytes),
            windows=[PeriodicWindows(*window) for window in self.windows],
            keep_fraction=self.keep_fraction,
            prestages=self.prestages,
            blocking=self.blocking,
            staging_share=self.staging_share,
        )
