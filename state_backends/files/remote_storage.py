"""A storage of versions on a file system that ``pyarrow.fs`` reaches; see :mod:`state_backends.files.remote`."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path

import pyarrow.fs as pafs

from state_backends.files.bodies import Footer, Places, footer_of, read_footer
from state_backends.files.disk_budget import DiskBudget
from state_backends.files.handed_remote import HandedPlace, read_body
from state_backends.files.kept_copies import KeptCopies
from state_backends.files.local_copies import LocalCopies
from state_backends.files.names import HANDED, MANIFEST, OPERATOR, SstFile, ToDelete
from state_backends.files.parallel import in_parallel, wait_for
from state_backends.files.remote import WHOLE_PUTS, At, Remote, storage_errors
from state_backends.files.requests import Requests
from state_backends.files.storage import check_same, link_or_copy, make_folder, part_of
from state_backends.format.block import BodyAt
from state_backends.format.errors import CorruptBlock, CorruptState, StorageError
from state_backends.thresholds import threshold

_CHUNK_BYTES = threshold(4 << 20, 256)  # one request each, if the file system reads in ranges
log = logging.getLogger(__name__)


class RemoteStorage:
    """One shard's folder on a remote file system. ``cache``: the folder with the host's copies of the files in use.

    The names are the same as in a local folder: ``files/<number>-<attempt>.sst``, ``manifests/<token>.json``. A commit
    takes one request for each new file, and one for its manifest. ``handed``: where children leave files for the shard.
    ``requests`` counts what is asked of the file system. ``kept``: copies that this host keeps for later. ``budget``:
    for copies while their shards are open.
    """

    def __init__(
        self,
        remote: Remote,
        folder: str,
        cache: Path,
        handed: HandedPlace | None = None,
        requests: Requests | None = None,
        kept: KeptCopies | None = None,
        budget: DiskBudget | None = None,
    ) -> None:
        self._remote = remote.counted_by(requests)
        self._folder = folder
        self.files = cache
        self._handed = handed
        self._budget = budget or DiskBudget()
        self._adopted: list[str] = []  # paths of files that were copied, and can be deleted
        kept = kept or KeptCopies(cache)
        self.copies = LocalCopies(self._remote, f"{folder}/files", cache, kept, self._in_background, self._budget)
        self._uploads: dict[str, Future[None]] = {}  # by name: files that no version names yet
        self._deleting: set[Future[None]] = set()
        self._failed = ToDelete([], [])  # what could not be deleted
        self._lock = threading.Lock()  # of the two lists of what is to be deleted

    def publish(self, new: Sequence[str], named: Sequence[str]) -> None:
        """Uploads the new files, unless it has done so ahead. All others have been uploaded before."""
        ahead = {name: upload for name in new if (upload := self._uploads.pop(name, None)) is not None}
        in_parallel(self._remote.pool, self._upload, [name for name in new if name not in ahead])
        wait_for(ahead.values())
        in_parallel(self._remote.pool, self._upload, [name for name, upload in ahead.items() if not _succeeded(upload)])
        self._uploads = {name: upload for name, upload in self._uploads.items() if not upload.done()}
        self.copies.published(new)

    def publish_ahead(self, path: Path, name: str) -> None:
        if name not in self._uploads:
            with contextlib.suppress(RuntimeError):  # the connection is closed
                self._uploads[name] = self._remote.pool.submit(self._upload_from, path, name)

    def end_publishing(self) -> None:
        uploads, self._uploads = self._uploads, {}
        for upload in uploads.values():
            upload.cancel()
        wait_for(uploads.values())

    def adopt(self, handed: Sequence[str]) -> list[Footer]:
        """The file system copies the files itself."""
        in_parallel(self._remote.pool, self._adopt, handed)
        return [self._footer(name) for name in handed]

    def _adopt(self, name: str) -> None:
        left = self._left(name)
        if left is None or self._handed is None:
            raise CorruptState(f"file {name} was handed over, and nobody knows where")
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            make_folder(self.files)
            link_or_copy(self._handed.local / name, self.files / name)
            (self._handed.local / name).unlink()
            self._budget.add(self.files / name)
        target = self._at("files", name)
        try:
            self._copy(left, target)
        except FileNotFoundError:
            # Another attempt of the batch may have copied it.
            with storage_errors(target.uri):
                is_there = self._remote.fs.get_file_info(target.path).type is pafs.FileType.File
            if not is_there:
                raise CorruptState(f"file {name}, which a child handed over, is missing: {left.path}") from None
        self._adopted.append(left.path)

    def _footer(self, name: str) -> Footer:
        if (self.files / name).exists():
            return read_footer(self.files / name)
        at = self._at("files", name)
        with storage_errors(at.uri), self._remote.fs.open_input_file(at.path) as file:
            return footer_of(file.read_at, file.size_bytes, name)

    @property
    def bodies(self) -> Places:
        folders, paths = [str(self.files)], ["/".join([self._folder, "files"])]
        if self._handed is not None:
            # First where a file is before it is copied: it is never only there when it is looked for in the next.
            folders, paths = [*folders, str(self._handed.local)], [self._handed.path, *paths]
        return Places(folders, self._remote.uri, paths)

    def body_of(self, at: BodyAt, size: int) -> Future[bytes] | None:
        def read() -> bytes:
            try:
                return read_body(self._remote, self.bodies, at, size)
            except FileNotFoundError as error:
                raise CorruptBlock(f"a version names blocks in this file, and it is missing: {error}") from None

        try:
            return self._remote.ranges.submit(read)
        except RuntimeError:
            raise StorageError("the connection was closed") from None

    def fetch(self, files: Sequence[SstFile], *, partly: bool = False) -> None:
        self._remote.connect()  # raises for a wrong URI, before any work is done
        self.copies.fetch(files, partly=partly)

    def release(self, names: Collection[str]) -> None:
        self.copies.forget(names)

    def delete(self, to_delete: ToDelete) -> ToDelete:
        """Deletes in the background. Returns what could not be deleted before. A later opening finds it, too."""
        self.release(to_delete.files)
        with self._lock:
            adopted, self._adopted = self._adopted, []
            failed, self._failed = self._failed, ToDelete([], [])
        if not any(to_delete) and not adopted:
            return failed

        def not_deleted(error: Exception) -> None:
            log.warning("a later commit tries again, because old files could not be deleted: %s", error)
            with self._lock:
                self._adopted += adopted
                self._failed = ToDelete(
                    self._failed.manifests + to_delete.manifests, self._failed.files + to_delete.files
                )

        try:
            places = [self._at("manifests", name) for name in to_delete.manifests]
            places += [self._at("files", name) for name in to_delete.files]
            places += filter(None, [self._left(name) for name in to_delete.files if name.endswith(HANDED)])
            everything = [*(at.path for at in places), *adopted]
            # What it does not come to is found again later.
            self._watch(self._remote.deletions.add(self._remote.delete, everything, not_deleted))
        except StorageError as error:
            not_deleted(error)
        return failed

    def listing(self) -> tuple[list[str], list[str]]:
        """Also ends uploads that died, in the background: the object store keeps their parts, and nobody sees them."""
        self._in_background(self._end_uploads)
        fs, at = self._remote.fs, self._at()
        found: dict[str, list[str]] = {"manifests": [], "files": []}
        with storage_errors(at.uri):
            infos = fs.get_file_info(pafs.FileSelector(at.path, allow_not_found=True, recursive=True))
            if (left := self._left()) is not None:
                handed = fs.get_file_info(pafs.FileSelector(left.path, allow_not_found=True))
                found["files"] += [info.base_name for info in handed if info.is_file]
        for info in infos:
            kind = info.path.rpartition("/")[0].rpartition("/")[2]
            if info.type is pafs.FileType.File and kind in found:
                found[kind].append(info.base_name)
        return found["manifests"], found["files"]

    def siblings(self) -> list[str]:
        at = self._at()
        with storage_errors(at.uri):
            parent = pafs.FileSelector(at.path.rpartition("/")[0], allow_not_found=True)
            infos = self._remote.fs.get_file_info(parent)
        return [info.base_name for info in infos if info.type is pafs.FileType.Directory]

    def take(self, other: RemoteStorage, names: Sequence[str]) -> None:
        """The file system copies the files itself; their bytes do not pass through this host."""

        def copy(name: str) -> None:
            source = other._at("files", name)
            try:
                self._copy(source, self._at("files", name))
            except FileNotFoundError:
                raise CorruptState(f"file {name} is missing: {source.uri} does not exist") from None

        in_parallel(self._remote.pool, copy, names)

    def save(self, token: str, manifest: bytes, *, first: bool = False) -> None:
        at = self._at("manifests", token + MANIFEST)
        if first:
            check_same(self._remote.put_once(at, manifest), manifest, at.uri)
        else:
            self._remote.write(at, [manifest])

    def load(self, token: str) -> bytes:
        return self._remote.read(self._at("manifests", token + MANIFEST))

    def where(self, token: str) -> str:
        return f"{self._remote.shown}/{self._folder}/manifests/{token}{MANIFEST}"

    def owner(self) -> bytes | None:
        with contextlib.suppress(FileNotFoundError):
            return self._remote.read(self._operator())
        return None

    def claim(self, owner: bytes, *, first: bool, batch: int = 0) -> bytes:
        part = self._at("manifests", part_of(f"{batch:010d}-{OPERATOR}")).path
        if first:
            return self._remote.put_once(self._operator(), owner, part)
        self._remote.write(self._operator(), [owner], part, alone=False)
        return owner

    def leave(self) -> None:
        self.copies.close()

    def close(self) -> None:
        """Deletes the host's copies. What children on this host are writing stays: the shard may be on another one."""
        self.end_publishing()
        self.copies.close()
        self._budget.forget_folder(self.files)
        shutil.rmtree(self.files, ignore_errors=True)
        if self._handed is not None:
            for path in self._handed.local.glob(f"*{HANDED}"):
                path.unlink(missing_ok=True)

    def settle(self) -> None:
        """Waits until the deletions under way are over."""
        wait_for(set(self._deleting))

    # -- one file -----------------------------------------------------------------------------------------

    def _upload(self, name: str) -> None:
        self._upload_from(self.files / name, name)

    def _upload_from(self, path: Path, name: str) -> None:
        with path.open("rb", buffering=0) as file:
            self._remote.write(self._at("files", name), iter(lambda: file.read(_CHUNK_BYTES), b""))

    def _copy(self, source: At, target: At) -> None:
        """Copies a file within the file system. Raises FileNotFoundError, or StorageError."""
        fs = self._remote.fs
        with storage_errors(target.uri, may_be_missing=True):
            if fs.type_name not in WHOLE_PUTS:
                fs.create_dir(target.path.rpartition("/")[0], recursive=True)
            try:
                fs.copy_file(source.path, target.path)
            except FileNotFoundError:
                raise
            except OSError:
                if not self._remote.copied_in_parts(source.path, target.path):
                    raise

    # -- helpers ------------------------------------------------------------------------------------------

    def _in_background(self, function: Callable[[], None]) -> None:
        """Calls the function later, unless the connection is closed before."""
        with contextlib.suppress(RuntimeError):
            self._watch(self._remote.cleaning.submit(function))

    def _watch(self, future: Future[None]) -> None:
        """:meth:`settle` waits for it."""
        self._deleting.add(future)
        future.add_done_callback(self._deleting.discard)

    def _end_uploads(self) -> None:
        try:
            for at in filter(None, (self._at(), self._left())):
                self._remote.end_uploads(f"{at.path}/")
        except StorageError as error:
            log.warning("uploads that died could not be ended; the next opening tries again: %s", error)

    def _operator(self) -> At:
        """Returns the place of ``operator.json``, which the operator's shards share."""
        return self._remote.at(self._folder.rpartition("/")[0], OPERATOR)

    def _at(self, *names: str) -> At:
        return self._remote.at(self._folder, *names)

    def _left(self, name: str = "") -> At | None:
        """Returns where a child leaves a file of this name."""
        return None if self._handed is None else self._remote.at(self._handed.path, name)


def _succeeded(upload: Future[None]) -> bool:
    if upload.cancelled():
        return False
    error = upload.exception()
    if error is not None:
        log.debug("a file could not be uploaded ahead: %s", error)
    return error is None
