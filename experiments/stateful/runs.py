"""The Spark part of ``aion experiment stateful``: a processor with Spark's state store, with Aion's, and with neither.

The last leg puts ten times as much state as memory into Aion, and compares a batch whose state is in memory with one
whose state has to come from disk.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.shared.generate import EventPlan
from experiments.shared.stream import SPARK_ALONE, run_to_end, spark_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DELAY_MS = 10_000
SCHEMA = "key bigint, ts timestamp, value double"
SKIPPED_BATCHES = 2
"""The first batch starts workers and compiles, and the second one is the first that finds state."""
STATE_OVER_BUDGET = 10
BYTES_OF_A_PROFILE = 1_000


@dataclass(frozen=True, slots=True)
class Leg:
    """A workload: ``processor`` of ``processors``, and how many keys it has."""

    label: str
    processor: str
    keys: int
    time_mode: str = "none"

    def plan(self, events: int, seed: int) -> EventPlan:
        return EventPlan(events_per_batch=events, keys=self.keys, late_share=0.0, seed=seed)


LEGS = {
    "value": Leg("value: a count", "Count", 100_000),
    "list": Leg("list: append and read", "Window", 1_000),
    "map": Leg("map: update", "Histogram", 10_000),
    "session": Leg("session: timers", "Sessions", 25_000, "eventTime"),
    "tiers": Leg("tiers: profiles", "Profile", 100_000),
}
CONTENDERS = {"stock": "Spark", "tuned": "Spark, tuned", "aion": "Aion", "floor": "floor"}
TIERS = {"memory": "in memory", "disk": "on disk", "disk-plain": "on disk, no prefetching"}


@dataclass(frozen=True, slots=True)
class Measured:
    """A run. ``batches_ms``: how long each measured batch took."""

    leg: str
    contender: str
    events_per_batch: int
    batches_ms: list[float]
    progress: list[dict[str, Any]]

    @property
    def events_per_s(self) -> float:
        return self.events_per_batch / statistics.median(self.batches_ms) * 1_000

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "events_per_s": self.events_per_s}


def has_aion() -> bool:
    """Whether this version of Aion runs stateful processors."""
    import aion

    return hasattr(aion, "group_by")


def build(contender: str, leg: Leg, pandas: bool, stream: DataFrame) -> DataFrame:
    """The streaming DataFrame of a contender."""
    from experiments.stateful import processors as stateful_processors
    from experiments.stateful.floor import driver_of

    processor = getattr(stateful_processors, leg.processor)
    if contender == "floor":
        driven = driver_of(uuid.uuid4().hex, lambda: processor(pandas), pandas, DELAY_MS)
        return stream.repartition("key").mapInArrow(driven, stateful_processors.OUTPUT)
    if contender == "aion":
        import aion

        grouped = aion.group_by(stream, "key")
    else:
        grouped = stream.groupBy("key")
    call = grouped.transformWithStateInPandas if pandas else grouped.transformWithState
    return call(processor(pandas), stateful_processors.OUTPUT, "append", leg.time_mode)


def measure(
    spark: SparkSession, name: str, contender: str, pandas: bool, paths: Sequence[Path], work: Path
) -> Measured:
    """One run over all files. Raises RuntimeError if it did not read all events."""
    with spark_settings(spark, SPARK_ALONE if contender == "stock" else {}):
        run = run_to_end(
            build(contender, LEGS[name], pandas, stream_of(spark, paths)), work / "checkpoint", events_in(paths)
        )
    return Measured(
        name, contender, run.events // len(paths), durations_ms(run.progress)[SKIPPED_BATCHES:], run.progress
    )


def stream_of(spark: SparkSession, paths: Sequence[Path]) -> DataFrame:
    from experiments.shared.stream import file_stream

    return file_stream(spark, paths, SCHEMA, f"{DELAY_MS} milliseconds")


def events_in(paths: Sequence[Path]) -> int:
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(path).num_rows for path in paths)


def durations_ms(progress: Sequence[Mapping[str, Any]]) -> list[float]:
    """How long each batch with events took, from its trigger to its commit."""
    return [report["durationMs"]["triggerExecution"] for report in progress if report["numInputRows"]]


# -- more state than memory ---------------------------------------------------------------------------


def tier(spark: SparkSession, phase: str, pandas: bool, paths: Sequence[Path], work: Path) -> Measured:
    """A run of Aion whose state is ten times its budget, or fits.

    While it runs on disk, the pages of its files are dropped from the page cache again and again.
    """
    state = work / f"tiers-{phase}"
    shutil.rmtree(state, ignore_errors=True)
    leg = LEGS["tiers"]
    state_bytes = leg.keys * BYTES_OF_A_PROFILE
    budget = state_bytes * 3 if phase == "memory" else state_bytes // STATE_OVER_BUDGET
    policy = {"spark.aion.state.dir": str(state), "spark.aion.memory.budget": str(budget), **prefetch(phase)}
    # The files that RocksDB has open are links to these.
    look = None if phase == "memory" else partial(drop_from_page_cache, state)
    with spark_settings(spark, policy):
        stream = build("aion", leg, pandas, stream_of(spark, paths))
        run = run_to_end(stream, work / "checkpoint", events_in(paths), look)
    return Measured(
        "tiers", phase, run.events // len(paths), durations_ms(run.progress)[SKIPPED_BATCHES:], run.progress
    )


def prefetch(phase: str) -> dict[str, str]:
    """The policy of a phase: prefetching is on, except where it is measured what it brings."""
    return {"spark.aion.prestage.mode": "none"} if phase == "disk-plain" else {}


def drop_from_page_cache(folder: Path) -> None:
    """Writes all files of a folder back and asks the kernel to forget their pages. Files may come and go meanwhile."""
    for path in (Path(parent, name) for parent, _, names in os.walk(folder) for name in names):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
