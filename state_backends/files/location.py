"""What ``state.dir`` means on a host: a local folder, or a URI with a folder for local copies."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import pyarrow.fs as pafs

from state_backends.files.disk_budget import DiskBudget
from state_backends.files.faults import disk_errors
from state_backends.files.handed_remote import HandedPlace
from state_backends.files.kept_copies import KeptCopies
from state_backends.files.names import HANDED_FOLDER
from state_backends.files.remote import Remote
from state_backends.files.remote_storage import RemoteStorage
from state_backends.files.requests import Requests
from state_backends.files.storage import LocalStorage, Storage, local_path, make_folder
from state_backends.format.errors import StorageError

_PROBE = ".aion-probe-"


class Location(Protocol):
    """A place for state. ``live``: a local folder for temporary files: RocksDB's own, and copies of remote files.

    The state server deletes its files there when it ends.
    """

    live: Path

    def keep_copies(self, limit_bytes: int | None, local_bytes: int | None = None) -> None:
        """Lets copies of remote files stay on this host when a shard is closed, up to this number of bytes for all.

        None: what others have kept stays, too, and 0: what they have kept of the shards that are opened goes.
        ``local_bytes``: the most that copies may take while their shards are open, or None if there is no limit. The
        largest limits that anybody asks for hold.
        """

    def storage(self, names: Sequence[str], cache: Path, lineage: str, requests: Requests | None = None) -> Storage:
        """Returns the storage of a shard.

        ``names``: its folders, from the query down to the shard. ``cache``: a folder for local copies of its files.
        ``lineage``: identifies the lineage that works with it, in the names of files that children hand over.
        ``requests`` counts what it asks of a remote file system.
        """

    def filesystem(self) -> tuple[Any, str]:
        """pyarrow's file system, and the folder in it. Raises StorageError naming the URI."""

    def check_writable(self) -> None:
        """Writes a small file and deletes it. Raises StorageError or DiskError."""

    def close(self) -> None:
        """Frees what it uses. Call it when no shard is open any more."""


class LocalLocation:
    """A local or mounted folder. RocksDB's files are in it too, so that it can ingest by hard link."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.live = folder / ".live"

    def keep_copies(self, limit_bytes: int | None, local_bytes: int | None = None) -> None:
        """Does nothing: there are no copies."""

    def storage(
        self, names: Sequence[str], cache: Path, lineage: str, requests: Requests | None = None
    ) -> LocalStorage:
        query, operator, *_ = names
        return LocalStorage(self.folder.joinpath(*names), self.folder / query / operator / HANDED_FOLDER)

    def filesystem(self) -> tuple[Any, str]:
        return pafs.LocalFileSystem(), str(self.folder.absolute())

    def check_writable(self) -> None:
        with disk_errors("writing state", self.folder):
            make_folder(self.folder)
            with tempfile.TemporaryFile(prefix=_PROBE, dir=self.folder) as file:
                file.write(b"probe")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.live.rmdir()


class RemoteLocation:
    """A URI that pyarrow reaches. RocksDB's files, and copies, are in a folder of the host; see :func:`scratch`."""

    def __init__(self, remote: Remote, folder: Path) -> None:
        self.remote = remote
        self._folder = folder
        self._kept = KeptCopies(folder, None)
        self._budget = DiskBudget()
        self.live = folder / ".live"

    def keep_copies(self, limit_bytes: int | None, local_bytes: int | None = None) -> None:
        if limit_bytes is not None:
            self._kept.limit_bytes = max(self._kept.limit_bytes or 0, limit_bytes)
        self._budget.limit(local_bytes)

    def storage(
        self, names: Sequence[str], cache: Path, lineage: str, requests: Requests | None = None
    ) -> RemoteStorage:
        # Without a shard's name it is an operator's folder, to look at: children hand over nothing to it.
        handed = HandedPlace.of(self._folder, names, lineage) if len(names) > 2 else None
        return RemoteStorage(self.remote, "/".join(names), cache, handed, requests, self._kept, self._budget)

    def filesystem(self) -> tuple[Any, str]:
        return self.remote.filesystem()

    def check_writable(self) -> None:
        probe = self.remote.at(f"{_PROBE}{uuid4().hex}")
        self.remote.put_once(probe, b"probe")
        self.remote.delete([probe.path])

    def close(self) -> None:
        self.remote.close()
        for folder in (self.live, self._folder):
            with contextlib.suppress(OSError):
                folder.rmdir()


def locate(state_dir: str) -> Location:
    """Returns the location for a path or URI. Makes no connection. Raises StorageError if there is no folder for
    copies.
    """
    if (folder := local_path(state_dir)) is not None:
        return LocalLocation(folder)
    return RemoteLocation(Remote(state_dir), scratch())


def scratch() -> Path:
    """This user's folder for copies of remote files: on Spark's first local disk, or in the temporary folder.

    Spark sets ``SPARK_LOCAL_DIRS`` for its Python workers. Each executor has a folder there, and deletes it when it
    ends. The server may outlive an executor, so its folder is beside theirs.
    """
    first = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    parent = Path(first) if first else Path(tempfile.gettempdir())
    if parent.name.startswith("blockmgr-"):
        parent = parent.parent
    return _only_ours(parent)


def shared_memory() -> Path | None:
    """Returns this user's folder of shared memory, or None if this system has no shared memory. Raises StorageError."""
    parent = Path("/dev/shm")
    return _only_ours(parent) if parent.is_dir() else None


def _only_ours(parent: Path) -> Path:
    """This user's folder there. Raises StorageError."""
    folder = parent / f"aion-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise StorageError(f"cannot make a folder for temporary files: {error}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise StorageError(f"{folder} must be a folder, not a link, that only this user can enter (mode 0700)")
    return folder
