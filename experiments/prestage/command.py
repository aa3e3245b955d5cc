"""What prestaging is worth on Spark: the seconds of on-time, late and final executions, by disk and gap.

State is ten times the memory. After each batch the page cache is emptied of all state, before anything is prestaged;
behind S3, this host loses its copies of bodies, as a host has none of what others wrote. Then comes a gap, and the next
batch. Three modes take turns: with prestaging, without, and everything in memory.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.prestage.settings import TRIGGERS, Disk, Settings

if TYPE_CHECKING:
    from experiments.prestage.runs import Cell

PACKAGES = ("aion", "pyspark", "pyarrow", "rocksdict", "numpy")


def prestage(
    window: Annotated[int, typer.Option(min=1, help="MiB of events of a window, 2,304 bytes each.")] = 4,
    parts: Annotated[int, typer.Option(min=3, help="Batches that bring the events of a window.")] = 20,
    past: Annotated[int, typer.Option(min=4, help="Windows that may still get late events.")] = 40,
    batches: Annotated[int, typer.Option(min=2, help="Measured batches.")] = 8,
    gaps: Annotated[str, typer.Option(help="Seconds between two batches.")] = "0,2",
    disks: Annotated[str, typer.Option(help="Reads per second, fast, or s3: and ms per request.")] = "120,fast,s3:30",
    triggers: Annotated[
        str, typer.Option(help="planned: late windows run at known instants. own: in the batch of their last event.")
    ] = "planned",
    runs: Annotated[int, typer.Option(min=1, help="Runs of each mode; the modes take turns.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for results.", file_okay=False)] = Path("out/prestage"),
) -> None:
    """Measure what prestaging saves executions on Spark, on time, late and final, on slow and fast disks."""
    from experiments.chaos.places import CREDENTIALS
    from experiments.prestage import report as prestage_report
    from experiments.prestage.runs import run
    from experiments.shared import bench
    from experiments.shared.bench import wide_console

    console = wide_console()
    settings = Settings(
        window_bytes=window << 20,
        parts=parts,
        past=past,
        measured=batches,
        gaps_s=tuple(float(gap) for gap in gaps.split(",")),
        disks=tuple(Disk.of(disk) for disk in disks.split(",")),
        runs=runs,
        triggers=tuple(triggers.split(",")),
    )
    if unknown := {*settings.triggers} - {*TRIGGERS}:
        raise typer.BadParameter(f"{unknown.pop()!r} is no trigger; write {' or '.join(TRIGGERS)}")
    record: dict[str, Any] = {
        "experiment": "prestage",
        "settings": asdict(settings),
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
    }
    if any(disk.request_ms is not None for disk in settings.disks):
        os.environ.update(CREDENTIALS)  # before the first session: its JVM stays, and workers have its environment
    cells: list[Cell] = []
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="work-", dir=out) as work:
        for number in range(settings.runs):
            for disk, gap_s, trigger, mode in settings.cells():
                words = f"run {number + 1}, {disk.name}, gap {gap_s:g} s, {trigger}, {prestage_report.WORDS[mode]}"
                with console.status(words):
                    cells.append(run(settings, disk, gap_s, trigger, mode, Path(work).absolute() / "cell"))
                seconds = {pane: prestage_report.seconds_of(cells[-1:], pane) for pane in prestage_report.PANES}
                each = ", ".join(f"{pane} {s:.4f} s" for pane, s in seconds.items() if s is not None)
                console.print(f"{words}: {each}", highlight=False)
                prestage_report.write(out, record, cells)  # an interruption loses only one run
    console.print(prestage_report.table(cells))
    for line in prestage_report.verdicts(cells):
        console.print(line, highlight=False)
    paths = prestage_report.write(out, record, cells)
    console.print("written: " + ", ".join(str(path) for path in paths), highlight=False, soft_wrap=True)
