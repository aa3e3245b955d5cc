"""What a shard reads when it is opened, besides its version: whose state it is, and which older versions are kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

from state_backends.files.names import MANIFEST, OPERATOR
from state_backends.files.storage import Storage
from state_backends.format.errors import CorruptState, ForeignState, FormatError, MissingState, StateError
from state_backends.versions.lineage import is_taken, newest_versions, read_version
from state_backends.versions.manifest import (
    Identity,
    Manifest,
    Past,
    check_kept,
    check_operator,
    dump_operator,
    load_operator,
)
from state_backends.versions.retention import batch_of, floor_of

log = logging.getLogger(__name__)


def claim(
    storage: Storage, identity: Identity, shards: Callable[[], Iterable[Storage]], batch: int, *, begins: bool
) -> None:
    """Compares a shard with ``operator.json``, which the operator's shards share. Writes it if it is missing.

    ``shards``: the storages of the operator's shards. ``batch``: the one at work. ``begins``: the shard has no version.
    Until the first batch is complete, the definition may still change. Raises ForeignState.
    """
    found, own = storage.owner(), dump_operator(identity)
    if found is None:
        found = storage.claim(own, first=True, batch=max(batch, 0))
    if found == own:
        return
    where = f"{OPERATOR} of operator {identity.operator!r}"
    if not begins or batch != 0:
        operator = load_operator(found, where)
        check = partial(check_operator, wanted=identity, state=f"the state of {where}")
        check_kept(operator, lambda: newest_versions(shards(), batch), check)
        if operator["checkpoint"] != identity.checkpoint:
            raise ForeignState(
                f"the state of {where} is used by the query with the checkpoint {operator['checkpoint']}, not by this "
                f"one with {identity.checkpoint}; start again, and it gets a folder of its own"
            )
    storage.claim(own, first=False, batch=max(batch, 0))


def check_begins(storage: Storage, identity: Identity, committed: int, *, asked: bool = False) -> bool:
    """Checks that a shard that is opened without a version has never had one. Raises CorruptState. Returns whether
    there are versions, which may be what failed attempts left.

    ``committed``: the last batch that Spark has committed. A version up to it proves that Spark has kept a token of the
    shard, if one of these is true:

    - It has a history: whoever made it was handed the token of the version before.
    - ``asked``: in the first batch of each run, each shard is opened, and gets a version if it finds others. So what
      the runs before have left is older than a token. And if an attempt of this run had rows for the shard, so had the
      one that took its place. A version that was taken from another lineage proves nothing: the checkpoint may have
      been copied from a third one, which has no token.

    Versions of later batches prove nothing: the checkpoint may have been set back to an older batch.
    """
    tokens = sorted(n.removesuffix(MANIFEST) for n in storage.listing()[0] if n.endswith(MANIFEST))
    for token in tokens:
        if not 0 <= batch_of(token) <= committed:
            continue
        try:
            manifest = read_version(storage, token)
        except (CorruptState, FormatError, FileNotFoundError):
            continue
        if manifest.history or (asked and not is_taken(manifest)):
            said = f" from version {manifest.history[-1].token}" if manifest.history else ""
            raise CorruptState(
                f"Spark's checkpoint names no version of shard {identity.shard} of operator {identity.operator!r}, but "
                f"it has named one: batch {batch_of(token)} made {storage.where(token)}{said}. The shard would begin "
                "again with nothing. Was the operator changed by something that keeps state of its own around it? "
                "Start the query as it ran before, or with a new checkpoint. If the checkpoint is right and the shard "
                "had no events yet, move the manifests in that folder elsewhere"
            )
    return bool(tokens)


def older(storage: Storage, manifest: Manifest | None, keep: int) -> tuple[list[Past], int]:
    """Returns the kept versions before a version, oldest first, and a floor: see :func:`floor_of`.

    ``keep``: how many are kept, with this one. The manifest lists them all, unless the history is longer than one
    manifest lists, or more versions are kept now than when it was written. Then the oldest version that it lists names
    those before.
    """
    if manifest is None:
        return [], -1
    past, first = list(manifest.history), manifest
    while len(past) < keep - 1 and first.history:
        try:
            first = read_version(storage, first.history[0].token)
            past = [*first.history, *past]
        except FileNotFoundError:
            break  # deleted, and so are all before it
        except (CorruptState, FormatError) as error:
            log.warning("an older version of shard %d cannot be read: %s", manifest.identity.shard, error)
            return past, floor_of(past) if past else batch_of(manifest.token)
    return past[-(keep - 1) :], -1


def not_found(storage: Storage, token: str, identity: Identity, keep: int, *, has_lineages: bool) -> StateError:
    """Returns the error for a version that Spark asks for and that does not exist. It names the likely reason.

    It is CorruptState only if other versions of the shard exist.
    """
    text = (
        f"Spark asks for version {token} of shard {identity.shard} of operator {identity.operator!r}, "
        f"but {storage.where(token)} does not exist"
    )
    there = [int(n[:10]) for n in storage.listing()[0] if n.endswith(MANIFEST) and n[:10].isdecimal()]
    if not there:
        if has_lineages:
            text += ", and no other lineage of the query has this version. Was the checkpoint copied long ago?"
        return MissingState(text)
    batch = token.partition("-")[0]
    if batch.isdecimal() and int(batch) < min(there):
        text += (
            f". The checkpoint is at batch {int(batch)}, but only batches {min(there)} to {max(there)} are kept "
            "here: was it restored from a backup, or copied long ago? State is kept for "
            f"spark.sql.streaming.minBatchesToRetain batches, {keep - 1}"
        )
    else:
        text += (
            ". If the query uses the result of this operator twice, its state was written twice: use it once, and "
            "take it apart in foreachBatch after batch.persist()"
        )
    return CorruptState(text)
