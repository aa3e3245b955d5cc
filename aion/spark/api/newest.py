"""``aion.table``: the newest pane of each key and window that a running query has written where Spark can read it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import Window as Over
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from aion.core.life.actions import PaneKind
from aion.core.query.pane_columns import KIND, SEQ, START, PaneColumns
from aion.errors import ConfigError, SchemaError
from aion.spark.session.types import quoted

if TYPE_CHECKING:
    import pandas as pd

_FILES = re.compile(r"FileSink\[(.*)\]")


def table(query: StreamingQuery) -> pd.DataFrame:
    """Returns the newest pane of each key and window that a query has written, as a table of pandas, now.

    For example::

        query = panes.writeStream.format("memory").queryName("panes").start()
        aion.table(query)

    A window that was taken back, and dropped events, are not in it. The rows are read from what the query writes: from
    the table of the format ``memory``, which has the panes of this run, or from Parquet files, which have those of all
    runs. Other sinks keep the newest panes themselves: read their tables. Call it again for what has come since.

    Raises ConfigError for another sink, and SchemaError if the query does not write the columns that identify a pane:
    the key, ``window_start``, ``window_end``, ``kind`` and ``pane_seq``.
    """
    rows = _written(query)
    meaning = PaneColumns.of((field.name, field.metadata) for field in rows.schema)
    if meaning is None:
        raise SchemaError("table: the query writes no columns of panes; give it the result of aion.windowed as it is")
    if missing := meaning.missing(SEQ, KIND):
        raise SchemaError(f"table: the query does not write {' and '.join(missing)}; keep these columns in the select")
    kind, seq = (F.col(quoted(meaning.columns[part])) for part in (KIND, SEQ))
    identity = [F.col(quoted(meaning.columns[part])) for part in meaning.said.identity]
    newest = (
        rows.where(kind != PaneKind.DROPPED.value)
        .withColumn("\0newest", F.max(seq).over(Over.partitionBy(*identity)))
        .where((seq == F.col("`\0newest`")) & (kind != PaneKind.RETRACTED.value))
    )
    shown = [quoted(name) for name in rows.columns if name not in meaning.besides]
    order = [quoted(name) for name in (*meaning.keys, meaning.columns[START])]
    found: pd.DataFrame = newest.orderBy(*order).select(*shown).toPandas()
    return found


def _written(query: StreamingQuery) -> DataFrame:
    """Returns what a query has written. Raises ConfigError if Spark cannot read it."""
    spark, sink = _session(query), _sink(query)
    if sink.startswith("MemorySink"):
        return spark.table(quoted(query.name))
    if (files := _FILES.fullmatch(sink)) is not None:
        return spark.read.parquet(files[1])
    raise ConfigError(
        f"table: the query writes to {sink or 'a sink that has not reported yet'}, which Spark cannot read back. Read "
        "the table of that sink, or start the query with .format('memory').queryName(...)"
    )


def _session(query: Any) -> SparkSession:
    remote = getattr(query, "_session", None)
    if remote is not None:
        return remote
    return SparkSession.active()


def _sink(query: Any) -> str:
    """Returns the sink as Spark describes it."""
    if hasattr(query, "_jsq"):
        found = query._jsq.streamingQuery() if hasattr(query._jsq, "streamingQuery") else query._jsq
        return str(found.sink().toString())
    progress = query.lastProgress
    return "" if progress is None else str(progress["sink"]["description"])
