"""The settings of a store of blocks: how much memory it uses, and how it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from state_backends.store.m_bucket import MemoryBudget, Stretches
from state_backends.store.merge_choice import DEFAULTS, Limits

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """``bucket_limit_bytes``: the most memory that one window's m-bucket may use; 0: a block stays in memory only until
    it is written. ``windows``: of these, an m-bucket is the slices that a window spans. ``keep_fraction``: the share of
    an expired window that stays in memory as its bootstrap part (rho_min). ``prestages``: whether anything is staged.
    ``blocking``: an execution waits for all of a window. ``keeps_all``: all blocks stay in memory, even beyond the
    budget. ``outbox_bytes``: when blocks that wait to be written have this many bytes, they are written as one file.
    ``staging_share``: prestages fill at most this share of the budget, 0 to 1, and blocks are held for an execution up
    to it. ``read_ahead``: how many blocks a read fetches ahead. ``limits``: of merging.
    """

    bucket_limit_bytes: int = 0
    windows: Sequence[Stretches] = ()
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
