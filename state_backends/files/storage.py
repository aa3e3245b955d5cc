"""Where the versions of a shard lie: a local folder, or any file system that ``pyarrow.fs`` reaches.

A storage holds SST files and manifests. They are immutable and have unique names: nothing is written twice or seen half
written, so a name always means the same bytes. RocksDB reads local files only. So a remote storage has a folder on the
host with copies of the files in use: new files are written there first, others are downloaded to it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

from aion.errors import CorruptState
from state_backends.files.faults import disk_error, disk_errors
from state_backends.files.names import MANIFEST, OPERATOR, PART, Doomed, SstFile

# Another file system, or one without links, or with too many links to the file.
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
log = logging.getLogger(__name__)


class Storage(Protocol):
    """The files and manifests of one shard. The caller makes one call at a time.

    Every method raises OSError (a remote storage: StorageError) when the file system cannot be reached or refuses.
    """

    files: Path
    """The local folder with the SST files: new ones are written to it, and RocksDB ingests from it."""

    def publish(self, new: Sequence[str], named: Sequence[str]) -> None:
        """Makes files durable before a version names them.

        ``named``: all files that the version will name; ``new``: those among them that are not durable yet. Raises
        CorruptState naming a file that is missing. No lock that readers need is held meanwhile.
        """

    def fetch(self, files: Sequence[SstFile]) -> None:
        """Brings these files to the folder ``files``, and checks those that had to be downloaded.

        For a shard that is being opened: nobody needs other files in that folder. A file that is there already is not
        read, so the time to open depends on the number of files, not on bytes. Raises CorruptState naming the file.
        """

    def release(self, names: Collection[str]) -> None:
        """The current version no longer needs these files. Older versions may need them."""

    def delete(self, doomed: Doomed) -> Doomed:
        """Deletes manifests and files, as far as they exist. Returns those that the disk refused to delete.

        Does not raise. A remote storage deletes later, and returns nothing.
        """

    def listing(self) -> tuple[list[str], list[str]]:
        """The names of all manifests and of all files, also of failed attempts and of half-written files."""

    def take(self, other: Any, names: Sequence[str]) -> None:
        """Brings files here from another storage of the same kind on the same file system.

        Raises CorruptState if one is gone.
        """

    def save(self, token: str, manifest: bytes) -> None:
        """Writes a manifest. It is durable and whole when this returns, and invisible before."""

    def load(self, token: str) -> bytes:
        """Raises FileNotFoundError."""

    def where(self, token: str) -> str:
        """The path or URI of a manifest, for messages."""

    def owner(self) -> bytes | None:
        """The contents of the file that all shards of the operator share; None if there is none."""

    def claim(self, owner: bytes, *, first: bool) -> bytes:
        """Writes that file; with ``first``, only if there is none. Returns its contents afterwards."""

    def siblings(self) -> list[str]:
        """The names of the folders beside this one: the operator's shards with state."""

    def close(self) -> None:
        """Removes the copies. The shard is closed and does not come back to this storage."""


class LocalStorage:
    """A folder of a local or mounted file system: files stay where they were written.

    ``files/<number>-<attempt>.sst``, ``manifests/<token>.json``: see docs/state-format.md.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = folder / "files"
        self._manifests = folder / "manifests"

    def publish(self, new: Sequence[str], named: Sequence[str]) -> None:
        """New files were synced with their folder when they were linked there."""
        with disk_errors("looking for files", self.files):
            missing = [name for name in named if not (self.files / name).exists()]
        if missing:
            raise CorruptState(f"file {missing[0]} in {self.files} is gone, and the version to be made needs it")

    def fetch(self, files: Sequence[SstFile]) -> None:
        """Nothing to do: RocksDB finds a missing file when it ingests it."""

    def release(self, names: Collection[str]) -> None:
        """Nothing to do: this is the only copy."""

    def delete(self, doomed: Doomed) -> Doomed:
        left = Doomed([], [])
        for folder, names, kept in (
            (self._manifests, doomed.manifests, left.manifests),
            (self.files, doomed.files, left.files),
        ):
            for name in names:
                try:
                    (folder / name).unlink(missing_ok=True)
                except OSError as error:
                    log.warning("cannot delete %s: %s", folder / name, error)
                    kept.append(name)
        return left

    def listing(self) -> tuple[list[str], list[str]]:
        with disk_errors("listing versions", self.folder):
            return [p.name for p in self._manifests.glob("*")], [p.name for p in self.files.glob("*")]

    def take(self, other: LocalStorage, names: Sequence[str]) -> None:
        with disk_errors("bringing files of another lineage", self.files):
            make_folder(self.files)
            for name in names:
                if not (other.files / name).exists():
                    raise CorruptState(f"file {name} is missing in {other.files}")
                with contextlib.suppress(FileExistsError):
                    link_or_copy(other.files / name, self.files / name)
            sync(self.files)

    def save(self, token: str, manifest: bytes) -> None:
        path = self._path(token)
        try:
            self._write(path, path.with_suffix(PART), manifest)
        except BaseException:
            with contextlib.suppress(OSError):  # the caller learns that there is no version, so none may be visible
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

    def claim(self, owner: bytes, *, first: bool) -> bytes:
        path = self.folder.parent / OPERATOR
        self._write(path, path.with_name(f"{OPERATOR}.{self.folder.name}{PART}"), owner, over=not first)
        return self.owner() or owner

    def siblings(self) -> list[str]:
        with disk_errors("listing versions", self.folder.parent):
            return [path.name for path in self.folder.parent.glob("*") if path.is_dir()]

    def close(self) -> None:
        """Nothing to do: there are no copies."""

    def _write(self, path: Path, part: Path, data: bytes, *, over: bool = True) -> None:
        """Writes a file that is whole and durable, or not there. ``over``: also where one exists."""
        try:
            with disk_errors("writing a version", path.parent):
                make_folder(path.parent)
                with part.open("wb") as out:
                    out.write(data)
                    out.flush()
                    os.fsync(out.fileno())
                if over:
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


def make_folder(path: Path) -> None:
    """Makes a folder and those above it. Each is synced in its parent, so that it survives a power cut."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """Gives a file a second name. If the file systems cannot link, makes a copy and syncs it.

    Overwrites nothing. Raises FileExistsError, or the system's OSError.
    """
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        with source.open("rb") as read, target.open("xb") as out:
            shutil.copyfileobj(read, out)
            out.flush()
            os.fsync(out.fileno())


def sync(path: Path) -> None:
    """Makes a file's bytes, or a folder's names, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
