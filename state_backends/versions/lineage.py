"""Lineages: a query whose checkpoint was copied or moved goes on in a folder of its own.

The id of a query travels with its checkpoint. Without lineages, a copy and its original would share folders, and each
would delete files that the other needs. A lineage is the state that one checkpoint location made. The first lineage
lies in the operator's folder, and ``operator.json`` there names its checkpoint. Other lineages lie beside its shards,
in ``lineage-<digest of the location>``. The first version that such a lineage opens belongs to another lineage: its
files are brought over by hard link, or copied. After that no lineage looks at the folders of another one, and each can
be deleted alone.
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
from state_backends.versions.manifest import Identity, check_operator, check_unrecorded, dump_operator, load_operator

PREFIX = "lineage-"


class Home(NamedTuple):
    """The storage of a shard's versions, and ``elsewhere``, a search for a version that another lineage made."""

    storage: Storage
    elsewhere: Callable[[str], Storage | None]


def folder_of(checkpoint: str) -> str:
    """The folder of a lineage that is not the first."""
    return PREFIX + hashlib.sha256(checkpoint.encode()).hexdigest()[:12]


def home_of(location: Location, identity: Identity, cache: Path) -> Home:
    """Finds the lineage of a checkpoint, and begins a new one if necessary.

    Raises CorruptState if ``operator.json`` is damaged, ForeignState if the state is another operator's.
    """

    def storage(*lineage: str) -> Storage:
        return location.storage([identity.query, identity.operator, *lineage, f"shard-{identity.shard:05d}"], cache)

    base, own = storage(), folder_of(identity.checkpoint)
    found = _owner(base, identity)
    if found is not None and found.get("checkpoint") == identity.checkpoint:
        return Home(base, lambda token: _search(storage, base, token, but=""))
    mine = storage(own)
    if mine.owner() is None:
        if found is None or "checkpoint" not in found:
            return Home(base, lambda token: _search(storage, base, token, but=""))
        whose = f"the state of operator {identity.operator!r}, which this checkpoint is a copy of,"
        check_operator(found, identity, whose)
        shards = (int(name.removeprefix("shard-")) for name in base.siblings() if name.startswith("shard-"))
        check_unrecorded(found, identity, shards, whose)
        mine.claim(dump_operator(replace(identity, definition=found["definition"])), first=True)
    return Home(mine, lambda token: _search(storage, base, token, but=own))


def _search(storage: Callable[..., Storage], base: Storage, token: str, *, but: str) -> Storage | None:
    for name in ["", *(n for n in base.siblings() if n.startswith(PREFIX))]:
        if name != but:
            other = storage(*filter(None, [name]))
            try:
                other.load(token)
            except FileNotFoundError:
                continue
            return other
    return None


def _owner(base: Storage, identity: Identity) -> dict[str, Any] | None:
    data = base.owner()
    return None if data is None else load_operator(data, f"{OPERATOR} of operator {identity.operator!r}")
