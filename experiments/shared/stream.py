"""The Spark part of an experiment: a session for all contenders, files as a stream, a run to the end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.shared.bench import steady_rate

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from aion.spark.api.files import Files

# The first batch pays for code generation and for starting workers. The second executes fewer windows than later ones,
# since the watermark's delay holds some back. From the third on, a batch executes as much event time as it brings.
SKIPPED_BATCHES = 2
LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class Run:
    """The result of one run of one streaming query. ``progress``: Spark's own progress reports, abridged.

    ``state_bytes``: how many more bytes Aion's state has in files.
    """

    events: int
    steady_events_per_s: float
    whole_events_per_s: float
    wall_s: float
    dropped_by_spark: int
    progress: list[dict[str, Any]]
    state_bytes: int = 0


CHECKPOINTS = "Spark writes checkpoints as it does without Aion; tuned: with the settings that aion.configure makes."
# What aion.configure would change.
SPARK_ALONE = {
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "1",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileContextBasedCheckpointFileManager"
    ),
}


def session(
    cores: int,
    work_dir: Path,
    *,
    policy: str | Mapping[str, Any] | None,
    memory: str = "4g",
    more: Mapping[str, str] | None = None,
) -> SparkSession:
    """A local session for all contenders; with a ``policy``, it includes Aion's settings. ``more``: other settings.

    The settings of partitions, of RocksDB for every stateful operator, and of the sizes of tasks are the same for all
    contenders. Contenders of stock Spark write their checkpoints as Spark does without Aion (SPARK_ALONE), except those
    that are called tuned: these use the settings of ``aion.configure``.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{cores}]").appName("aion experiment ingest")
    settings = {
        "spark.driver.memory": memory,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": str(cores),
        # Spark adds this to a file's size before it splits the file between the cores. With the default of 4 MB, the
        # first core would get nearly all of a small file.
        "spark.sql.files.openCostInBytes": str(cores),
        "spark.sql.streaming.numRecentProgressUpdates": "10000",
        "spark.sql.streaming.stateStore.providerClass": (
            "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
        ),
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        "spark.aion.state.dir": str(work_dir / "state"),
    }
    for key, value in {**settings, **(more or {})}.items():
        builder = builder.config(key, value)
    if policy is not None:
        import aion

        # As eager as the contenders that compute what has changed in each batch; a mapping says it itself.
        eager: dict[str, Any] = {} if isinstance(policy, Mapping) else {"trigger_kind": "every_batch"}
        builder = aion.configure(builder, policy=policy, **eager)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def file_stream(spark: SparkSession, paths: Sequence[Path], schema: str, delay: str) -> DataFrame:
    """The files ``paths``, all in one folder, as a stream of one file per trigger, with a watermark on ``ts``."""
    names = ",".join(path.name for path in paths)
    glob = f"{paths[0].parent.absolute()}/{{{names}}}"
    reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
    return reader.parquet(glob).withWatermark("ts", delay)


def files_stream(spark: SparkSession, paths: Sequence[Path], schema: str, delay: str) -> Files:
    """The same files, whose events never become rows."""
    import aion

    names = ",".join(path.name for path in paths)
    glob = f"{paths[0].parent.absolute()}/{{{names}}}"
    return aion.read_files(spark, glob, schema=schema, watermark=("ts", delay), max_files_per_trigger=1)


@contextlib.contextmanager
def spark_settings(spark: SparkSession, wanted: Mapping[str, str]) -> Iterator[None]:
    """Settings of the session, put back afterwards."""
    before = {key: spark.conf.get(key, None) for key in wanted}
    for key, value in wanted.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                spark.conf.unset(key)
            else:
                spark.conf.set(key, value)


def run_to_end(
    stream: DataFrame,
    checkpoint: Path,
    expected_events: int,
    look: Callable[[], None] | None = None,
    *,
    goes_on: bool = False,
) -> Run:
    """Runs a streaming DataFrame over all its files and discards the output. Removes ``checkpoint`` before and after.

    ``goes_on``: it does neither, so a query goes on where the last one with this checkpoint ended. Calls ``look`` a few
    times a second while it runs. Raises RuntimeError if it did not read exactly ``expected_events``, since the rate
    would then be wrong.
    """
    if not goes_on:
        shutil.rmtree(checkpoint, ignore_errors=True)
    started = time.perf_counter()
    query = (
        stream.writeStream.format("noop")
        .outputMode("append")
        .option("checkpointLocation", str(checkpoint.absolute()))
        .trigger(availableNow=True)
        .start()
    )
    try:
        if look is None:
            query.awaitTermination()
        else:
            while not query.awaitTermination(LOOK_S):
                look()
    finally:
        query.stop()
    wall_s = time.perf_counter() - started
    if not goes_on:
        shutil.rmtree(checkpoint, ignore_errors=True)
    progress = [_plain(report) for report in query.recentProgress]
    events = sum(report["numInputRows"] for report in progress)
    if events != expected_events:
        raise RuntimeError(f"the query read {events:,} events, but the files hold {expected_events:,}")
    return Run(
        events=events,
        steady_events_per_s=steady_rate(progress, 0 if goes_on else SKIPPED_BATCHES),
        whole_events_per_s=events / wall_s,
        wall_s=wall_s,
        dropped_by_spark=sum(report["dropped_by_spark"] for report in progress),
        progress=progress,
    )


def _plain(report: Any) -> dict[str, Any]:
    """The parts of a progress report that explain a rate: rows, milliseconds per phase, state, drops."""
    parsed = report if isinstance(report, dict) else json.loads(report.json)
    operators = parsed.get("stateOperators", [])
    return {
        "batchId": parsed["batchId"],
        "numInputRows": _events(parsed),
        "durationMs": parsed["durationMs"],
        "watermark": parsed.get("eventTime", {}).get("watermark"),
        "output_rows": parsed.get("sink", {}).get("numOutputRows"),
        "state_rows": sum(operator["numRowsTotal"] for operator in operators),
        "state_bytes": sum(operator["memoryUsedBytes"] for operator in operators),
        "dropped_by_spark": sum(operator["numRowsDroppedByWatermark"] for operator in operators),
        "observed": _observed(parsed),
    }


def _events(parsed: Mapping[str, Any]) -> int:
    """The events of a batch. If they never became rows, Spark's own count is of files, and ours is observed."""
    counted = [of["events"] for name, of in _observed(parsed).items() if name.endswith(".files")]
    return int(sum(counted) if counted else parsed["numInputRows"])


def _observed(parsed: Mapping[str, Any]) -> dict[str, Any]:
    """The results of :meth:`DataFrame.observe`, by the name of the observation."""
    return {
        name: row.asDict() if hasattr(row, "asDict") else row for name, row in parsed.get("observedMetrics", {}).items()
    }
