"""Stores versions on any file system that ``pyarrow.fs`` reaches: S3, Google Cloud Storage, HDFS, ...

RocksDB reads local files only, so every file in use has a copy on the host, in a folder that the server deletes when it
ends. A new file is written there, and uploaded before a version names it. Files of other hosts are downloaded when the
shard is opened. pyarrow finds credentials in the environment or in the instance's metadata.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs as pafs

from state_backends.files import s3
from state_backends.files.causes import told
from state_backends.files.deletions import Deletions
from state_backends.files.names import PART
from state_backends.files.parallel import in_parallel
from state_backends.files.requests import CountedFiles, Requests
from state_backends.files.storage import part_of
from state_backends.format.errors import StorageError
from state_backends.thresholds import threshold

THREADS = 16
_THREADS_FOR_RANGES = 8
_THREADS_AHEAD = 4
_THREADS_FOR_DELETING = 8
_UNCONFIRMED_BYTES = threshold(32 << 20, 512)  # an upload sends its parts in the background; this limits their memory
WHOLE_PUTS = frozenset({"s3", "gcs"})
"""File systems on which a file appears only when it is complete. On others it is written as ``.part`` and renamed."""

log = logging.getLogger(__name__)


class At(NamedTuple):
    """A place on a remote file system: its path there, and its URI, for messages."""

    path: str
    uri: str


class Remote:
    """A connection to the file system of a URI, and the threads that use it. The shards of a host share it.

    ``filesystem``: pyarrow's object and the path in it. If None, they are made from the URI when they are first needed,
    which may take a network request. ``requests`` counts what is asked of it.
    """

    def __init__(self, uri: str, filesystem: tuple[Any, str] | None = None) -> None:
        self.uri = uri
        self.requests = Requests()
        self._link = _Link(uri, filesystem)
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="aion-remote")
        # Ranges, downloads ahead and deletions have their own pools, so that no commit or opening waits for them.
        self.ranges = ThreadPoolExecutor(_THREADS_FOR_RANGES, thread_name_prefix="aion-remote-ranges")
        self.ahead = ThreadPoolExecutor(_THREADS_AHEAD, thread_name_prefix="aion-remote-ahead")
        self.cleaning = ThreadPoolExecutor(1, thread_name_prefix="aion-remote-clean")
        self.deletions = Deletions(self.cleaning)
        self._deleting = ThreadPoolExecutor(_THREADS_FOR_DELETING, thread_name_prefix="aion-remote-delete")

    @property
    def shown(self) -> str:
        """The URI for messages, without its options."""
        return self.uri.partition("?")[0].rstrip("/")

    def at(self, *names: str) -> At:
        """Returns the place of a file or folder, by the names of the folders that it is in. Raises StorageError."""
        return At("/".join(filter(None, [self.connect()[1], *names])), "/".join(filter(None, [self.shown, *names])))

    @property
    def fs(self) -> CountedFiles:
        """The file system. Raises StorageError naming the URI."""
        return self.connect()[0]

    def counted_by(self, requests: Requests | None) -> Remote:
        """Returns the same connection, whose requests are counted there."""
        if requests is None:
            return self
        remote = copy.copy(self)
        remote.requests = requests
        return remote

    def connect(self) -> tuple[CountedFiles, str]:
        """The file system, and the path in it. Raises StorageError naming the URI."""
        fs, path = self.filesystem()
        return CountedFiles(fs, self.requests), path

    def filesystem(self) -> tuple[Any, str]:
        """pyarrow's file system, whose requests are not counted, and the path in it. Raises StorageError."""
        return self._link.connect()

    @property
    def _s3(self) -> s3.S3 | None:
        client = self._link.s3
        return None if client is None else client.counted_by(self.requests)

    def read(self, at: At) -> bytes:
        """Reads a small file. Raises FileNotFoundError, or StorageError."""
        with storage_errors(at.uri, may_be_missing=True), self.fs.open_input_file(at.path) as file:
            return b"".join(file.whole())

    def write(self, at: At, chunks: Iterable[Any], part: str = "", *, alone: bool = True) -> None:
        """Writes a file, or nothing. Raises StorageError.

        ``part``, ``alone``: see RemoteUpload; by default it has a name of its own until it is complete.
        """
        upload = RemoteUpload(self, at, part or part_of(at.path), alone=alone)
        try:
            for chunk in chunks:
                upload.write(chunk)
            upload.finish()
        except BaseException:
            upload.discard()
            raise

    def put_once(self, at: At, data: bytes, part: str = "") -> bytes:
        """Writes a small file unless there is one. Returns what is there afterwards: it may be another host's.

        ``part``: see :meth:`write`.

        On S3 with boto3 the server decides who is first. Elsewhere a file that is there already stays, and of two
        hosts that write at the same moment one is overwritten, and may not see it. Raises StorageError.
        """
        with storage_errors(at.uri):
            if self._s3 is not None:
                with contextlib.suppress(NotImplementedError):
                    if self._s3.put_once(at.path, data):
                        return data
            with contextlib.suppress(FileNotFoundError):
                return self.read(at)
        self.write(at, [data], part, alone=False)
        return self.read(at)

    def delete(self, paths: Sequence[str]) -> None:
        """Deletes files, if they exist. Raises StorageError."""
        fs = self.fs
        with storage_errors(self.uri):
            if self._s3 is not None:
                self._s3.delete(paths)
                return

            def delete(path: str) -> None:
                with contextlib.suppress(FileNotFoundError):
                    fs.delete_file(path)

            in_parallel(self._deleting, delete, paths)

    def copied_in_parts(self, source: str, target: str) -> bool:
        """Copies a file if it is too large for S3 to copy at once. Returns whether it was. Raises OSError.

        Call it when a copy has failed: how large a file is takes a request, and hardly any is so large.
        """
        fs = self.fs
        if fs.type_name != "s3" or (fs.get_file_info(source).size or 0) <= s3.LARGEST_COPY:
            return False
        if self._s3 is None:
            raise OSError(f"S3 copies no object above {s3.LARGEST_COPY:,} bytes at once; pip install aion[s3]")
        self._s3.copy(source, target)
        return True

    def end_uploads(self, prefix: str, age: timedelta = s3.ABANDONED) -> None:
        """Ends uploads whose paths begin with ``prefix``, if it is S3 and boto3 is installed. Raises StorageError.

        ``age``: only those that began so long ago. By default they have died.
        """
        with storage_errors(self.uri):
            if self._s3 is not None:
                self._s3.end_uploads(prefix, age)

    def close(self) -> None:
        """Waits for requests under way, and drops others. Files that were to be deleted are found again later."""
        self.deletions.close()
        for pool in (self.pool, self.ranges, self.ahead, self.cleaning, self._deleting):
            pool.shutdown(wait=True, cancel_futures=True)


class _Link:
    """What all users of a connection share."""

    def __init__(self, uri: str, given: tuple[Any, str] | None) -> None:
        self._uri, self._given = uri, given
        self._connected: tuple[Any, str] | None = None
        self._connecting = threading.Lock()

    def connect(self) -> tuple[Any, str]:
        with self._connecting:
            if self._connected is None:
                with storage_errors(f"state.dir {self._uri}"):
                    try:
                        fs, path = self._given or pafs.FileSystem.from_uri(pyarrow_uri(self._uri))
                    except ValueError as error:  # fsspec's, for a protocol that it does not know
                        raise StorageError(f"state.dir {self._uri}: {error}") from error
                    path = path.rstrip("/")
                    bucket = path.partition("/")[0]
                    if fs.type_name in WHOLE_PUTS and not bucket:
                        raise StorageError(f"state.dir {self._uri}: it names no bucket; write scheme://bucket/path")
                    # Folders are made when they are needed, but only the user makes buckets.
                    if fs.type_name == "s3" and not _has_bucket(fs, bucket):
                        raise StorageError(f"state.dir {self._uri}: there is no bucket {bucket!r}; make it")
                    self._connected = fs, path
            return self._connected

    @cached_property
    def s3(self) -> s3.S3 | None:
        """A client for what pyarrow cannot do. It is made when it is first needed: most workers never need it."""
        fs, _ = self.connect()
        return s3.client_of(self._uri, fs.region) if fs.type_name == "s3" else None


def _has_bucket(fs: Any, bucket: str) -> bool:
    try:
        return bool(fs.get_file_info(bucket).type is not pafs.FileType.NotFound)
    except OSError:
        # The answer to this request has no body, and so no reason. The one to a list has.
        fs.get_file_info(pafs.FileSelector(bucket))
        raise


class RemoteUpload:
    """A file that is being written. It appears under its name when it is complete.

    ``part``: its path until then, on file systems that do not put files whole; by default beside it. ``alone``: no
    other process writes a file of this name. Every method raises StorageError.
    """

    def __init__(self, remote: Remote, at: At, part: str = "", *, alone: bool = True) -> None:
        self._remote = remote
        self._path, self._where = at
        self._part = part or at.path + PART
        self._alone = alone
        self._out: Any = None
        self._unconfirmed = 0
        self._finished = False

    def write(self, data: Any) -> None:
        with storage_errors(self._where):
            out = self._opened()
            out.write(data)
            self._unconfirmed += memoryview(data).nbytes
            if self._unconfirmed >= _UNCONFIRMED_BYTES:
                out.flush()
                self._unconfirmed = 0

    def finish(self) -> None:
        with storage_errors(self._where):
            out = self._opened()
            if self._is_whole:
                out.close()
            else:
                out.flush()
                out.close()
                self._remote.fs.move(self._part, self._path)
            self._finished = True

    def discard(self) -> None:
        """Deletes what was written. Does nothing after :meth:`finish`. Never raises: what is left is swept later."""
        if self._finished or self._out is None:
            return
        if self._is_whole and not self._alone:
            return  # what has the name now may be another's
        if self._is_whole:
            with contextlib.suppress(StorageError):
                self._remote.end_uploads(self._path, timedelta())
        with contextlib.suppress(StorageError), storage_errors(self._where):
            self._out.close()  # only a stream that is closed can be deleted
        with contextlib.suppress(StorageError):
            self._remote.delete([self._path if self._is_whole else self._part])

    @property
    def _is_whole(self) -> bool:
        return self._remote.fs.type_name in WHOLE_PUTS

    def _opened(self) -> Any:
        if self._out is None:
            fs = self._remote.fs
            if not self._is_whole:
                fs.create_dir(self._part.rpartition("/")[0], recursive=True)
            self._out = fs.open_output_stream(self._path if self._is_whole else self._part)
        return self._out


@contextlib.contextmanager
def storage_errors(where: str, *, may_be_missing: bool = False) -> Iterator[None]:
    """Turns pyarrow's errors into StorageError, which names the place.

    ``may_be_missing``: lets FileNotFoundError through.
    """
    try:
        yield
    except StorageError:
        raise
    except (OSError, ImportError, pa.ArrowException) as error:
        if may_be_missing and isinstance(error, FileNotFoundError):
            raise
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise StorageError(f"{where}: {told(first)}") from error


_OPTIONS = {
    "s3": "allow_delayed_open=true",  # a small file takes one request instead of three
    "gs": "retry_limit_seconds=30",  # without it, a place that cannot be reached is an error after 15 minutes
}
"""Options of file systems that are set unless a URI sets them."""


def pyarrow_uri(uri: str) -> str:
    """Returns the URI for pyarrow: Spark has other names for some file systems. Sets the options of ``_OPTIONS``."""
    scheme, _, rest = uri.partition("://")
    scheme = {"s3a": "s3", "s3n": "s3"}.get(scheme, scheme)
    option = _OPTIONS.get(scheme)
    if option is not None and option.partition("=")[0] not in rest:
        rest += ("&" if "?" in rest else "?") + option
    return f"{scheme}://{rest}"
