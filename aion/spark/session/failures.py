"""What a query raises after an error of Aion: first the sentence that says what is wrong and what to do.

Spark puts the names of its own errors before an error of a task, and the plan of the query after it. So ``str`` of
pyspark's StreamingQueryException is replaced (:func:`install`). It is as before for all other errors. Who asks a stream
for its rows, as for those of a table, gets Spark's error with what to do instead.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from pyspark.errors import PySparkException
from pyspark.errors.exceptions import captured
from pyspark.errors.exceptions.captured import CapturedException, StreamingQueryException

from aion.spark.session.undo import note_change

_REPORT = re.compile(
    # What a task says; or a sink, on the driver, at the end of a traceback.
    r"(?:Python worker: |\[FOREACH_BATCH_USER_FUNCTION_ERROR\].*\n)"
    r"(?:aion|state_backends)\.[\w.]*?(\w+: .*?)\n SQLSTATE: ",
    re.DOTALL,
)
_QUERY = re.compile(r"\[id = [^]]*, runId = [^]]*\]")
_WITH_CALLS = "\n\nJVM stacktrace:\n"
"""Is in the text if the user has asked for the calls in the JVM."""


_OF_A_TABLE = ("Queries with streaming sources must be executed with", "[CALL_ON_STREAMING_DATASET_UNSUPPORTED]")
_STREAM = (
    "A stream, such as the result of aion.windowed, has no rows before a query runs. Start one: query = "
    "panes.writeStream.format('memory').queryName('panes').start(). Then spark.table('panes') has what came out, and "
    "aion.table(query) the newest row of each window."
)


def install() -> None:
    """Replaces ``str`` of pyspark's StreamingQueryException and AnalysisException."""
    stock = StreamingQueryException.__str__
    if stock is not _str:
        StreamingQueryException.__str__ = _str
        note_change("the text of a failed query", partial(setattr, StreamingQueryException, "__str__", stock))
    advise(captured.AnalysisException)


def advise(error: Any) -> None:
    """Makes a class of pyspark's errors say what to do when a stream was asked for its rows."""
    stock = error.__str__

    def text(self: PySparkException) -> str:
        said = stock(self)
        return f"{_STREAM}\n{said}" if any(part in said for part in _OF_A_TABLE) and _STREAM not in said else said

    if not hasattr(stock, "__of_aion__"):
        text.__of_aion__ = True  # type: ignore[attr-defined]
        error.__str__ = text
        note_change(f"the text of {error.__module__}.{error.__name__}", partial(setattr, error, "__str__", stock))


def _str(error: CapturedException) -> str:
    return brief(CapturedException.__str__(error))


def brief(text: str) -> str:
    """Returns the text of a failed query. If it reports an error of Aion, that comes first, and the plan is left out.

    Spark shows the error twice if it has aborted a job; once is enough.
    """
    report = _REPORT.search(text)
    if report is None or _WITH_CALLS in text:
        return text
    query = _QUERY.search(text)
    return "\n".join([report[1], *([f"Query {query[0]}"] if query else [])])
