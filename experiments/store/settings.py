"""The settings of `aion experiment store`: plain values, passed to each leg's process as JSON."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
OVERCOMMIT = 20
"""The size of the state, as a multiple of the budget."""
PAST_WINDOWS = (1, 10, 100, 1000)


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of one run of the experiment. ``gap_s``: the time from a late event to its late execution."""

    state_bytes: int = 1280 * MIB
    disk_bytes: int = 256 * MIB
    window_bytes: int = 96 * MIB
    payload_bytes: int = 2304
    commit_blocks: int = 32
    gap_s: float = 1.0
    past_windows: tuple[int, ...] = PAST_WINDOWS
    past_batches: int = 60
    past_events: int = 100_000
    runs: int = 3
    seed: int = 1

    @property
    def budget_bytes(self) -> int:
        return self.state_bytes // OVERCOMMIT

    @property
    def ingest_window_bytes(self) -> int:
        """The size of one window in the leg ``ingest``: an eighth of the budget, so that several windows share it."""
        return self.budget_bytes // 8
