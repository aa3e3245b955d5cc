"""Runs a stateful processor over batches, on Spark's state store or on Aion's, and returns the rows of each batch.

A run has one micro-batch for each list of rows. ``restart_after`` ends the query after these batches and starts another
one from the same checkpoint. The two runs of a test differ only in the function that groups the rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StatefulProcessor

from tests.spark.conftest import FileStream

Rows = Sequence[Sequence[Any]]
Output = dict[int, Counter[tuple[Any, ...]]]
"""The rows of each batch that has some, by the batch's id, in any order."""
Group = Callable[..., Any]
"""From a DataFrame and columns to what has ``transformWithState``."""


def grouped_by_spark(df: DataFrame, *columns: Any) -> Any:
    return df.groupBy(*columns)


def grouped_by_aion(df: DataFrame, *columns: Any) -> Any:
    import aion

    return aion.group_by(df, *columns)


def ours() -> Group:
    """Aion's grouping. While there is none, Spark's: then a test compares two runs of Spark, and so tests itself."""
    import aion

    return grouped_by_aion if hasattr(aion, "group_by") else grouped_by_spark


@dataclass(frozen=True)
class Case:
    """A processor and all that a run of it needs.

    ``columns``: names and Arrow types of the input. Timestamps are given in seconds since the epoch. ``keys``: the
    grouping columns. ``watermark``: event-time column and delay. ``initial``: rows of the initial state with its own
    columns, grouped by the same keys. ``then``: what follows in the same query, such as a second operator.
    ``before``: what happens to the input first.
    """

    processor: Callable[[], StatefulProcessor]
    columns: Sequence[tuple[str, pa.DataType]]
    output: str
    batches: Sequence[Rows]
    keys: Sequence[str] = ("k",)
    time_mode: str = "none"
    output_mode: str = "update"
    pandas: bool = True
    watermark: tuple[str, str] | None = None
    restart_after: Sequence[int] = ()
    initial_columns: Sequence[tuple[str, pa.DataType]] = ()
    initial: Rows = ()
    event_time_column: str = ""
    before: Callable[[DataFrame], DataFrame] = field(default=lambda df: df)
    then: Callable[[DataFrame], DataFrame] = field(default=lambda df: df)

    @property
    def by_the_clock(self) -> bool:
        """In processing time a query always has one more batch, with or without data. So each batch is a query."""
        return self.time_mode.lower() == "processingtime"


def run(spark: SparkSession, folder: Path, case: Case, group: Group) -> Output:
    """All batches of ``case``. Raises StreamingQueryException if the query fails."""
    folder.mkdir()
    stream = FileStream(spark, folder / "input", pa.schema(case.columns))
    collected: Output = {}
    for part in _parts(case):
        for rows in part:
            stream.put(rows)
        to_the_end(query_of(spark, case, group, stream), folder / "checkpoint", case, collected)
    return {batch: rows for batch, rows in sorted(collected.items()) if rows}


def both(spark: SparkSession, folder: Path, make: Callable[[], Case]) -> tuple[Output, Output]:
    """What Aion and Spark give for the same batches."""
    return run(spark, folder / "aion", make(), ours()), run(spark, folder / "spark", make(), grouped_by_spark)


def compare(aions: Output, sparks: Output) -> None:
    """AssertionError with the first batch that differs, and its rows that only one side has."""
    for batch in sorted(aions.keys() | sparks.keys()):
        one, other = aions.get(batch, Counter()), sparks.get(batch, Counter())
        more, fewer = one - other, other - one
        assert not (more or fewer), f"batch {batch}: only Aion {_some(more)}; only Spark {_some(fewer)}"


def error(spark: SparkSession, folder: Path, case: Case, group: Group) -> str:
    """The message of the exception with which the query fails. AssertionError if it does not fail."""
    with pytest.raises(PySparkException) as caught:
        run(spark, folder, case, group)
    return str(caught.value)


def _parts(case: Case) -> Iterator[Sequence[Rows]]:
    ends = range(len(case.batches)) if case.by_the_clock else case.restart_after
    edges = sorted({0, *(after + 1 for after in ends), len(case.batches)})
    for start, end in pairwise(edges):
        yield case.batches[start:end]


def query_of(spark: SparkSession, case: Case, group: Group, stream: FileStream) -> DataFrame:
    rows = stream.read(ddl(case.columns))
    if case.watermark is not None:
        rows = rows.withWatermark(*case.watermark)
    grouped = group(case.before(rows), *case.keys)
    more: dict[str, Any] = {}
    if case.initial_columns:
        initial = spark.createDataFrame(list(case.initial), ddl(case.initial_columns))
        more["initialState"] = group(initial, *case.keys)
    if case.event_time_column:
        more["eventTimeColumnName"] = case.event_time_column
    transform = grouped.transformWithStateInPandas if case.pandas else grouped.transformWithState
    return case.then(transform(case.processor(), case.output, case.output_mode, case.time_mode, **more))


def ddl(columns: Sequence[tuple[str, pa.DataType]]) -> str:
    from pyspark.sql.pandas.types import from_arrow_schema

    return ", ".join(f"`{f.name}` {f.dataType.simpleString()}" for f in from_arrow_schema(pa.schema(columns)).fields)


def to_the_end(df: DataFrame, checkpoint: Path, case: Case, collected: Output) -> None:
    def keep(batch: DataFrame, batch_id: int) -> None:
        collected[batch_id] = Counter(comparable(row) for row in batch.collect())

    query = (
        df.writeStream.foreachBatch(keep)
        .outputMode(case.output_mode)
        .option("checkpointLocation", str(checkpoint))
        .trigger(**{"once" if case.by_the_clock else "availableNow": True})
        .start()
    )
    try:
        query.awaitTermination()
    finally:
        query.stop()


def comparable(value: Any) -> Any:
    """Plain, hashable and equal to itself: NaN is the same as NaN, and -0.0 is not the same as 0.0."""
    match value:
        case float():
            return "NaN" if math.isnan(value) else (value, math.copysign(1, value)) if value == 0 else value
        case dict():
            return tuple(sorted(((comparable(k), comparable(v)) for k, v in value.items()), key=repr))
        case list() | tuple():
            return tuple(comparable(part) for part in value)
        case bytearray():
            return bytes(value)
        case _:
            return value


def _some(rows: Counter[tuple[Any, ...]], most: int = 5) -> str:
    shown = sorted(rows.elements(), key=repr)
    return f"{shown[:most]}" + (f" and {len(shown) - most} more" if len(shown) > most else "")
