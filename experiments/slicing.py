"""Stream slicing on one core: Scotty figures 5a and 5b, against buckets and FlatFAT, without an engine around it.

``slicing_runs`` says what is run, ``slicing_records`` what Kafka's windows per record cost (KIP-450), and
``slicing_operator`` what the lazy and the eager way cost inside the operator. Contenders take turns; all are given the
same batches and watermarks, and the panes of each run are compared with those of the lazy store by a checksum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from experiments.slicing_runs import Cell, Result, Settings

PACKAGES = ("aion", "numpy", "rocksdict")
LEGS = ("windows", "disorder", "rates", "records", "operator")


def slicing(
    events: Annotated[int, typer.Option(min=50_000, help="Events that a run of a fast contender takes.")] = 4_000_000,
    batch: Annotated[int, typer.Option(min=1_000, help="Events of a batch.")] = 100_000,
    rate: Annotated[
        int, typer.Option(min=200, help="Events per second of event time, as long as it is fixed.")
    ] = 15_000,
    runs: Annotated[int, typer.Option(min=1, help="Measured runs of each contender.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.01, help="That a slow contender is measured for, in each run.")] = 0.3,
    legs: Annotated[str, typer.Option(help="Some of: windows,disorder,rates,records,operator.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Of the generated events.")] = 1,
    out: Annotated[Path, typer.Option(help="For results.")] = Path("out/slicing"),
) -> None:
    """Events/s with 1 to 1,000 windows, sessions and disorder: Aion's slices, buckets and FlatFAT, against targets."""
    # Here, not above: `aion --help` imports this module and needs none of it.
    from experiments import bench, slicing_report
    from experiments.ingest import wide_console
    from experiments.slicing_runs import Settings

    console = wide_console()
    chosen = [name.strip() for name in legs.split(",") if name.strip()] or list(LEGS)
    if unknown := [name for name in chosen if name not in LEGS]:
        raise typer.BadParameter(f"{', '.join(unknown)}: there are {', '.join(LEGS)}")
    settings = Settings(events=events, batch=batch, rate=rate, runs=runs, seconds=seconds, seed=seed)
    record: dict[str, Any] = {
        "experiment": "slicing",
        "settings": asdict(settings),
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
    }
    results = take_turns(settings, chosen, console)
    if "records" in chosen:
        from experiments.slicing_records import measure_records

        with console.status("windows per record"):
            record["records"] = measure_records(settings.records, seed, out)
    if "operator" in chosen:
        from experiments import slicing_operator

        wanted = slicing_operator.cases(settings)
        record["operator"] = slicing_operator.measure_operator(
            wanted, settings.runs, settings.seed, lambda words: console.print(words, highlight=False)
        )
    console.print()
    for table in slicing_report.tables(results, settings, record.get("records"), record.get("operator")):
        console.print(table)
    if results:
        console.print(slicing_report.remarks(settings), highlight=False)
    paths = slicing_report.write(out, record, results, settings)
    console.print("written: " + ", ".join(str(path) for path in paths), highlight=False, soft_wrap=True)


def cells(settings: Settings, legs: list[str]) -> Iterator[tuple[str, Cell]]:
    """What is measured, by leg: 5a, 5b, and 1,000 windows at other rates."""
    from experiments.slicing_runs import Cell

    if "windows" in legs:
        for session in (False, True):
            for windows in settings.windows:
                yield "windows", Cell(settings.rate, windows, session, settings.out_of_order)
    if "disorder" in legs:
        for fraction in settings.fractions:
            yield "disorder", Cell(settings.rate, settings.concurrent, True, fraction)
    if "rates" in legs:
        for rate in settings.rates:
            for session in (False, True):
                yield "rates", Cell(rate, max(settings.windows), session, settings.out_of_order)


def take_turns(settings: Settings, legs: list[str], console: Console) -> dict[str, list[tuple[Cell, list[Result]]]]:
    """Every run of every contender, by leg and cell. Raises RuntimeError where panes differ."""
    from experiments import bench
    from experiments.slicing_runs import CONTENDERS, FAST, generate, measure, reference

    results: dict[str, list[tuple[Cell, list[Result]]]] = {}
    streams: dict[tuple[int, float], Any] = {}
    known: dict[Cell, list[Result]] = {}
    for leg, cell in cells(settings, legs):
        if cell not in known:
            if (cell.rate, cell.out_of_order) not in streams:
                # One at a time: they are large.
                streams = {
                    (cell.rate, cell.out_of_order): generate(
                        settings.events, cell.rate, cell.out_of_order, settings.seed
                    )
                }
            stream = streams[cell.rate, cell.out_of_order]
            known[cell] = []
            for turn in bench.turns(tuple(CONTENDERS), settings.runs, 0):
                fast = turn.contender in FAST
                with console.status(f"{leg}, {cell.windows} windows, run {turn.round}: {turn.contender}"):
                    found = measure(turn.contender, cell, stream, settings, None if fast else settings.seconds)
                    if turn.round == 0 and reference(found, cell, stream, settings) != (found.panes, found.checksum):
                        raise RuntimeError(f"{turn.contender} yields other panes than the lazy store for {cell}")
                known[cell].append(found)
            console.print(line(leg, cell, known[cell]), highlight=False)
        results.setdefault(leg, []).append((cell, known[cell]))
    return results


def line(leg: str, cell: Cell, found: list[Result]) -> str:
    """One cell in words: medians in million events/s."""
    from experiments.slicing_report import medians

    rates = ", ".join(f"{name} {figure / 1e6:,.3g}" for name, figure in medians(found).items())
    session = " + session" if cell.session else ""
    return (
        f"{leg:<8} {cell.windows:>5,} windows{session:<10} {cell.out_of_order:4.0%} out of order, "
        f"{cell.rate:>7,}/s: {rates} M/s"
    )
