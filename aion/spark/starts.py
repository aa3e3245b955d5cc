"""Tells the tasks of a query where its checkpoint lies, and the state server of this host that a query ended.

The location is what tells a query from its copy: both have one id (state_backends/versions/lineage.py). It is known
when the query starts, on the driver, where Spark calls listeners before the first batch. Settings of the query's own
session travel with each of its tasks.

Only the driver knows that no batch will come any more. A state server on its host lets go of what the query held. On
other hosts nobody hears of it, and time shows it (docs/operating.md).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from pyspark import SparkContext, TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQueryListener

from aion.errors import StateError
from state_backends.server.server_folder import note_end, runtime_dir

_CHECKPOINT = "spark.sql.streaming.aion.checkpoint"
log = logging.getLogger(__name__)


class _Starts(StreamingQueryListener):
    """Hears of each query that starts or ends in one session.

    From the JVM directly: Spark's own wrapper makes Python objects of each event first, and asks the JVM for each field
    of the progress of a batch, which takes longer than many a batch.
    """

    class Java:
        implements = ("org.apache.spark.sql.streaming.PythonStreamingQueryListener",)

    def __init__(self, spark: SparkSession) -> None:
        self._session = spark
        self._servers = runtime_dir(spark.sparkContext.applicationId)

    @cached_property
    def _jlistener(self) -> Any:  # what Spark adds and removes
        assert SparkContext._jvm is not None
        return SparkContext._jvm.org.apache.spark.sql.streaming.PythonStreamingQueryListenerWrapper(self)

    def onQueryStarted(self, event: Any) -> None:
        try:
            query = self._session.streams.get(event.id().toString())
            execution = query._jsq.streamingQuery()
            execution.sparkSessionForStream().conf().set(_CHECKPOINT, execution.resolvedCheckpointRoot())
        except Exception:
            log.exception("where the checkpoint of a query lies could not be found out; its tasks will say so")

    def onQueryProgress(self, event: Any) -> None:
        pass

    def onQueryIdle(self, event: Any) -> None:
        pass

    def onQueryTerminated(self, event: Any) -> None:
        try:
            note_end(self._servers, event.runId().toString())
        except Exception:
            log.exception("the state server of this host keeps what a query held that ended, for some time")

    def leave(self) -> None:
        """Python ends before the JVM, which must not call it any more then."""
        with contextlib.suppress(Exception):  # the session was stopped
            self._session.streams.removeListener(self)


_watched: WeakKeyDictionary[SparkSession, _Starts] = WeakKeyDictionary()


def watch(spark: SparkSession) -> None:
    """From now on tasks of queries that start in this session know where their checkpoint lies."""
    if spark not in _watched:
        _watched[spark] = listener = _Starts(spark)
        spark.streams.addListener(listener)
        atexit.register(listener.leave)


def checkpoint_of(context: TaskContext) -> str:
    """The location of the checkpoint of a task's query, as Spark qualifies it. Raises StateError."""
    found = context.getLocalProperty(_CHECKPOINT)
    if found is None:
        raise StateError(
            "this query did not tell its tasks where its checkpoint lies; start it in the session in which "
            "aion.windowed was called, and see the driver's log"
        )
    return str(found)
