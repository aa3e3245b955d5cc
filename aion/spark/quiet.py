"""Keeps off the standard error what Spark says there of each stateful query, though nothing is wrong.

- Whenever a query starts, Spark makes its stateful operator once in a process of its own, only to learn the schema of
  its state. The module that this process runs prints each step. Spark has no setting for it, and no other way into the
  process than its environment. So the environment names a folder with a ``sitecustomize``, which Python imports first.
- The JVM warns of each state variable that has no value yet. In the first batch, no shard has one.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

_STARTUP = str(Path(__file__).parent / "startup")
_WARNS = "org.apache.spark.sql.execution.python.streaming.TransformWithStateInPySparkStateServer"


def quiet(session: SparkSession) -> None:
    """Makes the queries of a session's context quiet. A log level that the user has set stays."""
    context = session.sparkContext
    folders = context.environment.get("PYTHONPATH", "")
    if _STARTUP not in folders.split(os.pathsep):
        context.environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_STARTUP, folders)))
    with contextlib.suppress(Py4JError, TypeError):  # Spark logs with something else than log4j
        log4j = context._jvm.org.apache.logging.log4j
        if not log4j.LogManager.getContext(False).getConfiguration().getLoggers().containsKey(_WARNS):
            log4j.core.config.Configurator.setLevel(_WARNS, log4j.Level.ERROR)
