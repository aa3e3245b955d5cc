"""Stores versions on any file system that ``pyarrow.fs`` reaches: S3, Google Cloud Storage, Azure, HDFS, ...

RocksDB reads local files only, so every file in use has a copy on the host, in a folder that the server deletes when it
ends. A new file is written there, and uploaded before a version names it. Files of other hosts are downloaded when the
shard is opened. pyarrow finds credentials in the environment or in the instance's metadata.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from aion.core.checksum import crc32
from aion.errors import CorruptState, StorageError
from state_backends.files import bulk_delete
from state_backends.files.names import MANIFEST, OPERATOR, PART, Doomed, SstFile

THREADS = 8
_CHUNK_BYTES = 4 << 20  # one request each, if the file system reads in ranges
_UNCONFIRMED_BYTES = 32 << 20  # an upload sends its parts in the background; this limits their memory
_WHOLE_PUTS = frozenset({"s3", "gcs", "abfs"})
"""File systems on which a file appears only when it is complete. On others it is written as ``.part`` and renamed."""

log = logging.getLogger(__name__)


class Remote:
    """A connection to the file system of a URI, and the threads that use it. The shards of a host share it.

    ``filesystem``: pyarrow's object and the path in it. If None, they are made from the URI when they are first needed,
    which may take a network request.
    """

    def __init__(self, uri: str, filesystem: tuple[Any, str] | None = None) -> None:
        self.uri = uri
        self._connected: tuple[Any, str] | None = None
        self._connecting = threading.Lock()
        self._given = filesystem
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="aion-remote")
        # Deletions have their own pool, so that no task waits for them.
        self.cleaning = ThreadPoolExecutor(1, thread_name_prefix="aion-remote-delete")
        self._bulk: Callable[[Sequence[str]], None] | None = None

    def connect(self) -> tuple[Any, str]:
        """pyarrow's file system, and the path in it. Raises StorageError naming the URI."""
        with self._connecting:
            if self._connected is None:
                with storage_errors(f"state.dir {self.uri}"):
                    fs, path = self._given or pafs.FileSystem.from_uri(pyarrow_uri(self.uri))
                    path = path.rstrip("/")
                    bucket = path.partition("/")[0]
                    # Folders are made when they are needed, but only the user makes buckets.
                    if fs.type_name == "s3" and fs.get_file_info(bucket).type is pafs.FileType.NotFound:
                        raise StorageError(f"state.dir {self.uri}: there is no bucket {bucket!r}")
                    self._connected = fs, path
            return self._connected

    def delete(self, paths: Sequence[str]) -> None:
        """Deletes files, if they exist. Raises StorageError."""
        fs, _ = self.connect()
        if self._bulk is None and fs.type_name == "s3":
            self._bulk = bulk_delete.on_s3(self.uri, fs.region)
        with storage_errors(self.uri):
            if self._bulk is not None:
                self._bulk(paths)
                return
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    fs.delete_file(path)

    def close(self) -> None:
        """Waits for requests under way, and drops others. Files that were to be deleted are found again later."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        self.cleaning.shutdown(wait=True, cancel_futures=True)


class RemoteStorage:
    """One shard's folder on a remote file system. ``cache``: the folder with the host's copies of the files in use.

    The names are the same as in a local folder: ``files/<number>-<attempt>.sst``, ``manifests/<token>.json``. A commit
    takes one request for each new file, and one for its manifest.
    """

    def __init__(self, remote: Remote, folder: str, cache: Path) -> None:
        self._remote = remote
        self._folder = folder
        self.files = cache
        self._deleting: set[Future[None]] = set()

    def publish(self, new: Sequence[str], named: Sequence[str]) -> None:
        """Uploads the new files. All others existed when the shard was opened, or have been uploaded since."""
        self._in_parallel(self._upload, new)

    def adopt(self, handed: Sequence[str]) -> None:
        """Children hand over nothing to a remote place, so there is nothing to link. Raises CorruptState."""
        if handed:
            raise CorruptState(f"file {handed[0]} was handed over on a local file system, and this place is remote")

    @property
    def bodies(self) -> list[Path]:
        return []

    def fetch(self, files: Sequence[SstFile]) -> None:
        self._remote.connect()  # raises for a wrong URI, before any work is done
        self.files.mkdir(parents=True, exist_ok=True)
        wanted = {f.name for f in files}
        for path in self.files.iterdir():
            if path.name not in wanted:
                path.unlink(missing_ok=True)
        self._in_parallel(self._download, [f for f in files if not Path(f.path).exists()])

    def release(self, names: Collection[str]) -> None:
        for name in names:
            (self.files / name).unlink(missing_ok=True)

    def delete(self, doomed: Doomed) -> Doomed:
        """Deletes in the background. Files that cannot be deleted are found again when the shard is opened."""
        for name in doomed.files:
            (self.files / name).unlink(missing_ok=True)
        if not any(doomed):
            return doomed

        def delete() -> None:
            try:
                paths = [self._at("manifests", name)[1] for name in doomed.manifests]
                self._remote.delete([*paths, *(self._at("files", name)[1] for name in doomed.files)])
            except StorageError as error:
                log.warning("old files could not be deleted: %s", error)

        with contextlib.suppress(RuntimeError):  # the connection is closed; the files are found again later
            future = self._remote.cleaning.submit(delete)
            self._deleting.add(future)
            future.add_done_callback(self._deleting.discard)
        return Doomed([], [])

    def listing(self) -> tuple[list[str], list[str]]:
        fs, path = self._at()
        with storage_errors(self._uri()):
            infos = fs.get_file_info(pafs.FileSelector(path, allow_not_found=True, recursive=True))
        found: dict[str, list[str]] = {"manifests": [], "files": []}
        for info in infos:
            kind = info.path.rpartition("/")[0].rpartition("/")[2]
            if info.type is pafs.FileType.File and kind in found:
                found[kind].append(info.base_name)
        return found["manifests"], found["files"]

    def siblings(self) -> list[str]:
        fs, path = self._at()
        path = path.rpartition("/")[0]
        with storage_errors(self._uri()):
            infos = fs.get_file_info(pafs.FileSelector(path, allow_not_found=True))
        return [info.base_name for info in infos if info.type is pafs.FileType.Directory]

    def take(self, other: RemoteStorage, names: Sequence[str]) -> None:
        """The file system copies the files itself; their bytes do not pass through this host."""

        def copy(name: str) -> None:
            (fs, source), (_, target) = other._at("files", name), self._at("files", name)
            try:
                with storage_errors(other._uri("files", name), may_be_missing=True):
                    fs.copy_file(source, target)
            except FileNotFoundError:
                raise CorruptState(f"file {name} is missing: {other._uri('files', name)} does not exist") from None

        fs, _ = self._at()
        if fs.type_name not in _WHOLE_PUTS:
            with storage_errors(self._uri("files")):
                fs.create_dir(self._at("files")[1], recursive=True)
        self._in_parallel(copy, names)

    def save(self, token: str, manifest: bytes) -> None:
        self._put("manifests", token + MANIFEST, [manifest])

    def load(self, token: str) -> bytes:
        fs, path = self._at("manifests", token + MANIFEST)
        with storage_errors(self.where(token), may_be_missing=True), fs.open_input_file(path) as file:
            data: bytes = file.read(file.size())
            return data

    def where(self, token: str) -> str:
        return self._uri("manifests", token + MANIFEST)

    def owner(self) -> bytes | None:
        fs, _ = self._remote.connect()
        path, where = self._operator()
        with (
            contextlib.suppress(FileNotFoundError),
            storage_errors(where, may_be_missing=True),
            fs.open_input_file(path) as file,
        ):
            data: bytes = file.read(file.size())
            return data
        return None

    def claim(self, owner: bytes, *, first: bool) -> bytes:
        """If two hosts write at the same time, both read the file afterwards, to see whose it is."""
        path, where = self._operator()
        self._write(path, where, [owner], part=f".{self._folder.rpartition('/')[2]}{PART}")
        return (self.owner() if first else None) or owner

    def close(self) -> None:
        shutil.rmtree(self.files, ignore_errors=True)

    def settle(self) -> None:
        """Waits until the deletions under way are over."""
        wait(set(self._deleting))

    # -- one file -----------------------------------------------------------------------------------------

    def _upload(self, name: str) -> None:
        with (self.files / name).open("rb", buffering=0) as file:
            self._put("files", name, iter(lambda: file.read(_CHUNK_BYTES), b""))

    def _download(self, file: SstFile) -> None:
        """Downloads a file and checks it. An incomplete copy never has the file's name."""
        path = Path(file.path)
        part = path.with_suffix(PART)
        size = crc = 0
        fs, source = self._at("files", file.name)
        try:
            with (
                storage_errors(self._uri("files", file.name), may_be_missing=True),
                fs.open_input_file(source) as remote,
                part.open("wb") as out,
            ):
                while chunk := remote.read(_CHUNK_BYTES):
                    size += len(chunk)
                    crc = crc32(chunk, crc)
                    out.write(chunk)
        except FileNotFoundError:
            raise CorruptState(f"file {file.name} is missing: {self._uri('files', file.name)} does not exist") from None
        if (size, crc) != (file.size_bytes, file.crc):
            part.unlink()
            raise CorruptState(
                f"file {file.name} at {self._uri('files', file.name)} is damaged: it has {size} bytes with CRC-32 "
                f"{crc:08x}, but its manifest says {file.size_bytes} bytes with {file.crc:08x}"
            )
        part.rename(path)

    def _put(self, kind: str, name: str, chunks: Iterable[bytes]) -> None:
        _, path = self._at(kind, name)
        self._write(path, self._uri(kind, name), chunks)

    def _write(self, path: str, where: str, chunks: Iterable[bytes], part: str = PART) -> None:
        fs, _ = self._remote.connect()
        whole = fs.type_name in _WHOLE_PUTS
        with storage_errors(where):
            if not whole:
                fs.create_dir(path.rpartition("/")[0], recursive=True)
            with fs.open_output_stream(path if whole else path + part) as out:
                unconfirmed = 0
                for chunk in chunks:
                    out.write(chunk)
                    unconfirmed += len(chunk)
                    if unconfirmed >= _UNCONFIRMED_BYTES:
                        out.flush()
                        unconfirmed = 0
                if not whole:
                    out.flush()
            if not whole:
                fs.move(path + part, path)

    # -- helpers ------------------------------------------------------------------------------------------

    def _in_parallel(self, function: Callable[[Any], None], arguments: Sequence[Any]) -> None:
        """Calls the function for all arguments in parallel, because the calls wait for the network.

        Raises the first error when all calls are over.
        """
        futures = [self._remote.pool.submit(function, argument) for argument in arguments]
        wait(futures)
        for future in futures:
            future.result()

    def _operator(self) -> tuple[str, str]:
        """The path of ``operator.json``, which the operator's shards share, and its URI."""
        _, base = self._remote.connect()
        names = [self._folder.rpartition("/")[0], OPERATOR]
        return "/".join(filter(None, [base, *names])), "/".join(filter(None, [self._shown, *names]))

    def _at(self, *parts: str) -> tuple[Any, str]:
        fs, base = self._remote.connect()
        return fs, "/".join([base, self._folder, *parts])

    def _uri(self, *parts: str) -> str:
        return "/".join([self._shown, self._folder, *parts])

    @property
    def _shown(self) -> str:
        return self._remote.uri.partition("?")[0].rstrip("/")


@contextlib.contextmanager
def storage_errors(where: str, *, may_be_missing: bool = False) -> Iterator[None]:
    """Turns pyarrow's errors into StorageError, which names the place.

    ``may_be_missing``: lets FileNotFoundError through.
    """
    try:
        yield
    except StorageError:
        raise
    except (OSError, pa.ArrowException) as error:
        if may_be_missing and isinstance(error, FileNotFoundError):
            raise
        first, *_ = str(error).splitlines() or [type(error).__name__]
        raise StorageError(f"{where}: {first}") from error


def pyarrow_uri(uri: str) -> str:
    """Turns a URI into the one that pyarrow needs, because Spark has other names for S3.

    On S3, ``allow_delayed_open`` makes a small file take one request instead of three.
    """
    scheme, _, rest = uri.partition("://")
    if scheme in ("s3a", "s3n"):
        scheme = "s3"
    if scheme == "s3" and "allow_delayed_open" not in rest:
        rest += ("&" if "?" in rest else "?") + "allow_delayed_open=true"
    return f"{scheme}://{rest}"
