"""Which query and which batch a task works for."""

from __future__ import annotations

import json
from typing import NamedTuple

from pyspark import TaskContext

from aion.spark.query_settings import RUNNING


class Running(NamedTuple):
    """``query``: the id of the query. ``run``: identifies one run of it."""

    query: str
    run: str
    batch: int

    @classmethod
    def of(cls, context: TaskContext) -> Running:
        """Returns what a task works for.

        Spark runs a streaming query in a job group named by the run. With Spark Connect, a function for foreachBatch
        asks for rows in a thread that Spark has told nothing (:mod:`aion.spark.remote_batches`).
        """
        query = context.getLocalProperty("sql.streaming.queryId")
        if query is None and (said := context.getLocalProperty(RUNNING)) is not None:
            return cls(*json.loads(said))
        run = context.getLocalProperty("spark.jobGroup.id") or ""
        return cls(query or "no-query", run, int(context.getLocalProperty("streaming.sql.batchId") or "0"))
