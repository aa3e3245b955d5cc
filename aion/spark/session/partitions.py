"""The batches of a checkpoint that only changed the number of its partitions (:mod:`aion.spark.api.rescale`)."""

from __future__ import annotations

import json
import logging

from aion.spark.session.checkpoint_files import CheckpointFiles, ReadableFiles

NOTE = "aion-rescaling.json"
"""The file of a checkpoint that says which batch is about to change the number of partitions."""
_PARTITIONS = "spark.sql.shuffle.partitions"
log = logging.getLogger(__name__)


def take_back(files: CheckpointFiles) -> None:
    """Takes back what an interrupted :func:`rescale` has begun in a checkpoint, if there is such a thing."""
    if not files.exists(NOTE):
        return
    batch = int(json.loads(files.read(NOTE))["batch"])
    if batch not in files.batches("commits"):
        files.delete(f"offsets/{batch}")
        log.warning("%s: a rescale was interrupted; the query keeps the partitions that it had", files.location)
    files.delete(NOTE)


def rescaled(files: ReadableFiles, commits: list[int]) -> tuple[int, int] | None:
    """Returns the first and the last of the newest batches if these only changed the number of partitions."""
    first = None
    for batch in reversed(commits[1:]):
        if batch - 1 not in commits or partitions_of(files, batch) == partitions_of(files, batch - 1):
            break
        first = batch
    return None if first is None else (first, commits[-1])


def partitions_of(files: ReadableFiles, batch: int) -> int:
    """Returns the number of partitions of a batch."""
    return int(files.metadata("offsets", batch)["conf"][_PARTITIONS])
