"""What sinks know of Spark: the query that runs a batch, and the rows of the batch as Arrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from aion.errors import ConfigError
from aion.sinks.database import JSON
from aion.sinks.marks import History

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_NESTED = ("array<", "map<", "struct<")
_JSON = (
    "map('timestampFormat', \"yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX\", "
    "'timestampNTZFormat', \"yyyy-MM-dd'T'HH:mm:ss.SSSSSS\", 'ignoreNullFields', 'false')"
)


def history_of(batch: DataFrame) -> History:
    """Returns the history of the query that runs this batch. Raises ConfigError outside ``foreachBatch``."""
    from aion.spark.starts import CHECKPOINT

    session = batch.sparkSession
    query = session.sparkContext.getLocalProperty("sql.streaming.queryId")
    if query is None:
        raise ConfigError("a sink must be called by a streaming query: pass it to writeStream.foreachBatch")
    return History(query, session.conf.get(CHECKPOINT, None) or "")


def panes_of(batch: DataFrame, columns: Sequence[str], *, json: bool) -> pa.Table:
    """Returns the rows of a batch.

    ``json``: lists, maps and structs become JSON. All rows are computed, because Spark fails a batch if only some rows
    of it were read.
    """
    from aion.spark.types import quoted

    types = dict(batch.dtypes)
    selected = [
        f"to_json({quoted(c)}, {_JSON}) AS {quoted(c)}" if json and types[c].startswith(_NESTED) else quoted(c)
        for c in columns
    ]
    rows = batch.selectExpr(*selected).toArrow()
    fields = [f.with_metadata(JSON) if json and types[f.name].startswith(_NESTED) else f for f in rows.schema]
    return rows.cast(pa.schema(fields))


@contextmanager
def computed(batch: DataFrame) -> Iterator[DataFrame]:
    """A context in which a batch is computed once and whole. Spark fails a batch if only some of its rows were read."""
    kept = batch.persist()
    try:
        kept.write.format("noop").mode("overwrite").save()
        yield kept
    finally:
        kept.unpersist()
