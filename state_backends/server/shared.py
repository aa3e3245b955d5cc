"""What the shards of a host share: memory, the I/O thread, and the policies for both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rocksdict import Cache

from policies.destage import StandardDestage
from policies.prestage import PrestagePolicy
from state_backends.backends import StoreConfig, make_cache
from state_backends.server.guard import Guard, make_policies
from state_backends.server.heap import Holes
from state_backends.server.machine import memory_limit_bytes, memory_share_used
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.pressure import PressureManager, Sampler

_CALM = 0.5  # the share of the budget that prestages for batches after the next one fill, if nobody knows a better one
_SPARE = 8  # the part of the budget that prestages leave free which could still wait: one in this many


class Shared:
    """What is there once for all shards.

    The first operator's policy decides about the I/O thread, and the first one with the backend ``tiered`` about memory
    pressure and the times of prestages. The budget is the largest that any operator asks for; RocksDB's block cache is
    part of it.
    """

    def __init__(self) -> None:
        self.budget = MemoryBudget(0)
        self.cache: Cache | None = None
        self.io: IoThread | None = None
        self.pressure: PressureManager | None = None
        self.prestage: PrestagePolicy | None = None
        self.starts_early = True
        """Whether what fits into memory is staged at once. A policy of the user's always decides."""
        self._calm = self._staging_share = 0.0
        self.sampler: Sampler | None = None
        self._guard: Guard | None = None
        self._holes = Holes()

    def start(self, config: StoreConfig, tick: Callable[[], None], next_s: Callable[[], float | None]) -> None:
        """Starts what an operator needs and is not there yet. ``tick``, ``next_s``: see :class:`Sampler`.

        Raises PolicyError for a policy class that cannot be used.
        """
        limit = memory_limit_bytes()
        self.budget.raise_to(min(config.budget(limit), limit))
        if self.io is None:
            self.io = config.make_io()
            self.cache = make_cache(self.budget)
        if self.sampler is None and config.backend == "tiered":
            policy, self.prestage, self._guard = make_policies(config)
            self.starts_early = config.prestage_class is None
            # Where the standard policy stops to free memory. Above it, what was staged would leave memory again.
            self._calm = policy.resume if isinstance(policy, StandardDestage) else _CALM
            self._staging_share = config.staging_share
            self.pressure = PressureManager(self.budget, policy, memory_share_used)
            self.sampler = Sampler(tick, next_s)

    def staging_room(self) -> int:
        """Returns how many bytes may be staged so that memory pressure does not take them out of memory again."""
        return self.budget.room(spare_bytes=self.budget.limit_bytes // _SPARE, until_share=self._staging_share)

    def room_for_later(self) -> int:
        """Returns how many bytes may be staged for batches after the next one."""
        return self.budget.room(until_share=self._calm)

    def fill_holes(self) -> None:
        """Gives back what the heap keeps for itself."""
        self._holes.tick(self.budget.limit_bytes)

    @property
    def failure(self) -> str | None:
        """Says why this host cannot serve any more. It is None as long as the host works."""
        return self.io.died() if self.io is not None else None

    def stats(self) -> dict[str, Any]:
        return {
            "peak_m_bucket_bytes": self.budget.peak_bytes,
            "budget_bytes": self.budget.limit_bytes,
            "used_bytes": self.budget.used_bytes,
            "reserved_bytes": self.budget.reserved_bytes,
            "ledger_bytes": self.budget.ledger_bytes,
            "cached_bytes": self.budget.cached_bytes,
            "io": self.io.stats.to_json() | {"waiting": self.io.waiting()} if self.io is not None else {},
            "destaged_under_pressure": self.pressure.destaged if self.pressure else 0,
            "refused_under_pressure": self.pressure.refused if self.pressure else 0,
        }

    def close(self) -> None:
        """Ends threads and processes. The shards must have been closed, and the sampler stopped."""
        if self.io is not None:
            self.io.close()
        if self._guard is not None:
            self._guard.close()
