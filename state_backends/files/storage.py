"""Stores the versions of a shard in a local folder, or on any file system that ``pyarrow.fs`` reaches.

A storage has SST files and manifests. They are immutable and have unique names, and no one sees them half written. So a
name always means the same bytes. RocksDB reads local files only. So a remote storage has a folder on the host with
copies of the files in use: new files are written there first, others are downloaded to it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Collection, Generator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit
from uuid import uuid4

from state_backends.files.bodies import Footer, Places, read_footer
from state_backends.files.faults import disk_error, disk_errors
from state_backends.files.names import MANIFEST, OPERATOR, PART, SstFile, ToDelete
from state_backends.files.partial import Copies
from state_backends.format.block import BodyAt
from state_backends.format.errors import CorruptState
from state_backends.thresholds import threshold

# The target is on another file system, or the file system has no hard links, or the file has too many.
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
COPY_BYTES = threshold(4 << 20, 64)
"""The bytes of one step of a copy."""
log = logging.getLogger(__name__)


class Storage(Protocol):
    """The files and manifests of one shard. The caller makes one call at a time.

    Every method raises OSError if the file system fails. A remote storage raises StorageError.
    """

    files: Path
    """The local folder with the SST files. New files are written to it, and RocksDB ingests from it."""

    @property
    def copies(self) -> Copies:
        """Those files in the folder ``files`` that are copies."""

    def publish(self, new: Sequence[str], named: Sequence[str]) -> None:
        """Makes files durable before a version names them.

        ``named``: all files that the version will name. ``new``: those of them that are not durable yet. Raises
        CorruptState naming a file that is missing. Holds no lock that readers need.
        """

    def publish_ahead(self, path: Path, name: str) -> None:
        """Begins to make a new file durable, which a version may name. Does not wait, and never raises.

        ``path``: where the file is now. Any thread may call it.
        """

    def end_publishing(self) -> None:
        """Ends what :meth:`publish_ahead` began. When this returns, none of these files appears any more."""

    def adopt(self, handed: Sequence[str]) -> list[Footer]:
        """Links files that children handed over into this shard's folder. They are durable when this returns.

        A remote storage copies them. Returns the footer of each. Raises CorruptState if one is missing.
        """

    @property
    def bodies(self) -> Places:
        """Where this shard's workers find files that children handed over."""

    def body_of(self, at: BodyAt, size: int) -> Future[bytes] | None:
        """Starts to read ``size`` bytes at a place of a file with bodies that this host does not have. Does not wait.

        Returns None if all files are in folders of this host. The future raises CorruptBlock or StorageError.
        """

    def fetch(self, files: Sequence[SstFile], *, partly: bool = False) -> None:
        """Makes sure that these files are in the folder ``files``. Downloads missing files, and checks them.

        A remote storage deletes all other files there: the shard is being opened, so nobody needs them. A file that
        exists already is not read, so the time depends on the number of files, not on their size. ``partly``: of large
        files, only what RocksDB needs to ingest them; see :attr:`copies`. Raises CorruptState naming the file.
        """

    def release(self, names: Collection[str]) -> None:
        """Removes the local copies of these files: the current version does not need them, but older ones may."""

    def delete(self, to_delete: ToDelete) -> ToDelete:
        """Deletes manifests and files, if they exist. Returns those that could not be deleted. Never raises.

        A remote storage deletes in the background, and returns what could not be deleted in earlier calls.
        """

    def listing(self) -> tuple[list[str], list[str]]:
        """Returns the names of all manifests and all files, including those of failed attempts, and incomplete ones."""

    def take(self, other: Any, names: Sequence[str]) -> None:
        """Links or copies files from another storage of the same kind on the same file system.

        Raises CorruptState if one is missing.
        """

    def save(self, token: str, manifest: bytes, *, first: bool = False) -> None:
        """Writes a manifest. It becomes visible when it is complete, and is durable when this returns.

        ``first``: another host may write the same manifest at the same time, and one that is there already stays.
        Raises CorruptState if that is not the same.
        """

    def load(self, token: str) -> bytes:
        """Reads a manifest. Raises FileNotFoundError."""

    def where(self, token: str) -> str:
        """Returns the path or URI of a manifest, for messages."""

    def owner(self) -> bytes | None:
        """Returns the contents of ``operator.json``, which all shards of the operator share, or None if there is no
        such file.
        """

    def claim(self, owner: bytes, *, first: bool, batch: int = 0) -> bytes:
        """Writes ``operator.json``; with ``first`` only if it does not exist. Returns its contents afterwards.

        ``batch``: the one at work. Until the file is complete, it lies among the manifests under a name with the batch.
        So if this process dies meanwhile, what it leaves is listed and deleted as what other dead attempts leave.
        """

    def siblings(self) -> list[str]:
        """Returns the names of this folder and those beside it: the operator's shards that have state, and lineages."""

    def leave(self) -> None:
        """Another storage takes the place of this one, with its local copies. Nothing more is fetched for this one."""

    def close(self) -> None:
        """Removes the local copies. The shard is closed, and does not use this storage again."""


class LocalStorage:
    """A folder of a local or mounted file system. It needs no copies of its files.

    ``files/<number>-<attempt>.sst``, ``manifests/<token>.json``: see docs/reference/formats.md. ``handed``: the folder
    of the operator in which children hand over files.
    """

    copies = Copies()

    def __init__(self, folder: Path, handed: Path | None = None) -> None:
        self.folder = folder
        self.files = folder / "files"
        self._handed = handed
        self._manifests = folder / "manifests"

    def publish(self, new: Sequence[str], named: Sequence[str]) -> None:
        """Checks that all files exist. New ones were synced with their folder when they were linked there."""
        with disk_errors("looking for files", self.files):
            missing = [name for name in named if not (self.files / name).exists()]
        if missing:
            raise CorruptState(f"file {missing[0]} in {self.files} is missing, but the new version needs it")

    def publish_ahead(self, path: Path, name: str) -> None:
        """Does nothing: to publish a file is to link it."""

    def end_publishing(self) -> None:
        """Does nothing."""

    def adopt(self, handed: Sequence[str]) -> list[Footer]:
        if not handed:
            return []
        assert self._handed is not None
        with disk_errors("writing state", self.files):
            self._link(self._handed, handed, ", which a child handed over,")
            return [read_footer(self.files / name) for name in handed]

    @property
    def bodies(self) -> Places:
        return Places([str(folder) for folder in (self.files, self._handed) if folder is not None])

    def body_of(self, at: BodyAt, size: int) -> None:
        """Returns None, because all files are in folders."""

    def fetch(self, files: Sequence[SstFile], *, partly: bool = False) -> None:
        """Does nothing: RocksDB notices a missing file when it ingests it."""

    def release(self, names: Collection[str]) -> None:
        """Does nothing: this is the only copy."""

    def delete(self, to_delete: ToDelete) -> ToDelete:
        remaining = ToDelete([], [])
        for folder, names, failed in (
            (self._manifests, to_delete.manifests, remaining.manifests),
            (self.files, to_delete.files, remaining.files),
        ):
            for name in names:
                try:
                    (folder / name).unlink(missing_ok=True)
                except OSError as error:
                    log.warning("cannot delete %s: %s", folder / name, error)
                    failed.append(name)
        return remaining

    def listing(self) -> tuple[list[str], list[str]]:
        with disk_errors("listing versions", self.folder):
            return [p.name for p in self._manifests.glob("*")], [p.name for p in self.files.glob("*")]

    def take(self, other: LocalStorage, names: Sequence[str]) -> None:
        with disk_errors("copying files of another lineage", self.files):
            self._link(other.files, names)

    def save(self, token: str, manifest: bytes, *, first: bool = False) -> None:
        path = self._path(token)
        if first:
            self._write(path, manifest, self._manifests / part_of(path.name), overwrite=False)
            check_same(self.load(token), manifest, str(path))
            return
        try:
            self._write(path, manifest, self._manifests / part_of(path.name))
        except BaseException:
            with contextlib.suppress(OSError):  # the commit fails, so its version must not be visible
                path.unlink()
            raise

    def load(self, token: str) -> bytes:
        path = self._path(token)
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise disk_error("reading a version", path.parent, error) from error

    def where(self, token: str) -> str:
        return str(self._path(token))

    def owner(self) -> bytes | None:
        with disk_errors("reading a version", self.folder.parent), contextlib.suppress(FileNotFoundError):
            return (self.folder.parent / OPERATOR).read_bytes()
        return None

    def claim(self, owner: bytes, *, first: bool, batch: int = 0) -> bytes:
        part = self._manifests / part_of(f"{batch:010d}-{OPERATOR}")
        self._write(self.folder.parent / OPERATOR, owner, part, overwrite=not first)
        return self.owner() or owner

    def siblings(self) -> list[str]:
        with disk_errors("listing versions", self.folder.parent):
            return [path.name for path in self.folder.parent.glob("*") if path.is_dir()]

    def leave(self) -> None:
        """Does nothing: there are no copies."""

    def close(self) -> None:
        """Does nothing: there are no copies."""

    def _link(self, folder: Path, names: Sequence[str], whose: str = "") -> None:
        """Links or copies files from a folder, durably, unless they are here."""
        make_folder(self.files)
        for name in names:
            try:
                link_or_copy(folder / name, self.files / name)
            except FileExistsError:
                continue
            except FileNotFoundError as error:
                raise CorruptState(f"file {name}{whose} is missing: {error}") from error
        sync(self.files)

    def _write(self, path: Path, data: bytes, part: Path, *, overwrite: bool = True) -> None:
        """Writes a file that is complete and durable, or does not appear. ``overwrite``: replaces an existing file.

        ``part``: where it is until then, on the same file system.
        """
        try:
            with disk_errors("writing a version", path.parent):
                make_folder(part.parent)
                with open(part, "wb", opener=private) as out:
                    out.write(data)
                    out.flush()
                    os.fsync(out.fileno())
                if overwrite:
                    part.rename(path)
                else:
                    with contextlib.suppress(FileExistsError):
                        link_or_copy(part, path)
                    part.unlink()
                sync(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise

    def _path(self, token: str) -> Path:
        # Not with_suffix: a token may have a dot.
        return self._manifests / f"{token}{MANIFEST}"


def local_path(state_dir: str) -> Path | None:
    """Returns the folder that ``state.dir`` means on this host, or None if it is a URI of another file system."""
    if state_dir.startswith("file:"):
        return Path(unquote(urlsplit(state_dir).path))
    return None if "://" in state_dir else Path(state_dir)


def make_folder(path: Path) -> None:
    """Makes a folder and its parents, which only this user can enter: a worker's umask may let others in.

    Syncs the parent of each, so that it survives a power cut.
    """
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)
    sync(path.parent)


def part_of(name: str) -> str:
    """Returns a name for a file while it is being written. Another host may write the same file."""
    return f"{name}.{uuid4().hex}{PART}"


def check_same(found: bytes, wanted: bytes, where: str) -> None:
    """Raises CorruptState if a file that should be written was there already, and is not the same."""
    if found != wanted:
        raise CorruptState(f"{where} is there already, and is not what this task would write; it was left as it is")


def private(path: str, flags: int) -> int:
    """Returns an opener: a file that is made can be read by this user only."""
    return os.open(path, flags, 0o600)


def link_or_copy(source: Path, target: Path) -> None:
    """Gives a file a second name by hard link. If that is not possible, makes a copy and syncs it.

    Raises FileExistsError if the target exists, or another OSError. A copy appears when it is complete, and may replace
    one that another process makes at the same moment.
    """
    for _ in linking(source, target):
        pass


def linking(source: Path, target: Path) -> Generator[int, None, None]:
    """:func:`link_or_copy` in steps: yields the bytes of each block that is copied. A link takes no step."""
    try:
        os.link(source, target)
        return
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
    if target.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    part = target.with_name(part_of(target.name))
    try:
        with source.open("rb") as read, open(part, "xb", opener=private) as out:
            while block := read.read(COPY_BYTES):
                out.write(block)
                yield len(block)
            out.flush()
            os.fsync(out.fileno())
        part.rename(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Syncs a file's bytes, or the names in a folder, so that they survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
