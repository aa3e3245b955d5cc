"""Shared by all experiments: turns, medians, ratios against targets, and the table, JSON file and bar chart of results.

Pure functions of plain values, except those that inspect the machine or write a file.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R")
PACKAGES = ("aion", "pyspark", "pyarrow", "pandas", "numpy", "rocksdict")
"""Those whose versions most experiments record."""


class Turn(NamedTuple):
    """One run of one contender. Rounds count from 0; the first ones are warm-ups, if there are any."""

    contender: str
    round: int
    warm_up: bool


def turns(contenders: Sequence[str], runs: int, warm_ups: int) -> Iterator[Turn]:
    """A B C D A B C D ...: the contenders take turns, so that noise on the machine affects all of them alike."""
    for round_ in range(warm_ups + runs):
        for contender in contenders:
            yield Turn(contender, round_, round_ < warm_ups)


def pick(names: str, known: Sequence[str], default: Sequence[str] | None = None) -> list[str]:
    """The names of an option like "a,b" that are known, in their own order; without names ``default``, else all.

    Raises typer.BadParameter with what may be used.
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()] or (known if default is None else default)
    if unknown := [name for name in wanted if name not in known]:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; use {', '.join(known)}")
    return [name for name in known if name in wanted]


@dataclass(frozen=True, slots=True)
class Summary:
    """The measured runs of one contender, in the unit of its figures."""

    median: float
    lowest: float
    highest: float
    runs: int


def summarise(figures: Mapping[str, Sequence[float]]) -> dict[str, Summary]:
    """Median and range per contender; contenders without a figure are left out."""
    return {
        name: Summary(statistics.median(values), min(values), max(values), len(values))
        for name, values in figures.items()
        if values
    }


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio of two contenders' medians, and the least it has to be. None: there is no target, only a measurement."""

    over: str
    under: str
    at_least: float | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and the ratio measured for it."""

    target: Target
    ratio: float

    @property
    def holds(self) -> bool | None:
        return None if self.target.at_least is None else self.ratio >= self.target.at_least

    @property
    def words(self) -> str:
        return {None: "no target", True: "holds", False: "does not hold"}[self.holds]


def verdicts(targets: Sequence[Target], summaries: Mapping[str, Summary]) -> list[Verdict]:
    """A verdict on each target whose two contenders were measured."""
    return [
        Verdict(target, summaries[target.over].median / summaries[target.under].median)
        for target in targets
        if target.over in summaries and target.under in summaries
    ]


def steady_rate(progress: Sequence[Mapping[str, Any]], skip: int) -> float:
    """Events per second of a streaming query in its steady state.

    ``progress``: Spark's progress reports as mappings. The rate is input rows over trigger time, without the first
    ``skip`` batches and without batches that had no input. Raises ValueError if no batch is left.
    """
    with_data = [report for report in progress if report["numInputRows"] > 0][skip:]
    duration_ms = sum(report["durationMs"]["triggerExecution"] for report in with_data)
    if not duration_ms:
        raise ValueError(f"no batch left to measure: {len(progress)} batches, {skip} of them skipped; run more batches")
    return float(sum(report["numInputRows"] for report in with_data) / duration_ms * 1_000)


def machine() -> dict[str, Any]:
    """Processor, logical cores, memory in bytes and load average of this machine."""
    import psutil

    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": os.getloadavg(),
    }


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """The versions of Python and ``packages`` (None if not installed), and the commit of this checkout."""
    found: dict[str, str | None] = {"python": platform.python_version(), "commit": commit()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write the whole file or nothing, so that an interruption never leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(record, indent=2, default=str) + "\n")
    unfinished.replace(path)


def rates_table(
    title: str,
    labels: Mapping[str, str],
    rates: Mapping[str, Summary],
    more: Mapping[str, Mapping[str, str]],
    unit: str = "events/s",
) -> Table:
    """The rate of each contender, with the range over its runs. ``more``: further columns, by contender."""
    table = Table(title=title, title_justify="left")
    table.add_column("contender", no_wrap=True)
    for heading in (unit, "lowest", "highest", "runs", *more):
        table.add_column(heading, justify="right")
    for name, rate in rates.items():
        extra = [column.get(name, "") for column in more.values()]
        figures = [f"{figure:,.0f}" for figure in (rate.median, rate.lowest, rate.highest)]
        table.add_row(labels.get(name, name), *figures, str(rate.runs), *extra)
    return table


def numbers(text: str) -> tuple[int, ...]:
    """``"1,2,4"`` as numbers. Raises typer.BadParameter."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise typer.BadParameter(f"{text!r} is not a list of positive numbers; write e.g. 1,2,4")
    return found


def beside(ratio: float, limit: float | None) -> str:
    """A ratio with two decimals, or with as many as it takes to tell it from its limit."""
    decimals = 2
    while limit is not None and ratio != limit and decimals < 9 and f"{ratio:.{decimals}f}" == f"{limit:.{decimals}f}":
        decimals += 1
    return f"{ratio:.{decimals}f}"


def ratios_table(labels: Mapping[str, str], judged: Sequence[Verdict]) -> Table:
    """The measured ratio of each target, the target, and whether it holds."""
    table = Table(title="ratios of the medians", title_justify="left")
    table.add_column("ratio", no_wrap=True)
    for heading in ("measured", "target", "verdict"):
        table.add_column(heading, justify="right")
    for verdict in judged:
        target = verdict.target
        wanted = "" if target.at_least is None else f">= {target.at_least:g}"
        colour = {None: "default", True: "green", False: "red"}[verdict.holds]
        words = f"[{colour}]{verdict.words}[/{colour}]"
        names = [labels.get(name, name) for name in (target.over, target.under)]
        table.add_row(" / ".join(names), beside(verdict.ratio, target.at_least), wanted, words)
    return table


def bar_chart(
    path: Path, title: str, labels: Mapping[str, str], figures: Mapping[str, Sequence[float]], unit: str
) -> None:
    """Write a PNG with a bar for each contender, as long as its median, and a dot for each of its figures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name, values in figures.items() if values]
    height = 1.4 + 0.55 * len(names)
    figure, axes = pyplot.subplots(figsize=(8.5, height), layout="constrained")
    medians = [statistics.median(figures[name]) for name in names]
    axes.barh([labels.get(name, name) for name in names], medians, height=0.6, color="#4c78a8")
    for at, (name, median) in enumerate(zip(names, medians, strict=True)):
        axes.plot(figures[name], [at] * len(figures[name]), "o", color="#1b1b1b", markersize=3)
        # To the right of the bar and all dots: a dot on a digit would change how the digit looks.
        beside = (max(median, *figures[name]), at)
        axes.annotate(f"{median:,.0f}", beside, (8, 0), textcoords="offset points", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(max(figures[name]) for name in names) * 1.18)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel(f"{unit} (bar: median, dots: runs)")
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def commit() -> str | None:
    """The commit of these files, with a plus sign if they have changed since; None outside git."""
    command = ["git", "describe", "--always", "--dirty=+"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def figures(names: Iterable[str], done: Sequence[tuple[Turn, R]], of: Callable[[R], float]) -> dict[str, list[float]]:
    """One figure per measured run, by contender, without warm-ups."""
    return {name: [of(run) for turn, run in done if turn.contender == name and not turn.warm_up] for name in names}


def as_rows(done: Sequence[tuple[Turn, DataclassInstance]]) -> list[dict[str, Any]]:
    """All runs, warm-ups included, as rows for the JSON file."""
    return [{**turn._asdict(), **asdict(run)} for turn, run in done]


def wide_console() -> Console:
    """A console of the terminal's width; in a log file, wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=120)
