"""Keeps off the standard error what Spark says there of each stateful query, though nothing is wrong.

What the processes of Aion's functions would print is kept off in them (:mod:`aion.spark.session.workers`).

- The JVM warns of each state variable that has no value yet. In the first batch, no shard has one.
- The JVM writes an error of a task several times for each attempt, with all calls inside Spark. An error of Aion says
  in its first line what to do. So the others are written once, and the calls not at all. If the program does not use
  Spark's default configuration of the log, it stays as it is.
"""

from __future__ import annotations

import contextlib
from typing import Any

from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from aion.spark.session.undo import note_change

_ERROR = r"(thrown from the Python worker: (?:aion|state_backends)[.]"
_REST = rf"{_ERROR}[^\n]*\n).*"
"""A regular expression of Java for an error of Aion: its first line, as a group, and what comes after it."""
_CALLS = rf"{_ERROR}.*? SQLSTATE: \w+)\s+at .*"
"""The same for the whole error, and the calls in the JVM after it."""
_WARNS = "org.apache.spark.sql.execution.python.streaming.TransformWithStateInPySparkStateServer"


def quiet(session: SparkSession) -> None:
    """Makes the queries of a session's context quiet. A log level that the user has set stays."""
    context = session.sparkContext
    with contextlib.suppress(Py4JError, TypeError):  # Spark logs with something else than log4j
        log4j = context._jvm.org.apache.logging.log4j
        logs = log4j.LogManager.getContext(False)
        _shorten_errors(log4j.core, logs.getConfiguration())
        if not logs.getConfiguration().getLoggers().containsKey(_WARNS):
            log4j.core.config.Configurator.setLevel(_WARNS, log4j.Level.ERROR)

            def warn_again() -> None:
                with contextlib.suppress(Py4JError, OSError):  # the JVM has ended
                    logs.getConfiguration().removeLogger(_WARNS)
                    logs.updateLoggers()

            note_change("the log's level", warn_again)


def _replacing(what: str, error: str) -> str:
    """A part of a pattern of log4j."""
    return f"%replace{{{what}}}{{(?s){error}}}{{$1}}"


def _shorten_errors(core: Any, configuration: Any) -> None:
    root, name = configuration.getRootLogger(), "console"
    console = configuration.getAppender(name)
    if console is None or not str(configuration.getConfigurationSource()).endswith("log4j2-defaults.properties"):
        return
    pattern = console.getLayout().getConversionPattern()
    if not pattern.endswith("%m%n%ex"):  # it is shortened already
        return
    pattern = pattern.removesuffix("%m%n%ex") + f"{_replacing('%m', _CALLS)}%n{_replacing('%ex', _REST)}"
    layout = core.layout.PatternLayout.newBuilder().withPattern(pattern).withConfiguration(configuration)
    layout = layout.withAlwaysWriteExceptions(False).build()
    shorter = core.appender.ConsoleAppender.newBuilder().setName(name).setTarget(console.getTarget())
    shorter = shorter.setLayout(layout).setFilter(console.getFilter()).build()
    shorter.start()

    def use(appender: Any) -> None:
        with contextlib.suppress(Py4JError, OSError):  # the JVM has ended
            root.removeAppender(name)
            root.addAppender(appender, None, None)

    use(shorter)
    note_change("the log's pattern", lambda: use(console))
