"""Handing blocks over on a remote file system, which has no links (docs/inside/hand-over.md).

A child uploads a file for each shard, while it works. A version that needs the file copies it into its shard's folder;
the file system does that itself. After that the first one is deleted. What the children of a host have written is also
in a folder of that host. All other hosts read the ranges that they need: before they are needed if they are staged, or
else when they are read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from state_backends.files.bodies import Places, too_short
from state_backends.files.handed import HandedFile, sweep
from state_backends.files.names import HANDED_FOLDER
from state_backends.files.remote import Remote, RemoteUpload, storage_errors
from state_backends.format.block import Block, BodyAt


class HandedPlace(NamedTuple):
    """Where the children of a lineage leave files for one shard: on the remote file system, and copies on their host.

    ``path``: below the folder that ``state.dir`` names.
    """

    path: str
    local: Path

    @classmethod
    def of(cls, scratch: Path, names: Sequence[str], lineage: str) -> HandedPlace:
        """``scratch``: this host's folder for copies. ``names``: of the query, the operator and the shard's folder."""
        query, operator, *_, shard = names
        below = query, operator, HANDED_FOLDER, lineage, shard
        return cls("/".join(below), scratch.joinpath(*below))


def create(remote: Remote, place: HandedPlace, name: str) -> HandedFile:
    """Returns a file that is uploaded while it is written."""
    return HandedFile(place.local, name, RemoteUpload(remote, remote.at(place.path, name)))


def sweep_copies(place: HandedPlace, lineage: str, batch: int) -> None:
    """Deletes this host's copies of what children of a lineage handed over before ``batch``, for all shards.

    Never raises. Those batches are complete. Who still reads such a file downloads it.
    """
    with contextlib.suppress(OSError):
        for folder in place.local.parent.iterdir():
            sweep(folder, lineage, batch)


@cache
def shared(uri: str) -> Remote:
    """This process's connection to a file system."""
    return Remote(uri)


def fetch_body(places: Places, reference: Block) -> bytes:
    """Reads the body of a reference. Raises FileNotFoundError if its file is nowhere, CorruptBlock, StorageError."""
    assert reference.at is not None
    return read_body(shared(places.uri), places, reference.at, reference.header.body_bytes)


def read_body(remote: Remote, places: Places, at: BodyAt, size: int) -> bytes:
    """Reads exactly this range: a file has the blocks of many windows. Raises what :func:`fetch_body` raises."""
    name, offset = at
    for number, folder in enumerate(places.paths):
        source = remote.at(folder, name)
        try:
            with storage_errors(source.uri, may_be_missing=True), remote.fs.open_input_file(source.path) as file:
                body = file.read_at(size, offset)
            break
        except FileNotFoundError:
            # It may just have been copied from the first place to the next.
            if number + 1 == len(places.paths):
                raise
    if len(body) != size:
        raise too_short(at, size)
    return body
