"""A workload as a running query: its first stage in Spark, the later stages in ``foreachBatch``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from experiments.workloads.chaining import LastPanes, Results
from experiments.workloads.model import Probe, Shape, Workload

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery

SPARK_STATE = "spark-state"
FLINK = ("flink-heap", "flink-rocksdb")
BACKENDS = ("tiered", "memory", "rocksdb", SPARK_STATE, "spark-list", "spark-window", *FLINK)
"""Aion's three stores; with stock Spark: events in its state and timers, events in a list, its windowed aggregates;
Flink with its two state backends (only the workload ``average``)."""


def is_aion(backend: str) -> bool:
    return not backend.startswith(("spark-", "flink-"))


def runs_twice(backend: str) -> bool:
    """Whether it runs a window at its end and at the end of its lateness. The others run it after every change."""
    return is_aion(backend) or backend == SPARK_STATE or backend in FLINK


def settings_of(backend: str, state_bytes: int | None = None) -> dict[str, str]:
    """Settings of Spark for this way to keep state. ``state_bytes``: what the stock RocksDB may use."""
    if backend != SPARK_STATE:
        return {}
    store = "spark.sql.streaming.stateStore"
    found = {f"{store}.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"}
    if state_bytes is not None:
        found[f"{store}.rocksdb.boundedMemoryUsage"] = "true"
        found[f"{store}.rocksdb.maxMemoryUsageMB"] = str(max(1, state_bytes >> 20))
    return found


def panes_of(
    workload: Workload,
    backend: str,
    streams: Mapping[str, DataFrame],
    shape: Shape,
    probe: Probe,
    policy: Mapping[str, Any] | None = None,
) -> DataFrame:
    """The panes of the first stage. ``policy``: Aion's, which overrides the session's and names the store."""
    if is_aion(backend):
        return workload.with_aion(streams, shape, probe, policy)
    if backend == "spark-window":
        return workload.with_window(streams, shape)
    from experiments.workloads.collected import collected
    from experiments.workloads.kept import kept

    w, branches = workload, workload.branches(streams, shape)
    if backend == SPARK_STATE:
        return kept(branches, w.key, w.function, w.schema, probe, shape, w.held)
    return collected(branches, w.key, w.function, w.schema, probe, w.held)


def start(
    workload: Workload,
    backend: str,
    panes: DataFrame,
    shape: Shape,
    folder: Path,
    *,
    every: str | None = None,
    keep_us: int | None = None,
    seen: Callable[[int, pa.Table], None] = lambda batch, rows: None,
) -> StreamingQuery:
    """Starts the query. ``folder`` gets checkpoint, panes and results. ``every``: time between batches, "4 seconds".

    Without ``every`` the query processes the available events as fast as it can, and ends. ``seen`` is called with the
    panes of each batch.
    """
    last = LastPanes(workload.keys_of(backend), folder=folder / "panes", keep_us=keep_us)
    results = Results(folder / "results")

    def take(df: DataFrame, batch: int) -> None:
        rows = df.toArrow()
        if not runs_twice(backend):
            rows = numbered(rows, batch)
        results.put(workload.finals(last, last.upsert(rows), shape))
        seen(batch, rows)

    writer = panes.writeStream.foreachBatch(take).queryName(f"{workload.name}-{backend}")
    writer = writer.outputMode("append" if runs_twice(backend) else "update")
    writer = writer.option("checkpointLocation", str(folder / "checkpoint"))
    return (writer.trigger(processingTime=every) if every else writer.trigger(availableNow=True)).start()


def numbered(rows: pa.Table, batch: int) -> pa.Table:
    """Rows of stock Spark's ``update`` mode as panes, numbered by batch. Those of the newest window are on time."""
    ends = rows["window_end"].cast(pa.int64()).to_numpy()
    newest = ends >= ends.max(initial=0)
    kinds: Any = pc.if_else(pa.array(newest), "on_time", "late")
    return rows.append_column("pane", pa.array(np.full(len(ends), batch, np.int32))).append_column("kind", kinds)
