"""``fork``: a copy of a query's checkpoint and state, which goes on by itself beside the original.

The state of the copy begins as other names of the same files, where the place of the state can do that: hard links in a
local folder, and copies that an object store makes itself. So it takes seconds, and the original may go on meanwhile.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from aion.base.numbers import counted
from aion.errors import ConfigError
from aion.execute.files.zone_rules import FOLDER as ZONES
from aion.spark.api.alone import session_of
from aion.spark.session.checkpoint_files import CheckpointFiles
from aion.spark.session.rewound import version_of
from aion.spark.taking_over.tokens import tokens_of
from state_backends.files.location import LocalLocation, Location, RemoteLocation, locate, scratch
from state_backends.versions.lineage import Taking, find_version, has_made, home_of, operator_of, operators_of
from state_backends.versions.manifest import Identity, dump_operator


class Forked(NamedTuple):
    """What :func:`fork` has done.

    ``batch``: the last batch of the copy. ``shards``: how many shards of each operator it has, by its name.
    ``state_dir``: where its state is.
    """

    batch: int
    shards: Mapping[str, int]
    state_dir: str

    def lines(self, checkpoint: str) -> Iterator[str]:
        """Yields sentences that say it. ``checkpoint``: where the copy is."""
        shards = ", ".join(f"{counted(count, 'shard')} of {name!r}" for name, count in self.shards.items())
        yield f"{checkpoint} is the query as after batch {self.batch}, with {shards or 'no state of Aion'}."
        yield "Start a job with it that writes to other tables than the original:"
        yield f"  checkpointLocation    {checkpoint}"
        yield f"  spark.aion.state.dir  {self.state_dir}"


def fork(spark: SparkSession, checkpoint: str, new: str, *, state_dir: str, new_state_dir: str | None = None) -> Forked:
    """Copies a checkpoint and its state, as they are after the last complete batch. The query may run meanwhile.

    ``new``: the place of the new checkpoint, which must not exist. ``state_dir``: where the state is.
    ``new_state_dir``: where that of the copy is to be; by default it is in the same folder. Both must be folders, or
    places of one object store. Raises ConfigError with the reason if it is not possible.
    """
    files, target = CheckpointFiles(spark, checkpoint), CheckpointFiles(spark, new)
    if not files.exists("metadata") or not files.exists("offsets"):
        raise ConfigError(f"{checkpoint}: not the checkpoint of a streaming query; it has no metadata and no offsets")
    if target.exists():
        raise ConfigError(f"{new}: there is something already; give a place that does not exist")
    if f"{target.location}/".startswith(f"{files.location}/"):
        raise ConfigError(f"{new}: it would be inside of the checkpoint {checkpoint}; give another place")
    commits = files.batches("commits")
    if not commits:
        raise ConfigError(f"{checkpoint}: no batch of this query is complete, so there is nothing to copy")
    batch, place = commits[-1], new_state_dir or state_dir
    # Whole or not at all: a checkpoint without some of its files would begin again with nothing.
    made = CheckpointFiles(spark, f"{new.rstrip('/')}.aion-fork-{uuid.uuid4().hex[:8]}")
    try:
        _copy(files, made, "", batch)
        _set_places(made, files.location, target.location)
        named = tokens_of(spark, files, batch)
        with closing(locate(state_dir)) as here, closing(locate(place)) as there:
            _check_places(here, there, state_dir, place)
            shards = _take(here, there, files, target.location, named)
        target.take_the_place_of(made)
    except BaseException:
        made.delete("")
        raise
    return Forked(batch, shards, place)


def fork_alone(
    checkpoint: str,
    new: str,
    settings: Mapping[str, str],
    *,
    state_dir: str | None = None,
    new_state_dir: str | None = None,
) -> Forked:
    """Returns the same as :func:`fork`, in a session with these settings, which it makes and stops."""
    with session_of("fork", settings) as spark:
        return fork(spark, checkpoint, new, state_dir=state_dir or "aion-state", new_state_dir=new_state_dir)


_COPIED = ("metadata", "offsets", "commits", "sources", "state", ZONES)


def _copy(files: CheckpointFiles, made: CheckpointFiles, folder: str, batch: int) -> None:
    """Copies what belongs to the batches up to ``batch``. What is deleted meanwhile, no later batch needs."""
    for name in files.names(folder):
        path = f"{folder}/{name}" if folder else name
        if not folder and name not in _COPIED:
            continue
        if folder in ("offsets", "commits") and (not name.isdecimal() or int(name) > batch):
            continue
        if (version := version_of(name)) is not None and version > batch + 1:
            continue
        try:
            if files.is_folder(path):
                _copy(files, made, path, batch)
            else:
                made.copy_from(files, path)
        except Py4JJavaError:
            if files.exists(path):
                raise


def _set_places(made: CheckpointFiles, before: str, after: str) -> None:
    """Spark writes down where the schemas of its state are, with their whole paths: the copy gets its own."""
    for number in made.names("state"):
        for batch in made.batches(f"state/{number}/_metadata/v2"):
            name = f"state/{number}/_metadata/v2/{batch}"
            version, text = made.read(name).split("\n", 1)
            made.write(
                name, f"{version}\n{text.replace(json.dumps(before)[1:-1] + '/', json.dumps(after)[1:-1] + '/')}"
            )


def _check_places(here: Location, there: Location, place: str, new_place: str) -> None:
    """Raises ConfigError if files do not get from one place to the other without passing through this host."""
    match here, there:
        case (LocalLocation(), LocalLocation()):
            return
        case (RemoteLocation(), RemoteLocation()) if _store(place) == _store(new_place):
            return
    raise ConfigError(
        f"state: {new_place} and {place} are not in one file system or object store; copy the state folder with the "
        "tools of the store, and start the copy of the query with it"
    )


def _store(uri: str) -> tuple[str, str]:
    return uri.partition("://")[0], uri.partition("?")[2]


def _take(
    here: Location, there: Location, files: CheckpointFiles, checkpoint: str, named: list[dict[int, str]]
) -> dict[str, int]:
    """Gives the new checkpoint the versions that the old one names, before anything deletes them."""
    query, found = files.query, dict[str, int]()
    for name in operators_of(here, query, files.location):
        operator = operator_of(here, query, name, files.location)
        assert operator is not None
        if has_made(there, query, name, checkpoint):
            raise ConfigError(
                f"{checkpoint}: an earlier copy was at this place, and its state is still there; delete it with aion "
                "inspect STATE_DIR --forget --gone, or give another place"
            )
        for tokens in named:
            for shard, token in tokens.items():
                theirs = find_version(here, query, name, shard, token, scratch())
                if theirs is None:
                    continue
                identity = Identity(
                    query=query, operator=name, shard=shard, shards=operator["shards"], checkpoint=checkpoint,
                    definition=operator["definition"], ids=tuple(operator["ids"]),
                    key_types=tuple(operator["key_types"]),
                )  # fmt: skip
                ours = home_of(there, identity, scratch()).storage
                ours.claim(dump_operator(identity), first=False)
                Taking(theirs, ours).take(token)
                found[name] = found.get(name, 0) + 1
    if lost := sum(map(len, named)) - sum(found.values()):
        raise ConfigError(
            f"{files.location}: versions that it names are not there ({lost} of {sum(map(len, named))}); is this the "
            "query's state.dir?"
        )
    return found
