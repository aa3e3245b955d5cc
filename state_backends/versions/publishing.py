"""Publishes files of an attempt while it still computes, so that its commit waits for the last of them only.

Where to publish means to upload, a file takes its time. An attempt writes files before its commit when memory is short
or events are late; and files are merged between two attempts. Each has the name that the attempt's version would give
it, so only that version can name it. If no version does, it is like any file of an attempt that failed: a commit of a
later batch deletes it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path

from state_backends.files.names import is_merged
from state_backends.files.storage import Storage
from state_backends.store.p_bucket import published_name


class PublishingAhead:
    """The new files of a shard that no version names yet. The I/O thread adds files, beside the attempt."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._files: dict[int, Path] = {}
        self._attempt: str | None = None
        self._names: set[str] = set()  # that were begun for this attempt

    def made(self, file_no: int, path: Path) -> None:
        """A file is complete. A merged file waits for the next attempt: this one may end without it."""
        with self._lock:
            self._files[file_no] = path
            if self._attempt is not None and not is_merged(path.name):
                self._begin(self._attempt, file_no, path)

    def begins(self, attempt: str) -> None:
        """An attempt begins. The merged files that are here will most likely be in its version."""
        with self._lock:
            self._attempt = attempt
            self._files = {file_no: path for file_no, path in self._files.items() if _is_there(path)}
            for file_no, path in self._files.items():
                self._begin(attempt, file_no, path)

    def committed(self, file_nos: Collection[int], names: Collection[str]) -> set[str]:
        """A version has these new files, under these names. Returns the names of others that were begun."""
        with self._lock:
            for file_no in file_nos:
                self._files.pop(file_no, None)
            left, self._names = self._names.difference(names), set()
            self._attempt = None
            return left

    def ends(self) -> set[str]:
        """The attempt has failed. Returns the names that were begun. None of them appears after this."""
        with self._lock:
            left, self._names = self._names, set()
            self._attempt = None
        if left:
            self._storage.end_publishing()
        return left

    def _begin(self, attempt: str, file_no: int, path: Path) -> None:
        name = published_name(file_no, path.name, attempt)
        self._names.add(name)
        self._storage.publish_ahead(path, name)


def _is_there(path: Path) -> bool:
    """Returns whether a file is there. A disk that cannot say it says so again when the file is read."""
    try:
        return path.exists()
    except OSError:
        return True
