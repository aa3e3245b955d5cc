"""Planned executions with prestaging: how much late executions find in memory, and how long they wait for disk.

It runs the whole operator on the tiered store, with far less memory than the late windows take. Each batch moves the
watermark, brings events and executes. A gap follows, in which the I/O thread works, as on Spark. All modes get the same
events and must yield the same panes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.planned.settings import DEFAULTS, MODES, Settings

if TYPE_CHECKING:
    import pyarrow as pa

    import aion

PACKAGES = ("aion", "numpy", "pyarrow", "rocksdict", "matplotlib")
MINUTE_US = 60_000_000
GAP_S = 5.0


def planned(
    windows: Annotated[int, typer.Option(min=2, help="How many windows of a minute.")] = DEFAULTS.windows,
    events: Annotated[int, typer.Option(min=10, help="Events in time per window, 1 kB each.")] = DEFAULTS.events,
    late: Annotated[int, typer.Option(min=1, help="Late events per window, on average.")] = DEFAULTS.late,
    budget: Annotated[int, typer.Option(min=4, help="MiB of memory.")] = DEFAULTS.budget_bytes >> 20,
    staleness: Annotated[float, typer.Option(min=0.001, max=0.9, help="The trigger's bound.")] = DEFAULTS.staleness,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each mode; the modes take turns.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the events.")] = DEFAULTS.seed,
    out: Annotated[Path, typer.Option(help="Folder for results.", file_okay=False)] = Path("out/planned"),
) -> None:
    """Plan late executions by staleness and prestage for them: hits, misses and waiting, by mode."""
    from dataclasses import asdict

    from experiments.planned import report as planned_report
    from experiments.shared import bench
    from experiments.shared.bench import wide_console

    console = wide_console()
    settings = Settings(windows, events, late, budget_bytes=budget << 20, staleness=staleness, seed=seed)
    results: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    for number in range(runs):
        for mode in MODES:
            with console.status(f"{mode}, run {number + 1} of {runs}"):
                results[mode].append(run(mode, settings))
    record = {
        "experiment": "planned",
        "settings": asdict(settings),
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
        "results": results,
    }
    for table in planned_report.tables(results):
        console.print(table)
    console.print(planned_report.remarks(settings), highlight=False)
    paths = planned_report.write(out, record, results)
    console.print("written: " + ", ".join(str(path) for path in paths), highlight=False, soft_wrap=True)


def policy(mode: str, settings: Settings) -> dict[str, Any]:
    """The policy of a mode. ``coverage: null`` keeps every window equally long, so that only the mode differs."""
    return {
        "memory": {"budget": settings.budget_bytes, "bucket_limit": settings.budget_bytes // 2},
        "blocks": {"target": "64KiB"},
        "prestage": {"mode": mode},
        "lateness": {"initial_bound": f"{settings.bound_s}s", "coverage": None},
        "trigger": {"kind": "staleness", "bound": settings.staleness},
    }


def run(mode: str, settings: Settings) -> dict[str, Any]:
    """Runs the whole stream: what reads found in memory, and what the trigger did."""
    import time

    import aion
    from aion.base.hashing import ShardOfKeys
    from aion.execute.assembly import make_builder

    batches = stream(settings)
    panes = 0
    late_s: list[float] = []
    with aion.LocalOperator(
        windows=aion.Tumbling("1 minute"),
        time="ts",
        apply=aion.Apply(total, "n bigint, payload bigint"),
        policy=policy(mode, settings),
    ) as operator:
        operator.process(next(batches)[1])
        executor = operator._windows
        assert executor is not None
        for watermark_us, table in batches:
            panes += checksum(operator._answer(executor, executor.advance(watermark_us)))
            settle(operator)
            builder = make_builder(executor.plan, operator.policy, operator._codec, ShardOfKeys([0]))
            blocks = [b.block for batch in table.to_batches() for b in builder.add(batch)]
            rows = list(executor.arrive([*blocks, *(b.block for b in builder.finish())]))
            begin = time.perf_counter()
            rows += executor.end_batch()
            late_s.append(time.perf_counter() - begin)
            panes += checksum(operator._answer(executor, rows))
            settle(operator)
        counters = operator.counters
        staging = operator.store.stats().staging
        left = len(executor.operator.windows)
    assert left == 0, f"{left} windows are left"
    stale = counters["staleness"]
    return {
        "panes": panes % (1 << 63),
        "executions": counters["executions"],
        "late_per_window": counters["executions"]["late"] / settings.windows,
        "late_seconds": sum(late_s),
        "hits": staging.hits,
        "ahead": staging.ahead,
        "late": staging.late,
        "misses": staging.misses,
        "blocked_s": staging.blocked_s,
        "staged_bytes": staging.staged_bytes,
        "vain_bytes": staging.vain_bytes,
        "staleness": {
            "kept": stale["kept"] / stale["windows"],
            "largest": stale["largest"],
            "mean": stale["total"] / stale["windows"],
        },
    }


def total(_key: tuple[Any, ...], _window: Any, batches: Iterator[pa.RecordBatch]) -> dict[str, int]:
    """The window function: reads every byte of every event, and keeps none."""
    import numpy as np

    n = size = 0
    for batch in batches:
        n += batch.num_rows
        size += int(np.frombuffer(batch.column("payload").buffers()[2], np.uint8).sum(dtype=np.uint64))
    return {"n": n, "payload": size % 2**31}


def checksum(panes: pa.Table) -> int:
    """A checksum of panes that does not depend on their order."""
    import zlib

    if not panes.num_rows:
        return 0
    rows = panes.select(["window_start", "pane", "kind", "n", "events", "late_events"]).to_pylist()
    return sum(zlib.crc32(repr(sorted(row.items())).encode()) for row in rows)


def settle(operator: aion.LocalOperator) -> None:
    """Waits until the I/O thread has nothing left to do: the gap after a call."""
    import time

    deadline = time.monotonic() + GAP_S
    while operator._io.stats.queued and time.monotonic() < deadline:
        time.sleep(0.0005)


def stream(settings: Settings) -> Iterator[tuple[int, pa.Table]]:
    """Watermarks, each with the events that come at it: current ones, and late ones of windows that have ended.

    It goes on until the last window has reached its bound.
    """
    import numpy as np
    import pyarrow as pa

    rng = np.random.default_rng(settings.seed)
    step_us = settings.batch_s * 1_000_000
    bound_us = settings.bound_s * 1_000_000
    starts = np.arange(settings.windows) * MINUTE_US
    in_time = rng.integers(0, settings.windows * MINUTE_US, settings.windows * settings.events)
    counts = rng.poisson(settings.late, settings.windows)
    late = np.repeat(starts, counts) + rng.integers(0, MINUTE_US, counts.sum())
    lateness = settings.median_s * 1e6 * np.exp(rng.standard_normal(counts.sum()))
    arrives = np.concatenate([in_time, late // MINUTE_US * MINUTE_US + MINUTE_US + lateness.astype(np.int64)])
    times = np.concatenate([in_time, late])
    order = np.argsort(arrives, kind="stable")
    arrives, times = arrives[order], times[order]
    end_us = settings.windows * MINUTE_US + bound_us + step_us
    for begin_us in range(0, end_us, step_us):
        first, last = np.searchsorted(arrives, [begin_us, begin_us + step_us])
        rows = int(last - first)
        ends = np.arange(rows + 1, dtype=np.int32) * settings.payload_bytes
        content = pa.py_buffer(rng.bytes(rows * settings.payload_bytes))
        payload = pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(ends), content])
        yield begin_us, pa.table({"ts": pa.array(times[first:last]).cast(pa.timestamp("us")), "payload": payload})
