"""What sinks know of Spark: the query that runs a batch, and the rows of the batch as Arrow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pyarrow as pa

from aion.core.query.sink_notes import REWOUND
from aion.errors import ConfigError, SinkError
from aion.sinks.bad_values import JSON
from aion.sinks.marks import Goal, History, Mark, digest_of
from aion.sinks.rows import KEPT

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_NESTED = ("array<", "map<", "struct<")
_JSON = (
    "map('timestampFormat', \"yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX\", "
    "'timestampNTZFormat', \"yyyy-MM-dd'T'HH:mm:ss.SSSSSS\", 'timeZone', 'UTC', 'ignoreNullFields', 'false')"
)


def mark_of(batch: DataFrame, batch_id: int) -> Mark:
    """Returns the mark of a batch. Raises ConfigError outside ``foreachBatch``."""
    from aion.spark.session.query_settings import CHECKPOINT, RESCALED

    session = batch.sparkSession
    checkpoint = session.conf.get(CHECKPOINT, None) or ""
    query, run = _query(session, checkpoint)
    if query is None:
        raise ConfigError("a sink must be called by a streaming query: pass it to writeStream.foreachBatch")
    first, last = json.loads(session.conf.get(RESCALED, None) or "[0, -1]")
    idle = last - first + 1 if batch_id == last + 1 else 0
    goal = _goal(session, checkpoint, run)
    return Mark(History(query, checkpoint), batch_id, idle, None if run is None else digest_of(run), goal=goal)


_goals: dict[str, tuple[str | None, Goal | None]] = {}
"""The last run that this process has seen of each checkpoint, and where its query was set back to."""


def _goal(session: SparkSession, checkpoint: str, run: str | None) -> Goal | None:
    """Returns where a query was set back to, if it was. Reads the checkpoint once in a run."""
    from aion.spark.session.checkpoint_files import CheckpointFiles
    from aion.spark.session.query_settings import TEMPORARY
    from aion.spark.session.sessions import is_remote

    if checkpoint in ("", TEMPORARY) or is_remote(session):
        return None
    if checkpoint not in _goals or _goals[checkpoint][0] != run:
        files = CheckpointFiles(session, checkpoint)
        _goals[checkpoint] = (run, goal_in(files.read(REWOUND)) if files.exists(REWOUND) else None)
    return _goals[checkpoint][1]


def goal_in(text: str) -> Goal:
    """Returns what the file REWOUND of a checkpoint says. Raises SinkError if it cannot be read."""
    try:
        found = json.loads(text)
        return Goal(int(found["to"]), f"{int(found['id'], 16):012x}")
    except (ValueError, KeyError, TypeError) as error:
        raise SinkError(
            f"the file {REWOUND} of the checkpoint cannot be read ({error}), so nobody knows to which batch the tables "
            "must go back; run aion rewind again"
        ) from None


def _query(session: SparkSession, checkpoint: str) -> tuple[str | None, str | None]:
    """Returns the id of the query that runs a batch, and that of its run."""
    from aion.spark.session.query_settings import RUNNING, TEMPORARY
    from aion.spark.session.sessions import is_remote

    if not is_remote(session):
        context = session.sparkContext
        # Spark runs a streaming query in a job group named by the run.
        return context.getLocalProperty("sql.streaming.queryId"), context.getLocalProperty("spark.jobGroup.id")
    if checkpoint == TEMPORARY:
        raise ConfigError("a sink needs the checkpoint of its query: set the option checkpointLocation of the writer")
    running = session.conf.get(RUNNING, None)
    if running is None:
        raise ConfigError(
            "with Spark Connect, a sink works in foreachBatch of a query that starts in the session in which "
            "aion.windowed or aion.group_by was called, and since Spark 4.3 (docs/how-to/connect.md)"
        )
    said, run, _ = json.loads(running)
    return str(said), str(run)


def panes_of(batch: DataFrame, columns: Sequence[str], *, as_json: bool, where: str | None) -> pa.Table:
    """Returns the rows of a batch.

    ``as_json``: lists, maps and structs become JSON. ``where``: a condition; the column :data:`aion.sinks.rows.KEPT`
    says which rows it is true for. All rows are computed, because Spark fails a batch if only some
    rows of it were read.
    """
    from aion.spark.session.types import quoted

    types = dict(batch.dtypes)
    nested = {name for name in columns if as_json and types[name].startswith(_NESTED)}
    as_texts = {name: f"to_json({quoted(name)}, {_JSON}) AS {quoted(name)}" for name in nested}
    selected = [as_texts.get(name, quoted(name)) for name in columns]
    if where is not None:
        selected.append(f"coalesce({where}, false) AS {quoted(KEPT)}")
    rows = batch.selectExpr(*selected).toArrow()
    fields = [f.with_metadata(JSON) if f.name in nested else f for f in rows.schema]
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
