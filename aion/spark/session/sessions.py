"""What differs between a session of this process and one of Spark Connect, whose server is another process.

A server runs the queries, and Python has no way into its JVM. What both kinds of session can say is asked in the same
way, by settings and by plans as text. What only the JVM can do is refused (:func:`refuse`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, TypeGuard

from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, GroupedData, SparkSession

from aion.errors import ConfigError

_CONNECT = "pyspark.sql.connect."
_ANALYZED = re.compile(r"== Analyzed Logical Plan ==\n.*\n(?s:(.*?))\n== Optimized Logical Plan ==")
_SPLITS = re.compile(r"splits=Some\((\d+)\)")
_LONGEST, _WHOLE = "spark.sql.maxPlanStringLength", str(2**31 - 16)
_NEVER = "aion-never"


def is_remote(session: SparkSession) -> bool:
    """Returns whether a session is one of Spark Connect."""
    return _is_of(session, "session.SparkSession")


def is_session(value: object) -> TypeGuard[SparkSession]:
    return isinstance(value, SparkSession) or _is_of(value, "session.SparkSession")


def is_grouped(value: object) -> bool:
    """Returns whether this is what ``DataFrame.groupBy`` returns."""
    return isinstance(value, GroupedData) or _is_of(value, "group.GroupedData")


def _is_of(value: object, name: str) -> bool:
    """Whether a value is of a class of Spark Connect, which cannot be imported without its packages."""
    return any(f"{kind.__module__}.{kind.__qualname__}" == _CONNECT + name for kind in type(value).__mro__)


def refuse(session: SparkSession, what: str, instead: str) -> None:
    """Raises ConfigError if the session is one of Spark Connect. ``what`` does not work there; ``instead``: what to
    do.
    """
    if is_remote(session):
        raise ConfigError(f"{what}: this needs the JVM of the driver, to which Spark Connect has no way; {instead}")


def application(session: SparkSession) -> str:
    """Returns the id of the application that runs the queries."""
    return str(session.conf.get("spark.app.id"))


def master(session: SparkSession) -> str:
    """Returns the URL of the master of the cluster. ``local`` if the driver is the only executor."""
    return str(session.conf.get("spark.master") if is_remote(session) else session.sparkContext.master)


def of_application(session: SparkSession, key: str) -> str | None:
    """Returns a setting of the application, which no session can change. None if it is unset."""
    settings: Any = session.conf if is_remote(session) else session.sparkContext.getConf()
    found: str | None = settings.get(key, None)
    return found


def parallelism(session: SparkSession) -> int:
    """Returns how many tasks Spark makes where nothing says how many: the number of cores, unless it is set."""
    if not is_remote(session):
        return int(session.sparkContext.defaultParallelism)
    found = _SPLITS.search(analyzed_text(session.range(1)))
    assert found is not None, "a range says how many partitions it has"
    return int(found[1])


def analyzed_text(df: DataFrame) -> str:
    """Returns the analyzed plan of a DataFrame of Spark Connect, as the server prints it, whole."""
    conf: Any = df.sparkSession.conf
    before = conf.get(_LONGEST, None)
    conf.set(_LONGEST, _WHOLE)
    try:
        connected: Any = df
        found = _ANALYZED.search(connected._explain_string(extended=True))
    finally:
        conf.unset(_LONGEST) if before is None else conf.set(_LONGEST, before)
    assert found is not None, "the plan of a DataFrame has a part that is analyzed"
    return found[1]


def qualified(session: SparkSession, path: str) -> str:
    """Returns a path as Spark writes it: with its scheme, and without a slash at the end. Raises what Spark raises."""
    if not is_remote(session):
        jvm: Any = session._jvm
        place = jvm.org.apache.hadoop.fs.Path(path)
        files = place.getFileSystem(session._jsparkSession.sessionState().newHadoopConf())
        return str(files.makeQualified(place).toString())
    # Spark names a path that is not there as it would name it if it were.
    never = session.read.format("binaryFile").load(f"{path.rstrip('/')}/{_NEVER}")
    found = None
    try:
        _ = never.schema
    except PySparkException as error:
        if (found := not_found(error)) is None:
            raise
    assert found is not None, "nobody writes a file of this name"
    return found.removesuffix(_NEVER).rstrip("/")


def not_found(error: PySparkException) -> str | None:
    """Returns the path that Spark has not found, or None if it is another error."""
    return error.getMessageParameters()["path"] if error.getCondition() == "PATH_NOT_FOUND" else None


def grouping(grouped: Any) -> tuple[DataFrame, Sequence[Column]]:
    """Returns the DataFrame and the columns of what ``DataFrame.groupBy`` has returned."""
    df = grouped._df
    if is_remote(df.sparkSession):
        return df, list(grouped._grouping_cols)
    from pyspark.sql.classic.column import Column as Classic

    expressions = grouped._jgd.groupingExprs()
    utilities = df.sparkSession.sparkContext._jvm.org.apache.spark.sql.classic.ExpressionUtils
    return df, [Classic(utilities.column(expressions.apply(i))) for i in range(expressions.size())]
