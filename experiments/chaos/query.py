"""The process that the chaos experiment disturbs: Spark with the queries of a workload, each with an idempotent sink.

``python -m experiments.chaos.query WORK STATE WORKLOAD`` reads ``WORK/input-<query>``, one file per batch, until there
are no more files. STATE is the folder or URI of its state. The rows of a batch become ``WORK/<query>/<batch>.json``, by
renaming. If that file exists and has other rows, they become ``<batch>.differs-<n>.json`` instead. ``<batch>.offset``
is the offset of the batch in its source. A query that fails restarts from its checkpoint.

If WORK has a file ``going-back``, the queries may go back: batches are kept for longer, and ``WORK/<query>.db`` has a
table with the results, which can go back, too. ``WORK/adopt-<query>`` has the mark by which a copy takes over its own.

``python -m experiments.chaos.query WORK STATE WORKLOAD N`` only repartitions the checkpoints to N partitions, offline.

Spark runs in this process, unless ``WORK/cluster.json`` has the settings of a cluster.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.chaos.data import BOUND_S, DDL, DELAY_S, Workload
from experiments.chaos.workloads import workload_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

REQUEST_TIMEOUT_S = 5
POLICY: dict[str, Any] = {
    # Little memory, so that every batch destages, prestages and reads from disk.
    "memory": {"budget": "256KiB", "bucket_limit": "64KiB"},
    # Every batch yields its results at once, and a fixed bound makes the truth known, also what is dropped.
    "lateness": {"initial_bound": f"{BOUND_S} seconds", "coverage": None},
    "trigger": {"kind": "every_batch"},
    # About the bytes of a file for a shard: some blocks are handed over, and the others travel as rows.
    "distribution": {"hand_over": "16KiB"},
    "io": {"request_timeout": f"{REQUEST_TIMEOUT_S}s"},
}
JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""The JVM lives for minutes and shares the cores. With the full JIT, nearly half its time would go into compiling code
that runs only a few times."""
CLASSES = "classes.jsa"
"""Next to WORK: the JVM's archive of the classes that the queries use. A JVM with it starts in half the time."""
UNDISTURBED = "undisturbed"
"""If WORK has a file of this name, nobody causes faults. Its JVM writes the archive at its end, if there is none."""
STARTED = "started.json"
FAILURES = "failures.jsonl"
LOST_JVM = 3


SHARDS = 4
RETAINED = 2
GOING_BACK, RETAINED_TO_GO_BACK = "going-back", 20
PARTITIONS = "partitions"
CLUSTER = "cluster.json"
SPARK = "spark"
"""Spark's local files. Copies of remote state are there, too."""


def jvm_options(folder: Path, record: bool = False) -> str:
    """The options of all JVMs. ``folder``: where the archive of classes is. ``record``: write it if it is not there."""
    archive = folder / CLASSES
    if archive.exists():
        return f"{JVM} -XX:SharedArchiveFile={archive}"
    return f"{JVM} -XX:ArchiveClassesAtExit={archive}" if record else JVM


def cluster_settings(master: str, driver: str, executors: int, jvm: str) -> dict[str, str]:
    """Spark's settings for a cluster with this master, a driver at this address, and one core for each executor.

    ``jvm``: options of the executors' JVMs.
    """
    return {
        "spark.master": master,
        "spark.driver.host": driver,
        "spark.driver.bindAddress": driver,
        "spark.executor.memory": "700m",
        "spark.executor.cores": "1",
        "spark.cores.max": str(executors),
        "spark.executor.extraJavaOptions": jvm,
        "spark.executor.heartbeatInterval": "5s",
        "spark.network.timeout": "60s",
        # An executor that dies is started again, however often.
        "spark.task.maxFailures": "4",
    }


def session(work: Path, state: str) -> SparkSession:
    from pyspark.sql import SparkSession

    import aion

    undisturbed = (work / UNDISTURBED).exists()
    builder = (
        SparkSession.builder.master("local[2,4]")  # a task may fail three times before its query does
        .appName("aion chaos")
        .config("spark.driver.memory", "1g")
        .config("spark.driver.extraJavaOptions", jvm_options(work.parent, record=undisturbed))
        .config("spark.local.dir", str(work / SPARK))
        .config("spark.sql.shuffle.partitions", _partitions(work))
        .config("spark.sql.streaming.minBatchesToRetain", str(RETAINED_TO_GO_BACK if _may_go_back(work) else RETAINED))
        # Otherwise it would depend on timing whether a batch without data follows.
        .config("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        .config("spark.sql.warehouse.dir", str(work / "warehouse"))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
    )
    if undisturbed:  # Spark's default starts two processes for each small file of a checkpoint
        manager = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
        builder = builder.config("spark.sql.streaming.checkpointFileManagerClass", manager)
    if (work / CLUSTER).exists():
        for key, value in json.loads((work / CLUSTER).read_text()).items():
            builder = builder.config(key, value)
    spark = aion.configure(builder, policy=POLICY, state_dir=state, state_shards=SHARDS).getOrCreate()
    spark.sparkContext.setLogLevel("WARN")  # lost tasks are warnings
    return spark


def events_of(spark: SparkSession, work: Path, query: str) -> DataFrame:
    reader = spark.readStream.schema(DDL).option("maxFilesPerTrigger", 1)
    # Resolve the symlink: a checkpoint stores the paths of its files, and its copy must find the same paths.
    folder = (work / f"input-{query}").resolve()
    return reader.parquet(str(folder)).withWatermark("ts", f"{DELAY_S} seconds")


def _partitions(work: Path) -> str:
    path = work / PARTITIONS
    return path.read_text() if path.exists() else "2"


def _may_go_back(work: Path) -> bool:
    return (work / GOING_BACK).exists()


def repartition(work: Path, state: str, what: Workload, partitions: int) -> None:
    """Changes the number of partitions of the checkpoints. No query may be using them."""
    spark = session(work, state)
    for query in what.queries:
        spark._streamingCheckpointManager.repartition(str(work / f"checkpoint-{query}"), partitions)
    (work / PARTITIONS).write_text(str(partitions))
    spark.stop()


def kept_once(folder: Path, checkpoint: Path) -> Callable[[DataFrame, int], None]:
    """An idempotent sink for ``foreachBatch``. It records every batch that comes a second time."""

    def write(df: DataFrame, batch: int) -> None:
        rows = df.collect()
        # Copy the offset now: Spark soon deletes it.
        offset = json.loads((checkpoint / "offsets" / str(batch)).read_text().splitlines()[2])["logOffset"]
        (folder / f"{batch:06d}.offset").write_text(str(offset))
        text = "".join(sorted(json.dumps(row.asDict()) + "\n" for row in rows))
        path = folder / f"{batch:06d}.json"
        if path.exists():
            if path.read_text() == text:
                (folder / f"{batch:06d}.again-{time.time_ns()}").touch()
                return
            path = folder / f"{batch:06d}.differs-{time.time_ns()}.json"
        part = path.with_suffix(".part")
        part.write_text(text)
        part.rename(path)

    return write


def written(work: Path, query: str, what: Workload) -> Callable[[DataFrame, int], None]:
    """All that a query writes: its files, and its table if it may go back."""
    import aion

    keep = kept_once(work / query, work / f"checkpoint-{query}")
    if not _may_go_back(work) or query not in what.tables:
        return lambda batch, number: keep(what.shown(batch, query), number)
    adopt = work / f"adopt-{query}"
    table = aion.sinks.upsert(
        f"sqlite:///{work / query}.db", query, undo=f"{RETAINED_TO_GO_BACK} batches", dropped="ignore",
        adopt=adopt.read_text() if adopt.exists() else None,
    )  # fmt: skip

    def write(batch: DataFrame, number: int) -> None:
        kept = batch.persist()
        try:
            table(kept, number)
            keep(what.shown(kept, query), number)
        finally:
            kept.unpersist()

    return write


def run(work: Path, state: str, what: Workload) -> int:
    from py4j.protocol import Py4JError
    from pyspark.errors import StreamingQueryException

    spark = session(work, state)
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    started = {
        "application": spark.sparkContext.applicationId,
        "jvm": jvm.java.lang.ProcessHandle.current().pid(),
        "driver": os.getpid(),
    }
    (work / "started.part").write_text(json.dumps(started))
    (work / "started.part").rename(work / STARTED)

    def start(query: str) -> Any:
        (work / query).mkdir(exist_ok=True)
        checkpoint = work / f"checkpoint-{query}"
        result = what.result(events_of(spark, work, query), query)
        writer = result.writeStream.foreachBatch(written(work, query, what)).queryName(query)
        return writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()

    try:
        running = {query: start(query) for query in what.queries}
        while running:
            for query, handle in list(running.items()):
                try:
                    if handle.awaitTermination(0.1):
                        del running[query]
                except StreamingQueryException as error:
                    with (work / FAILURES).open("a") as out:
                        out.write(json.dumps({"query": query, "at": time.time(), "error": str(error)}) + "\n")
                    running[query] = start(query)
        spark.stop()
    except (Py4JError, OSError) as error:
        print(f"the JVM is gone: {type(error).__name__}", file=sys.stderr)
        return LOST_JVM
    return 0


if __name__ == "__main__":
    # Not sys.exit: threads that wait for a dead JVM would keep the process alive.
    folder, state_dir, name, *more = sys.argv[1:]
    if more:
        repartition(Path(folder).absolute(), state_dir, workload_of(name), int(more[0]))
        code = 0
    else:
        code = run(Path(folder).absolute(), state_dir, workload_of(name))
    sys.stderr.flush()
    os._exit(code)
