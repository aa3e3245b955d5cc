"""The sources of a workload's events: files, Spark's rate source, or Kafka.

Every source delivers the arrivals of one window's time in one micro-batch, so that the watermark moves once per window
(paper, section 5). The column ``arrived`` is the end of that time. The watermark is on ``arrived``, without
delay. Only stock Spark's aggregations drop events older than the watermark of the windowed column, so theirs is on
``ts``, minus the allowed lateness.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.workloads import topics
from experiments.workloads.model import TIMESTAMP, Shape, Workload, file_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import DataFrame, SparkSession

LATE = "late.json"
"""The file with the number of events by windows late, for each batch, summed over all streams."""
ROW_GROUPS = 8


def table_of(workload: Workload, stream: str, shape: Shape, batch: int) -> tuple[pa.Table, np.ndarray[Any, Any]]:
    """A batch with the column ``arrived``, and how many windows late each event is."""
    table, late = workload.streams[stream](shape, batch)
    arrived = pa.repeat(pa.scalar(shape.start_us(batch + 1), pa.int64()), table.num_rows).cast(TIMESTAMP)
    return table.append_column("arrived", arrived), late


def heartbeat(schema: pa.Schema, shape: Shape, number: int) -> pa.Table:
    """A row without an event, in the place of a batch."""
    arrived = shape.start_us(number + 1)
    columns = [pa.nulls(1, field.type) for field in schema]
    columns[schema.get_field_index("arrived")] = pa.array([arrived], pa.int64()).cast(TIMESTAMP)
    return pa.table(columns, schema=schema)


def write_files(workload: Workload, shape: Shape, batches: int, folder: Path) -> list[list[int]]:
    """Writes a folder for each stream, with a Parquet file for each batch, and files with heartbeats at the end.

    Keeps files that exist already. Returns, for each batch, how many events are 0, 1, ... N windows late.
    """
    known = folder / LATE
    counts: list[list[int]] = json.loads(known.read_text()) if known.exists() else []
    for batch in range(len(counts), batches):
        late = np.zeros(shape.past_windows + 1, np.int64)
        for stream in workload.streams:
            table, of = table_of(workload, stream, shape, batch)
            late += np.bincount(of, minlength=shape.past_windows + 1)
            _write(folder / stream / f"batch-{batch:05d}.parquet", table, batch)
        counts.append(late.tolist())
        partial = known.with_name(f"{LATE}.{os.getpid()}")
        partial.write_text(json.dumps(counts))
        partial.replace(known)
    for stream in workload.streams:
        schema = pq.read_schema(folder / stream / "batch-00000.parquet")
        for number in shape.heartbeats(batches):
            _write(folder / stream / f"last-{number:05d}.parquet", heartbeat(schema, shape, number), number)
    return counts[:batches]


def _write(path: Path, table: pa.Table, batch: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.with_name(f"_{path.name}")  # Spark ignores such names
    rows = max(1, -(-table.num_rows // ROW_GROUPS))
    pq.write_table(table, hidden, compression="none", row_group_size=rows)
    os.utime(hidden, (1_700_000_000 + batch,) * 2)  # Spark reads files in this order
    hidden.replace(path)


def events_of(folder: Path, workload: Workload, batches: int) -> dict[str, pa.Table]:
    """All events of all streams, without heartbeats."""
    return {
        stream: pa.concat_tables(
            pq.read_table(folder / stream / f"batch-{batch:05d}.parquet") for batch in range(batches)
        )
        for stream in workload.streams
    }


# -- streams ------------------------------------------------------------------------------------------------


def read(
    spark: SparkSession,
    workload: Workload,
    shape: Shape,
    *,
    batches: int,
    folder: Path | None = None,
    kafka: str | None = None,
    aion: bool,
) -> dict[str, DataFrame]:
    """The streams of a workload, with watermarks.

    They read ``folder`` (see :func:`write_files`). With ``kafka``, Kafka's servers, they read the topics that were
    filled with those files (:mod:`~experiments.workloads.topics`). Without a folder they use Spark's
    ``rate-micro-batch`` source, each row of which stands for a batch.
    """
    found = {}
    for stream in workload.streams:
        schema = table_of(workload, stream, shape, 0)[0].schema
        if folder is None:
            events = _rate(spark, workload.name, stream, schema, shape, batches)
        elif kafka is None:
            events = _files(spark, folder / stream, schema, file_names(batches, len(shape.heartbeats(batches))))
        else:
            topic = f"{topics.prefix(workload, shape, batches)}-{stream}"
            events = topics.read(spark, kafka, topic, schema, topics.longest(folder, stream, batches))
        found[stream] = watermarked(events, shape, aion=aion)
    return found


def watermarked(events: DataFrame, shape: Shape, *, aion: bool) -> DataFrame:
    """Adds the watermark, then filters out heartbeats. ``aion``: as Aion needs it, and stock Spark's state with timers.

    The filter uses the watermark's column, so that Spark does not push it below the watermark. It is a disjunction, so
    that Spark does not infer another filter that it could push.
    """
    if aion:
        return events.withWatermark("arrived", "0 seconds").filter("ts IS NOT NULL OR arrived IS NULL")
    return events.filter("ts IS NOT NULL").withWatermark("ts", shape.bound)


def _files(spark: SparkSession, folder: Path, schema: pa.Schema, names: Sequence[str]) -> DataFrame:
    from pyspark.sql.pandas.types import from_arrow_schema

    reader = spark.readStream.schema(from_arrow_schema(schema)).option("maxFilesPerTrigger", 1)
    return reader.parquet(f"{folder.absolute()}/{{{','.join(f'{name}.parquet' for name in names)}}}")


def _rate(spark: SparkSession, workload: str, stream: str, schema: pa.Schema, shape: Shape, batches: int) -> DataFrame:
    from pyspark.sql.pandas.types import from_arrow_schema

    def generate(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from experiments.workloads import load

        for batch in (value.as_py() for row in rows for value in row["value"]):
            made = load(workload)
            table = heartbeat(schema, shape, batch) if batch >= batches else table_of(made, stream, shape, batch)[0]
            yield from table.to_batches(max_chunksize=10_000)

    ticks = (
        spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", 1)
        .option("numPartitions", 1)
        .option("advanceMillisPerBatch", shape.window_us // 1_000)
        .load()
    )
    return ticks.select("value").mapInArrow(generate, from_arrow_schema(schema))
