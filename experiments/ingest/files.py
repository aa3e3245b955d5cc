"""``aion experiment ingest --source files``: the same files, with and without turning their events into rows.

Batches of two sizes run in turns in one session. This separates the cost of an event from the cost of a batch: the
events that a large batch has more than a small one are divided by the time that it takes longer.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from experiments.ingest.contenders import Contender
    from experiments.ingest.settings import Settings
    from experiments.shared.bench import Target, Turn
    from experiments.shared.stream import Run

SIZES = (1_000_000, 16_000_000)
SIZES_WITH_PAYLOAD = (200_000,)
STEM = "ingest-files"
# The least ratios, by contenders and number of events. The marginal one is of events above the first size.
TARGETS = {
    ("files", "stock-window", SIZES[0]): 0.75,
    ("files", "stock-window", SIZES[1]): 2.0,
    ("files", "stock-window", None): 4.0,
    ("files-apply", "apply", SIZES_WITH_PAYLOAD[0]): 1.3,
}

Place = tuple[str, int]
"""A contender and the events of its batches."""


def sizes_for(events: int | None, payload_bytes: int) -> tuple[int, ...]:
    """The events of a batch: those that were asked for, or the sizes that have targets."""
    if events is not None:
        return (events,)
    return SIZES_WITH_PAYLOAD if payload_bytes else SIZES


def compare_files(
    settings: Settings,
    chosen: Mapping[str, Contender],
    sizes: Sequence[int],
    seed: int,
    out: Path,
    record: dict[str, Any],
    console: Console,
) -> None:
    """Runs, prints and writes everything."""
    from experiments.shared import bench
    from experiments.shared.generate import EventPlan, write_batches
    from experiments.shared.stream import CHECKPOINTS

    batches = next(iter(settings.batches.values()))
    paths = {}
    for events in sizes:
        plan = EventPlan(events_per_batch=events, payload_bytes=settings.payload_bytes, seed=seed)
        with console.status(f"generating {batches} files of {events:,} events"):
            paths[events] = write_batches(plan, batches, out / "data")
    done = take_turns(settings, chosen, paths, out, console)
    figures, labels = rates_of(chosen, sizes, done)
    rates = bench.summarise(figures)
    judged = bench.verdicts(targets_of(chosen, sizes), rates)
    stem = STEM + (f"-payload{settings.payload_bytes}" if settings.payload_bytes else "")
    bench.write_json(
        out / f"{stem}.json",
        {
            **record,
            "events_per_s": {name: asdict(rate) for name, rate in rates.items()},
            "ratios": [{**asdict(verdict), "verdict": verdict.words} for verdict in judged],
            "runs": [{**turn._asdict(), "load": load, **asdict(run)} for turn, load, run in done],
        },
    )
    title = replace(settings, events_per_batch=max(sizes)).headline
    bench.bar_chart(out / f"{stem}.png", title, labels, figures, "events/s")
    console.print()
    console.print(bench.rates_table(title, labels, rates, {"batch": _seconds(rates)}))
    if judged:
        console.print(bench.ratios_table(labels, judged))
    loads = [load for _, load, _ in done]
    console.print(
        "events/s: median over the runs of events / trigger time, without the first two batches of each. further "
        f"events: those that a large batch has more than a small one, over the time that it takes longer. Load of the "
        f"machine during the runs: {min(loads):.1f} to {max(loads):.1f}.",
        highlight=False,
    )
    console.print(CHECKPOINTS, highlight=False)
    console.print(f"written: {out / stem}.json and .png", highlight=False)


def rates_of(
    chosen: Mapping[str, Contender], sizes: Sequence[int], done: Sequence[tuple[Turn, float, Run]]
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The rates of each contender, by size and of further events, one for each round; and the labels of both."""
    steady = {(turn.contender, turn.round): run.steady_events_per_s for turn, _, run in done if not turn.warm_up}
    rounds = sorted({round_ for _, round_ in steady})
    figures: dict[str, list[float]] = {}
    labels: dict[str, str] = {}
    for events in sizes:
        for name, contender in chosen.items():
            figures[key(name, events)] = [steady[key(name, events), round_] for round_ in rounds]
            labels[key(name, events)] = f"{contender.label}, {events:,}"
    if len(sizes) > 1:
        small, large = sizes
        for name, contender in chosen.items():
            costs = [
                large / steady[key(name, large), round_] - small / steady[key(name, small), round_] for round_ in rounds
            ]
            # A batch that was disturbed may seem to cost less the more events it has.
            figures[key(name, None)] = [(large - small) / cost for cost in costs if cost > 0]
            labels[key(name, None)] = f"{contender.label}, further events"
    return figures, labels


def targets_of(chosen: Mapping[str, Contender], sizes: Sequence[int]) -> list[Target]:
    from experiments.shared.bench import Target

    ours = [name for name, contender in chosen.items() if contender.reads_files]
    return [
        Target(key(name, events), key(other, events), TARGETS.get((name, other, events)))
        for events in (*sizes, *([None] if len(sizes) > 1 else []))
        for name in ours
        for other in chosen
        if other not in ours
    ]


def key(name: str, events: int | None) -> str:
    return f"{name} {events or 'further'}"


def _seconds(rates: Mapping[str, Any]) -> dict[str, str]:
    """The time of a batch."""
    sizes = {name: name.rpartition(" ")[2] for name in rates}
    return {name: f"{int(size) / rates[name].median:.2f} s" for name, size in sizes.items() if size.isdecimal()}


def take_turns(
    settings: Settings,
    chosen: Mapping[str, Contender],
    paths: Mapping[int, list[Path]],
    out: Path,
    console: Console,
) -> list[tuple[Turn, float, Run]]:
    """All runs, and the load of the machine before each."""
    from experiments.ingest.contenders import Shape
    from experiments.ingest.settings import SCHEMA, WINDOW, WINDOW_MS
    from experiments.shared import bench
    from experiments.shared.stream import file_stream, files_stream, run_to_end, session, spark_settings

    shape = Shape(WINDOW, WINDOW_MS, None, settings.payload_bytes > 0)
    schema = SCHEMA + (", payload binary" if shape.payload else "")
    places = {key(name, events): (name, events) for events in paths for name in chosen}
    done: list[tuple[Turn, float, Run]] = []
    work_dir = Path(tempfile.mkdtemp(prefix="work-", dir=out)).absolute()
    spark = None
    try:
        spark = session(settings.cores, work_dir, policy=settings.policy)
        for turn in bench.turns(list(places), settings.runs, settings.warm_ups):
            name, events = places[turn.contender]
            contender, files = chosen[name], paths[events]
            load = os.getloadavg()[0]
            make = files_stream if contender.reads_files else file_stream
            with console.status(f"round {turn.round}: {contender.label}, {events:,}"):
                stream = contender.build(make(spark, files, schema, WINDOW), shape)
                with spark_settings(spark, contender.settings):
                    run = run_to_end(stream, work_dir / "checkpoint", events * len(files))
            done.append((turn, load, run))
            kind = "warm-up" if turn.warm_up else "run"
            console.print(
                f"{kind:>7} {turn.round}  {contender.label:<26} {events:>12,}  load {load:>4.1f}   events/s: "
                f"{run.steady_events_per_s:>11,.0f} steady, {run.whole_events_per_s:>11,.0f} whole run"
            )
    finally:
        if spark is not None:
            spark.stop()
        shutil.rmtree(work_dir, ignore_errors=True)
    return done
