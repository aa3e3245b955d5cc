"""Lineages: a query whose checkpoint was copied or moved goes on in a folder of its own.

The id of a query travels with its checkpoint, so a copy and its original would otherwise share folders, and each would
delete what the other needs. A lineage is what one checkpoint location made. The first one lies in the operator's
folder, whose ``operator.json`` says for which checkpoint; others lie in ``lineage-<digest of the location>`` beside its
shards. The first version that a lineage asks for is another one's: its files are brought over by hard link, or copied
where there is no such thing. After that no lineage looks at the folders of another one, and each can be deleted alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from state_backends.files.depot import Depot
from state_backends.files.location import Location
from state_backends.files.names import OPERATOR
from state_backends.versions.manifest import Identity, check_operator, check_unrecorded, dump_operator, load_operator

PREFIX = "lineage-"


class Place(NamedTuple):
    """Where a shard's versions lie, and a search for one that another lineage made."""

    depot: Depot
    elsewhere: Callable[[str], Depot | None]


def folder_of(checkpoint: str) -> str:
    """The name of the folder of a lineage that is not the first."""
    return PREFIX + hashlib.sha256(checkpoint.encode()).hexdigest()[:12]


def place_of(location: Location, identity: Identity, cache: Path) -> Place:
    """Finds out which lineage it is, and begins a new one if need be.

    Raises CorruptState where ``operator.json`` is damaged, ForeignState where the state is another operator's.
    """

    def depot(*lineage: str) -> Depot:
        return location.depot([identity.query, identity.operator, *lineage, f"shard-{identity.shard:05d}"], cache)

    base, own = depot(), folder_of(identity.checkpoint)
    found = _owner(base, identity)
    if found is not None and found.get("checkpoint") == identity.checkpoint:
        return Place(base, lambda token: _search(depot, base, token, but=""))
    mine = depot(own)
    if mine.owner() is None:
        if found is None or "checkpoint" not in found:
            return Place(base, lambda token: _search(depot, base, token, but=""))
        whose = f"the state of operator {identity.operator!r}, of which this is a copy,"
        check_operator(found, identity, whose)
        shards = (int(name.removeprefix("shard-")) for name in base.siblings() if name.startswith("shard-"))
        check_unrecorded(found, identity, shards, whose)
        mine.claim(dump_operator(replace(identity, definition=found["definition"])), first=True)
    return Place(mine, lambda token: _search(depot, base, token, but=own))


def _search(depot: Callable[..., Depot], base: Depot, token: str, *, but: str) -> Depot | None:
    for name in ["", *(n for n in base.siblings() if n.startswith(PREFIX))]:
        if name != but:
            other = depot(*filter(None, [name]))
            try:
                other.load(token)
            except FileNotFoundError:
                continue
            return other
    return None


def _owner(base: Depot, identity: Identity) -> dict[str, Any] | None:
    data = base.owner()
    return None if data is None else load_operator(data, f"{OPERATOR} of operator {identity.operator!r}")
