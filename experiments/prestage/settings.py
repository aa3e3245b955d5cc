"""The settings of `aion experiment prestage`."""

from __future__ import annotations

from dataclasses import dataclass

PAYLOAD_BYTES = 2304
MINUTE_S = 60
MODES = ("with", "without", "memory")
"""With prestaging, without, and with a budget that keeps everything in memory."""


@dataclass(frozen=True, slots=True)
class Settings:
    """``window_bytes``: of the events of a window of a minute. They come in ``parts`` batches.

    ``past``: windows that may still get late events. Batches first fill them. Then ``measured`` batches follow,
    ``gaps_s`` after one another. ``reads_per_s``: of each disk; None: as fast as it is.
    """

    window_bytes: int
    parts: int
    past: int
    measured: int
    gaps_s: tuple[float, ...]
    reads_per_s: tuple[int | None, ...]
    runs: int
    late: int = 20
    """Events for each window that is about to end for good."""

    @property
    def events(self) -> int:
        """In time, of each window."""
        return max(self.window_bytes // PAYLOAD_BYTES, 1)

    @property
    def budget_bytes(self) -> int:
        """A tenth of the state. Never less than what one batch executes: a window on time, and two again."""
        return max(self.past * self.window_bytes // 10, 4 * self.window_bytes)
