"""The disk of a host that copies of remote state may take while their shards are open (``state.local_copies``).

Two kinds of copies share it: the files with blocks and keyed values that RocksDB has ingested, here called rows, and
the files with bodies that children have handed over. Both are on the remote file system, too, so what is gone is read
from there, in ranges, when it is staged or needed.

A file with bodies goes whole, the oldest batch first: its windows ended first. But bodies may always have a half, so
that neither kind drives the other out. A file of rows becomes a copy with holes, and only the I/O thread may make
these, in its steps for the file's shard. So the budget only says how much a shard has too many: what is above its
equal share of what bodies leave, as long as all together have too many. After each shard has had its turn, they are
within the limit.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path


class DiskBudget:
    """The copies of all open shards of a host. ``limit_bytes``: the most that they may take, or None if there is no
    limit.

    Any thread may call it. No method raises an error of the disk.
    """

    def __init__(self) -> None:
        self.limit_bytes: int | None = None
        self._lock = threading.RLock()
        self._bodies: dict[Path, int] = {}  # in the order in which versions took them
        self._rows: dict[Path, int] = {}
        self._shards: Counter[Path] = Counter()  # bytes of rows, by the folder of the copies
        self._body_bytes = 0

    def limit(self, limit_bytes: int | None) -> None:
        """The largest limit that anybody asks for holds."""
        if limit_bytes is not None:
            with self._lock:
                self.limit_bytes = max(self.limit_bytes or 0, limit_bytes)

    def used(self) -> int:
        with self._lock:
            return self._used()

    def room(self) -> int | None:
        """Returns the bytes that are left, or None if there is no limit."""
        with self._lock:
            return None if self.limit_bytes is None else self.limit_bytes - self._used()

    # -- bodies -------------------------------------------------------------------------------------------

    def add(self, path: Path) -> None:
        """A version has taken a file with bodies, if this host has a copy of it. Removes others if it is too much."""
        with self._lock, contextlib.suppress(OSError):
            size = path.stat().st_size
            self._body_bytes += size - self._bodies.pop(path, 0)
            self._bodies[path] = size
            self._remove_bodies()

    def _remove_bodies(self) -> None:
        limit = self.limit_bytes
        while limit is not None and self._used() > limit and self._body_bytes > limit // 2:
            oldest = next(iter(self._bodies))
            self._body_bytes -= self._bodies.pop(oldest)
            with contextlib.suppress(OSError):
                oldest.unlink()

    # -- rows ---------------------------------------------------------------------------------------------

    def has(self, path: Path, size_bytes: int) -> None:
        """A copy with rows has this many bytes here."""
        with self._lock:
            self._shards[path.parent] += size_bytes - self._rows.get(path, 0)
            self._rows[path] = size_bytes
            self._remove_bodies()

    def grew(self, path: Path, size_bytes: int) -> None:
        """This many bytes came, or, below zero, went. Ignores a copy that was forgotten."""
        with self._lock:
            if path in self._rows:
                self._rows[path] += size_bytes
                self._shards[path.parent] += size_bytes
                self._remove_bodies()

    def excess(self, folder: Path) -> int:
        """Returns how many bytes of rows the shard with the copies in ``folder`` has to give back."""
        with self._lock:
            if self.limit_bytes is None or (over := self._used() - self.limit_bytes) <= 0:
                return 0
            share = max(self.limit_bytes - self._body_bytes, 0) // max(len(self._shards), 1)
            return max(min(over, self._shards[folder] - share), 0) if folder in self._shards else 0

    # -- both ---------------------------------------------------------------------------------------------

    def forget(self, paths: Iterable[Path]) -> None:
        """These are gone: no version needs them, or their shard was closed."""
        with self._lock:
            for path in paths:
                self._body_bytes -= self._bodies.pop(path, 0)
                if (size := self._rows.pop(path, None)) is not None:
                    self._shards[path.parent] -= size

    def forget_folder(self, folder: Path) -> None:
        """The shard with the copies in ``folder`` was closed, or is opened anew."""
        with self._lock:
            self.forget([path for path in (*self._rows, *self._bodies) if path.parent == folder])
            del self._shards[folder]

    def _used(self) -> int:
        return self._body_bytes + self._shards.total()
