"""``aion experiment memory-pressure`` and ``aion experiment compare``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.memory_pressure.report import Sheet
    from experiments.memory_pressure.run import Progress
    from experiments.memory_pressure.settings import Settings

LINE_S = 30.0


def memory_pressure(
    settings_file: Annotated[
        Path | None, typer.Option("--settings", exists=True, dir_okay=False, help="A YAML file with these settings.")
    ] = None,
    workload: Annotated[str | None, typer.Option(help="Some of: average,bigrams,stock,linear-road.")] = None,
    past_windows: Annotated[str | None, typer.Option(help="How many windows late an event may be: 1..10")] = None,
    backend: Annotated[str | None, typer.Option(help="Some of: tiered,memory,rocksdb,spark-list,spark-window.")] = None,
    policy: Annotated[str | None, typer.Option(help="Aion's policy: a preset or a file.")] = None,
    parts: Annotated[bool, typer.Option("--parts", help="Also one part of the policy at a time (figure 8).")] = False,
    state: Annotated[str | None, typer.Option(help="Memory for state, above each one's floor, e.g. 200MiB.")] = None,
    scale: Annotated[float | None, typer.Option(help="Scale of rates and windows; state shrinks by its square.")] = (
        None
    ),
    flink: Annotated[
        str | None, typer.Option(help="Flink's jars: a folder, or the wheel of apache-flink-libraries.")
    ] = None,
    limit: Annotated[str | None, typer.Option(help="auto, watched, or cgroup:PATH of your own group.")] = None,
    warm_up: Annotated[int | None, typer.Option(help="Batches (and so windows) before the measured ones.")] = None,
    measured: Annotated[int | None, typer.Option(help="Measured batches.")] = None,
    pace: Annotated[str | None, typer.Option(help="real: in real time; max: as fast as possible.")] = None,
    executions: Annotated[str | None, typer.Option(help="twice: as in the paper; policy: as the policy says.")] = None,
    source: Annotated[str | None, typer.Option(help="files, rate or kafka.")] = None,
    kafka: Annotated[str | None, typer.Option(help="Kafka's servers, for the source kafka.")] = None,
    cores: Annotated[int | None, typer.Option(help="Cores, and shuffle partitions.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the generated events.")] = None,
    staleness: Annotated[bool | None, typer.Option(help="Include the staleness experiment (figure 9).")] = None,
    minutes: Annotated[float | None, typer.Option(help="Begin no cell after this time. Run it again to go on.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for results. A stopped sweep continues there.", file_okay=False)
    ] = Path("out/memory-pressure"),
) -> None:
    """Memory, speed and crashes under late events: the four workloads of the Aion paper, section 5, on Spark.

    Each cell (workload, store, past windows) runs in processes of its own under a memory limit. You can stop the
    command at any time; the same command continues with the missing cells. The result is OUT/report.html.
    """
    # Here, not above: `aion --help` imports this module and needs none of it.
    from experiments.memory_pressure import report
    from experiments.memory_pressure.run import sweep
    from experiments.memory_pressure.settings import PARTS, estimate, load_settings, words
    from experiments.shared.bench import wide_console

    given = {
        "workload": workload, "past_windows": past_windows, "backend": backend, "policy": policy, "state": state,
        "flink": flink, "parts": PARTS if parts else None,
        "scale": scale, "limit": limit, "warm_up": warm_up, "measured": measured,
        "pace": pace, "executions": executions, "source": source, "kafka": kafka, "cores": cores, "seed": seed,
        "staleness": staleness,
    }  # fmt: skip
    settings = load_settings(settings_file, given)
    console = wide_console()
    console.print(words(settings), highlight=False)
    console.print(estimate(settings), highlight=False)
    if left_out := flink_left_out(settings):
        console.print(left_out, highlight=False, soft_wrap=True)
    out.mkdir(parents=True, exist_ok=True)
    with ProgressDisplay(console) as show:
        results = sweep(settings, out, show, minutes=minutes)
    record = report.record_of(settings, results, staleness_of(out) if settings.staleness else None)
    paths = report.write(out, settings, record)
    console.print(rich_table("cells, medians", report.cells_sheet(results)))
    console.print(rich_table("the paper's claims", report.findings_sheet(record["findings"])))
    console.print("written: " + ", ".join(str(path) for path in paths), highlight=False, soft_wrap=True)
    if any(result["status"] == "failed" or result.get("agrees") is False for result in results):
        raise typer.Exit(1)


def compare(
    a: Annotated[Path, typer.Argument(help="The folder of a sweep, or its memory-pressure.json.", exists=True)],
    b: Annotated[Path, typer.Argument(help="The same of another sweep.", exists=True)],
    out: Annotated[Path, typer.Option(help="Folder for results.", file_okay=False)] = Path("out/compare"),
) -> None:
    """Compare two runs of memory-pressure: the settings that differ, and the results side by side."""
    from experiments.memory_pressure import compare as comparing
    from experiments.memory_pressure.report import Sheet
    from experiments.shared.bench import wide_console

    console = wide_console()
    changed, cells, paths = comparing.write(out, (a, b))
    console.print(rich_table("what changed", Sheet(["setting", "A", "B"], changed, left=3)))
    for start in range(3, len(cells.headings), 3):  # a table for each figure, since a single one would be too wide
        chosen = [0, 1, 2, *range(start, start + 3)]
        part = Sheet(
            [cells.headings[i] for i in chosen], [[row[i] for i in chosen] for row in cells.rows], left=cells.left
        )
        console.print(rich_table("medians", part))
    console.print("written: " + ", ".join(str(path) for path in paths), highlight=False, soft_wrap=True)


def flink_left_out(settings: Settings) -> str | None:
    """Why Flink is left out where it was asked for, and how to get it. Raises ConfigError."""
    from aion.errors import ConfigError
    from experiments.memory_pressure.settings import FLINK_WORKLOAD
    from experiments.shared.flink import HOW_TO_GET, FlinkError, check
    from experiments.workloads.application import FLINK

    if not set(FLINK) & set(settings.backend):
        return None
    if settings.flink is None:
        return HOW_TO_GET
    try:
        check(Path(settings.flink))
    except FlinkError as error:
        raise ConfigError(str(error)) from None
    others = [workload for workload in settings.workload if workload != FLINK_WORKLOAD]
    return f"Flink is left out of {', '.join(others)}: it has a program only for {FLINK_WORKLOAD}" if others else None


def staleness_of(out: Path) -> dict[str, Any]:
    """Figure 9 and its claims. They are the same every time, so they are kept in ``out``."""
    import json
    from dataclasses import asdict

    from experiments.shared import bench
    from experiments.staleness import report as staleness_report
    from experiments.staleness.command import figure_9
    from experiments.staleness.settings import DEFAULTS

    kept, picture = out / "staleness.json", out / "figure-9.png"
    if kept.exists() and picture.exists():
        found: dict[str, Any] = json.loads(kept.read_text())
        return found
    results = figure_9(DEFAULTS)
    staleness_report.chart(picture, results, DEFAULTS)
    claims = [asdict(claim) for claim in staleness_report.claims(results)]
    bench.write_json(kept, {"settings": asdict(DEFAULTS), "claims": claims, "results": results})
    return {"settings": asdict(DEFAULTS), "claims": claims, "results": results}


def rich_table(title: str, sheet: Sheet) -> Any:
    from rich.markup import escape
    from rich.table import Table

    colours = {"holds": "green", "holds at this scale": "green", "does not hold": "red"}
    made = Table(title=title, title_justify="left")
    for i, name in enumerate(sheet.headings):
        made.add_column(name, justify="left" if i < sheet.left else "right", no_wrap=i == 0)
    for row in sheet.rows:
        made.add_row(*(f"[{colours[text]}]{text}[/]" if text in colours else escape(text) for text in row))
    return made


class ProgressDisplay:
    """Shows the progress of a sweep and the time left: a bar in a terminal, a line now and then in a log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0
        self._last = ""
        self._bar: Any = None

    def __enter__(self) -> ProgressDisplay:
        if self._console.is_terminal:
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(TextColumn("{task.description}"), BarColumn(), transient=True, console=self._console)
            self._task = self._bar.add_task("", total=1.0)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, text: str, progress: Progress) -> None:
        line = progress_line(text, progress)
        if self._bar is not None:
            share = progress.batches / progress.batches_of_cell if progress.batches_of_cell else 0.0
            done = (progress.done + min(1.0, share)) / max(1, progress.total)
            self._bar.update(self._task, description=line, completed=done)
            return
        now = time.monotonic()
        if now >= self._next or text != self._last:
            self._next, self._last = now + LINE_S, text
            self._console.print(line, highlight=False)


def progress_line(text: str, progress: Progress) -> str:
    """``cell 3 of 24, average-tiered-04: batch 12 of 20; about 14 min left``."""
    left = progress.left_s
    at = f"cell {min(progress.done + 1, progress.total)} of {progress.total}, " if progress.total else ""
    batches = min(progress.batches, progress.batches_of_cell)  # the last ones have no events and do not count
    batch = f": batch {batches} of {progress.batches_of_cell}" if batches else ""
    words = "" if left is None else f"; about {left / 60:.0f} min left" if left >= 90 else f"; about {left:.0f} s left"
    return f"{at}{text}{batch}{words}"
