"""Lineages: a query whose checkpoint was copied or moved continues in a folder of its own.

A checkpoint contains the id of its query. Without lineages, a copy and its original would share folders, and each would
delete files that the other needs. A lineage is the state that belongs to one checkpoint location. The first lineage is
in the operator's folder, and ``operator.json`` there names its checkpoint. Other lineages are in
``lineage-<digest of the location>``, beside the shards of the first. The first version that such a lineage opens
belongs to another lineage: its files are hard-linked, or copied. So are the versions of the operator's other shards, of
all other lineages: these go on and delete them, and a checkpoint that was copied twice may have versions of each.
Before a lineage is deleted, the others take what they lack, because a shard that was idle since then may need it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from state_backends.files.location import Location
from state_backends.files.names import HANDED, MANIFEST, OPERATOR
from state_backends.files.requests import Requests
from state_backends.files.storage import Storage
from state_backends.format.errors import AionError, CorruptState, DiskError, FormatError, StorageError
from state_backends.format.plain_names import PLAIN, is_plain
from state_backends.versions.manifest import (
    Identity,
    Manifest,
    check_operator,
    check_owner,
    dump,
    dump_operator,
    load,
    load_operator,
)
from state_backends.versions.retention import batch_of

PREFIX = "lineage-"
_SHARD = "shard-"
_turns: WeakKeyDictionary[Location, threading.Lock] = WeakKeyDictionary()
log = logging.getLogger(__name__)


class OtherLineage(NamedTuple):
    """The storage of a version that another lineage made.

    ``beside`` gives the storages of the operator's other shards: another lineage's of each shard, and this one's.
    ``turn``: held while versions are taken.
    """

    storage: Storage
    beside: Callable[[], Iterator[tuple[Storage, Storage]]]
    turn: threading.Lock


class Home(NamedTuple):
    """The storage of a shard's versions. ``other_lineage`` finds a version that another lineage made.

    ``shards`` gives the storages of all shards of the operator that have state, of all lineages.
    """

    storage: Storage
    other_lineage: Callable[[str], OtherLineage | None]
    shards: Callable[[], Iterator[Storage]]


def folder_of(checkpoint: str) -> str:
    """Returns the folder of a later lineage. The first lineage has none of its own."""
    return PREFIX + digest_of(checkpoint)


def digest_of(checkpoint: str) -> str:
    """Identifies the lineage of a checkpoint, in names."""
    return hashlib.sha256(checkpoint.encode()).hexdigest()[:12]


def home_of(location: Location, identity: Identity, cache: Path, requests: Requests | None = None) -> Home:
    """Finds the lineage of a checkpoint. Begins a new one if there is none. ``requests`` counts those of its storages.

    Raises CorruptState if ``operator.json`` is damaged, ForeignState if the state belongs to another operator.
    """

    shard = f"{_SHARD}{identity.shard:05d}"

    def storage(*below: str) -> Storage:
        names = identity.query, identity.operator, *below
        return location.storage(names, cache, digest_of(identity.checkpoint), requests)

    def home(*own: str) -> Home:
        def other_lineage(token: str) -> OtherLineage | None:
            def others() -> Iterator[tuple[str, ...]]:
                return _lineages(storage(shard), skip="".join(own))

            def beside() -> Iterator[tuple[Storage, Storage]]:
                for lineage in others():
                    names = _shard_names(storage(*lineage, shard))
                    # Tasks on other hosts do the same. Each begins elsewhere, and finds what the others have taken.
                    for name in [n for n in names if n > shard] + [n for n in names if n < shard]:
                        yield storage(*lineage, name), storage(*own, name)

            found = _first_with(token, (storage(*lineage, shard) for lineage in others()))
            return None if found is None else OtherLineage(found, beside, _turns.setdefault(location, threading.Lock()))

        return Home(storage(*own, shard), other_lineage, lambda: _shards(storage))

    base, later = home(), home(folder_of(identity.checkpoint))
    found = _operator(base.storage, identity)
    if found is not None and found["checkpoint"] == identity.checkpoint:
        return base
    if later.storage.owner() is None:
        if found is None:
            return base
        # The original may have another definition since it was copied. Each version is compared when it is taken.
        state = f"the state of operator {identity.operator!r} of the original checkpoint"
        check_operator({**found, "definition": identity.definition}, identity, state)
        later.storage.claim(dump_operator(identity), first=True)
    return later


def operator_of(location: Location, query: str, operator: str, checkpoint: str) -> dict[str, Any] | None:
    """Returns what ``operator.json`` says of the lineage of a checkpoint, or else of the original, or None if nothing
    is there. Raises CorruptState, FormatError, StorageError, DiskError.
    """
    first = None
    for own in ((), (folder_of(checkpoint),)):
        data = location.storage((query, operator, *own, f"{_SHARD}00000"), location.live, "look").owner()
        found = None if data is None else load_operator(data, f"{OPERATOR} of operator {operator!r}")
        if found is not None and found["checkpoint"] == checkpoint:
            return found
        first = first or found
    return first


def storage_of(location: Location, query: str, operator: str, checkpoint: str) -> Storage:
    """Returns the storage of the lineage of a checkpoint. Its owner is the checkpoint's, if it has state."""
    first, own = (
        location.storage((query, operator, *below, f"{_SHARD}00000"), location.live, "look")
        for below in ((), (folder_of(checkpoint),))
    )
    return first if own.owner() is None else own


def operators_of(location: Location, query: str, checkpoint: str) -> dict[str, int]:
    """Returns the operators of a query that have state, and how many shards each has. Raises StorageError, DiskError,
    CorruptState, FormatError.
    """
    found = {}
    for name in location.storage((query, "any"), location.live, "look").siblings():
        operator = operator_of(location, query, name, checkpoint) if is_plain(name) else None
        if operator is not None:
            found[name] = int(operator["shards"])
    return found


def shards_of(location: Location, query: str, operator: str) -> Iterator[Storage]:
    """Yields the storages of all shards of an operator that have state, of all lineages. Only to read."""
    return _shards(lambda *below: location.storage((query, operator, *below), location.live, "look"))


def _shards(storage: Callable[..., Storage]) -> Iterator[Storage]:
    """``storage`` returns that of the folders below the operator's."""
    for lineage in _lineages(storage(f"{_SHARD}00000"), skip=None):
        for name in _shard_names(storage(*lineage, f"{_SHARD}00000")):
            yield storage(*lineage, name)


def _shard_names(shard: Storage) -> list[str]:
    """Returns the names of the shards that have state, in the lineage of this one."""
    return sorted(name for name in shard.siblings() if name.startswith(_SHARD))


def newest_versions(shards: Iterable[Storage], batch: int) -> list[Manifest]:
    """Returns the versions of the last batch before ``batch`` that any of these shards has a version of.

    Spark has decided about all batches before the one at work, so what none of these versions has was never committed.
    ``batch``: -1 for all of them. A damaged version may be that of an attempt that Spark gave up, so it is left out.
    Raises CorruptState if all are damaged, FormatError, StorageError, DiskError.
    """
    found: dict[int, list[tuple[Storage, str]]] = {}
    for shard in shards:
        for token in _tokens(shard.listing()[0]):
            found.setdefault(batch_of(token), []).append((shard, token))
    versions, damaged = [], []
    earlier = [its for its in found if its < batch or batch < 0]
    for shard, token in found[max(earlier)] if earlier else ():
        try:
            with contextlib.suppress(FileNotFoundError):  # it has just been deleted
                versions.append(read_version(shard, token))
        except CorruptState as error:
            damaged.append(error)
    if damaged and not versions:
        raise damaged[0]
    return versions


def read_version(storage: Storage, token: str) -> Manifest:
    """Raises FileNotFoundError, CorruptState, FormatError."""
    where = storage.where(token)
    manifest = load(storage.load(token), where.rpartition("/")[2])
    if manifest.token != token:
        raise CorruptState(f"{where} is the manifest of another version, {manifest.token}")
    return manifest


def take_version(found: OtherLineage, token: str, ours: Storage, identity: Identity, batch: int) -> Manifest:
    """Takes a version of another lineage, and before that the operator's other shards.

    These are taken as of the batches before ``batch``, the one at work. The checkpoint names a version of each shard,
    but only Spark knows which. A task opens a shard when it has rows for it. That may be much later, and the other
    lineages may have deleted the version by then. So the task that opens the first shard takes the versions of all
    shards, before its own. Those that nobody opens are deleted like what failed attempts leave. Tasks of one host wait
    for each other, because the first one brings what the others need. Raises CorruptState, ForeignState, StorageError
    or DiskError: the task must be run again, or a shard would lack its version.
    """
    with found.turn:
        with contextlib.suppress(FileNotFoundError):
            return read_version(ours, token)
        check_owner(read_version(found.storage, token), identity)
        for theirs, beside in found.beside():
            taking = Taking(theirs, beside)
            for other in taking.missing:
                if batch_of(other) < batch or batch < 0:
                    taking.take_if_there(other)
        # Last: if anything fails before, the next attempt takes all of it again.
        return Taking(found.storage, ours).take(token)


def has_made(location: Location, query: str, operator: str, checkpoint: str) -> bool:
    """Returns whether there are versions that the query of a checkpoint has made, beside those that it has taken."""
    if (operator_of(location, query, operator, checkpoint) or {}).get("checkpoint") != checkpoint:
        return False
    shards = [(shard, shard.owner()) for shard in shards_of(location, query, operator)]
    own = [shard for shard, owner in shards if owner and load_operator(owner, OPERATOR)["checkpoint"] == checkpoint]
    return not all(map(is_taken, newest_versions(own, -1)))


def is_taken(manifest: Manifest) -> bool:
    """Returns whether another lineage made the version."""
    return manifest.parent is not None and not manifest.history


def take_all(theirs: Storage, ours: Storage) -> None:
    """Takes what this lineage lacks of a shard, before the other lineage is deleted. Damaged versions stay behind."""
    taking = Taking(theirs, ours)
    for token in taking.missing:
        try:
            taking.take(token)
        except (CorruptState, FormatError, FileNotFoundError) as error:
            log.warning("%s is damaged, so no other lineage gets it: %s", theirs.where(token), error)


class Taking:
    """Links or copies versions of a shard from another lineage's folder. Each file is linked or copied once."""

    def __init__(self, theirs: Storage, ours: Storage) -> None:
        self._theirs, self._ours = theirs, ours
        manifests, files = ours.listing()
        # What a child handed over may be listed before it is in the folder of the shard.
        self._there = {name for name in files if not name.endswith(HANDED)}
        there = set(_tokens(manifests))
        self.missing = sorted(set(_tokens(theirs.listing()[0])) - there, reverse=True)
        """The versions that only the other lineage has. The newest first."""

    def take(self, token: str) -> Manifest:
        """Returns the version as it is in this lineage: older versions stay behind.

        Raises FileNotFoundError, FormatError, or CorruptState, also if a file is missing.
        """
        found = read_version(self._theirs, token)
        manifest = replace(found, parent=found.parent or token, history=())
        names = [file.name for file in manifest.files if file.name not in self._there]
        self._ours.take(self._theirs, names)
        self._there.update(names)
        self._ours.save(token, dump(manifest), first=True)
        return manifest

    def take_if_there(self, token: str) -> None:
        """The other lineage may delete the version meanwhile. Raises StorageError, DiskError."""
        for last in (False, True):
            try:
                self.take(token)
                return
            except (StorageError, DiskError):
                if last:
                    raise
            except (AionError, OSError) as error:
                where = self._theirs.where(token)
                log.debug("%s is not taken over; it may have been deleted meanwhile: %s", where, error)
                return


def _tokens(manifests: Iterable[str]) -> list[str]:
    return [name.removesuffix(MANIFEST) for name in manifests if name.endswith(MANIFEST)]


def find_version(location: Location, query: str, operator: str, shard: int, token: str, cache: Path) -> Storage | None:
    """Returns the storage that has a version of a shard, in whatever lineage. It is only to read. Returns None if no
    lineage has it.

    Raises CorruptState for a name that is not plain.
    """
    names = folders_with(location, query, operator, shard, token, cache)
    return None if names is None else location.storage(names, cache, "read")


def folders_with(
    location: Location, query: str, operator: str, shard: int, token: str, cache: Path
) -> tuple[str, ...] | None:
    """Returns the folders of a shard, from the query on, in the lineage that has a version, or None if no lineage has
    it.

    Raises CorruptState for a name that is not plain: query and token are from a checkpoint.
    """
    for name in (query, operator, token):
        if not is_plain(name):
            raise CorruptState(f"the checkpoint names {name!r:.200}, which is not a plain name ({PLAIN})")

    def names(*lineage: str) -> tuple[str, ...]:
        return (query, operator, *lineage, f"{_SHARD}{shard:05d}")

    first = location.storage(names(), cache, "read")
    for lineage in _lineages(first, skip="-"):
        with contextlib.suppress(FileNotFoundError):
            location.storage(names(*lineage), cache, "read").load(token)
            return names(*lineage)
    return None


def _lineages(first: Storage, *, skip: str | None) -> Iterator[tuple[str, ...]]:
    """Yields the folders of all lineages but ``skip``. The first lineage has none: it is (), and "" to skip.

    ``first``: the storage of any shard of the first one.
    """
    for name in ["", *(n for n in first.siblings() if n.startswith(PREFIX))]:
        if name != skip:
            yield (name,) if name else ()


def _first_with(token: str, storages: Iterable[Storage]) -> Storage | None:
    for storage in storages:
        try:
            storage.load(token)
        except FileNotFoundError:
            continue
        return storage
    return None


def _operator(base: Storage, identity: Identity) -> dict[str, Any] | None:
    data = base.owner()
    return None if data is None else load_operator(data, f"{OPERATOR} of operator {identity.operator!r}")
