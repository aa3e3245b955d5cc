"""The last batch of a run that ends by itself (``availableNow``): it shows late windows whose triggers wait.

Spark does not say which batch is the last one, and has no batch after it if the watermark stays. Only how many files
are left can be counted before the first batch, with Spark's own class. Files that come at that moment may be one batch
more, after which late windows wait for the next run. For other sources, each batch of the run may be the last one.
So the answer is the number of a batch: it and those after it show all late windows.

A batch that runs again in another run must show the same, because a sink may have its rows already. Spark's logs do not
say what it has shown. So a run that ends leaves a note in the checkpoint, and the next run decides as it says about the
batch that it repeats. A client of Spark Connect can leave none.
"""

from __future__ import annotations

import json
import logging
import math
from typing import Any

from pyspark import SparkContext

from aion.spark.session.checkpoint_files import CheckpointFiles
from aion.spark.tasks.running import shows
from state_backends.thresholds import threshold

NOTE = "aion-ends.json"
"""The file of a checkpoint that says which batches of its last run show all late windows."""
_TRIGGERS = ("AvailableNowTrigger", "OneTimeTrigger")
_OF_FILES = "maxfilespertrigger"
_OTHERS = ("maxbytespertrigger", "filenameonly")
_MOST = threshold(100_000, 100)
"""More files are not counted: that would take longer than a batch."""
_NEVER = 2**63 - 1
"""No batch has this number."""
log = logging.getLogger(__name__)


def decide(execution: Any, files: CheckpointFiles, commits: list[int]) -> str | None:
    """Returns which batches of a run show all late windows, for :func:`aion.spark.tasks.running.shows_all`, or None if
    no batch does. ``execution``: Spark's, before its first batch. ``files``: of its checkpoint. ``commits``: the
    batches that are complete. Notes the answer in the checkpoint.
    """
    last = _shows_all_from(execution)
    begun = max(files.batches("offsets"), default=-1)
    noted = json.loads(files.read(NOTE)) if files.exists(NOTE) else None
    again = {}
    if begun >= 0 and begun not in commits:
        again[str(begun)] = noted is not None and shows(noted, begun)
    found = {"from": last, "again": again}
    shows_none = last is None and not any(again.values())
    if not shows_none:
        files.write(f".{NOTE}", json.dumps(found))
    files.delete(NOTE)
    if shows_none:
        return None
    files.move(f".{NOTE}", NOTE)
    return json.dumps(found)


def quiet(begins: int | None, ends: str | None) -> str:
    """Returns the first and the last number of batches that neither begin nor may end a run, for QUIET.

    ``begins``: the first batch of the run, or None for the first one of the query. ``ends``: what :func:`decide` has
    returned.
    """
    last = None if ends is None else json.loads(ends)["from"]
    return f"{0 if begins is None else begins + 1} {_NEVER if last is None else last - 1}"


def interval_ms(execution: Any) -> int:
    """Returns how often a query's trigger starts a batch, in milliseconds. 0: as soon as there are rows."""
    trigger = execution.trigger()
    return int(trigger.intervalMs()) if _name(trigger) == "ProcessingTimeTrigger" else 0


def _name(trigger: Any) -> str:
    return str(trigger.getClass().getSimpleName()).rstrip("$")


def _shows_all_from(execution: Any) -> int | None:
    """Returns the batch from which on a run shows all late windows, or None if the run does not end by itself.

    ``execution``: Spark's, before its first batch.
    """
    if _name(execution.trigger()) not in _TRIGGERS:
        return None
    planned = execution.offsetLog().getLatestBatchId()
    next_batch = int(planned.get()) + 1 if planned.isDefined() else 0
    try:
        left = _batches_left(execution)
    except Exception as error:
        log.debug("the files that are left could not be counted: %s", error)
        left = None
    return 0 if left is None else next_batch + left - 1


def _batches_left(execution: Any) -> int | None:
    """Returns how many batches of files the query has not read, or None if it has other sources, or limits."""
    leaves = execution.analyzedPlan().collectLeaves()
    streams = [leaf for leaf in map(leaves.apply, range(leaves.size())) if leaf.isStreaming()]
    if len(streams) != 1 or streams[0].getClass().getSimpleName() != "StreamingRelation":
        return None
    source = streams[0].dataSource()
    options = {str(name).lower(): value for name, value in _items(source.options())}
    if _OF_FILES not in options or any(other in options for other in _OTHERS):
        return None
    of_files = source.createSource(f"{execution.resolvedCheckpointRoot()}/sources/0")
    try:
        if of_files.getClass().getSimpleName() != "FileStreamSource":
            return None
        of_files.prepareForTriggerAvailableNow()
        found, seen = _field(of_files, "allFilesForTriggerAvailableNow"), _field(of_files, "seenFiles")
        if found.size() > _MOST or seen.size() > _MOST:
            return None
        jvm: Any = SparkContext._jvm
        oldest = int(_field(seen, "lastPurgeTimestamp"))
        before = set(jvm.java.lang.String.join("\n", _field(seen, "map").keySet()).splitlines())
        entries = [entry.partition("(")[2].rstrip(")").rsplit(",", 2) for entry in found.mkString("\n").splitlines()]
        new = [path for path, _, time_ms in entries if int(time_ms) >= oldest and path not in before]
        return math.ceil(len(new) / int(options[_OF_FILES]))
    finally:
        of_files.stop()


def _field(instance: Any, name: str) -> Any:
    field = instance.getClass().getDeclaredField(name)
    field.setAccessible(True)
    return field.get(instance)


def _items(options: Any) -> list[tuple[str, str]]:
    pairs = options.toSeq()
    return [(pair._1(), pair._2()) for pair in map(pairs.apply, range(pairs.size()))]
