"""Reads ranges of a file on a remote file system."""

from __future__ import annotations

import threading

from state_backends.files.names import SstFile
from state_backends.files.remote import storage_errors
from state_backends.files.requests import CountedFiles, CountedInput
from state_backends.format.errors import CorruptState


class RemoteFile:
    """Threads may read it together. It is opened when it is first read. ``where``: its URI, for messages."""

    def __init__(self, file: SstFile, at: tuple[CountedFiles, str], where: str) -> None:
        self._file, self._where = file, where
        self._fs, self._path = at
        self._lock = threading.Lock()
        self._opened: CountedInput | None = None

    def open(self) -> CountedInput:
        """Raises CorruptState if the file is missing or has another size, or StorageError."""
        with self._lock:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def read_at(self, size_bytes: int, offset: int) -> bytes:
        """Reads a range. Raises what :meth:`open` raises."""
        source = self.open()
        with storage_errors(self._where):
            return source.read_at(size_bytes, offset)

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.close()

    def _open(self) -> CountedInput:
        name, size = self._file.name, self._file.size_bytes
        try:
            with storage_errors(self._where, may_be_missing=True):
                source = self._fs.open_input_file(self._path)
        except FileNotFoundError:
            raise CorruptState(f"file {name} is missing: {self._where} does not exist") from None
        if source.size_bytes != size:
            source.close()
            raise CorruptState(
                f"file {name} at {self._where} is damaged: it has {source.size_bytes} bytes, but its manifest says "
                f"{size}"
            )
        return source
