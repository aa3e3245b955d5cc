"""A storage of versions on a file system that ``pyarrow.fs`` reaches; see :mod:`state_backends.files.remote`."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import pyarrow.fs as pafs

from state_backends.files.bodies import Footer, Places, advise, by_file, find, footer_of, read_footer
from state_backends.files.faults import disk_errors
from state_backends.files.handed_remote import HandedPlace, bring
from state_backends.files.kept_copies import KeptCopies
from state_backends.files.names import HANDED, MANIFEST, OPERATOR, PART, Doomed, SstFile
from state_backends.files.partial import PartialCopy, is_large
from state_backends.files.remote import WHOLE_PUTS, Remote, RemoteUpload, chunks_of, keep, storage_errors
from state_backends.files.remote_file import RemoteFile
from state_backends.files.requests import CountedFiles, Requests
from state_backends.files.storage import check_same, link_or_copy, make_folder
from state_backends.format.block import Block
from state_backends.format.checksum import crc32
from state_backends.format.errors import CorruptState, StateError, StorageError
from state_backends.thresholds import threshold

_CHUNK_BYTES = threshold(4 << 20, 256)  # one request each, if the file system reads in ranges
T = TypeVar("T")
log = logging.getLogger(__name__)


class RemoteStorage:
    """One shard's folder on a remote file system. ``cache``: the folder with the host's copies of the files in use.

    The names are the same as in a local folder: ``files/<number>-<attempt>.sst``, ``manifests/<token>.json``. A commit
    takes one request for each new file, and one for its manifest. ``handed``: where children leave files for the shard.
    ``requests`` counts what is asked of the file system. ``kept``: copies that this host keeps for later.
    """

    def __init__(
        self,
        remote: Remote,
        folder: str,
        cache: Path,
        handed: HandedPlace | None = None,
        requests: Requests | None = None,
        kept: KeptCopies | None = None,
    ) -> None:
        self._remote = remote.counted_by(requests)
        self._kept = kept or KeptCopies(cache)
        self._folder = folder
        self.files = cache
        self._handed = handed
        self._adopted: list[str] = []  # paths of files that were copied, and can be deleted
        self._coming: set[str] = set()  # files that are being downloaded because they will be read
        self._closed = False
        self._partial: dict[str, PartialCopy] = {}  # by name: copies that may lack a part
        self._deleting: set[Future[None]] = set()
        self._failed = Doomed([], [])  # what could not be deleted
        self._lock = threading.Lock()  # of the two lists of what is to be deleted

    def publish(self, new: Sequence[str], named: Sequence[str]) -> None:
        """Uploads the new files. All others existed when the shard was opened, or have been uploaded since."""
        self._in_parallel(self._upload, new)
        self._keep(new)

    def adopt(self, handed: Sequence[str]) -> list[Footer]:
        """The file system copies the files itself."""
        self._in_parallel(self._adopt, handed)
        return [self._footer(name) for name in handed]

    def _adopt(self, name: str) -> None:
        left = self._left(name)
        if left is None or self._handed is None:
            raise CorruptState(f"file {name} was handed over, and nobody knows where")
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            make_folder(self.files)
            link_or_copy(self._handed.local / name, self.files / name)
            (self._handed.local / name).unlink()
        fs, target = self._at("files", name)
        try:
            self._copy(left, target, self._uri("files", name))
        except FileNotFoundError:
            # Another attempt of the batch may have copied it.
            with storage_errors(self._uri("files", name)):
                is_there = fs.get_file_info(target).type is pafs.FileType.File
            if not is_there:
                raise CorruptState(f"file {name}, which a child handed over, is missing: {left}") from None
        self._adopted.append(left)

    def _footer(self, name: str) -> Footer:
        if (self.files / name).exists():
            return read_footer(self.files / name)
        fs, path = self._at("files", name)
        with storage_errors(self._uri("files", name)), fs.open_input_file(path) as file:
            return footer_of(file.read_at, file.size_bytes, name)

    @property
    def bodies(self) -> Places:
        folders, paths = [str(self.files)], ["/".join([self._folder, "files"])]
        if self._handed is not None:
            # First where a file is before it is copied: it is never only there when it is looked for in the next.
            folders, paths = [*folders, str(self._handed.local)], [self._handed.path, *paths]
        return Places(folders, self._remote.uri, paths)

    def read_ahead(self, references: Iterable[Block]) -> None:
        """Downloads the files that are not on this host, in the background."""
        places = self.bodies
        for name, blocks in by_file(references).items():
            if (path := find(places.folders, name)) is not None:
                advise(path, blocks)
            elif name not in self._coming:
                self._coming.add(name)
                try:
                    self._remote.ahead.submit(self._bring, places, name)
                except RuntimeError:  # the connection is closed
                    self._coming.discard(name)

    def _bring(self, places: Places, name: str) -> None:
        try:
            bring(self._remote, places, name)
        except (OSError, StateError) as error:  # the reader of the block reports it
            log.debug("%s was not downloaded ahead: %s", name, error)
        finally:
            self._coming.discard(name)
            if self._closed:
                (self.files / name).unlink(missing_ok=True)

    def fetch(self, files: Sequence[SstFile], *, partly: bool = False) -> None:
        self._remote.connect()  # raises for a wrong URI, before any work is done
        self._closed = False
        make_folder(self.files)
        wanted = {f.name for f in files}
        for path in self.files.iterdir():
            if path.name not in wanted or self.partial(path.name) is not None:
                path.unlink(missing_ok=True)
        self._forget_partial(list(self._partial))
        missing = [f for f in files if not Path(f.path).exists()]
        if partly and _has_links(self.files):
            self._fetch_partly([f for f in missing if is_large(f)])
            missing = [f for f in missing if not is_large(f) and not self._take_small(f)]
        else:
            self._kept.remove(self._place, [f.name for f in missing])
        self._in_parallel(self._download, missing)
        self._keep([f.name for f in missing])

    def partial(self, name: str) -> PartialCopy | None:
        copy = self._partial.get(name)
        return None if copy is None or copy.is_whole else copy

    def _fetch_partly(self, files: Sequence[SstFile]) -> None:
        """Makes local copies with the parts that RocksDB needs to ingest them.

        The files take their turns, so that each request is for all of them at the same time.
        """
        copies = [self._kept_copy(file) for file in files]
        begun = self._in_parallel(self._begin_copy, [f for f, copy in zip(files, copies, strict=True) if copy is None])
        wanted = {copy.file.name: copy.first_spans() for copy in begun}
        while wanted:
            futures = {name: [f for s in spans for f in self._partial[name].bring(s)] for name, spans in wanted.items()}
            _wait([future for of_file in futures.values() for future in of_file])
            for name, of_file in futures.items():
                for future in of_file:
                    future.result()
                try:
                    wanted[name] = self._partial[name].open_index()
                except CorruptState as error:
                    raise CorruptState(f"file {name} at {self._uri('files', name)} is damaged: {error}") from error
            wanted = {name: spans for name, spans in wanted.items() if spans}

    def _begin_copy(self, file: SstFile) -> PartialCopy:
        source = self._source(file)
        source.open()
        copy = self._partial[file.name] = self._copy_of(file, source)
        copy.create()
        return copy

    def _kept_copy(self, file: SstFile) -> PartialCopy | None:
        """Takes a copy that this host has kept. None: there is none that can be used."""
        if not self._kept.take(self._place, file):
            return None
        copy = self._copy_of(file, self._source(file))
        copy.take_kept()
        try:
            copy.open_index()
        except CorruptState:
            Path(file.path).unlink()
            self._kept.remove(self._place, [file.name])
            return None
        self._partial[file.name] = copy
        copy.check_kept()
        return copy

    def _copy_of(self, file: SstFile, source: RemoteFile) -> PartialCopy:
        def checked(right: bool) -> None:
            if right:
                self._keep([file.name])
            else:
                self._kept.remove(self._place, [file.name])

        return PartialCopy(file, source.read_at, self._remote.pool, self._remote.ahead, source.close, checked)

    def _take_small(self, file: SstFile) -> bool:
        """Takes a copy that this host has kept, if it has the right checksum."""
        if not self._kept.take(self._place, file):
            return False
        path = Path(file.path)
        with disk_errors("reading a copy of remote state", path.parent):
            if crc32(path.read_bytes()) == file.crc:
                return True
            path.unlink()
        self._kept.remove(self._place, [file.name])
        return False

    def _keep(self, names: Sequence[str]) -> None:
        """Keeps copies for later openings, behind the caller."""

        def keep() -> None:
            for name in names:
                self._kept.put(self._place, self.files / name)

        if names and self._kept.limit_bytes:
            self._in_background(keep)

    def _source(self, file: SstFile) -> RemoteFile:
        return RemoteFile(file, self._at("files", file.name), self._uri("files", file.name))

    def _forget_partial(self, names: Iterable[str]) -> None:
        for name in names:
            if (copy := self._partial.pop(name, None)) is not None:
                copy.close()

    def release(self, names: Collection[str]) -> None:
        self._forget_partial(names)
        for name in names:
            with contextlib.suppress(OSError):  # the version exists already; fetch() tries again
                (self.files / name).unlink(missing_ok=True)
        self._kept.remove(self._place, names)

    def delete(self, doomed: Doomed) -> Doomed:
        """Deletes in the background. Returns what could not be deleted before. A later opening finds it, too."""
        self.release(doomed.files)
        with self._lock:
            adopted, self._adopted = self._adopted, []
            failed, self._failed = self._failed, Doomed([], [])
        if not any(doomed) and not adopted:
            return failed

        def delete() -> None:
            try:
                paths = [self._at("manifests", name)[1] for name in doomed.manifests]
                paths += [self._at("files", name)[1] for name in doomed.files]
                left = [self._left(name) for name in doomed.files if name.endswith(HANDED)]
                self._remote.delete([*paths, *adopted, *filter(None, left)])
            except StorageError as error:
                log.warning("a later commit tries again, because old files could not be deleted: %s", error)
                with self._lock:
                    self._adopted += adopted
                    self._failed = Doomed(self._failed.manifests + doomed.manifests, self._failed.files + doomed.files)

        self._in_background(delete)  # what it does not come to is found again later
        return failed

    def listing(self) -> tuple[list[str], list[str]]:
        """Also ends uploads that died, in the background: the object store keeps their parts, and nobody sees them."""
        self._in_background(self._end_uploads)
        fs, path = self._at()
        found: dict[str, list[str]] = {"manifests": [], "files": []}
        with storage_errors(self._uri()):
            infos = fs.get_file_info(pafs.FileSelector(path, allow_not_found=True, recursive=True))
            if (left := self._left("")) is not None:
                handed = fs.get_file_info(pafs.FileSelector(left, allow_not_found=True))
                found["files"] += [info.base_name for info in handed if info.is_file]
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
            (_, source), (_, target) = other._at("files", name), self._at("files", name)
            try:
                self._copy(source, target, other._uri("files", name))
            except FileNotFoundError:
                raise CorruptState(f"file {name} is missing: {other._uri('files', name)} does not exist") from None

        self._in_parallel(copy, names)

    def save(self, token: str, manifest: bytes, *, first: bool = False) -> None:
        path, where = self._at("manifests", token + MANIFEST)[1], self.where(token)
        if first:
            check_same(self._remote.put_once(path, manifest, where), manifest, where)
        else:
            self._write(path, where, [manifest])

    def load(self, token: str) -> bytes:
        fs, path = self._at("manifests", token + MANIFEST)
        with storage_errors(self.where(token), may_be_missing=True), fs.open_input_file(path) as file:
            return b"".join(file.whole())

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
            return b"".join(file.whole())
        return None

    def claim(self, owner: bytes, *, first: bool) -> bytes:
        path, where = self._operator()
        if first:
            return self._remote.put_once(path, owner, where)
        self._write(path, where, [owner], alone=False)
        return owner

    def close(self) -> None:
        """Deletes the host's copies. What children on this host are writing stays: the shard may be on another one."""
        self._closed = True
        self._forget_partial(list(self._partial))
        shutil.rmtree(self.files, ignore_errors=True)
        if self._handed is not None:
            for path in self._handed.local.glob(f"*{HANDED}"):
                path.unlink(missing_ok=True)

    def settle(self) -> None:
        """Waits until the deletions under way are over."""
        _wait(set(self._deleting))

    # -- one file -----------------------------------------------------------------------------------------

    def _upload(self, name: str) -> None:
        with (self.files / name).open("rb", buffering=0) as file:
            self._put("files", name, iter(lambda: file.read(_CHUNK_BYTES), b""))

    def _download(self, file: SstFile) -> None:
        """Downloads a file and checks it. An incomplete copy never has the file's name."""
        path = Path(file.path)
        part = path.with_suffix(PART)
        fs, source = self._at("files", file.name)
        try:
            size, crc = keep(chunks_of(fs, source, self._uri("files", file.name)), part)
        except FileNotFoundError:
            raise CorruptState(f"file {file.name} is missing: {self._uri('files', file.name)} does not exist") from None
        if (size, crc) != (file.size_bytes, file.crc):
            part.unlink()
            raise CorruptState(
                f"file {file.name} at {self._uri('files', file.name)} is damaged: it has {size} bytes with CRC-32 "
                f"{crc:08x}, but its manifest says {file.size_bytes} bytes with {file.crc:08x}"
            )
        part.rename(path)

    def _copy(self, source: str, target: str, where: str) -> None:
        """Copies a file within the file system. Raises FileNotFoundError, or StorageError, which names ``where``."""
        fs, _ = self._remote.connect()
        with storage_errors(where, may_be_missing=True):
            if fs.type_name not in WHOLE_PUTS:
                fs.create_dir(target.rpartition("/")[0], recursive=True)
            try:
                fs.copy_file(source, target)
            except FileNotFoundError:
                raise
            except OSError:
                if not self._remote.copied_in_parts(source, target):
                    raise

    def _put(self, kind: str, name: str, chunks: Iterable[bytes]) -> None:
        _, path = self._at(kind, name)
        self._write(path, self._uri(kind, name), chunks)

    def _write(self, path: str, where: str, chunks: Iterable[bytes], *, alone: bool = True) -> None:
        upload = RemoteUpload(self._remote, path, where, f".{uuid4().hex}{PART}", alone=alone)
        try:
            for chunk in chunks:
                upload.write(chunk)
            upload.finish()
        except BaseException:
            upload.discard()
            raise

    # -- helpers ------------------------------------------------------------------------------------------

    @property
    def _place(self) -> str:
        """Names the folder of the files to all processes of this host."""
        return self._uri("files")

    def _in_background(self, function: Callable[[], None]) -> None:
        """Calls the function later, unless the connection is closed before."""
        with contextlib.suppress(RuntimeError):
            future = self._remote.cleaning.submit(function)
            self._deleting.add(future)
            future.add_done_callback(self._deleting.discard)

    def _end_uploads(self) -> None:
        try:
            for path in (self._at("")[1], self._left("")):
                if path is not None:
                    self._remote.end_uploads(path)
        except StorageError as error:
            log.warning("uploads that died could not be ended; the next opening tries again: %s", error)

    def _in_parallel(self, function: Callable[[Any], T], arguments: Sequence[Any]) -> list[T]:
        """Returns what the function returns for each argument. Calls it in parallel, because it waits for the network.

        Raises the first error when all calls are over.
        """
        futures = [self._remote.pool.submit(function, argument) for argument in arguments]
        _wait(futures)
        return [future.result() for future in futures]

    def _operator(self) -> tuple[str, str]:
        """Returns the path of ``operator.json``, which the operator's shards share, and its URI."""
        _, base = self._remote.connect()
        names = [self._folder.rpartition("/")[0], OPERATOR]
        return "/".join(filter(None, [base, *names])), "/".join(filter(None, [self._shown, *names]))

    def _at(self, *parts: str) -> tuple[CountedFiles, str]:
        fs, base = self._remote.connect()
        return fs, "/".join([base, self._folder, *parts])

    def _left(self, name: str) -> str | None:
        """Returns where a child leaves a file of this name."""
        _, base = self._remote.connect()
        return None if self._handed is None else "/".join(filter(None, [base, self._handed.path, name]))

    def _uri(self, *parts: str) -> str:
        return "/".join([self._shown, self._folder, *parts])

    @property
    def _shown(self) -> str:
        return self._remote.uri.partition("?")[0].rstrip("/")


def _wait(futures: Iterable[Future[Any]]) -> None:
    """Waits until all are over. ``wait`` would not return if the pool is closed, which cancels what has not begun."""
    for future in futures:
        with contextlib.suppress(CancelledError):
            future.exception()


def _has_links(folder: Path) -> bool:
    """Whether RocksDB can take a file by a hard link. A copy of it would not get what is fetched later."""
    probe = folder / f"{uuid4().hex}{PART}"
    link = probe.with_name(f"{uuid4().hex}{PART}")
    try:
        with disk_errors("keeping copies of remote state", folder):
            probe.touch(0o600)
        os.link(probe, link)
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)
        link.unlink(missing_ok=True)
    return True
