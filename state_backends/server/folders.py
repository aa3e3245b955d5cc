"""The folders that a state server uses: state folders by their names, and its own for what lives as long as it does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from aion.errors import ServerError
from state_backends.files.depot import Depot
from state_backends.files.location import LocalLocation, Location
from state_backends.server import live_folder
from state_backends.server.live_folder import LiveFolder
from state_backends.versions.lineage import Place, place_of
from state_backends.versions.manifest import Identity


class OfShard(NamedTuple):
    """The folders of one shard. ``live``: nobody else's, and nothing is in it. ``place``: see checkpoint.Shard."""

    depot: Depot
    live: Path
    place: Callable[[], Place]


class Folders:
    """Not locked: the host's lock is held around every call. ``locate``: see :mod:`state_backends.files.location`."""

    def __init__(self, locate: Callable[[str], Location]) -> None:
        self._locate = locate
        self._locations: dict[str, Location] = {}
        self._live: dict[Path, LiveFolder] = {}  # all remote places have one together
        self._id = live_folder.own_name()
        self._made = 0

    def of(self, state_dir: str, identity: Identity) -> OfShard:
        """Those of a shard that is about to be made. Raises ServerError, StorageError."""
        if state_dir not in self._locations:
            self._locations[state_dir] = self._locate(state_dir)
        location = self._locations[state_dir]
        if location.live not in self._live:
            live_folder.sweep(location.live)
            self._live[location.live] = LiveFolder(location.live, self._id)
        own = self._live[location.live].path
        if isinstance(location, LocalLocation):
            _check_hands(location.folder, identity, own)
        names = identity.query, identity.operator, f"shard-{identity.shard:05d}"
        self._made += 1  # no two shards share a folder, not even one and its successor
        live = own / str(self._made)
        copies = live.joinpath("copies", *names)
        return OfShard(
            location.depot(names, copies), live.joinpath("shard", *names), lambda: place_of(location, identity, copies)
        )

    def live(self) -> list[LiveFolder]:
        return list(self._live.values())

    def close(self) -> None:
        """Call it when no shard is open any more."""
        for live in self._live.values():
            live.close()
        for location in self._locations.values():
            location.close()


def _check_hands(state_dir: Path, identity: Identity, own: Path) -> None:
    """State that another user keeps is not touched; whose files are ours is seen from one that we made there."""
    for folder in (state_dir / identity.query, state_dir / identity.query / identity.operator):
        with contextlib.suppress(FileNotFoundError):
            if (uid := folder.lstat().st_uid) != own.lstat().st_uid:
                raise ServerError(f"{folder} belongs to another user ({uid}); its state is not this query's")
