"""Stream slicing: Scotty's figures 5a and 5b for LocalOperator, compared with buckets and FlatFAT, without Spark.

``runs`` has the streams and the runs, ``baselines`` the contenders, ``records`` the cost of Kafka's windows per record
(KIP-450), ``operator`` the cost of the lazy and the eager way with overlapping windows. Contenders take turns over the
same events. A checksum compares the panes of each contender's warm-up with those of LocalOperator.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from experiments.slicing.runs import Cell, Result, Settings

PACKAGES = ("aion", "numpy", "pyarrow", "rocksdict")
LEGS = ("windows", "batches", "disorder", "rates", "records", "operator")
_OPERATORS = ("aion", "standard", "lazy", "eager")
_BASELINES = ("buckets", "flatfat-batch", "flatfat")
CONTENDERS_OF = {
    "windows": (*_OPERATORS, *_BASELINES),
    "batches": _OPERATORS,
    "disorder": (*_OPERATORS, *_BASELINES),
    # Without lazy and eager: the leg "windows" already shows what many windows cost with them.
    "rates": ("aion", "standard", *_BASELINES),
}


def slicing(
    events: Annotated[int, typer.Option(min=50_000, help="Events in a run of LocalOperator.")] = 4_000_000,
    batch: Annotated[int, typer.Option(min=1_000, help="Events in a batch.")] = 4_000_000,
    small_batch: Annotated[
        int, typer.Option(min=1_000, help="Events in a batch of the leg batches; the largest batch of a baseline.")
    ] = 100_000,
    rate: Annotated[
        int, typer.Option(min=200, help="Events per second of event time, except in the leg rates.")
    ] = 15_000,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each contender.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.01, help="How long a baseline is measured in each run.")] = 0.3,
    legs: Annotated[str, typer.Option(help="Some of: windows,batches,disorder,rates,records,operator.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the generated events.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for results.", file_okay=False)] = Path("out/slicing"),
) -> None:
    """Compare LocalOperator with buckets and FlatFAT: events/s with 1 to 1,000 windows, sessions and disorder."""
    # Here, not above: `aion --help` imports this module and needs none of it.
    from experiments.shared import bench
    from experiments.shared.bench import wide_console
    from experiments.slicing import report
    from experiments.slicing.runs import Settings

    console = wide_console()
    chosen = [name.strip() for name in legs.split(",") if name.strip()] or list(LEGS)
    if unknown := [name for name in chosen if name not in LEGS]:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; use {', '.join(LEGS)}")
    settings = Settings(
        events=events, batch=batch, small_batch=small_batch, rate=rate, runs=runs, seconds=seconds, seed=seed
    )
    record: dict[str, Any] = {
        "experiment": "slicing",
        "settings": asdict(settings),
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
    }
    with _existing_objects_not_collected():
        results = take_turns(settings, chosen, console)
    if "records" in chosen:
        from experiments.slicing.records import measure_records

        with console.status("windows per record"):
            record["records"] = measure_records(settings.records, seed, out)
    if "operator" in chosen:
        from experiments.slicing import operator

        wanted = operator.cases(settings)
        record["operator"] = operator.measure_operator(
            wanted, settings.runs, settings.seed, lambda words: console.print(words, highlight=False)
        )
    console.print()
    for table in report.tables(results, settings, record.get("records"), record.get("operator")):
        console.print(table)
    if results:
        console.print(report.remarks(settings), highlight=False)
    paths = report.write(out, record, results, settings)
    console.print("written: " + ", ".join(str(path) for path in paths), highlight=False, soft_wrap=True)


def cells(settings: Settings, legs: list[str]) -> Iterator[tuple[str, Cell]]:
    """The cells of each leg: figure 5a, the same in small batches, figure 5b, and the most windows at other rates."""
    from experiments.slicing.runs import Cell

    for leg, batch in (("windows", settings.batch), ("batches", settings.small_batch)):
        if leg in legs:
            for session in (False, True):
                for windows in settings.windows:
                    yield leg, Cell(settings.rate, windows, session, settings.out_of_order, batch)
    if "disorder" in legs:
        for fraction in settings.fractions:
            yield "disorder", Cell(settings.rate, settings.concurrent, True, fraction, settings.batch)
    if "rates" in legs:
        for rate in settings.rates:
            for session in (False, True):
                yield "rates", Cell(rate, max(settings.windows), session, settings.out_of_order, settings.batch)


def take_turns(settings: Settings, legs: list[str], console: Console) -> dict[str, list[tuple[Cell, list[Result]]]]:
    """All runs of all contenders, by leg and cell, after a warm-up round. Raises RuntimeError if panes differ."""
    from experiments.shared import bench
    from experiments.slicing.runs import generate, measure, reference

    results: dict[str, list[tuple[Cell, list[Result]]]] = {}
    streams: dict[tuple[int, float], Any] = {}
    known: dict[tuple[Cell, tuple[str, ...]], list[Result]] = {}
    for leg, cell in cells(settings, legs):
        place = cell, tuple(CONTENDERS_OF[leg])
        if place not in known:
            if (cell.rate, cell.out_of_order) not in streams:
                # Keep only one stream at a time: they are large.
                streams = {
                    (cell.rate, cell.out_of_order): generate(
                        settings.events, cell.rate, cell.out_of_order, settings.seed
                    )
                }
            stream = streams[cell.rate, cell.out_of_order]
            known[place] = []
            for turn in bench.turns(CONTENDERS_OF[leg], settings.runs, 1):
                with console.status(f"{leg}, {cell.windows} windows, run {turn.round}: {turn.contender}"):
                    found = measure(turn.contender, cell, stream, settings)
                    if not turn.warm_up:
                        known[place].append(found)
                    elif reference(found, cell, stream, settings) != (found.panes, found.checksum):
                        raise RuntimeError(f"{turn.contender} and LocalOperator yield different panes for {cell}")
            console.print(line(leg, cell, known[place]), highlight=False)
        results.setdefault(leg, []).append((cell, known[place]))
    return results


@contextmanager
def _existing_objects_not_collected() -> Iterator[None]:
    """Keeps the garbage collector from scanning objects made before, at the expense of whichever contender runs."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def line(leg: str, cell: Cell, found: list[Result]) -> str:
    """One cell in one line: medians in million events/s."""
    from experiments.slicing.report import medians

    rates = ", ".join(f"{name} {figure / 1e6:,.3g}" for name, figure in medians(found).items())
    session = " + session" if cell.session else ""
    return (
        f"{leg:<8} {cell.windows:>5,} windows{session:<10} {cell.out_of_order:4.0%} out of order, "
        f"{cell.rate:>7,}/s: {rates} M/s"
    )
