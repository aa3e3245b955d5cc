"""Handing blocks over on a remote file system, which has no links (docs/hand-over.md).

A child uploads a file for each shard, while it works. A version that needs the file copies it into its shard's folder;
the file system does that itself. After that the first one is deleted. What the children of a host have written is also
in a folder of that host, and all other hosts download what they need: before it is needed if it is staged, or else when
it is read.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from state_backends.files.bodies import Places, read_footer
from state_backends.files.handed import HandedFile, sweep
from state_backends.files.names import HANDED_FOLDER, PART
from state_backends.files.remote import Remote, RemoteUpload, chunks_of, keep
from state_backends.files.storage import make_folder


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
    _, base = remote.connect()
    return HandedFile(place.local, name, RemoteUpload(remote, "/".join(filter(None, [base, place.path, name]))))


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


def download(places: Places, name: str) -> None:
    """Brings a file to the first local folder of ``places``.

    Raises FileNotFoundError if it is nowhere, CorruptState if it is not complete, StorageError.
    """
    bring(shared(places.uri), places, name)


def bring(remote: Remote, places: Places, name: str) -> None:
    """See :func:`download`. Several processes may bring one file at the same time."""
    fs, base = remote.connect()
    target = Path(places.folders[0]) / name
    make_folder(target.parent)
    part = target.with_name(f"{name}.{uuid.uuid4().hex}{PART}")
    try:
        for number, path in enumerate(places.paths):
            source = "/".join(filter(None, [base, path, name]))
            try:
                keep(chunks_of(fs, source, source), part)
                break
            except FileNotFoundError:
                # It may just have been copied from the first place to the next.
                if number + 1 == len(places.paths):
                    raise
        read_footer(part)
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)
