"""Lineages: a query whose checkpoint was copied or moved continues in a folder of its own.

A checkpoint contains the id of its query. Without lineages, a copy and its original would share folders, and each would
delete files that the other needs. A lineage is the state that belongs to one checkpoint location. The first lineage is
in the operator's folder, and ``operator.json`` there names its checkpoint. Other lineages are in
``lineage-<digest of the location>``, beside the shards of the first. The first version that such a lineage opens
belongs to another lineage: its files are hard-linked, or copied. After that no lineage looks into another one's
folders, and each can be deleted alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from state_backends.files.location import Location
from state_backends.files.names import OPERATOR
from state_backends.files.storage import Storage
from state_backends.versions.manifest import Identity, check_operator, dump_operator, load_operator

PREFIX = "lineage-"


class Home(NamedTuple):
    """The storage of a shard's versions. ``elsewhere`` finds the storage of a version that another lineage made."""

    storage: Storage
    elsewhere: Callable[[str], Storage | None]


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

    def storage(*lineage: str) -> Storage:
        names = identity.query, identity.operator, *lineage, f"shard-{identity.shard:05d}"
        return location.storage(names, cache, digest_of(identity.checkpoint))

    base, folder = storage(), folder_of(identity.checkpoint)
    found = _operator(base, identity)
    if found is not None and found["checkpoint"] == identity.checkpoint:
        return Home(base, lambda token: _search(storage, base, token, skip=""))
    own = storage(folder)
    if own.owner() is None:
        if found is None:
            return Home(base, lambda token: _search(storage, base, token, skip=""))
        check_operator(found, identity, f"the state of operator {identity.operator!r} of the original checkpoint")
        own.claim(dump_operator(replace(identity, definition=found["definition"])), first=True)
    return Home(own, lambda token: _search(storage, base, token, skip=folder))


def find_version(location: Location, query: str, operator: str, shard: int, token: str, cache: Path) -> Storage | None:
    """The storage that has a version of a shard, in whatever lineage. Only to read. None: no lineage has it."""

    def storage(*lineage: str) -> Storage:
        return location.storage((query, operator, *lineage, f"shard-{shard:05d}"), cache, "read")

    return _search(storage, storage(), token, skip="-")


def _search(storage: Callable[..., Storage], base: Storage, token: str, *, skip: str) -> Storage | None:
    """The storage of the lineage that has this version. Does not look into the folder ``skip``; "" is the first one."""
    for name in ["", *(n for n in base.siblings() if n.startswith(PREFIX))]:
        if name != skip:
            other = storage(*filter(None, [name]))
            try:
                other.load(token)
            except FileNotFoundError:
                continue
            return other
    return None


def _operator(base: Storage, identity: Identity) -> dict[str, Any] | None:
    data = base.owner()
    return None if data is None else load_operator(data, f"{OPERATOR} of operator {identity.operator!r}")
