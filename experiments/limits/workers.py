"""The leg ``workers`` of ``aion experiment limits``: the Python workers of a local session, forked by either daemon."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.shared.tree import python_workers, resident_bytes

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    import psutil
    from pyspark.sql import SparkSession

CORES = 2
EVENTS = 10_000
WARM, TURNS = 10, 7
KEYS, BATCH_US = 100, 10_000_000
MIB = 1 << 20
DAEMONS = {"spark": "pyspark.daemon", "aion": "aion.spark.daemon"}


class Look(NamedTuple):
    """``together_mib``: shared pages counted once. ``own_mib``: pages that one process has for itself, summed."""

    together_mib: float
    own_mib: float
    first_s: float
    batch_s: float
    after_idle_s: float


def workers(work: Path, rounds: int) -> dict[str, Any]:
    """Sessions with Spark's own daemon and with that of ``aion.configure``, in turns; medians of each."""
    looks: dict[str, list[Look]] = {name: [] for name in DAEMONS}
    for number in range(rounds):
        for name, daemon in DAEMONS.items() if number % 2 == 0 else reversed(DAEMONS.items()):
            place = work / f"{name}-{number}"
            looks[name].append(_look(place, daemon))
            shutil.rmtree(place)
    medians = {
        name: {field: median(getattr(look, field) for look in of) for field in Look._fields}
        for name, of in looks.items()
    }
    return {
        "events": EVENTS,
        **medians,
        "rounds": {name: [look._asdict() for look in of] for name, of in looks.items()},
    }


def _look(place: Path, daemon: str) -> Look:
    """A session of its own: some batches, then its workers' memory, then batches with and without workers at hand."""
    import psutil

    from experiments.shared.stream import session

    place.mkdir(parents=True)
    spark = session(CORES, place, policy="standard", more={"spark.python.daemon.module": daemon})
    try:
        jvm = psutil.Process(int(spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()))
        with contextlib.closing(_batches(spark, place)) as batches:
            first_s = next(batches)
            for _ in range(WARM):
                next(batches)
            daemons, forked = python_workers(jvm.children(recursive=True))
            together = sum(resident_bytes(process) for process in (*daemons, *forked))
            own = sum(process.memory_full_info().uss for process in (*daemons, *forked))
            at_hand, after_idle = [], []
            for _ in range(TURNS):
                at_hand.append(next(batches))
                _end(python_workers(jvm.children(recursive=True))[1])
                after_idle.append(next(batches))
    finally:
        spark.stop()
    return Look(together / MIB, own / MIB, first_s, median(at_hand), median(after_idle))


def _end(workers: Iterable[psutil.Process]) -> None:
    """What Spark does with workers that were idle for a minute."""
    import psutil

    of = list(workers)
    for worker in of:
        worker.kill()
    psutil.wait_procs(of, timeout=10)


def _batches(spark: SparkSession, place: Path) -> Generator[float]:
    """A query. Each turn brings it a file, which it reads in two tasks, and gives how long it took."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    import aion
    from aion import aggregates as A

    source = place / "events"
    source.mkdir()
    events = spark.readStream.schema("ts timestamp, key bigint, v double").parquet(str(source.absolute()))
    panes = aion.windowed(
        events.withWatermark("ts", "1 second"), key="key", time="ts", windows=aion.Tumbling("20 seconds"),
        aggregates={"mean": A.mean("v")},
    )  # fmt: skip
    query = panes.writeStream.format("noop").option("checkpointLocation", str((place / "cp").absolute())).start()
    draw = np.random.default_rng(1)
    try:
        for number in range(1 << 30):
            times = number * BATCH_US + np.sort(draw.integers(0, BATCH_US, EVENTS))
            columns = {
                "ts": pa.array(times, pa.timestamp("us", "UTC")),
                "key": draw.integers(0, KEYS, EVENTS),
                "v": draw.random(EVENTS),
            }
            written = place / f"{number}.parquet"
            pq.write_table(pa.table(columns), written, row_group_size=EVENTS // CORES)
            began = time.perf_counter()
            written.rename(source / written.name)
            query.processAllAvailable()
            yield time.perf_counter() - began
    finally:
        query.stop()
