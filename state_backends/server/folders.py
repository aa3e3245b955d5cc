"""The folders that a state server uses: state folders, and its own folders for temporary files."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from state_backends.files.location import LocalLocation, Location, shared_memory
from state_backends.files.requests import Requests
from state_backends.files.storage import Storage
from state_backends.format.errors import ServerError, StorageError
from state_backends.server import live_folder
from state_backends.server.live_folder import LiveFolder
from state_backends.versions.lineage import Home, digest_of, home_of
from state_backends.versions.manifest import Identity

_UNKNOWN = Path()
log = logging.getLogger(__name__)


class ShardFolders(NamedTuple):
    """The folders of one shard. ``live``: an empty folder of its own. ``home``: see versions.shard.Shard.

    ``requests`` counts what is asked of a remote file system for the shard. ``staged``: a folder of shared memory.
    """

    storage: Storage
    live: Path
    home: Callable[[Identity], Home]
    requests: Requests
    staged: Path | None


class Folders:
    """It owns the locations in use, and the server's own folder in each.

    It has no lock: hold the host's lock around every call. ``locate``: see :mod:`state_backends.files.location`.
    """

    def __init__(self, locate: Callable[[str], Location]) -> None:
        self._locate = locate
        self._locations: dict[str, Location] = {}
        self._live: dict[Path, LiveFolder] = {}  # all remote locations share one
        self._id = live_folder.own_name()
        self._shared: Path | None = _UNKNOWN
        self._made = 0

    def of(
        self, state_dir: str, identity: Identity, requests: Requests, kept_bytes: int, local_bytes: int | None
    ) -> ShardFolders:
        """Returns the folders of a new shard. Raises ServerError, StorageError.

        ``requests``: of its operator. ``kept_bytes``, ``local_bytes``: see :meth:`Location.keep_copies`.
        """
        if state_dir not in self._locations:
            self._locations[state_dir] = self._locate(state_dir)
        location = self._locations[state_dir]
        location.keep_copies(kept_bytes, local_bytes)
        parent = location.live.resolve()  # one folder may have several paths
        if parent not in self._live:
            live_folder.sweep(parent)
            self._live[parent] = LiveFolder(parent, self._id)
        own = self._live[parent].path
        if isinstance(location, LocalLocation):
            _check_owner(location.folder, identity, own)
        names = identity.query, identity.operator, f"shard-{identity.shard:05d}"
        self._made += 1  # each shard gets a new folder, even if the same shard was here before
        live = own / str(self._made)
        copies = live.joinpath("copies", *names)
        counts = Requests(requests)
        return ShardFolders(
            location.storage(names, copies, digest_of(identity.checkpoint), counts),
            live.joinpath("shard", *names),
            lambda now: home_of(location, now, copies, counts),
            counts,
            staged / str(self._made) if (staged := self._shared_memory()) is not None else None,
        )

    def _shared_memory(self) -> Path | None:
        """Returns this server's folder of shared memory, or None if it cannot have one."""
        if self._shared is _UNKNOWN:
            self._shared = None
            try:
                if (parent := shared_memory()) is not None:
                    live_folder.sweep(parent)
                    self._live[parent] = LiveFolder(parent, self._id)
                    self._shared = self._live[parent].path
            except (OSError, StorageError) as error:
                log.warning("handed-over blocks are not staged, but read when they are needed: %s", error)
        return self._shared

    def live(self) -> list[LiveFolder]:
        return list(self._live.values())

    def close(self) -> None:
        """Call it when no shard is open any more."""
        for live in self._live.values():
            live.close()
        for location in self._locations.values():
            location.close()


def _check_owner(state_dir: Path, identity: Identity, own: Path) -> None:
    """Raises ServerError if the state is another user's. ``own``: a folder that we made there, with our user id."""
    for folder in (state_dir / identity.query, state_dir / identity.query / identity.operator):
        with contextlib.suppress(FileNotFoundError):
            if (uid := folder.lstat().st_uid) != own.lstat().st_uid:
                raise ServerError(f"{folder} belongs to another user ({uid}), so its state is not this query's")
