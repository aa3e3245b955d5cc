"""Where the versions of a shard lie: a local folder, or any file system that ``pyarrow.fs`` reaches.

A depot holds immutable things under unique names: SST files and manifests. Nothing is ever written twice or seen half
written, and whoever knows a name knows what is behind it. RocksDB reads local files only, so a remote depot has a
folder on the host with copies of the files in use: new ones are written there first, others are brought there.
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

# Another file system, or one that knows no links, or no more of them.
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
log = logging.getLogger(__name__)


class Depot(Protocol):
    """The files and manifests of one shard. Calls are serialised by the caller, except where said.

    Everything raises OSError (a remote depot: StorageError) when the place cannot be reached or refuses.
    """

    files: Path
    """The local folder into which new SST files are written, and out of which RocksDB ingests all."""

    def publish(self, new: Sequence[str], named: Sequence[str]) -> None:
        """Makes the new ones of the files that a version is about to name durable, and checks that all are there.

        No lock that readers need is held meanwhile. Raises CorruptState naming a file that is not.
        """

    def fetch(self, files: Sequence[SstFile]) -> None:
        """Makes these files be in ``files``, and checks whatever had to be brought there.

        For a shard that is being opened: nothing else needs what else is in that folder. Raises CorruptState naming
        the file. A file that is there already is not read: opening takes as long as there are files, not bytes.
        """

    def release(self, names: Collection[str]) -> None:
        """The version at work does not need these any more; older ones still may."""

    def delete(self, doomed: Doomed) -> Doomed:
        """Removes manifests and files for good, those that are there; what the disk did not let go is returned.

        Does not raise. A remote depot deletes later, and returns nothing.
        """

    def listing(self) -> tuple[list[str], list[str]]:
        """The names of all manifests and of all files, those of failed attempts and half written ones included."""

    def take(self, other: Any, names: Sequence[str]) -> None:
        """Brings files here from another depot of the same kind and place.

        Raises CorruptState where one is gone.
        """

    def save(self, token: str, manifest: bytes) -> None:
        """Writes a manifest: durable and whole when this returns, and not to be seen before."""

    def load(self, token: str) -> bytes:
        """Raises FileNotFoundError."""

    def where(self, token: str) -> str:
        """Where a manifest lies, for people."""

    def owner(self) -> bytes | None:
        """The file that all shards of the operator share, if it is there."""

    def claim(self, owner: bytes, *, first: bool) -> bytes:
        """Writes that file; with ``first``, only if there is none. Returns what stands there then."""

    def siblings(self) -> list[str]:
        """The names of the folders beside this one: the operator's shards that have state."""

    def close(self) -> None:
        """Lets go of copies: the shard is closed and does not come back to this depot."""


class LocalDepot:
    """A folder of a local or mounted file system: files stay where they were written.

    ``files/<number>-<attempt>.sst``, ``manifests/<token>.json``: see docs/state-format.md.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = folder / "files"
        self._manifests = folder / "manifests"

    def publish(self, new: Sequence[str], named: Sequence[str]) -> None:
        """The new ones were synced, with their folder, when they were put there."""
        with disk_errors("looking for files", self.files):
            missing = [name for name in named if not (self.files / name).exists()]
        if missing:
            raise CorruptState(f"file {missing[0]} in {self.files} is gone, and the version to be made needs it")

    def fetch(self, files: Sequence[SstFile]) -> None:
        """Nothing to do: what is missing is found out where it is ingested."""

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

    def take(self, other: LocalDepot, names: Sequence[str]) -> None:
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
            with contextlib.suppress(OSError):  # a version that its writer was told is none must not look like one
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
        """A file that is whole and durable, or not there. Not ``over`` one that is there."""
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
    """Makes a folder and those above it; they survive a power cut, each being synced in the one that holds it."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """A second name for a file, or where the file systems have no such thing a copy, synced. Nothing is overwritten.

    Raises FileExistsError, and whatever the system says.
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
