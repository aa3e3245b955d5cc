"""Counts the requests that storages send to a remote file system, by their class, and the bytes that they move.

An object store charges for each request, and each takes tens of milliseconds. pyarrow reports none of them. So every
call is counted as the requests that pyarrow sends for it to S3. Repeated requests after an error are not counted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pyarrow.fs as pafs

from state_backends.files.request_counts import BYTES, CLASSES
from state_backends.thresholds import threshold

_LISTED_AT_ONCE = 1000  # what S3 lists for one request
_PART_BYTES = 10 << 20  # pyarrow uploads a larger file in parts of this size
WHOLE_BYTES = threshold(4 << 20, 256)
"""A file up to this size is read at once."""


class Requests:
    """The counts of one shard, of an operator, or of a connection. ``parent`` counts the same requests, too."""

    def __init__(self, parent: Requests | None = None) -> None:
        self._parent = parent
        self._lock = threading.Lock()
        self._counts = dict.fromkeys((*CLASSES, *BYTES), 0)
        self._before = dict(self._counts)

    def count(self, kind: str, number: int = 1, *, read_bytes: int = 0, written_bytes: int = 0) -> None:
        with self._lock:
            self._counts[kind] += number
            self._counts["read_bytes"] += read_bytes
            self._counts["written_bytes"] += written_bytes
        if self._parent is not None:
            self._parent.count(kind, number, read_bytes=read_bytes, written_bytes=written_bytes)

    def to_json(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    def since_last(self) -> dict[str, int]:
        """Returns what was counted since the last call of this method."""
        with self._lock:
            since = {name: number - self._before[name] for name, number in self._counts.items()}
            self._before = dict(self._counts)
            return since


class CountedFiles:
    """A file system of pyarrow's whose calls are counted. It has the calls that storages use."""

    def __init__(self, fs: Any, requests: Requests) -> None:
        self._fs, self._requests = fs, requests
        self.type_name: str = fs.type_name

    def open_input_file(self, path: str) -> CountedInput:
        self._requests.count("head")  # pyarrow asks for the size
        return CountedInput(self._fs.open_input_file(path), self._requests)

    def open_output_stream(self, path: str) -> CountedOutput:
        return CountedOutput(self._fs.open_output_stream(path), self._requests)

    def get_file_info(self, what: Any) -> Any:
        if not isinstance(what, pafs.FileSelector):
            self._requests.count("head")
            return self._fs.get_file_info(what)
        try:
            found = self._fs.get_file_info(what)
        except BaseException:
            self._requests.count("list")
            raise
        self._requests.count("list", max(1, -(-len(found) // _LISTED_AT_ONCE)))
        return found

    def copy_file(self, source: str, target: str) -> None:
        self._requests.count("copy")
        self._fs.copy_file(source, target)

    def delete_file(self, path: str) -> None:
        self._requests.count("delete")
        self._fs.delete_file(path)

    def move(self, source: str, target: str) -> None:
        self._requests.count("put")
        self._fs.move(source, target)

    def create_dir(self, path: str, *, recursive: bool) -> None:
        self._fs.create_dir(path, recursive=recursive)

    @property
    def region(self) -> str:
        return str(self._fs.region)


class CountedInput:
    """An open file. Threads may share it if they only call :meth:`read_at`."""

    def __init__(self, file: Any, requests: Requests) -> None:
        self._file, self._requests = file, requests
        self.size_bytes: int = file.size()

    def __enter__(self) -> CountedInput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def read_at(self, size_bytes: int, offset: int) -> bytes:
        """Reads a range. Returns fewer bytes at the end of the file."""
        size = min(size_bytes, self.size_bytes - offset)
        if size <= 0:
            return b""
        self._requests.count("get" if size == self.size_bytes else "range", read_bytes=size)
        data: bytes = self._file.read_at(size, offset)
        return data

    def whole(self) -> Iterator[bytes]:
        """Reads the file: at once, or, if it is large, in ranges."""
        for offset in range(0, self.size_bytes, WHOLE_BYTES):
            yield self.read_at(WHOLE_BYTES, offset)


class CountedOutput:
    """A file that is being written."""

    def __init__(self, file: Any, requests: Requests) -> None:
        self._file, self._requests = file, requests
        self._size = 0
        self.flush = file.flush

    def write(self, data: Any) -> None:
        self._size += memoryview(data).nbytes
        self._file.write(data)

    def close(self) -> None:
        parts = -(-self._size // _PART_BYTES)
        self._requests.count("put", parts + 2 if parts > 1 else 1, written_bytes=self._size)
        self._file.close()
