"""Where the versions of a shard lie: a local folder, or any file system that ``pyarrow.fs`` reaches.

A depot holds immutable things under unique names: SST files and manifests. Nothing is ever written twice or seen half
written, and whoever knows a name knows what is behind it. RocksDB reads local files only, so a remote depot has a
folder on the host with copies of the files in use: new ones are written there first, others are brought there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol

from state_backends.faults import disk_error, disk_errors
from state_backends.store import SstFile

MANIFEST = ".json"
SST = ".sst"
PART = ".part"
OPERATOR = "operator.json"


class Depot(Protocol):
    """The files and manifests of one shard. Calls are serialised by the caller, except where said.

    Everything raises OSError (a remote depot: StorageError) when the place cannot be reached or refuses.
    """

    files: Path
    """The local folder into which new SST files are written, and out of which RocksDB ingests all."""

    def publish(self, names: Sequence[str]) -> None:
        """Makes files that were written into ``files`` durable. No lock that readers need is held meanwhile."""

    def fetch(self, files: Sequence[SstFile]) -> None:
        """Makes these files be in ``files``, and checks whatever had to be brought there.

        For a shard that is being opened: nothing else needs what else is in that folder. Raises CorruptState naming
        the file. A file that is there already is not read: opening takes as long as there are files, not bytes.
        """

    def release(self, names: Collection[str]) -> None:
        """The version at work does not need these any more; older ones still may."""

    def delete(self, name: str) -> None:
        """Removes a file for good, if it is there; called by several threads."""

    def names(self) -> list[str]:
        """The names of all SST files, those of attempts that failed and half written ones included."""

    def save(self, token: str, manifest: bytes) -> None:
        """Writes a manifest: durable and whole when this returns, and not to be seen before."""

    def load(self, token: str) -> bytes:
        """Raises FileNotFoundError."""

    def manifests(self) -> list[str]:
        """The names of all manifests, ``<token>.json``, and of half written ones."""

    def discard(self, name: str) -> None:
        """Removes a manifest, if it is there."""

    def where(self, token: str) -> str:
        """Where a manifest lies, for people."""

    def owner(self) -> bytes | None:
        """The file that all shards of the operator share, if it is there."""

    def claim(self, owner: bytes) -> None:
        """Writes that file, in place of the one that may be there; shards may do so at the same time."""

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

    def publish(self, names: Sequence[str]) -> None:
        """Nothing to do: files are synced, with their folder, where they are written."""

    def fetch(self, files: Sequence[SstFile]) -> None:
        """Nothing to do: what is missing is found out where it is ingested."""

    def release(self, names: Collection[str]) -> None:
        """Nothing to do: this is the only copy."""

    def delete(self, name: str) -> None:
        (self.files / name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        return [path.name for path in self.files.glob("*") if path.suffix in (SST, PART)]

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

    def manifests(self) -> list[str]:
        return [path.name for path in self._manifests.glob("*") if path.suffix in (MANIFEST, PART)]

    def discard(self, name: str) -> None:
        (self._manifests / name).unlink(missing_ok=True)

    def where(self, token: str) -> str:
        return str(self._path(token))

    def owner(self) -> bytes | None:
        try:
            return (self.folder.parent / OPERATOR).read_bytes()
        except FileNotFoundError:
            return None

    def claim(self, owner: bytes) -> None:
        path = self.folder.parent / OPERATOR
        self._write(path, path.with_name(f"{OPERATOR}.{self.folder.name}{PART}"), owner)

    def close(self) -> None:
        """Nothing to do: there are no copies."""

    def _write(self, path: Path, part: Path, data: bytes) -> None:
        try:
            with disk_errors("writing a version", path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
                with part.open("wb") as out:
                    out.write(data)
                    out.flush()
                    os.fsync(out.fileno())
                part.rename(path)
                sync(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise

    def _path(self, token: str) -> Path:
        # Not with_suffix: a token may have a dot.
        return self._manifests / f"{token}{MANIFEST}"


def sync(path: Path) -> None:
    """Makes a file's bytes, or a folder's names, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
