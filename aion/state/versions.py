"""Finds the versions of an operator's shards as of a batch, from what lies in the state folder.

The checkpoint says which batches are complete. A version of an attempt that Spark gave up lies beside that of
the attempt which won. The versions after it tell them apart: each was made from a version that won.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow.fs as pafs

from state_backends.files.names import MANIFEST
from state_backends.files.storage import Storage
from state_backends.format.errors import ConfigError, MissingState, StorageError
from state_backends.versions.audit import StateFolder, reaching
from state_backends.versions.lineage import read_version
from state_backends.versions.manifest import Manifest
from state_backends.versions.retention import batch_of


@dataclass(frozen=True)
class StoredOperator:
    """An operator in a state folder. ``place``: its name, and for a later lineage ``operator/lineage``.

    ``found``: what ``operator.json`` says. ``shards``: the names of the folders of its shards.
    """

    query: str
    place: str
    found: Mapping[str, Any]
    shards: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """Returns windows, join or stateful."""
        return str(self.found["definition"].get("kind", "windows"))

    def names(self, shard: str) -> tuple[str, ...]:
        """Returns the folders of a shard, from the query on."""
        return (self.query, *self.place.split("/"), shard)


def operator_in(folder: StateFolder, query: str | None, name: str | None) -> StoredOperator:
    """Returns the operator that is meant. Raises ConfigError, which lists them, if that is none or not one alone."""
    shards: dict[tuple[str, str], list[str]] = {}
    for its_query, place, shard in folder.shards():
        shards.setdefault((its_query, place), []).append(shard)
    matching = [
        (its_query, place)
        for its_query, place in shards
        if query in (None, its_query) and name in (None, place, place.partition("/")[0])
    ]
    if len(matching) != 1:
        listed = "\n".join(f"  query={q!r}, name={place!r}" for q, place in sorted(matching or shards)) or "  none"
        what = "several operators" if matching else "no such operator"
        raise ConfigError(f"{folder.state_dir}: it has {what}; choose one by query= and name=:\n{listed}")
    (found,) = matching
    return StoredOperator(*found, folder.operator(*found), sorted(shards[found]))


def versions_at(
    folder: StateFolder, operator: StoredOperator, batch: int | None, shards: Iterable[str]
) -> dict[str, str]:
    """Returns the token of each of these shards that has state after ``batch``. If that is None, after the last
    complete batch.

    Raises ConfigError for a batch that is not complete, MissingState for one that is not kept any more or cannot be
    known, StorageError.
    """
    storages = {
        shard: folder.location.storage(operator.names(shard), folder.location.live, "read") for shard in operator.shards
    }
    tokens = {
        shard: sorted(name.removesuffix(MANIFEST) for name in storage.listing()[0] if name.endswith(MANIFEST))
        for shard, storage in storages.items()
    }
    last = _last_complete(folder, operator)
    newest = max((batch_of(token) for own in tokens.values() for token in own), default=-1)
    if batch is not None and last is not None and batch > last:
        raise ConfigError(f"batch: {batch} is not complete; the last complete batch is {last}")
    if batch is not None:
        upto = batch
    elif last is not None:
        upto = last
    else:
        # Nobody can say whether the newest batch is complete. It has begun, so the one before it is.
        upto = newest - 1
        if upto < 0:
            raise MissingState(
                f"{folder.state_dir}: the checkpoint {operator.found['checkpoint']!r} cannot be read from here, so "
                f"nobody knows whether batch {newest} is complete; give batch={newest} if it is"
            )
    return {
        shard: token
        for shard in shards
        if (token := _version(storages[shard], tokens[shard], upto, is_asked=batch is not None)) is not None
    }


def manifest_of(folder: StateFolder, operator: StoredOperator, shard: str, token: str) -> Manifest:
    """Reads a version. Raises MissingState if it has been deleted."""
    storage = folder.location.storage(operator.names(shard), folder.location.live, "read")
    try:
        return read_version(storage, token)
    except FileNotFoundError:
        raise MissingState(f"{storage.where(token)}: the version has been deleted meanwhile") from None


def _version(storage: Storage, tokens: list[str], upto: int, *, is_asked: bool) -> str | None:
    earlier = [token for token in tokens if 0 <= batch_of(token) <= upto]
    if not earlier:
        if tokens and is_asked and not _begins(storage, tokens):
            raise MissingState(
                f"{storage.where(tokens[0])}: this is the oldest version that is kept; give a later batch"
            )
        return None
    newest = batch_of(earlier[-1])
    those = [token for token in earlier if batch_of(token) == newest]
    if len(those) == 1:
        return those[0]
    for later in tokens:
        if batch_of(later) <= newest:
            continue
        try:
            manifest = read_version(storage, later)
        except FileNotFoundError:
            continue
        if named := {manifest.parent, *(past.token for past in manifest.history)}.intersection(those):
            return str(named.pop())
    raise MissingState(
        f"{storage.where(those[0])}: {len(those)} attempts made a version in batch {newest}, and only Spark knows "
        "which of them won; ask for an earlier batch, or use aion.read_state"
    )


def _begins(storage: Storage, tokens: list[str]) -> bool:
    """Returns whether the oldest version that is kept is the first that the shard has had."""
    try:
        return read_version(storage, tokens[0]).is_first
    except FileNotFoundError:
        return False


def _last_complete(folder: StateFolder, operator: StoredOperator) -> int | None:
    """Returns the last complete batch of the query, -1 if there is none, or None if its checkpoint cannot be read."""
    checkpoint = folder.checkpoint(operator.query, operator.place)
    if not checkpoint:
        return None
    try:
        with reaching(checkpoint) as (fs, path):
            if fs.get_file_info(f"{path}/metadata").type is pafs.FileType.NotFound:
                return None
            infos = fs.get_file_info(pafs.FileSelector(f"{path}/commits", allow_not_found=True))
    except StorageError:
        return None
    return max((int(info.base_name) for info in infos if info.base_name.isdecimal()), default=-1)
