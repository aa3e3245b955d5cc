"""Seeded event generators: Parquet files whose bytes depend only on their parameters.

A stream is a sequence of batches, one Parquet file each, in arrival order. Most events of a batch are in time. The
others are late with respect to the watermark of a reader of one file per trigger. Times are microseconds since the
epoch, UTC.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

SECOND_US = 1_000_000
FORMAT = 1  # raise it if the same parameters give other bytes, so that no stale file is reused

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class EventPlan:
    """The parameters of a stream of (key, ts, value[, payload]) events. Durations are in microseconds.

    The stream starts in the middle of a window. So no batch's watermark falls on a window's edge, where rounding would
    decide which windows have ended.
    """

    events_per_batch: int
    keys: int = 100
    late_share: float = 0.05
    past_windows: int = 5
    payload_bytes: int = 0
    window_us: int = 20 * SECOND_US
    span_us: int = 40 * SECOND_US  # event time per batch
    delay_us: int = 20 * SECOND_US  # the watermark delay that readers declare
    origin_us: int = 1_700_000_000 * SECOND_US  # a whole number of windows since the epoch
    seed: int = 1
    row_groups: int = 16  # Spark splits a file between row groups; enough to feed every core evenly

    def __post_init__(self) -> None:
        if self.events_per_batch < 1 or self.keys < 1:
            raise ValueError(f"{self}: needs at least one event per batch, and one key")
        if not 0 <= self.late_share <= 1:
            raise ValueError(f"late_share {self.late_share} is not a share; give 0 to 1")
        if self.past_windows < 1:
            raise ValueError(f"past_windows {self.past_windows} is less than 1; late events need a past window")
        if self.payload_bytes < 0:
            raise ValueError(f"payload_bytes {self.payload_bytes} is negative")

    def start_us(self, index: int) -> int:
        """Event time at which batch ``index`` begins."""
        return self.origin_us + self.window_us // 2 + index * self.span_us

    def watermark_us(self, index: int) -> int:
        """The watermark that decides which rows of batch ``index`` are late.

        Spark uses the watermark of the *previous* batch: the newest event of batch ``index`` - 2, minus the delay. So
        the windows of late events have been executed by then, under any definition. For the first two batches it is
        what it would be if the stream had begun earlier.
        """
        newest = self.start_us(index - 2) + int(_offsets(self.events_per_batch, self.span_us)[-1])
        return newest - self.delay_us

    def folder(self, data_dir: Path) -> Path:
        """The folder of this plan's files: a readable name, plus a digest of all parameters."""
        text = json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        return data_dir / f"events-{self.events_per_batch}x{self.payload_bytes}B-{digest}"


def lateness_shares(past_windows: int) -> npt.NDArray[np.float64]:
    """The probability that an event is 0, 1, ... ``past_windows`` windows old (the Aion paper's lateness).

    The paper draws i = round(X) - 1 with X log-normal (mu 0, sigma 1), sets negative i to 0, and redraws i above
    ``past_windows``. Here the distribution function gives the same probabilities without redrawing.
    """

    def below(x: float) -> float:
        return 0.5 * (1 + math.erf(math.log(x) / math.sqrt(2)))

    edges = [0.0, *(below(i + 1.5) for i in range(past_windows + 1))]
    shares = np.diff(np.asarray(edges))
    return np.asarray(shares / shares.sum())


def windows_late(rng: np.random.Generator, size: int, past_windows: int) -> Int64s:
    """``size`` draws of how many windows late a late event is, from :func:`lateness_shares` without 0."""
    shares = lateness_shares(past_windows)[1:]
    return rng.choice(np.arange(1, past_windows + 1), size=size, p=shares / shares.sum()).astype(np.int64)


def event_times(plan: EventPlan, index: int, rng: np.random.Generator) -> Int64s:
    """Event times (µs) of batch ``index`` in arrival order: ascending, with late ones at random positions.

    Exactly ``late_share`` of them (rounded) are late, by i = 1..``past_windows`` windows: such an event lies anywhere
    in the i-th newest window that the watermark of the batch has ended.
    """
    times = plan.start_us(index) + _offsets(plan.events_per_batch, plan.span_us)
    late_count = round(plan.events_per_batch * plan.late_share)
    late_at = rng.permutation(plan.events_per_batch)[:late_count]
    newest_ended_us = plan.watermark_us(index) // plan.window_us * plan.window_us
    behind_us = windows_late(rng, late_count, plan.past_windows) * plan.window_us
    within_us = rng.integers(0, plan.window_us, late_count)
    times[late_at] = newest_ended_us - behind_us + within_us
    return times


def events(plan: EventPlan, index: int) -> pa.Table:
    """Batch ``index`` without its payload: key bigint, ts timestamp (µs, UTC), value double.

    Values are whole numbers, so that their sums are exact in any order.
    """
    rng = np.random.default_rng([plan.seed, index])
    return pa.table(
        {
            "key": rng.integers(0, plan.keys, plan.events_per_batch),
            "ts": pa.array(event_times(plan, index, rng), pa.timestamp("us", tz="UTC")),
            "value": rng.integers(0, 1_000, plan.events_per_batch).astype(np.float64),
        }
    )


def payloads(rng: np.random.Generator, count: int, size_bytes: int) -> pa.Array:
    """``count`` binary values of ``size_bytes`` random bytes each, which no compressor can shrink."""
    offsets = np.arange(count + 1, dtype=np.int64) * size_bytes
    data = pa.py_buffer(rng.bytes(count * size_bytes))
    wide = pa.LargeBinaryArray.from_buffers(pa.large_binary(), count, [None, pa.py_buffer(offsets), data])
    return wide.cast(pa.binary())


def write_batches(plan: EventPlan, batches: int, data_dir: Path) -> list[Path]:
    """The files of the first ``batches`` batches, in order. Generates only those that do not exist yet."""
    folder = plan.folder(data_dir)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for index in range(batches):
        path = folder / f"batch-{index:05d}.parquet"
        if not path.exists():
            # Spark's file source ignores names that begin with an underscore. A file gets its final name only when it
            # is complete.
            unfinished = folder / f"_{path.name}.{os.getpid()}"
            _write_batch(plan, index, unfinished)
            # Spark reads files in order of their modification time, which must not depend on the writer's clock.
            seconds = plan.start_us(index) // SECOND_US
            os.utime(unfinished, (seconds, seconds))
            unfinished.replace(path)
        paths.append(path)
    return paths


def _write_batch(plan: EventPlan, index: int, path: Path) -> None:
    table = events(plan, index)
    rng = np.random.default_rng([plan.seed, index, plan.payload_bytes])
    schema = table.schema
    if plan.payload_bytes:
        schema = schema.append(pa.field("payload", pa.binary()))
    rows = -(-plan.events_per_batch // plan.row_groups)
    # Uncompressed, since the experiments measure what comes after the scan. One row group in memory at a time.
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=["key"]) as writer:
        for at in range(0, len(table), rows):
            group = table.slice(at, rows)
            if plan.payload_bytes:
                group = group.append_column("payload", payloads(rng, len(group), plan.payload_bytes))
            writer.write_table(group, row_group_size=rows)


def _offsets(count: int, span_us: int) -> Int64s:
    """``count`` evenly spaced instants within ``span_us``, from 0."""
    return np.arange(count, dtype=np.int64) * span_us // count
