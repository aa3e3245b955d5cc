"""The Spark part of `aion experiment network`: streams from many sources, central and distributed, and bytes by hop.

Every source is a child of the tree. It has its own file in every batch, so that one task reads it whole, and all
sources have the same stretch of event time. The root is one task. A hop is one shuffle. Its bytes are those that its
map tasks wrote, as Spark counts them (``shuffleWriteBytes`` of the stages in the status store, as in the REST API and
the UI), with Spark's default compression for all contenders.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.shared.bench import steady_rate

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WINDOW = "1 second"
SCHEMA = "key bigint, ts timestamp, value double"
AGGREGATES = ("mean", "median")
CONTENDERS = {
    "central": "central: events forwarded",
    "distributed": "Aion: merged on every level",
    "stock": "stock Spark: window().agg",
}
_START_US = 1_700_000_000 * 1_000_000
# The first batch pays for code generation and for starting workers.
SKIPPED_BATCHES = 1


@dataclass(frozen=True, slots=True)
class Sources:
    """The events of ``children`` sources. In a batch each has ``events_per_child`` events, over ``span_s`` seconds."""

    children: int
    events_per_child: int
    batches: int
    keys: int
    span_s: int
    seed: int
    decimals: int = 2

    @property
    def events(self) -> int:
        return self.children * self.events_per_child * self.batches

    def table(self, batch: int, child: int) -> pa.Table:
        """Key, time and value, in the order of time. The values have a few decimals, like a sensor's readings."""
        rng = np.random.default_rng([self.seed, batch, child])
        n, span_us = self.events_per_child, self.span_s * 1_000_000
        times = _START_US + batch * span_us + np.sort(rng.integers(0, span_us, n))
        return pa.table(
            {
                "key": rng.integers(0, self.keys, n),
                "ts": pa.array(times, pa.timestamp("us", tz="UTC")),
                "value": np.round(rng.normal(20.0, 5.0, n), self.decimals),
            }
        )

    def write(self, folder: Path) -> Path:
        """Writes a file for each batch and child. Their modification times make Spark read them in this order."""
        folder.mkdir(parents=True)
        for batch in range(self.batches):
            for child in range(self.children):
                path = folder / f"batch-{batch:04d}-child-{child:04d}.parquet"
                pq.write_table(self.table(batch, child), path, compression="none", row_group_size=1 << 30)
                seconds = _START_US // 1_000_000 + batch * self.children + child
                os.utime(path, (seconds, seconds))
        return folder


@dataclass(frozen=True, slots=True)
class Hop:
    """One shuffle, summed over all batches: bytes and rows written. ``tasks``: the most map tasks in a batch."""

    tasks: int
    bytes: int
    rows: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one contender. ``results``: the number of results. ``checksum``: their sum."""

    contender: str
    aggregate: str
    levels: int
    events: int
    hops: tuple[Hop, ...]
    events_per_s: float
    results: int
    checksum: float

    @property
    def bytes(self) -> int:
        return sum(hop.bytes for hop in self.hops)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "bytes": self.bytes}


def configured(spark: SparkSession) -> SparkSession:
    """Sets one root task, and one task per file."""
    spark.conf.set("spark.sql.shuffle.partitions", "1")
    spark.conf.set("spark.sql.files.maxPartitionBytes", str(1 << 30))
    spark.conf.set("spark.sql.files.openCostInBytes", str(1 << 30))
    return spark


def read(spark: SparkSession, sources: Sources, folder: Path) -> DataFrame:
    reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", sources.children)
    return reader.parquet(str(folder.absolute())).withWatermark("ts", "0 seconds")


def central(df: DataFrame, sources: Sources, aggregate: str, levels: int, fan_in: int) -> DataFrame:
    """Every event crosses every hop, and only the root aggregates (the paper's centralised implementation)."""
    from pyspark.sql import functions as F

    from aion.core.topology import Tree

    tree = Tree(levels=levels, fan_in=fan_in, children=sources.children, shards=(0,), root_tasks=1)
    for level in range(1, levels):
        # As many nodes as the tree has. The filter is always true; it keeps Spark from merging the hops.
        df = df.repartition(tree.nodes(level), "value").where(F.spark_partition_id() >= 0)
    return stock(df.repartition(1), sources, aggregate, 1, fan_in)


def stock(df: DataFrame, sources: Sources, aggregate: str, levels: int, fan_in: int) -> DataFrame:
    """Spark's own aggregation: partial aggregates before its shuffle. After a shuffle to one task it needs no other."""
    from pyspark.sql import functions as F

    function = {"mean": F.avg, "median": F.median}[aggregate]
    return df.groupBy("key", F.window("ts", WINDOW)).agg(function("value").alias("result"))


def distributed(df: DataFrame, sources: Sources, aggregate: str, levels: int, fan_in: int) -> DataFrame:
    """Aion: slices and partials on every child, merged on every level, results at the root."""
    import aion
    from aion import aggregates as A

    return aion.windowed(
        df,
        key="key",
        time="ts",
        windows=aion.Tumbling(WINDOW),
        aggregates={"result": {"mean": A.mean, "median": A.median}[aggregate]("value")},
        policy={
            "distribution": {"children": sources.children, "merge_levels": levels - 1, "fan_in": fan_in},
            "trigger": {"kind": "every_batch"},
        },
    )


BUILD: dict[str, Callable[[DataFrame, Sources, str, int, int], DataFrame]] = {
    "central": central,
    "distributed": distributed,
    "stock": stock,
}


def run(
    spark: SparkSession,
    sources: Sources,
    folder: Path,
    contender: str,
    aggregate: str,
    levels: int,
    fan_in: int,
    checkpoint: Path,
) -> Run:
    """Runs one query over all batches and discards its output. Raises RuntimeError if events or hops are missing."""
    from pyspark.sql import functions as F

    results = BUILD[contender](read(spark, sources, folder), sources, aggregate, levels, fan_in)
    results = results.observe("check", F.count(F.lit(1)).alias("results"), F.sum("result").alias("sum"))
    writer = results.writeStream.format("noop").outputMode("append").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(checkpoint.absolute())).start()
    try:
        query.awaitTermination()
    finally:
        query.stop()
    progress = [dict(report) for report in query.recentProgress]
    seen = [report["observedMetrics"]["check"] for report in progress if "check" in report["observedMetrics"]]
    events = sum(report["numInputRows"] for report in progress)
    hops = shuffles(spark, str(query.runId))
    if (events, len(hops)) != (sources.events, levels):
        raise RuntimeError(f"{contender}: saw {events:,} of {sources.events:,} events and {len(hops)} of {levels} hops")
    return Run(
        contender=contender,
        aggregate=aggregate,
        levels=levels,
        events=events,
        hops=tuple(hops),
        events_per_s=steady_rate(progress, SKIPPED_BATCHES),
        results=sum(found["results"] for found in seen),
        checksum=sum(found["sum"] or 0.0 for found in seen),
    )


def shuffles(spark: SparkSession, run_id: str) -> list[Hop]:
    """The shuffles of a query, the first hop first, summed over its batches."""
    context = spark.sparkContext
    scala = context._jsc.sc()
    scala.listenerBus().waitUntilEmpty()
    store, tracker = scala.statusStore(), context.statusTracker()
    batches: list[list[Hop]] = []
    for job in sorted(tracker.getJobIdsForGroup(run_id)):
        stages = [store.lastStageAttempt(stage) for stage in sorted(tracker.getJobInfo(job).stageIds)]
        written = [s for s in stages if s.shuffleWriteRecords() > 0]
        batches.append([Hop(s.numTasks(), s.shuffleWriteBytes(), s.shuffleWriteRecords()) for s in written])
    with_data = [hops for hops in batches if hops]
    if len({len(hops) for hops in with_data}) != 1:
        raise RuntimeError(f"the batches of {run_id} differ in shuffles: {[len(hops) for hops in with_data]}")
    return [_together(hop) for hop in zip(*with_data, strict=True)]


def _together(hops: Sequence[Hop]) -> Hop:
    return Hop(max(h.tasks for h in hops), sum(h.bytes for h in hops), sum(h.rows for h in hops))
