"""Keeps the copies of handed-over bodies on a host within a budget, if they are on a remote file system, too.

A child leaves what it uploads on its host as well, and a version's shard maps it there for as long as it needs it. So a
host would need as much disk as the state that its children have written. With a budget, the copies of the oldest
batches go first: their windows ended first. What is gone is read from the remote file system, in ranges, when it is
staged or needed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path


class BodyCopies:
    """The copies of all open shards of a host. ``limit_bytes``: the most that they may take; None: no limit.

    Any thread may call it. No method raises an error of the disk.
    """

    def __init__(self) -> None:
        self.limit_bytes: int | None = None
        self._lock = threading.Lock()
        self._sizes: dict[Path, int] = {}  # in the order in which versions took them
        self._total = 0

    def limit(self, limit_bytes: int | None) -> None:
        """The largest limit that anybody asks for holds."""
        if limit_bytes is not None:
            with self._lock:
                self.limit_bytes = max(self.limit_bytes or 0, limit_bytes)

    def add(self, path: Path) -> None:
        """A version has taken a file, if this host has a copy of it. Removes others if they are too many."""
        with self._lock, contextlib.suppress(OSError):
            size = path.stat().st_size
            self._total += size - self._sizes.pop(path, 0)
            self._sizes[path] = size
            while self.limit_bytes is not None and self._total > self.limit_bytes:
                oldest = next(iter(self._sizes))
                self._total -= self._sizes.pop(oldest)
                with contextlib.suppress(OSError):
                    oldest.unlink()

    def forget(self, paths: Iterable[Path]) -> None:
        """These are gone: no version needs them, or their shard was closed."""
        with self._lock:
            for path in paths:
                self._total -= self._sizes.pop(path, 0)
