"""The Python processes in which Spark runs functions of Aion.

Spark starts processes for each interpreter and environment that a function names. So Aion's functions name theirs, and
those of others run where they would without Aion.

With a local master, on Linux, the daemon that forks the workers of these functions has loaded what they need
(:mod:`aion.spark.tasks.preload`). Elsewhere it may start before it can find an Aion that the job brings along, and
libraries of macOS may not be used in a fork of a process that has loaded them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from aion.spark.session.sessions import is_remote, master

LOADS = "AION_LOADS"
"""The variable of the environment that says that the daemon of these processes loads what tasks need."""
_STARTUP = str(Path(__file__).parents[1] / "startup")
"""The folder of a module that Python imports when a process begins."""
_DAEMON, _PYTHON = "spark.python.daemon.module", "PYSPARK_PYTHON"
_turn = RLock()


@contextmanager
def of_aion(session: SparkSession) -> Iterator[None]:
    """Functions that Spark gets meanwhile run in processes of Aion. With Spark Connect, the server has its own."""
    if is_remote(session):
        yield
        return
    context = session.sparkContext
    with _turn:
        interpreter, environment = context.pythonExec, dict(context.environment)
        if _PYTHON not in os.environ:
            # It must find the same packages as this one.
            context.pythonExec = sys.executable
        folders = environment.get("PYTHONPATH", "")
        context.environment["PYTHONPATH"] = os.pathsep.join(filter(None, (_STARTUP, folders)))
        if _loads(session, context.pythonExec):
            context.environment[LOADS] = "1"
        try:
            yield
        finally:
            context.pythonExec = interpreter
            context.environment.clear()
            context.environment.update(environment)


def _loads(session: SparkSession, interpreter: str) -> bool:
    is_here = master(session).startswith("local") and interpreter == sys.executable
    return is_here and sys.platform == "linux" and not session.sparkContext._conf.contains(_DAEMON)


def in_arrow(df: DataFrame, function: Callable[[Iterator[Any]], Iterator[Any]], schema: StructType | str) -> DataFrame:
    """Returns what a function of Aion makes of the rows of a DataFrame."""
    with of_aion(df.sparkSession):
        return df.mapInArrow(function, schema)
