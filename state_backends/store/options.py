"""The settings of a store of blocks: how much memory it uses, and how it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from state_backends.store.m_bucket import MemoryBudget, PeriodicWindows
from state_backends.store.merge_choice import DEFAULTS, Limits

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """The parts of a store share these settings.

    ``bucket_limit_bytes`` is the most memory that the m-bucket of a window may use. With 0, a block stays in memory
    only until it is written. For ``windows``, an m-bucket is the slices that a window spans. ``keep_fraction`` of an
    expired window stays in memory as its bootstrap part (rho_min). ``prestages`` says whether anything is staged, and
    ``blocking`` whether an execution waits for all of a window. With ``keeps_all``, all blocks stay in memory, even
    beyond the budget. When ``outbox_bytes`` wait to be written, they become one file. ``staging_share`` is the share of
    the budget, 0 to 1, that prestages fill at most, and up to which blocks are held for an execution. A read fetches
    ``read_ahead`` blocks ahead. ``limits`` are those of merging.
    """

    bucket_limit_bytes: int = 0
    windows: Sequence[PeriodicWindows] = ()
    keep_fraction: float = 0.0
    prestages: bool = True
    blocking: bool = True
    keeps_all: bool = False
    outbox_bytes: int = 32 * MIB
    staging_share: float = 1.0
    read_ahead: int = 4
    limits: Limits = DEFAULTS

    def spare_bytes(self, budget: MemoryBudget) -> int:
        """Returns the room in the budget that new blocks and prestages leave free: that of a whole outbox.

        Blocks that wait to be written are in memory too, so it is an eighth of the budget at most.
        """
        return min(self.outbox_bytes, budget.limit_bytes // 8)
