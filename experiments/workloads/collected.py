"""Windows over kept events with stock Spark, as a user without ``aion.windowed`` would write them.

Each window of each key is a ``collect_list`` of its events in Spark's state, which is in the JVM's heap with Spark's
default state store. The function gets the whole list whenever a batch has changed it (``update`` mode). Spark allows
only one aggregation in such a query. So several windows share one aggregation: each event occurs once for each of them,
and the column ``stage`` says which window it is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from aion.base.schema import parse_schema
from aion.core.query.functions import Window
from experiments.workloads.model import Probe

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class Branch:
    """A stage: events with a column ``ts``, in windows of ``size`` every ``slide`` (None: tumbling)."""

    stage: str
    events: DataFrame
    size: str
    slide: str | None = None


def tagged(branches: Sequence[Branch], time: Any = "ts") -> DataFrame:
    """Each event once for each window of each branch: its columns, ``stage`` and ``w``, with Spark's watermark.

    ``time``: the column, or expression, that says which windows an event is in.
    """
    from pyspark.sql import functions as F

    def one(branch: Branch) -> DataFrame:
        window = F.window(time, branch.size, branch.slide) if branch.slide else F.window(time, branch.size)
        return branch.events.select("*", F.lit(branch.stage).alias("stage"), window.alias("w"))

    return reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), map(one, branches))


def collected(
    branches: Sequence[Branch], key: Sequence[str], function: Any, schema: str, probe: Probe, names: Sequence[str] = ()
) -> DataFrame:
    """Panes of ``function(key, window, events)``, as in ``aion.windowed(apply=...)``.

    ``names``: the columns of the events; by default all but the key's.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

    events = tagged(branches)
    held = [name for name in events.columns if name not in (*key, "stage", "w")] if not names else list(names)
    lists = events.groupBy("stage", "w", *key).agg(F.collect_list(F.struct(*held)).alias("held"))
    rows = lists.select(
        "stage", F.col("w.start").alias("window_start"), F.col("w.end").alias("window_end"), *key, "held"
    )
    fields = to_arrow_schema(rows.drop("held").schema, timezone="UTC")
    result = pa.schema(
        [
            *(fields.field(name) for name in ("stage", "window_start", "window_end", *key)),
            *parse_schema(probe.schema(schema)),
            pa.field("events", pa.int64()),
        ]
    )
    return rows.mapInArrow(Each(tuple(key), probe(function), result), from_arrow_schema(result))


class Each:
    """Calls a window function for each row, which holds a list of events, and turns its results into rows."""

    def __init__(self, key: tuple[str, ...], function: Any, schema: pa.Schema) -> None:
        self.key, self.function, self.schema = key, function, schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            done = [self._one(batch, row) for row in range(batch.num_rows)]
            if done:
                yield from pa.concat_tables(done).combine_chunks().to_batches()

    def _one(self, batch: pa.RecordBatch, row: int) -> pa.Table:
        given = {name: batch.column(name)[row] for name in ("stage", "window_start", "window_end", *self.key)}
        events = batch.column("held")[row].values
        window = Window(given["window_start"].value, given["window_end"].value, given["stage"].as_py())
        key = tuple(given[name].as_py() for name in self.key)
        found = self.function(key, window, iter([pa.RecordBatch.from_struct_array(events)]))
        return pane(found, given, len(events), self.schema)


def pane(found: Any, given: Mapping[str, pa.Scalar], events: int, schema: pa.Schema) -> pa.Table:
    """What a window function returned (a row, rows, or a table) as rows of ``schema``.

    Each has the values ``given`` and the number of events.
    """
    if isinstance(found, pa.RecordBatch):
        found = pa.Table.from_batches([found])
    elif not isinstance(found, pa.Table):
        rows = [found] if isinstance(found, dict) else list(found)
        outputs = [field for field in schema if field.name not in (*given, "events")]
        found = pa.Table.from_pylist(rows, pa.schema(outputs))
    n = found.num_rows
    columns = {name: pa.repeat(value, n) for name, value in given.items()}
    columns |= {name: found[name] for name in found.column_names}
    columns["events"] = pa.repeat(pa.scalar(events, pa.int64()), n)
    return pa.table([columns[field.name] for field in schema], schema.names).cast(schema)
