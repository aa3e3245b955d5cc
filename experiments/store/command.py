"""The cost of the tiered store compared with memory and with a plain file, without Spark.

Each leg runs in a process of its own (``legs``), so that no leg profits from the memory or caches of another. The
contenders of a leg take turns. ``ingest``, ``disk`` and ``windows`` do the measurements.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from experiments.store.settings import MIB, OVERCOMMIT, Settings

DEFAULTS = Settings()
CONTENDERS: dict[str, tuple[str, ...]] = {
    "ingest": ("tiered", "memory"),
    "disk": ("plain", "p-bucket"),
    "late": ("memory", "prestaged", "unstaged"),
    "past": ("all",),
    "blobs": ("sst", "blob-files"),
}
PACKAGES = ("aion", "pyarrow", "numpy", "rocksdict", "psutil")


def store(
    state_mib: Annotated[
        int, typer.Option(min=40, help=f"Size of the state; the budget is 1/{OVERCOMMIT} of it.")
    ] = DEFAULTS.state_bytes // MIB,
    disk_mib: Annotated[int, typer.Option(min=8, help="Size to write and read back.")] = DEFAULTS.disk_bytes // MIB,
    window_mib: Annotated[int, typer.Option(min=8, help="Size of the window that is executed late.")] = (
        DEFAULTS.window_bytes // MIB
    ),
    payload: Annotated[int, typer.Option(min=1, help="Random bytes in each event.")] = DEFAULTS.payload_bytes,
    gap: Annotated[
        float, typer.Option(min=0, max=120, help="Seconds between a late event and the end of its batch.")
    ] = DEFAULTS.gap_s,
    batches: Annotated[int, typer.Option(min=1, help="On-time batches per number of past windows and run.")] = (
        DEFAULTS.past_batches
    ),
    events: Annotated[int, typer.Option(min=1000, help="Events in an on-time batch.")] = DEFAULTS.past_events,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each leg.")] = DEFAULTS.runs,
    legs: Annotated[str, typer.Option(help="Some of: ingest,disk,late,past,blobs.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the generated events.")] = DEFAULTS.seed,
    out: Annotated[
        Path, typer.Option(help="Folder for results, and for the state during the runs.", file_okay=False)
    ] = Path("out/store"),
) -> None:
    """Measure the tiered store: memory, ingestion, disk, late executions, many past windows, blob files."""
    # Here, not above: `aion --help` imports this module and needs none of it.
    from experiments.shared import bench
    from experiments.shared.bench import wide_console

    console = wide_console()
    chosen = {leg: CONTENDERS[leg] for leg in bench.pick(legs, list(CONTENDERS))}
    settings = Settings(
        state_bytes=state_mib * MIB,
        disk_bytes=disk_mib * MIB,
        window_bytes=window_mib * MIB,
        payload_bytes=payload,
        gap_s=gap,
        past_batches=batches,
        past_events=events,
        runs=runs,
        seed=seed,
    )
    record = {
        "experiment": "store",
        "settings": {**asdict(settings), "budget_bytes": settings.budget_bytes},
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
    }
    results = take_turns(settings, chosen, out, record, console)
    report(settings, results, out, record, console)


def fits(settings: Settings, available_bytes: int) -> bool:
    """Whether the whole state fits into the available memory, with some to spare."""
    return settings.state_bytes * 1.25 + 512 * MIB < available_bytes


def take_turns(
    settings: Settings, chosen: dict[str, tuple[str, ...]], out: Path, record: dict[str, Any], console: Console
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """The results of all runs. Writes the JSON file after each run, so that an interruption loses only one run."""
    import psutil

    from experiments.shared import bench
    from experiments.store.legs import run_leg

    out.mkdir(parents=True, exist_ok=True)
    work_dir = Path(tempfile.mkdtemp(prefix="work-", dir=out)).absolute()
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    try:
        for leg, contenders in chosen.items():
            if leg == "ingest" and not fits(settings, psutil.virtual_memory().available):
                contenders = ("tiered",)
                console.print("skipping the memory backend: its state would not fit into this machine's memory")
            results[leg] = {contender: [] for contender in contenders}
            for turn in bench.turns(contenders, settings.runs, 0):
                folder = work_dir / f"{leg}-{turn.contender}-{turn.round}"
                with console.status(f"{leg}, run {turn.round}: {turn.contender}"):
                    found = run_leg(leg, turn.contender, settings, folder)
                shutil.rmtree(folder, ignore_errors=True)
                results[leg][turn.contender].append(found)
                console.print(f"run {turn.round}  {leg:<7} {turn.contender:<10} {line(leg, found)}", highlight=False)
                bench.write_json(out / "store.json", {**record, "results": results})
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    return results


def line(leg: str, found: dict[str, Any]) -> str:
    """One run in one line."""
    if leg == "ingest":
        peak = found["memory"]["peak_bytes"] / MIB
        return (
            f"{found['bytes_per_s'] / MIB:,.0f} MiB/s, {found['seconds']:.1f} s ({found['cpu_seconds']:.1f} "
            f"processor s), {found['windows']} windows, resident peak {peak:,.0f} MiB"
        )
    if leg == "disk":
        return f"write {found['write_bytes_per_s'] / MIB:,.0f}, read {found['read_bytes_per_s'] / MIB:,.0f} MiB/s"
    if leg == "late":
        return (
            f"{found['seconds'] * 1e3:,.0f} ms; blocks prestaged {found['hits']}, prestaged too late {found['late']}, "
            f"missed {found['misses']}"
        )
    if leg == "blobs":
        return (
            "; ".join(
                f"{what} " + ", ".join(f"{size}: {v / MIB:,.0f}" for size, v in found[f"{what}_bytes_per_s"].items())
                for what in ("write", "read")
            )
            + " MiB/s"
        )
    return ", ".join(f"{int(k):,}: {s * 1e3:.2f} ms" for k, s in found["seconds"].items())


def report(
    settings: Settings,
    results: dict[str, dict[str, list[dict[str, Any]]]],
    out: Path,
    record: dict[str, Any],
    console: Console,
) -> None:
    """Prints tables, and writes everything as JSON and the figures as PNG."""
    from experiments.store import report as store_report

    console.print()
    for _, title, unit, values in store_report.figures(results):
        console.print(store_report.figures_table(title, unit, values))
    console.print(store_report.checks_table(store_report.checks(results, settings)))
    console.print(remarks(settings), highlight=False)
    paths = store_report.write(out, record, results, settings)
    console.print("written: " + ", ".join(str(path) for path in paths), highlight=False, soft_wrap=True)


def remarks(settings: Settings) -> str:
    """The explanations below the tables."""
    budget, state, window = (b / MIB for b in (settings.budget_bytes, settings.state_bytes, settings.window_bytes))
    return "\n".join(
        [
            f"memory: resident memory (sampled 50 times a second) minus that before the first append, including "
            f"RocksDB; {state:,.0f} MiB of state, budget {budget:,.0f} MiB. flat: the median in the last quarter of "
            "the appends minus that in the second.",
            f"ingestion: blocks of 1 MiB are encoded and appended, 5 % of them late, and committed (synced) every "
            f"{settings.commit_blocks} blocks; both backends write all of them.",
            "writing, reading: the same bytes for both. Every file is synced, then dropped from the page cache with "
            "posix_fadvise(DONTNEED). A hypervisor's cache below cannot be dropped. The plain file is synced once, at "
            "the end, and read in blocks that are kept, as staging keeps them.",
            f"late execution: the call that ends the batch of a late event, {settings.gap_s:g} s after it; a window of "
            f"{window:,.0f} MiB; page cache dropped before the event; the function reads every byte of the payload.",
            "blob files: values are put without a log and flushed at each commit; SST files: written and ingested.",
            f"on-time batch: {settings.past_events:,} events of one window, and its execution, while the past windows "
            "are kept; it begins when the I/O of the previous batch is done.",
        ]
    )
