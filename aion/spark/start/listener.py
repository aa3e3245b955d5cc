"""Passes the location of a query's checkpoint to its tasks, and tells the state server of this host when a query ends.

A copied query has the same id as the original; only the location of the checkpoint distinguishes them
(state_backends/versions/lineage.py). The driver learns the location when the query starts: Spark calls listeners before
the first batch. It reaches each task as a setting of the query's own session.

Only the driver knows that a query has ended. The state server on the driver's host then releases what the query held.
State servers on other hosts are not told; they release it after some time without use (docs/operate/restarts.md).

A heartbeat in a query asks the driver how far the query is (:mod:`aion.spark.start.positions`).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQueryListener

from aion.core.heartbeat import RUN
from aion.errors import WatermarkError
from aion.spark.session import failures, partials, upstream
from aion.spark.session.plans import node_of
from aion.spark.session.query_settings import CHECKPOINT
from aion.spark.session.sessions import application, is_remote
from aion.spark.start import checks, connect, positions, progress
from state_backends.server.server_folder import note_end, runtime_dir

_LEAVING_MS = 2000
log = logging.getLogger(__name__)


class _Starts(StreamingQueryListener):
    """A listener that is called when a query of one session starts or ends.

    The JVM calls it directly. Spark's own wrapper would convert each event to Python objects, and ask the JVM for each
    field of a batch's progress; that can take longer than the batch.
    """

    class Java:
        implements = ("org.apache.spark.sql.streaming.PythonStreamingQueryListener",)

    def __init__(self, spark: SparkSession) -> None:
        self._session = spark
        self._servers = runtime_dir(application(spark))

    @cached_property
    def _jlistener(self) -> Any:  # the object that Spark adds and removes
        assert SparkContext._jvm is not None
        return SparkContext._jvm.org.apache.spark.sql.streaming.PythonStreamingQueryListenerWrapper(self)

    def onQueryStarted(self, event: Any) -> None:
        try:
            query = self._session.streams.get(event.id().toString())
            execution = query._jsq.streamingQuery()
            conf = execution.sparkSessionForStream().conf()
            plan = node_of(execution.analyzedPlan())
            smallest = conf.get("spark.sql.streaming.multipleWatermarkPolicy") == "min"
            if smallest and upstream.waits_for_itself(plan):
                checks.refuse(event.runId().toString(), WatermarkError(upstream.WAITS), conf)
            checkpoint = execution.resolvedCheckpointRoot()
            conf.set(CHECKPOINT, checkpoint)
            checks.look(self._session, execution, plan, event.runId().toString(), checkpoint, conf)
            if any(node.source == RUN for node in plan):
                positions.add(execution)
        except Exception:
            log.exception("the location of a query's checkpoint could not be found; the tasks of the query will fail")

    def onQueryProgress(self, event: Any) -> None:
        try:
            partials.decide()
        except Exception:
            log.exception("whether Spark groups events could not be decided; it goes on as before")
        if progress.log.isEnabledFor(logging.INFO):  # it asks the JVM several times
            try:
                progress.log_batch(event.progress())
            except Exception:
                log.exception("the progress of a query could not be read")

    def onQueryIdle(self, event: Any) -> None:
        pass

    def onQueryTerminated(self, event: Any) -> None:
        try:
            note_end(self._servers, event.runId().toString())
        except Exception:
            log.exception("the state server was not told that a query ended; it keeps the query's state for some time")

    def leave(self) -> None:
        """Removes the listener at exit: Python ends before the JVM, which must not call it after that."""
        with contextlib.suppress(Exception):  # the session was stopped
            # A call that has begun would fail, and Spark would write its error to the log.
            self._session.sparkContext._jsc.sc().listenerBus().waitUntilEmpty(_LEAVING_MS)
        with contextlib.suppress(Exception):
            self._session.streams.removeListener(self)


_watched: WeakKeyDictionary[SparkSession, _Starts] = WeakKeyDictionary()


def watch(spark: SparkSession) -> None:
    """Makes the location of the checkpoint known to the tasks of all queries that start in this session from now on."""
    if is_remote(spark):
        connect.watch(spark)
        return
    checks.install()
    failures.install()
    if spark not in _watched:
        _watched[spark] = listener = _Starts(spark)
        spark.streams.addListener(listener)
        atexit.register(listener.leave)


def watches(spark: SparkSession) -> bool:
    """Returns whether an operator has been made in this session."""
    return spark in _watched
