"""The settings of `aion experiment prestage`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

PAYLOAD_BYTES = 2304
MINUTE_S = 60
MODES = ("with", "without", "apart", "memory")
"""With prestaging, without, without and each block read alone, and with a budget that keeps everything in memory.

``apart`` is for disks with slow reads only.
"""
TRIGGERS = ("planned", "own")
"""What makes a late window run: an instant that is known in advance, or its own last event, in that event's batch."""


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
    ``gaps_s`` after one another, with state on each of ``disks``, and with each of ``triggers``.
    """

    window_bytes: int
    parts: int
    past: int
    measured: int
    gaps_s: tuple[float, ...]
    disks: tuple[Disk, ...]
    runs: int
    triggers: tuple[str, ...] = TRIGGERS[:1]
    late: int = 20
    """Events for each window that is about to end for good."""

    @property
    def events(self) -> int:
        """In time, of each window."""
        return max(self.window_bytes // PAYLOAD_BYTES, 1)

    @property
    def part(self) -> int:
        """Events that one batch brings to a window."""
        return max(self.events // self.parts, 1)

    def cells(self) -> list[tuple[Disk, float, str, str]]:
        """Returns a disk, a gap, a trigger and a mode for each cell of a run, so that modes take turns."""
        places = itertools.product(self.disks, self.gaps_s, self.triggers, MODES)
        return [cell for cell in places if cell[3] != "apart" or cell[0].reads_per_s is not None]

    @property
    def budget_bytes(self) -> int:
        """A tenth of the state. Never less than what one batch executes: a window on time, and two again."""
        return max(self.past * self.window_bytes // 10, 4 * self.window_bytes)
