"""The Spark side of ``aion experiment windows``: the same windows by Aion and by Spark, and what each run left behind.

What comes out is observed inside the query, so no run pays for a sink and all of them can be compared: the number of
results and the exclusive or of their hashes, which does not depend on their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.ingest_stream import Run, run_to_end

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from aion.core.windows import Definition

SHORTEST_MS, LONGEST_MS = 1_000, 20_000
# Stock Spark keeps nothing for late events; this is the policy under which Aion keeps nothing either.
NO_BOUND = {"lateness": {"initial_bound": "0 seconds", "coverage": None}}


@dataclass(frozen=True, slots=True)
class Leg:
    """Windows to compute: of ``size``, a new one every ``slide`` (None: tumbling), or sessions of ``gap``.

    ``different``: so many tumbling windows, of lengths from 1 to 20 seconds to the millisecond (Scotty, section VII),
    and sessions of ``gap`` beside them. Stock Spark has no such query.
    """

    label: str
    overlap: int
    size: str | None = None
    slide: str | None = None
    gap: str | None = None
    different: int = 0

    @property
    def windows(self) -> list[Definition]:
        """The definitions of Aion."""
        import aion

        found: list[Definition] = [aion.Tumbling(size_us) for size_us in sizes_us(self.different)]
        if self.size is not None:
            found.append(aion.Sliding(self.size, self.slide) if self.slide else aion.Tumbling(self.size))
        return [*found, aion.Session(self.gap)] if self.gap is not None else found


def sizes_us(windows: int) -> list[int]:
    """Lengths equally distributed from 1 to 20 seconds, in whole milliseconds; a single one is of a second."""
    step_ms = (LONGEST_MS - SHORTEST_MS) / max(windows - 1, 1)
    return [round(SHORTEST_MS + step_ms * i) * 1_000 for i in range(windows)]


@dataclass(frozen=True, slots=True)
class Measured:
    """A run and what was seen in it.

    ``results``, ``digest``: number of panes or rows, and of all of them together. ``state_rows``: the most rows that
    Spark's stores had after a batch. ``state_bytes``: the most that the state took: for Aion, bytes of live blocks in
    memory or on disk, as the state server says; for Spark, its state stores' ``memoryUsedBytes``.
    """

    leg: str
    contender: str
    run: Run
    results: int
    digest: int
    state_rows: int | None
    state_bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def aion_windows(events: DataFrame, leg: Leg, policy: Mapping[str, Any] | None = None) -> DataFrame:
    """By the operator; without ``policy`` by that of the session."""
    import aion
    from aion import aggregates as A

    aggregates = {"n": A.count(), "mean": A.mean("value")}
    return aion.windowed(events, key="key", time="ts", windows=leg.windows, aggregates=aggregates, policy=policy)


def without_bound(events: DataFrame, leg: Leg) -> DataFrame:
    """What stock Spark is asked: windows are forgotten as soon as they end."""
    return aion_windows(events, leg, NO_BOUND)


def stock(events: DataFrame, leg: Leg) -> DataFrame:
    """``window()`` and ``session_window()``, in append mode: a row per window when the watermark has passed it."""
    from pyspark.sql import functions as F

    window = F.session_window("ts", leg.gap) if leg.gap is not None else F.window("ts", leg.size, leg.slide)
    rows = events.groupBy("key", window.alias("window")).agg(F.count(F.lit(1)).alias("n"), F.avg("value").alias("mean"))
    bounds = [F.col(f"window.{side}").alias(f"window_{side}") for side in ("start", "end")]
    return rows.select("key", *bounds, "n", "mean", F.lit("on_time").alias("kind"))


@dataclass(frozen=True, slots=True)
class Contender:
    label: str
    is_aion: bool
    build: Callable[[DataFrame, Leg], DataFrame]


CONTENDERS = {
    "aion": Contender("Aion", True, aion_windows),
    "aion-no-bound": Contender("Aion, bound 0", True, without_bound),
    "stock": Contender("Spark", False, stock),
}


def measure(
    spark: SparkSession, leg_name: str, leg: Leg, contender: str, stream: DataFrame, checkpoint: Path, events: int
) -> Measured:
    """One run over all events. Raises RuntimeError where not all were read, or where a window came out twice."""
    from pyspark.sql import functions as F

    chosen = CONTENDERS[contender]
    rows = chosen.build(stream, leg)
    name = [F.col("window")] if leg.different else []
    hashed = F.xxhash64(*name, "key", "window_start", "window_end", "n", F.round("mean", 6))
    observed: list[Column] = [
        F.count(F.lit(1)).alias("results"),
        F.bit_xor(hashed).alias("digest"),
        F.count_if(F.col("kind") != "on_time").alias("others"),
    ]
    live = _Live(spark) if chosen.is_aion else None
    run = run_to_end(rows.observe("check", *observed), checkpoint, events, live)
    seen = [report["observed"]["check"] for report in run.progress if "check" in report["observed"]]
    if others := sum(row["others"] for row in seen):
        raise RuntimeError(f"{leg_name}, {contender}: {others:,} panes are not on time, though nothing came late")
    return Measured(
        leg=leg_name,
        contender=contender,
        run=run,
        results=sum(row["results"] for row in seen),
        digest=_together([row["digest"] or 0 for row in seen]),
        state_rows=None if live else max(report["state_rows"] for report in run.progress),
        state_bytes=live.peak_bytes if live else max(report["state_bytes"] for report in run.progress),
    )


def check_equal(first: Measured, other: Measured) -> None:
    """Raises RuntimeError where two contenders have other results for the same events."""
    if (first.results, first.digest) != (other.results, other.digest):
        raise RuntimeError(
            f"{other.leg}: {other.contender} has {other.results:,} results of digest {other.digest:x}, "
            f"{first.contender} has {first.results:,} of {first.digest:x}"
        )


class _Live:
    """The most bytes of live blocks that the state server was seen to have, beyond those it had before."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._before = self._bytes()
        self.peak_bytes = 0

    def __call__(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._bytes() - self._before)

    def _bytes(self) -> int:
        import aion

        state = aion.metrics.state(self._spark)
        return 0 if state is None else state.m_bucket_bytes + state.disk_only_bytes


def _together(digests: Sequence[int]) -> int:
    digest = 0
    for one in digests:
        digest ^= one
    return digest
