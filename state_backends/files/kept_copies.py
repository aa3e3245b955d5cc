"""Keeps local copies of remote files after their shards were closed, within a budget for the host.

A shard that is opened again on this host, by this state server or a later one, takes its files from here. The servers
of a user on a host share one folder. Files have two names while their shard is open: one here, and one in the folder of
the shard. So they need no disk of their own until the shard is closed. What was used least recently goes first. If a
query is opened by a server that keeps none, because its policy no longer says so, what was kept of it is removed.

Nothing here is trusted: who takes a file compares its length at once and its checksum behind the batch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from state_backends.files.names import SstFile
from state_backends.files.storage import private

FOLDER = "kept"
_LOCK = ".lock"
log = logging.getLogger(__name__)


class KeptCopies:
    """The copies of a host. ``folder``: of this user. ``limit_bytes``: the most that they may have together.

    Without a limit (None), this process only looks, and leaves them as they are.
    No method raises an error of the disk: what cannot be kept is fetched again.
    """

    def __init__(self, folder: Path, limit_bytes: int | None = 0) -> None:
        self._folder = folder / FOLDER
        self.limit_bytes = limit_bytes

    def opens(self, place: str) -> None:
        """A shard is opened. If this server keeps nothing, removes the copies of all shards of the shard's operator.

        Other queries may have a server that keeps copies, so theirs stay.
        """
        if self.limit_bytes != 0:
            return
        for folder in self._folder.glob(f"{_digest(place.rpartition('/shard-')[0])}-*"):
            shutil.rmtree(folder, ignore_errors=True)

    def take(self, place: str, file: SstFile) -> bool:
        """Gives a copy the path of ``file``. Returns whether it did. ``place``: the URI of the file's folder."""
        if not self.limit_bytes:
            return False
        kept = self._path(place, file.name)
        try:
            found = kept.lstat()
            if not stat.S_ISREG(found.st_mode) or found.st_size != file.size_bytes:
                kept.unlink()
                return False
            os.link(kept, file.path)
            os.utime(kept)
        except OSError:  # there is none, or another process has just removed it
            return False
        return True

    def put(self, place: str, path: Path) -> None:
        """Keeps a copy. It is whole, and its checksum is right."""
        if not (limit := self.limit_bytes):
            return
        try:
            if path.stat().st_size > limit:
                return
            kept = self._path(place, path.name)
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.link(path, kept)
            os.utime(kept)
            self._make_room(limit)
        except OSError as error:
            log.debug("%s is not kept: %s", path.name, error)

    def remove(self, place: str, names: Iterable[str]) -> None:
        """Forgets copies: the files are damaged, or no longer in use."""
        if not self.limit_bytes:
            return
        for name in names:
            with contextlib.suppress(OSError):
                self._path(place, name).unlink()

    def _path(self, place: str, name: str) -> Path:
        return self._folder / f"{_digest(place.rpartition('/shard-')[0])}-{_digest(place)}" / name

    def _make_room(self, limit_bytes: int) -> None:
        with open(self._folder / _LOCK, "w", opener=private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # otherwise two processes would remove more than is too much
            kept = sorted(self._all())
            excess = sum(size for _, size, _ in kept) - limit_bytes
            for _, size, path in kept:
                if excess <= 0:
                    break
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                    excess -= size
                with contextlib.suppress(OSError):  # unless there are others in it
                    path.parent.rmdir()

    def _all(self) -> Iterator[tuple[int, int, Path]]:
        """Yields each copy: when it was used, in ns, its bytes and its path."""
        for path in self._folder.glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                found = path.lstat()
                yield found.st_mtime_ns, found.st_size, path


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
