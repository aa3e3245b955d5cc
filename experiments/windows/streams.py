"""The Spark part of ``aion experiment windows``: the same windows with Aion and with Spark, and the size of the state.

The output is observed inside the query, so that no run pays for a sink. It yields the number of results and the
exclusive or of their hashes, which does not depend on their order. So all runs can be compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.shared.stream import SPARK_ALONE, Run, run_to_end, spark_settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from aion.core.windows import Definition

SHORTEST_MS, LONGEST_MS = 1_000, 20_000
# Stock Spark keeps nothing for late events. With this policy Aion keeps nothing for them either.
PATIENCE_S = 120.0  # until the state server has let go of a query that was stopped
NO_BOUND = {"lateness": {"initial_bound": "0 seconds", "coverage": None}}


@dataclass(frozen=True, slots=True)
class Leg:
    """Windows to compute: of ``size``, a new one every ``slide`` (None: tumbling), or sessions of ``gap``.

    ``different``: this many tumbling windows with sizes from 1 to 20 seconds, in whole milliseconds (Scotty, section
    VII), plus sessions of ``gap``. Stock Spark cannot run such a query.
    """

    label: str
    overlap: int
    size: str | None = None
    slide: str | None = None
    gap: str | None = None
    different: int = 0

    @property
    def windows(self) -> list[Definition]:
        """The window definitions for Aion."""
        import aion

        found: list[Definition] = [aion.Tumbling(f"{size_us} us") for size_us in sizes_us(self.different)]
        if self.size is not None:
            found.append(aion.Sliding(self.size, self.slide) if self.slide else aion.Tumbling(self.size))
        return [*found, aion.Session(self.gap)] if self.gap is not None else found


def sizes_us(windows: int) -> list[int]:
    """Window sizes, evenly spaced from 1 to 20 seconds, in whole milliseconds. A single one is a second."""
    step_ms = (LONGEST_MS - SHORTEST_MS) / max(windows - 1, 1)
    return [round(SHORTEST_MS + step_ms * i) * 1_000 for i in range(windows)]


@dataclass(frozen=True, slots=True)
class Measured:
    """A run and its measurements.

    ``results``: the number of panes or rows. ``digest``: a hash of all of them. ``state_rows``: the most rows in
    Spark's state stores after a batch. ``state_bytes``: the peak size of the state. For Aion, bytes of live blocks in
    memory or on disk, from the state server; for Spark, its state stores' ``memoryUsedBytes``.
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
    """The windows with Aion. Without ``policy`` it uses the session's."""
    import aion
    from aion import aggregates as A

    aggregates = {"n": A.count(), "mean": A.mean("value")}
    return aion.windowed(events, key="key", time="ts", windows=leg.windows, aggregates=aggregates, policy=policy)


def without_bound(events: DataFrame, leg: Leg) -> DataFrame:
    """The windows with Aion and a bound of zero: they are dropped when they end, as in stock Spark."""
    return aion_windows(events, leg, NO_BOUND)


def stock(events: DataFrame, leg: Leg) -> DataFrame:
    """``window()`` and ``session_window()``, in append mode: a row per window once the watermark has passed it."""
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
    """One run over all events. Raises RuntimeError if not all were read, or if a pane is not on time."""
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
    with spark_settings(spark, {} if chosen.is_aion else SPARK_ALONE):
        run = run_to_end(rows.observe("check", *observed), checkpoint, events, live)
    seen = [report["observed"]["check"] for report in run.progress if "check" in report["observed"]]
    if others := sum(row["others"] for row in seen):
        raise RuntimeError(f"{leg_name}, {contender}: {others:,} panes are not on time, although no event was late")
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
    """Raises RuntimeError if two contenders have different results for the same events."""
    if (first.results, first.digest) != (other.results, other.digest):
        raise RuntimeError(
            f"{other.leg}: {other.contender} has {other.results:,} results with digest {other.digest:x}, "
            f"but {first.contender} has {first.results:,} with {first.digest:x}"
        )


class _Live:
    """Tracks the peak of the state server's live bytes. Waits until the server has let go of earlier queries.

    Raises RuntimeError if it does not.
    """

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self.peak_bytes = 0
        deadline = time.monotonic() + PATIENCE_S
        while held := self._bytes():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the state server still holds {held:,} bytes of earlier queries")
            time.sleep(0.2)

    def __call__(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self._bytes())

    def _bytes(self) -> int:
        import aion

        state = aion.metrics.state(self._spark)
        return 0 if state is None else state.m_bucket_bytes + state.disk_only_bytes


def _together(digests: Sequence[int]) -> int:
    digest = 0
    for one in digests:
        digest ^= one
    return digest
