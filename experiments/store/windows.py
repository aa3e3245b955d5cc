"""Legs of `aion experiment store` that run the whole operator: late executions, and many past windows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import aion
from aion import aggregates as A
from experiments.store.common import MINUTE_US, drop_page_cache, events
from experiments.store.settings import MIB, Settings

PREPARE_TIMEOUT_S = 120
LATE_ROUNDS = 3
PAST_WARM_UPS = 5
FILL_EVENTS = 1000
KEYS = 100


# -- a late execution -------------------------------------------------------------------------------------


def mean_of_payloads(_key: tuple[Any, ...], _window: Any, batches: Iterator[pa.RecordBatch]) -> dict[str, float]:
    """The mean of all payload bytes, and of the values. Reads every byte once and keeps none."""
    total = size = rows = 0
    values = 0.0
    for batch in batches:
        payload = batch.column("payload")
        ends = np.frombuffer(payload.buffers()[1], np.int32)[payload.offset : payload.offset + len(payload) + 1]
        content = np.frombuffer(payload.buffers()[2], np.uint8)[ends[0] : ends[-1]]
        total += int(content.sum(dtype=np.uint64))
        size += content.size
        rows += len(payload)
        values += float(batch.column("value").to_numpy().sum())
    return {"payload": total / max(size, 1), "value": values / max(rows, 1)}


WAIT_US = 1_000_000
"""The event time from one execution to the next late one: the trigger's interval."""


def late_policy(contender: str, window_bytes: int) -> dict[str, Any]:
    """``memory``: everything in memory. ``prestaged``, ``unstaged``: the tiered store with and without prestaging."""
    return {
        "state": {"backend": "memory" if contender == "memory" else "tiered"},
        "memory": {"budget": 4 * window_bytes, "bucket_limit": 2 * window_bytes},
        "prestage": {"mode": "none" if contender == "unstaged" else "predictive"},
        "lateness": {"initial_bound": "1d"},
        "trigger": {"kind": "interval", "interval": f"{WAIT_US}us"},
    }


def late(contender: str, settings: Settings, folder: Path) -> dict[str, Any]:
    """Seconds of late executions of one window: the call in which its trigger is due, after one late event.

    Between the event and the call there is an idle gap, as between the batches of a stream, in which prestaging can
    work. Before the event the whole window is on disk (except with ``memory``), and the page cache is dropped.
    """
    rng = np.random.default_rng(settings.seed)
    rows = max(1, 4 * MIB // settings.payload_bytes)
    seconds: list[float] = []
    operator = aion.LocalOperator(
        windows=aion.Tumbling("1 minute"),
        time="ts",
        apply=aion.Apply(mean_of_payloads, "payload double, value double"),
        policy=late_policy(contender, settings.window_bytes),
    )
    with operator:
        for _ in range(max(1, settings.window_bytes // (4 * MIB))):
            operator.process(events(rng, rows, settings.payload_bytes))
        watermark = MINUTE_US
        operator.advance(watermark - WAIT_US)  # so that the operator knows the watermark's step
        assert operator.advance(watermark).num_rows == 1, "the on-time pane"
        for _ in range(LATE_ROUNDS):
            if contender != "memory":
                wait_until_on_disk(operator)
            dropped = drop_page_cache(Path(operator._folder.name))
            assert operator.process(events(rng, 1, settings.payload_bytes)).num_rows == 0
            time.sleep(settings.gap_s)
            watermark += WAIT_US
            begin = time.perf_counter()
            panes = operator.advance(watermark)
            seconds.append(time.perf_counter() - begin)
            assert panes.column("kind").to_pylist() == ["late"], panes
        stats = operator.store.stats()
    staging = stats.staging
    return {
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "window_bytes": stats.disk_only_bytes + stats.m_bucket_bytes,
        "dropped_bytes": dropped,
        "hits": staging.hits,
        "late": staging.late,
        "misses": staging.misses,
        "blocked_s": staging.blocked_s,
    }


def wait_until_on_disk(operator: aion.LocalOperator) -> None:
    """Waits until all expired windows are destaged and memory is empty."""
    deadline = time.monotonic() + PREPARE_TIMEOUT_S
    while operator.store.stats().m_bucket_bytes:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the window was not destaged within {PREPARE_TIMEOUT_S} s")
        time.sleep(0.01)


# -- many past windows ------------------------------------------------------------------------------------


def past(_contender: str, settings: Settings, _folder: Path) -> dict[str, Any]:
    """Median seconds of an on-time batch (one window's events and its execution), by number of past windows.

    The bound, in minutes, is the number of past windows. So each batch adds one window and purges one, and their number
    stays the same. The operators take turns, batch by batch. Each batch starts when its I/O thread is idle, so that it
    does not pay for an earlier one. The I/O thread's work per batch is in ``io_seconds``. ``cpu_seconds`` are of the
    calling thread, and depend less on the load of the machine.
    """
    rng = np.random.default_rng(settings.seed)
    seconds: dict[int, list[float]] = {k: [] for k in settings.past_windows}
    cpu_seconds: dict[int, list[float]] = {k: [] for k in settings.past_windows}
    io_seconds: dict[int, list[float]] = {k: [] for k in settings.past_windows}
    with ExitStack() as stack:
        operators = {k: stack.enter_context(past_operator(k)) for k in settings.past_windows}
        for k, operator in operators.items():
            for window in range(k):
                on_time_batch(operator, simple_events(rng, FILL_EVENTS, window), window)
        for round_ in range(PAST_WARM_UPS + settings.past_batches):
            # In random order, since the order decides for whom the caches are warm.
            for k in rng.permutation(settings.past_windows).tolist():
                window = k + round_
                table = simple_events(rng, settings.past_events, window)
                busy_s = settled(operators[k])
                cpu = time.thread_time()
                took = on_time_batch(operators[k], table, window)
                cpu = time.thread_time() - cpu
                busy_s = settled(operators[k]) - busy_s
                if round_ >= PAST_WARM_UPS:
                    seconds[k].append(took)
                    cpu_seconds[k].append(cpu)
                    io_seconds[k].append(busy_s)
        alive = {k: len(o._windows.operator.windows) for k, o in operators.items() if o._windows}
    assert alive == {k: k for k in settings.past_windows}, alive
    return {
        "seconds": {str(k): statistics.median(v) for k, v in seconds.items()},
        "cpu_seconds": {str(k): statistics.median(v) for k, v in cpu_seconds.items()},
        "io_seconds": {str(k): statistics.median(v) for k, v in io_seconds.items()},
        "batches": settings.past_batches,
    }


def settled(operator: aion.LocalOperator) -> float:
    """Waits until the operator's I/O thread is idle, and returns the seconds it has worked so far."""
    deadline = time.monotonic() + PREPARE_TIMEOUT_S
    while operator._io.stats.queued:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the I/O thread did not finish within {PREPARE_TIMEOUT_S} s")
        time.sleep(0.0005)
    return operator._io.stats.busy_s


def past_operator(past_windows: int) -> aion.LocalOperator:
    return aion.LocalOperator(
        windows=aion.Tumbling("1 minute"),
        time="ts",
        key="key",
        aggregates={"count": A.count(), "mean": A.mean("value")},
        policy={"lateness": {"initial_bound": f"{past_windows}m"}},
    )


def simple_events(rng: np.random.Generator, rows: int, window: int) -> pa.RecordBatch:
    """Events of one minute, without payload, with all keys."""
    times = pa.array(window * MINUTE_US + rng.integers(0, MINUTE_US, rows)).cast(pa.timestamp("us"))
    return pa.record_batch(
        [pa.array(np.arange(rows) % KEYS), times, pa.array(rng.random(rows))], ["key", "ts", "value"]
    )


def on_time_batch(operator: aion.LocalOperator, table: pa.RecordBatch, window: int) -> float:
    """Seconds to process the events of a window and to execute it."""
    begin = time.perf_counter()
    operator.process(table)
    panes = operator.advance((window + 1) * MINUTE_US)
    took = time.perf_counter() - begin
    assert panes.num_rows == min(KEYS, table.num_rows), panes.num_rows
    return took
