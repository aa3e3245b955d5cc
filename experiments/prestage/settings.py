"""The settings of `aion experiment prestage`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

PAYLOAD_BYTES = 2304
MINUTE_S = 60
MODES = ("with", "without", "memory")
"""With prestaging, without, and with a budget that keeps everything in memory."""


class Disk(NamedTuple):
    """The place of the state.

    ``reads_per_s`` is how many reads the disk does in a second; None adds no delay. With ``request_ms`` the state is in
    a bucket of an S3 server that delays each request by these milliseconds; with None it is in a folder.
    """

    name: str
    reads_per_s: int | None = None
    request_ms: float | None = None

    @classmethod
    def of(cls, text: str) -> Disk:
        """``fast``, a number of reads per second, or ``s3:`` and milliseconds. Raises ValueError for others."""
        if text == "fast":
            return cls("fast disk")
        if text.startswith("s3:"):
            return cls(f"S3, {text[3:]} ms", request_ms=float(text[3:]))
        return cls(f"{text} reads/s", reads_per_s=int(text))


@dataclass(frozen=True, slots=True)
class Settings:
    """``window_bytes``: of the events of a window of a minute. They come in ``parts`` batches.

    ``past``: windows that may still get late events. Batches first fill them. Then ``measured`` batches follow,
    ``gaps_s`` after one another, with state on each of ``disks``.
    """

    window_bytes: int
    parts: int
    past: int
    measured: int
    gaps_s: tuple[float, ...]
    disks: tuple[Disk, ...]
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
