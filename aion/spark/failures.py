"""What a query raises after an error of Aion: first the sentence that says what is wrong and what to do.

Spark puts the names of its own errors before an error of a task, and the plan of the query after it. So ``str`` of
pyspark's StreamingQueryException is replaced (:func:`install`). It is as before for all other errors.
"""

from __future__ import annotations

import re
from functools import partial

from pyspark.errors.exceptions.captured import CapturedException, StreamingQueryException

from aion.spark.touched import note_change

_REPORT = re.compile(
    # What a task says; or a sink, on the driver, at the end of a traceback.
    r"(?:Python worker: |\[FOREACH_BATCH_USER_FUNCTION_ERROR\].*\n)"
    r"(?:aion|state_backends)\.[\w.]*?(\w+: .*?)\n SQLSTATE: ",
    re.DOTALL,
)
_QUERY = re.compile(r"\[id = [^]]*, runId = [^]]*\]")
_WITH_CALLS = "\n\nJVM stacktrace:\n"
"""Is in the text if the user has asked for the calls in the JVM."""


def install() -> None:
    """Replaces ``str`` of pyspark's StreamingQueryException."""
    stock = StreamingQueryException.__str__
    if stock is not _str:
        StreamingQueryException.__str__ = _str
        note_change("the text of a failed query", partial(setattr, StreamingQueryException, "__str__", stock))


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
