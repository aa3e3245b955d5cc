"""Network traffic: Disco's figures 5 and 6 on Spark. Compares Aion's merging levels with forwarding every event.

``streams`` runs the queries and counts bytes, ``report`` reports the results.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from experiments.network.settings import Rate, Settings

if TYPE_CHECKING:
    from experiments.network.streams import Run

PACKAGES = ("aion", "pyspark", "pyarrow", "numpy")
LEGS = ("bytes", "rates")


def network(
    events: Annotated[int, typer.Option(min=1_000, help="Events in a batch, of all sources together.")] = 2_000_000,
    batches: Annotated[int, typer.Option(min=2, help="Batches in a run that counts bytes.")] = 2,
    keys: Annotated[int, typer.Option(min=1, help="Keys; every source has all of them.")] = 100,
    children: Annotated[int, typer.Option(min=1, help="Sources, for figure 6.")] = 32,
    fan_in: Annotated[int, typer.Option(min=2, help="Nodes that share a node of the next level.")] = 2,
    levels: Annotated[str, typer.Option(help="Hops between a child and the root, for figure 6.")] = "1,2,3,4,5",
    partitions: Annotated[str, typer.Option(help="Sources, for figure 5.")] = "1,2,4",
    cores: Annotated[str, typer.Option(help="Cores, for figure 5.")] = "1,2",
    runs: Annotated[int, typer.Option(min=1, help="Runs of each contender, for figure 5.")] = 1,
    decimals: Annotated[int, typer.Option(min=0, help="Decimals of the values; more compress worse.")] = 2,
    legs: Annotated[str, typer.Option(help="Some of: bytes,rates.")] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the generated events.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder for results.", file_okay=False)] = Path("out/network"),
) -> None:
    """Compare Aion with forwarding events: bytes shuffled with 1 to 5 levels, and events/s, for mean and median."""
    # Here, not above: `aion --help` imports this module and needs none of it.
    from experiments.network import report as network_report
    from experiments.shared import bench
    from experiments.shared.bench import wide_console

    console = wide_console()
    chosen = bench.pick(legs, list(LEGS))
    if "bytes" in chosen and events < children:
        raise typer.BadParameter(f"--events: {events:,} events are too few for {children:,} children")
    settings = Settings(
        events_per_batch=events,
        batches=batches,
        keys=keys,
        children=children,
        fan_in=fan_in,
        levels=bench.numbers(levels),
        partitions=bench.numbers(partitions),
        cores=bench.numbers(cores),
        runs=runs,
        seed=seed,
        decimals=decimals,
    )
    if "bytes" in chosen:
        check_levels(settings)
    record: dict[str, Any] = {
        "experiment": "network",
        "settings": asdict(settings),
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
        "paper": network_report.PAPER,
    }
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="work-", dir=out)).absolute()
    counted: list[Run] = []
    rates: list[Rate] = []
    measured = chain(
        count_bytes(settings, work, counted, console) if "bytes" in chosen else (),
        measure_rates(settings, work, rates, console) if "rates" in chosen else (),
    )
    try:
        for _ in measured:
            # After every run, so that an interruption loses only one run.
            network_report.save(out, record, counted, rates)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    network_report.report(settings, counted, rates, out, record, console)


def check_levels(settings: Settings) -> None:
    """Raises BadParameter for a tree with a single node before the root, since Spark merges those two hops into one."""
    from aion.core.topology import Tree

    tree = Tree(levels=0, fan_in=settings.fan_in, children=settings.children, shards=(0,), root_tasks=1)
    most = max(settings.levels)
    if most > 1 and tree.nodes(most - 1) == 1:
        raise typer.BadParameter(
            f"{most} levels: {settings.children} sources with a fan-in of {settings.fan_in} have a single node before "
            f"the root; give more than {settings.fan_in ** (most - 1)} --children"
        )


def count_bytes(settings: Settings, work: Path, done: list[Run], console: Console) -> Iterator[None]:
    """Figure 6, run by run: each number of levels, central and distributed; for one level also stock Spark."""
    from experiments.network.streams import AGGREGATES, configured, run
    from experiments.shared.stream import session

    sources = settings.sources(settings.children, settings.batches)
    folder = sources.write(work / "bytes")
    spark = configured(session(2, work, policy="standard"))
    try:
        for aggregate in AGGREGATES:
            cells = [(c, levels) for levels in settings.levels for c in ("central", "distributed")]
            for contender, levels in [*cells, ("stock", 1)]:
                with console.status(f"{aggregate}, {levels} levels: {contender}"):
                    checkpoint = work / f"checkpoint-{len(done)}"
                    found = run(spark, sources, folder, contender, aggregate, levels, settings.fan_in, checkpoint)
                done.append(found)
                _compare(done)
                each = " + ".join(f"{hop.bytes / sources.events:.3g}" for hop in found.hops)
                console.print(f"{aggregate:<6} {contender:<11} {levels} levels: {each} B/event", highlight=False)
                yield
    finally:
        spark.stop()


def measure_rates(settings: Settings, work: Path, done: list[Rate], console: Console) -> Iterator[None]:
    """Figure 5, run by run: the same events from more sources, and with more cores, over one hop."""
    from experiments.network.streams import AGGREGATES, CONTENDERS, SKIPPED_BATCHES, configured, run
    from experiments.shared.stream import session

    batches = SKIPPED_BATCHES + 3
    folders = {n: settings.sources(n, batches).write(work / f"rates-{n}") for n in settings.partitions}
    for cores in settings.cores:
        spark = configured(session(cores, work, policy="standard"))
        try:
            for round_ in range(settings.runs):
                for children, folder in folders.items():
                    sources = settings.sources(children, batches)
                    for aggregate in AGGREGATES:
                        same: list[Run] = []
                        for contender in CONTENDERS:
                            with console.status(f"{cores} cores, {children} sources, {aggregate}: {contender}"):
                                checkpoint = work / f"checkpoint-{cores}-{round_}-{children}-{aggregate}-{contender}"
                                found = run(
                                    spark, sources, folder, contender, aggregate, 1, settings.fan_in, checkpoint
                                )
                            same.append(found)
                            _compare(same)
                            done.append(Rate(cores, children, found))
                            yield
                        each = ", ".join(f"{r.contender} {r.events_per_s:,.0f}" for r in same)
                        console.print(
                            f"{aggregate:<6} {cores} cores, {children} sources: {each} events/s", highlight=False
                        )
        finally:
            spark.stop()


def _compare(runs: list[Run]) -> None:
    """Raises RuntimeError if the last run has other results than the first one of the same aggregate."""
    mine = runs[-1]
    first = next(run for run in runs if run.aggregate == mine.aggregate)
    same = first.results == mine.results and abs(first.checksum - mine.checksum) <= 1e-9 * abs(first.checksum)
    if not same:
        raise RuntimeError(
            f"{mine.contender}, {mine.levels} levels: {mine.results} results with sum {mine.checksum}, "
            f"but {first.contender} has {first.results} with sum {first.checksum}"
        )
