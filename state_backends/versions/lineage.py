"""Lineages: a query whose checkpoint was copied or moved continues in a folder of its own.

A checkpoint contains the id of its query. Without lineages, a copy and its original would share folders, and each would
delete files that the other needs. A lineage is the state that belongs to one checkpoint location. The first lineage is
in the operator's folder, and ``operator.json`` there names its checkpoint. Other lineages are in
``lineage-<digest of the location>``, beside the shards of the first. The first version that such a lineage opens
belongs to another lineage: its files are hard-linked, or copied. So are the versions of the operator's other shards,
because the other lineage goes on and deletes them. After that no lineage looks into another one's folders, and each can
be deleted alone.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from aion.errors import AionError
from state_backends.files.location import Location
from state_backends.files.names import MANIFEST, OPERATOR
from state_backends.files.storage import Storage
from state_backends.versions.manifest import (
    Identity,
    Manifest,
    check_operator,
    dump,
    dump_operator,
    load,
    load_operator,
)
from state_backends.versions.retention import batch_of

PREFIX = "lineage-"
_SHARD = "shard-"
log = logging.getLogger(__name__)


class Elsewhere(NamedTuple):
    """The storage of a version that another lineage made.

    ``beside`` gives the storages of the operator's other shards: that lineage's of each shard, and this one's.
    """

    storage: Storage
    beside: Callable[[], Iterator[tuple[Storage, Storage]]]


class Home(NamedTuple):
    """The storage of a shard's versions. ``elsewhere`` finds a version that another lineage made."""

    storage: Storage
    elsewhere: Callable[[str], Elsewhere | None]


def folder_of(checkpoint: str) -> str:
    """The folder of a later lineage. The first lineage has none of its own."""
    return PREFIX + digest_of(checkpoint)


def digest_of(checkpoint: str) -> str:
    """Identifies the lineage of a checkpoint, in names."""
    return hashlib.sha256(checkpoint.encode()).hexdigest()[:12]


def home_of(location: Location, identity: Identity, cache: Path) -> Home:
    """Finds the lineage of a checkpoint. Begins a new one if there is none.

    Raises CorruptState if ``operator.json`` is damaged, ForeignState if the state belongs to another operator.
    """

    shard = f"{_SHARD}{identity.shard:05d}"

    def storage(*below: str) -> Storage:
        names = identity.query, identity.operator, *below
        return location.storage(names, cache, digest_of(identity.checkpoint))

    def home(*own: str) -> Home:
        def elsewhere(token: str) -> Elsewhere | None:
            found = _search(lambda *lineage: storage(*lineage, shard), token, skip="".join(own))
            if found is None:
                return None
            other, lineage = found

            def beside() -> Iterator[tuple[Storage, Storage]]:
                for name in other.siblings():
                    if name.startswith(_SHARD) and name != shard:
                        yield storage(*lineage, name), storage(*own, name)

            return Elsewhere(other, beside)

        return Home(storage(*own, shard), elsewhere)

    base, later = home(), home(folder_of(identity.checkpoint))
    found = _operator(base.storage, identity)
    if found is not None and found["checkpoint"] == identity.checkpoint:
        return base
    if later.storage.owner() is None:
        if found is None:
            return base
        check_operator(found, identity, f"the state of operator {identity.operator!r} of the original checkpoint")
        later.storage.claim(dump_operator(replace(identity, definition=found["definition"])), first=True)
    return later


def take(manifest: Manifest, source: Storage, target: Storage) -> Manifest:
    """Links or copies a version of another lineage. Returns it as it is in this one: older versions stay behind.

    Raises CorruptState if a file is missing.
    """
    target.take(source, [file.name for file in manifest.files])
    manifest = replace(manifest, history=())
    target.save(manifest.token, dump(manifest), first=True)
    return manifest


def take_beside(found: Elsewhere, batch: int) -> None:
    """Takes the operator's other shards, as of the batches before ``batch``, the one at work. Never raises.

    The checkpoint names a version of each shard, but only Spark knows which. A task opens a shard when it has rows for
    it. That may be much later, and the other lineage may have deleted the version by then. So the task that opens the
    first shard takes the versions of all shards. Those that nobody opens are deleted like what failed attempts leave.
    A shard that already has one of the versions is left alone: its own task is at work on it.
    """
    try:
        for theirs, ours in found.beside():
            tokens = sorted(_tokens(theirs), reverse=True)
            if set(tokens).isdisjoint(_tokens(ours)):
                for token in tokens:
                    if batch_of(token) < batch or batch < 0:
                        _take_if_there(token, theirs, ours)
    except (AionError, OSError) as error:
        log.warning("state of a copied checkpoint could not be copied ahead of its use: %s", error)


def _take_if_there(token: str, theirs: Storage, ours: Storage) -> None:
    try:
        take(load(theirs.load(token), token), theirs, ours)
    except (AionError, OSError) as error:
        log.info("%s is not taken over; it may have been deleted meanwhile: %s", theirs.where(token), error)


def _tokens(storage: Storage) -> list[str]:
    return [name.removesuffix(MANIFEST) for name in storage.listing()[0] if name.endswith(MANIFEST)]


def find_version(location: Location, query: str, operator: str, shard: int, token: str, cache: Path) -> Storage | None:
    """The storage that has a version of a shard, in whatever lineage. Only to read. None: no lineage has it."""

    def storage(*lineage: str) -> Storage:
        return location.storage((query, operator, *lineage, f"{_SHARD}{shard:05d}"), cache, "read")

    found = _search(storage, token, skip="-")
    return None if found is None else found[0]


def _search(storage: Callable[..., Storage], token: str, *, skip: str) -> tuple[Storage, list[str]] | None:
    """The storage of the lineage that has this version, and the lineage's folder; the first one has none.

    ``storage`` gives that of a lineage. Does not look into the folder ``skip``; "" is the first one.
    """
    for name in ["", *(n for n in storage().siblings() if n.startswith(PREFIX))]:
        if name != skip:
            lineage = [name] if name else []
            other = storage(*lineage)
            try:
                other.load(token)
            except FileNotFoundError:
                continue
            return other, lineage
    return None


def _operator(base: Storage, identity: Identity) -> dict[str, Any] | None:
    data = base.owner()
    return None if data is None else load_operator(data, f"{OPERATOR} of operator {identity.operator!r}")
