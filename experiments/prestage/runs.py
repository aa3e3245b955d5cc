"""The Spark part of `aion experiment prestage`: one query, batch by batch, with a gap after each."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import aion
from experiments.memory_pressure.page_cache import evict
from experiments.prestage.settings import MINUTE_S, PAYLOAD_BYTES, Disk, Settings
from state_backends.files.location import scratch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from experiments.chaos.places import Bucket

SCHEMA = "ts timestamp, payload binary"
READS = "reads"
"""The file to which a slow disk writes, in the folder of the run: a line for each execution."""
EPOCH_S = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp())


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. ``seconds``: of the executions of each kind of pane, one for each measured batch that had some.

    ``waited_s``: how long they waited for blocks. ``hits``, ``misses``: blocks that were in memory, or were not.
    ``resident``: of the bytes that executions of each kind read from a slow disk, the share that was in memory when
    they began.
    """

    mode: str
    disk: str
    gap_s: float
    trigger: str
    seconds: dict[str, list[float]]
    waited_s: dict[str, list[float]]
    bytes: dict[str, int]
    hits: int
    ahead: int
    misses: int
    blocked_s: float
    staged_bytes: int
    panes: int
    checksum: int
    resident: dict[str, float] = field(default_factory=dict)


def run(settings: Settings, disk: Disk, gap_s: float, trigger: str, mode: str, folder: Path) -> Cell:
    """Runs a query over all batches, in a session with a state server of its own. Removes what it wrote."""
    from experiments.chaos.places import Bucket
    from experiments.shared.stream import session

    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        # Not as policy= of the windows, which would take the place of the session's policy.
        more = {"spark.sql.shuffle.partitions": "1", "spark.aion.trace.folder": str(folder / "trace")}
        bucket = None
        if disk.request_ms is not None:
            bucket = stack.enter_context(contextlib.closing(Bucket()))
            more["spark.aion.state.dir"] = bucket.uri
        spark = session(2, folder, policy=policy(settings, disk, trigger, mode, folder / READS), more=more)
        stack.callback(spark.stop)
        found = _run(spark, settings, disk, gap_s, folder, bucket)
        return Cell(mode, disk.name, gap_s, trigger, **found)


def _run(
    spark: SparkSession, settings: Settings, disk: Disk, gap_s: float, folder: Path, bucket: Bucket | None
) -> dict[str, Any]:
    """Returns what was measured: the fields of a :class:`Cell`."""
    from aion import metrics

    inbox, record = folder / "in", folder / "trace"
    inbox.mkdir(parents=True)
    events = aion.read_files(spark, str(inbox), schema=SCHEMA, watermark=("ts", "0 seconds"), max_files_per_trigger=1)
    panes = aion.windowed(
        events,
        time="ts",
        windows={"minute": aion.Tumbling("1 minute")},
        apply=aion.Apply(total, "n long, bytes long, checksum long"),
    )
    found: Counter[str] = Counter()

    def keep(rows: Any, _batch: int) -> None:
        for row in rows.collect():
            found["panes"] += 1
            found["checksum"] += row["checksum"] * row["n"]

    query = panes.writeStream.foreachBatch(keep).option("checkpointLocation", str(folder / "checkpoint")).start()
    slow = contextlib.ExitStack()
    try:
        before, filled = None, -1
        for number in range(settings.past + settings.measured):
            write(inbox, settings, number)
            query.processAllAvailable()
            while sum(report["numInputRows"] > 0 for report in query.recentProgress) <= number:  # it returned too early
                time.sleep(0.01)
                query.processAllAvailable()
            if number + 1 == settings.past:
                before, filled = metrics.state(spark), query.lastProgress["batchId"]
                if bucket is not None:
                    slow.enter_context(bucket.slow((disk.request_ms or 0.0) / 1e3))
            if number + 1 >= settings.past:
                forget(folder, bucket)
                time.sleep(gap_s)
        after = metrics.state(spark)
    finally:
        query.stop()
        slow.close()
    assert before is not None and after is not None
    staging = {name: after.staging[name] - before.staging[name] for name in after.staging}
    return {
        **measured(record, folder / READS, filled),
        "hits": int(staging["hits"]),
        "ahead": int(staging["ahead"]),
        "misses": int(staging["misses"] + staging["late"]),
        "blocked_s": float(staging["blocked_s"]),
        "staged_bytes": int(staging["staged_bytes"]),
        "panes": found["panes"],
        "checksum": found["checksum"],
    }


def forget(folder: Path, bucket: Bucket | None) -> None:
    """Takes state out of the page cache. Behind S3, deletes this host's copies of bodies."""
    if bucket is None:
        evict(folder / "state")
        return
    for path in scratch().rglob("*.bodies"):
        path.unlink(missing_ok=True)


def policy(settings: Settings, disk: Disk, trigger: str, mode: str, reads: Path) -> dict[str, Any]:
    """With ``memory``, everything fits, and windows stay there whole. A slow disk writes ``reads``."""
    planned = {"kind": "interval", "interval": f"{settings.parts * MINUTE_S}s"}
    # A window's first two parts come before its end. It runs when it has all others, in the batch of the last one.
    own = {"kind": "count", "count": (settings.parts - 2) * settings.part}
    everything = 4 * (settings.past + settings.measured) * settings.window_bytes
    budget = everything if mode == "memory" else settings.budget_bytes
    destage: dict[str, Any] = {"keep_fraction": 1.0} if mode == "memory" else {}
    if disk.reads_per_s is not None:
        arguments = {"reads_per_s": disk.reads_per_s, "together": mode != "apart", "record": str(reads)}
        destage |= {"class": "experiments.prestage.disk:SlowDisk", "arguments": arguments}
    return {
        "memory": {"budget": budget, "bucket_limit": budget},
        "prestage": {"mode": "none" if mode in ("without", "apart") else "predictive"},
        "distribution": {"hand_over": "1B"},
        "blocks": {"target": "256KiB"},
        "lateness": {"initial_bound": f"{settings.past * MINUTE_S}s", "coverage": None},
        "trigger": planned if trigger == "planned" else own,
        "destage": destage,
    }


def write(inbox: Path, settings: Settings, number: int) -> None:
    """The file of a batch: a part of the events of each of the latest windows, and some for one that ends for good.

    So the state of a window lies in as many files as it has parts. A window runs on time with its first part, late when
    it has all of them, and for the last time at its bound.
    """
    dice = np.random.default_rng(number)
    minutes = [np.full(settings.part, minute) for minute in range(max(number - settings.parts + 1, 0), number + 1)]
    if number >= settings.past:
        minutes.append(np.full(settings.late, number - settings.past + 1))
    minute = np.concatenate(minutes)
    times_us = (EPOCH_S + minute * MINUTE_S) * 1_000_000 + dice.integers(0, MINUTE_S * 1_000_000, len(minute))
    payload = [dice.bytes(PAYLOAD_BYTES) for _ in range(len(minute))]
    table = pa.table({"ts": pa.array(times_us, pa.timestamp("us", "UTC")), "payload": pa.array(payload, pa.binary())})
    path = inbox / f".{number:06d}"
    pq.write_table(table, path, compression="none")
    path.rename(inbox / f"{number:06d}.parquet")


def total(_key: tuple[Any, ...], _window: Any, batches: Iterator[pa.RecordBatch]) -> dict[str, int]:
    """The window function: reads every byte of every event, and keeps none."""
    import zlib

    n = size = checksum = 0
    for batch in batches:
        column = batch.column("payload")
        _, _, data = column.buffers()
        n += batch.num_rows
        size += column.nbytes
        checksum ^= zlib.crc32(data) if data is not None else 0
    return {"n": n, "bytes": size, "checksum": checksum}


def measured(record: Path, reads: Path, filled: int) -> dict[str, Any]:
    """What the trace says of the executions in the measured batches: those after the batch ``filled``.

    ``reads``: what a slow disk wrote of the same executions, if there is one.
    """
    rows = pq.read_table(
        record, columns=["batch", "kind", "pane", "at_us", "bytes", "took_us", "waited_us"]
    ).to_pylist()
    executions = sorted(
        (row for row in rows if row["kind"] == "execution"), key=lambda row: (row["batch"], row["at_us"])
    )
    lines = (
        [line.split() for line in reads.read_text().splitlines()] if reads.exists() else [("0", "0")] * len(executions)
    )
    here: Counter[str] = Counter()
    whole: Counter[str] = Counter()
    seconds: dict[str, dict[int, float]] = {}
    waited: dict[str, dict[int, float]] = {}
    size: Counter[str] = Counter()
    for row, (resident_bytes, all_bytes) in zip(executions, lines, strict=True):
        if row["batch"] > filled:
            pane, batch = row["pane"], row["batch"]
            for found, us in ((seconds, row["took_us"]), (waited, row["waited_us"])):
                of = found.setdefault(pane, {})
                of[batch] = of.get(batch, 0.0) + us / 1e6
            size[pane] += row["bytes"]
            here[pane] += int(resident_bytes)
            whole[pane] += int(all_bytes)
    return {
        "seconds": {pane: list(of.values()) for pane, of in seconds.items()},
        "waited_s": {pane: list(of.values()) for pane, of in waited.items()},
        "bytes": dict(size),
        "resident": {pane: here[pane] / whole[pane] for pane in whole if whole[pane]},
    }
