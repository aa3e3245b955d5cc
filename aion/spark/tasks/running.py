"""Which query and which batch a task works for, and where the checkpoint of the query is."""

from __future__ import annotations

import json
import time
from typing import Any, NamedTuple

from pyspark import TaskContext

from aion import errors
from aion.errors import AionError, ConfigError, StateError
from aion.spark.session.query_settings import BEGINS, CHECKPOINT, ENDS, EVERY, REFUSED, RUNNING, TEMPORARY


class Running(NamedTuple):
    """``query``: the id of the query. ``run``: identifies one run of it."""

    query: str
    run: str
    batch: int

    @classmethod
    def of(cls, context: TaskContext) -> Running:
        """Returns what a task works for.

        Spark runs a streaming query in a job group named by the run. With Spark Connect, a function for foreachBatch
        asks for rows in a thread that Spark has told nothing (:mod:`aion.spark.start.connect_batches`).
        """
        query = context.getLocalProperty("sql.streaming.queryId")
        if query is None and (said := context.getLocalProperty(RUNNING)) is not None:
            return cls(*json.loads(said))
        run = context.getLocalProperty("spark.jobGroup.id") or ""
        return cls(query or "no-query", run, int(context.getLocalProperty("streaming.sql.batchId") or "0"))


def is_first(context: TaskContext) -> bool:
    """Returns whether this is the first batch of a run that goes on with a checkpoint."""
    begins = context.getLocalProperty(BEGINS)
    return begins is not None and Running.of(context).batch == int(begins)


def next_start(context: TaskContext) -> tuple[float, float] | None:
    """Returns how often the query's trigger starts a batch, and when it does so next, in seconds from now.

    Spark's triggers start batches at multiples of the interval since 1970, and at once when one took longer than that.
    Returns None for a query whose batches start as soon as there are rows, and for one of Spark Connect.
    """
    said = context.getLocalProperty(EVERY)
    if said is None:
        return None
    every_s = int(said) / 1000
    return every_s, every_s - time.time() % every_s


def shows_all(context: TaskContext, batch: int) -> bool:
    """Returns whether a batch shows all late windows, because its run may end with it
    (:mod:`aion.spark.start.run_ends`).
    """
    ends = context.getLocalProperty(ENDS)
    return ends is not None and shows(json.loads(ends), batch)


def shows(ends: dict[str, Any], batch: int) -> bool:
    """Returns the same, from what ENDS says."""
    again: bool | None = ends["again"].get(str(batch))
    return again if again is not None else ends["from"] is not None and batch >= ends["from"]


def checkpoint_of(context: TaskContext) -> str:
    """Returns the qualified location of the checkpoint of a task's query.

    Raises StateError if it is not known, and another AionError if the driver has found that the query cannot run.
    """
    if (refused := context.getLocalProperty(REFUSED)) is not None:
        name, text = json.loads(refused)
        raise getattr(errors, name, AionError)(text)
    found = context.getLocalProperty(CHECKPOINT)
    if found is None:
        raise StateError(
            "the location of this query's checkpoint is not known; start the query in the session in which "
            "aion.windowed was called, and see the driver's log"
        )
    return str(found)


def lasting_checkpoint_of(context: TaskContext) -> str:
    """Returns the same for those that write into the checkpoint. Raises ConfigError if its folder is not known."""
    found = checkpoint_of(context)
    if found == TEMPORARY:
        raise ConfigError(
            "this query keeps something beside its checkpoint, and with Spark Connect a temporary one is not known; "
            "set the option checkpointLocation of the writer"
        )
    return found
