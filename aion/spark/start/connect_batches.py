"""Functions for ``foreachBatch`` with Spark Connect. They run in a Python process of the server."""

from __future__ import annotations

import json
from collections.abc import Callable

from pyspark.sql import DataFrame

from aion.spark.session.checkpoint_files import RemoteFiles
from aion.spark.session.query_settings import CHECKPOINT, RUNNING, TEMPORARY


class Batches:
    """A user's function, and what comes before it: the session of the query learns which batch it has."""

    def __init__(self, function: Callable[[DataFrame, int], None]) -> None:
        self._function = function
        self._query: str | None = None

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        session = batch.sparkSession
        checkpoint = session.conf.get(CHECKPOINT, None)
        if checkpoint is not None:
            run = str(session.session_id)  # Spark makes a session for each run
            if self._query is None:
                self._query = run if checkpoint == TEMPORARY else RemoteFiles(session, checkpoint).query
            session.conf.set(RUNNING, json.dumps([self._query, run, batch_id]))
        self._function(batch, batch_id)
