"""``rewind``: sets a stopped query back to the end of an earlier batch, together with the tables that it writes.

What came since is read again. The state is there: its versions are kept as long as Spark keeps batches, and the
checkpoint names the version of a batch. So going back is to delete later versions, and to cut Spark's logs after the
tables have gone back.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from typing import NamedTuple, Protocol

from pyspark.sql import SparkSession

from aion.base.numbers import counted
from aion.base.time import format_instant, instant_us
from aion.core.query.sink_notes import FOLDER, Note, notes_of
from aion.errors import ConfigError
from aion.spark.api.alone import session_of
from aion.spark.session.checkpoint_files import CheckpointFiles
from aion.spark.session.partitions import take_back
from aion.spark.session.rewound import Rewound, begin, begun, complete
from aion.spark.taking_over.tokens import tokens_of
from state_backends.files.location import Location, locate, scratch
from state_backends.files.remote import storage_errors
from state_backends.versions.audit import StateFolder
from state_backends.versions.lineage import find_version, operators_of


class Tables(Protocol):
    """The tables of a query (:class:`aion.sinks.going_back.Tables`, which this package does not know)."""

    def reasons(self) -> Mapping[str, str]:
        """Returns why tables cannot go back, by table."""

    def go_back(self, *, besides: Container[str]) -> None:
        """Takes all tables back but some."""


TablesOf = Callable[[Sequence[Note], str, str, int, str], Tables]
"""Takes the notes of a query, its id, its checkpoint, the batch to go back to, and a name for going back."""


class Rewinding(NamedTuple):
    """What :func:`rewind` has done, or would do.

    ``before``, ``to``: the last batch before and after it. ``shards``: how many shards of each operator go back, by its
    name. ``tables``: those that go back, or have nothing to take back. ``left``: why other tables do not go back.
    """

    before: int
    to: int
    shards: Mapping[str, int]
    tables: Sequence[str]
    left: Mapping[str, str]

    def lines(self, *, would: bool) -> Iterator[str]:
        """Yields sentences that say it. ``would``: nothing has been done."""
        goes, is_ = ("would go", "would be") if would else ("goes", "is")
        yield f"The query {goes} back from batch {self.before} to batch {self.to}."
        for name, count in self.shards.items():
            yield f"The state of {name!r} {is_} as after batch {self.to}, in {counted(count, 'shard')}."
        for table in self.tables:
            yield f"The table {table} {is_} as after batch {self.to}."
        for table, reason in self.left.items():
            yield f"The table {table} stays as it is: {reason}."
        if not would:
            yield "Start the job as before: it reads again what came since."


def rewind(
    spark: SparkSession, checkpoint: str, to: int | str | datetime, *, state_dir: str, tables_of: TablesOf,
    leave_tables: bool = False, dry_run: bool = False,
) -> Rewinding:  # fmt: skip
    """Sets a stopped query back: its checkpoint, its state and its tables are again as after an earlier batch.

    ``to``: the number of that batch, or an instant: then it is the last batch that began at or before it. An instant
    without a zone is one of UTC. ``state_dir``: where the query's state is. ``tables_of``: makes the tables of its
    notes. ``leave_tables``: tables that cannot go back stay as they are; otherwise nothing is done if there is one. A
    table with ``undo=`` that cannot be reached from here goes back when its sink gets its next batch. ``dry_run``:
    changes nothing.

    Raises ConfigError with the reason if it is not possible. If it is interrupted, the query's next start completes it.
    """
    files = CheckpointFiles(spark, checkpoint)
    if not files.exists("metadata") or not files.exists("offsets"):
        raise ConfigError(f"{checkpoint}: not the checkpoint of a streaming query; it has no metadata and no offsets")
    query = files.query
    if any(str(active.id) == query for active in spark.streams.active):
        raise ConfigError(f"{checkpoint}: its query is running; stop it first")
    if not dry_run:
        take_back(files)
    unfinished = begun(files)
    rewound = _chosen(files, to) if unfinished is None else unfinished
    if unfinished is not None and _number(files, to) != unfinished.to:
        raise ConfigError(
            f"{checkpoint}: going back to batch {unfinished.to} was interrupted; complete it with "
            f"--to {unfinished.to}, or start the query, which completes it"
        )
    shards = _shards(spark, files, rewound.to, state_dir)
    notes = notes_of(files.read(f"{FOLDER}/{name}") for name in files.names(FOLDER))
    tables = tables_of(notes, query, files.location, rewound.to, rewound.id)
    left = tables.reasons()
    found = Rewinding(rewound.before, rewound.to, shards, [t for t in map(str, notes) if t not in left], left)
    if left and not leave_tables and not dry_run:
        said = "".join(f"\n  {table}: {reason}" for table, reason in left.items())
        raise ConfigError(
            f"{checkpoint}: nothing was changed, because these tables cannot go back; --leave-tables goes back without "
            f"them{said}"
        )
    if dry_run:
        return found
    if unfinished is None:
        begin(files, rewound)
    if shards:
        with closing(StateFolder(state_dir)) as folder, storage_errors(state_dir):
            folder.undo(query, files.location, rewound.to)
    tables.go_back(besides=left)
    complete(files, rewound)
    if later := [batch for batch in files.batches("offsets") if batch > rewound.to]:
        raise ConfigError(
            f"{checkpoint}: batch {later[0]} came meanwhile, so the query is running; stop it, and go back again"
        )
    return found


def rewind_alone(
    checkpoint: str,
    to: int | str,
    settings: Mapping[str, str],
    *,
    tables_of: TablesOf,
    state_dir: str | None = None,
    leave_tables: bool = False,
    dry_run: bool = False,
) -> Rewinding:
    """Returns the same as :func:`rewind`, in a session with these settings, which it makes and stops."""
    with session_of("rewind", settings) as spark:
        return rewind(
            spark, checkpoint, to, state_dir=state_dir or "aion-state", tables_of=tables_of,
            leave_tables=leave_tables, dry_run=dry_run,
        )  # fmt: skip


def _chosen(files: CheckpointFiles, to: int | str | datetime) -> Rewound:
    batch, kept = _number(files, to), _kept(files)
    if batch not in kept:
        there = f"{kept[0]} to {kept[-1]}" if len(kept) > 1 else str(*kept)
        raise ConfigError(
            f"{files.location}: there is no batch {batch} to go back to; the checkpoint has the batches {there}. Spark "
            "keeps spark.sql.streaming.minBatchesToRetain of them"
        )
    return Rewound(batch, max(files.batches("offsets")), uuid.uuid4().hex[:12])


def _kept(files: CheckpointFiles) -> list[int]:
    """Returns the batches after which Spark can go on: it also reads the entry before the last one."""
    offsets, commits = set(files.batches("offsets")), files.batches("commits")
    kept = [batch for batch in commits if batch in offsets and (batch == 0 or batch - 1 in offsets)]
    if not kept:
        raise ConfigError(f"{files.location}: no batch of this query is complete, so there is nothing to go back to")
    return kept


def _number(files: CheckpointFiles, to: int | str | datetime) -> int:
    """Returns the batch that is meant. Raises ConfigError."""
    if isinstance(to, bool) or not isinstance(to, int | str | datetime):
        raise ConfigError(f"to: {to!r} is neither a batch nor an instant")
    if isinstance(to, str) and to.strip().isdecimal():
        to = int(to)
    if isinstance(to, int):
        return to
    try:
        at_us = instant_us(datetime.fromisoformat(to.strip()) if isinstance(to, str) else to)
    except ValueError as error:
        raise ConfigError(
            f"to: {to!r} is neither the number of a batch nor an instant like 2026-11-28T09:30:00Z"
        ) from error
    begins = {batch: 1000 * int(files.metadata("offsets", batch)["batchTimestampMs"]) for batch in _kept(files)}
    if earlier := [batch for batch, begin_us in begins.items() if begin_us <= at_us]:
        return max(earlier)
    first = min(begins)
    raise ConfigError(
        f"to: no batch that is kept began at or before {format_instant(at_us)}; the first one, {first}, began at "
        f"{format_instant(begins[first])}"
    )


def _shards(spark: SparkSession, files: CheckpointFiles, batch: int, state_dir: str) -> dict[str, int]:
    """Returns how many shards of each operator have a version after a batch. Raises ConfigError if one is missing."""
    named = tokens_of(spark, files, batch)
    location = locate(state_dir)
    try:
        return versions_of(location, files, named, state_dir, batch)
    finally:
        location.close()


def versions_of(
    location: Location, files: CheckpointFiles, named: Sequence[Mapping[int, str]], place: str, batch: int
) -> dict[str, int]:
    """Returns how many of the versions that a checkpoint names each operator has. Raises ConfigError if one is missing.

    ``named``: the versions of each operator with some, by shard.
    """
    query, found = files.query, dict[str, int]()
    names = operators_of(location, query, files.location)
    for tokens in named:
        missing = list(tokens.items())
        for name in names:
            left = [(s, t) for s, t in missing if find_version(location, query, name, s, t, scratch()) is None]
            if len(left) < len(missing):
                found[name] = len(missing) - len(left)
            missing = left
        if missing:
            shard, token = missing[0]
            raise ConfigError(
                f"{place}: version {token} of shard {shard} is not there, which the checkpoint names after batch "
                f"{batch}. Versions are kept for spark.sql.streaming.minBatchesToRetain batches; is this the "
                "query's state.dir?"
            )
    return found
