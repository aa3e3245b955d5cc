"""The average of random integers: one window function without key, as cheap as possible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from experiments.workloads.model import Int64s, Probe, Shape, Spec, Workload, arrivals, padding, timestamps

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame

    from experiments.workloads.chaining import LastPanes

SCHEMA = "mean double"


def numbers(shape: Shape, batch: int) -> tuple[pa.Table, Int64s]:
    """Random integers, with a counter. In the paper's prototype all values were 1."""
    n = shape.events_per_batch
    rng, ts, late = arrivals(shape, batch, n)
    table = pa.table(
        {
            "ts": timestamps(ts),
            "counter": (batch * n + pa.array(range(n), pa.int64()).to_numpy()) % 1_000_000,
            "value": rng.integers(0, 1_000, n),
            "pad": padding(rng, n, shape.payload_bytes),
        }
    )
    return table, late


def mean(key: tuple[Any, ...], window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, float | None]:
    """The mean, computed incrementally: it keeps only a sum and a count."""
    total = count = 0
    for batch in events:
        total += pc.sum(batch["value"]).as_py() or 0
        count += batch.num_rows
    return {"mean": total / count if count else None}


def with_aion(
    streams: Mapping[str, DataFrame], shape: Shape, probe: Probe, policy: Mapping[str, Any] | None = None
) -> DataFrame:
    import aion

    panes = aion.windowed(
        streams["numbers"],
        time="ts",
        windows={"mean": aion.Tumbling(shape.window)},
        apply=aion.Apply(probe(mean), probe.schema(SCHEMA), blocking=False),
        policy=policy,
        name="average",
    )
    return aion.panes(panes).withColumnRenamed("window", "stage")


def _branches(streams: Mapping[str, DataFrame], shape: Shape) -> list[Any]:
    from experiments.workloads.collected import Branch

    return [Branch("mean", streams["numbers"], shape.window)]


def with_window(streams: Mapping[str, DataFrame], shape: Shape) -> DataFrame:
    from pyspark.sql import functions as F

    averages = (
        streams["numbers"]
        .groupBy(F.window("ts", shape.window).alias("w"))
        .agg(F.avg("value").alias("mean"), F.count(F.lit(1)).alias("events"))
    )
    window = (F.col("w.start").alias("window_start"), F.col("w.end").alias("window_end"))
    return averages.select(F.lit("mean").alias("stage"), *window, "mean", "events")


def finals(last: LastPanes, touched: set[tuple[str, int]], shape: Shape) -> dict[tuple[str, int], pd.DataFrame]:
    return {where: last.of(*where)[["mean"]] for where in touched}


def truth(tables: Mapping[str, pa.Table], shape: Shape) -> dict[str, pd.DataFrame]:
    events = tables["numbers"].drop_columns("pad").to_pandas()
    events["window_start"] = tables["numbers"]["ts"].cast(pa.int64()).to_numpy() // shape.window_us * shape.window_us
    return {"mean": events.groupby("window_start", as_index=False).agg(mean=("value", "mean"))}


WORKLOAD = Workload(
    name="average",
    spec=Spec(rate=10_000, window_s=20, payload_bytes=2_304),
    streams={"numbers": numbers},
    with_aion=with_aion,
    branches=_branches,
    function=mean,
    schema=SCHEMA,
    with_window=with_window,
    keys={"mean": ()},
    finals=finals,
    truth=truth,
)
