"""``rescale``: gives a stopped query another number of partitions. Its shards and their files stay where they are.

Spark's own tool moves its tokens: it adds a batch to the checkpoint that reads nothing. A note in the checkpoint says
that this has begun. If it is interrupted, the note is found when the query starts or is rescaled again, and the batch
is taken back: so there are the old partitions or the new ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from aion.base.numbers import counted
from aion.errors import ConfigError
from aion.spark.api.alone import session_of
from aion.spark.session.checkpoint_files import CheckpointFiles
from aion.spark.session.partitions import NOTE, partitions_of, take_back
from state_backends.files.location import locate
from state_backends.versions.lineage import operators_of


class Rescaled(NamedTuple):
    """What :func:`rescale` has done. ``shards``: of each operator, by its name."""

    before: int
    after: int
    shards: dict[str, int]

    def line(self) -> str:
        """Returns a sentence that says it."""
        shards = ", ".join(f"{name!r} has {counted(count, 'shard')}" for name, count in self.shards.items())
        if self.before == self.after:
            return f"The query has {counted(self.after, 'partition')} already, so nothing was done; {shards}."
        return (
            f"{self.before} -> {counted(self.after, 'partition')}; {shards}. Start the job as before, and it goes on."
        )


def rescale(spark: SparkSession, checkpoint: str, partitions: int, *, state_dir: str) -> Rescaled:
    """Gives a stopped query another number of partitions: as many tasks as can work on its shards at once.

    ``state_dir``: where its state is. Raises ConfigError with the reason if it is not possible.
    """
    if isinstance(partitions, bool) or not isinstance(partitions, int) or partitions < 1:
        raise ConfigError(f"partitions: {partitions!r} is not a number of partitions; give 1 or more")
    files = CheckpointFiles(spark, checkpoint)
    if not files.exists("metadata") or not files.exists("offsets"):
        raise ConfigError(f"{checkpoint}: not the checkpoint of a streaming query; it has no metadata and no offsets")
    take_back(files)
    before = _partitions(files)
    query = files.query
    shards = operators_of(locate(state_dir), query, files.location)
    if not shards:
        raise ConfigError(f"{state_dir}: there is no state of the query {query}; give the folder of its state.dir")
    least = min(shards.values())
    if partitions > least:
        raise ConfigError(
            f"partitions: {partitions} is more than the {least} shards of the query, so some would have nothing to do; "
            f"give {least} or less. The first start of a query decides how many shards it has: state.shards"
        )
    if partitions != before:
        _move(spark, files, partitions)
    return Rescaled(before, partitions, shards)


def rescale_alone(
    checkpoint: str, partitions: int, settings: Mapping[str, str], *, state_dir: str | None = None
) -> Rescaled:
    """Returns the same as :func:`rescale`, in a session with these settings, which it makes and stops."""
    with session_of("rescale", settings) as spark:
        return rescale(spark, checkpoint, partitions, state_dir=state_dir or "aion-state")


def _partitions(files: CheckpointFiles) -> int:
    """Returns the number of partitions. Raises ConfigError if the last batch is not complete."""
    offsets, commits = files.batches("offsets"), files.batches("commits")
    if not offsets or offsets[-1] not in commits:
        planned = f"batch {offsets[-1]} has begun and is not complete" if offsets else "no batch is complete"
        raise ConfigError(
            f"{files.location}: {planned}, and only the job can complete it; run the job once with "
            ".trigger(availableNow=True), stop it, and rescale then"
        )
    return partitions_of(files, offsets[-1])


def _move(spark: SparkSession, files: CheckpointFiles, partitions: int) -> None:
    manager: Any = getattr(spark, "_streamingCheckpointManager", None)
    if manager is None:
        raise ConfigError("this pyspark cannot move the state of a query to other partitions; use pyspark 4.2 or later")
    files.write(f".{NOTE}", json.dumps({"batch": files.batches("offsets")[-1] + 1, "partitions": partitions}))
    files.move(f".{NOTE}", NOTE)
    try:
        manager.repartition(files.location, partitions)
    except (PySparkException, Py4JJavaError) as error:
        take_back(files)
        first, *_ = str(getattr(error, "java_exception", error)).splitlines()
        raise ConfigError(f"{files.location}: Spark cannot move the state to other partitions: {first}") from error
    files.delete(NOTE)
