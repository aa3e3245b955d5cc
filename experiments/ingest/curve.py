"""``aion experiment ingest --curve``: the time of a batch by its number of events, with and without late events.

The *fixed* cost of a contender is the time of its smallest batch, and its *marginal* cost is what a million further
events take between the two largest sizes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.ingest.files import key, take_turns

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from experiments.ingest.contenders import Contender
    from experiments.ingest.settings import Settings
    from experiments.shared.stream import Run

SIZES = (1_000, 100_000, 400_000, 2_000_000, 8_000_000)
CONTENDERS = ("partials", "partials-python", "tuned-window")
LATE_SHARES = (0.05, 0.0)
STEM = "ingest-curve"


class Curve(NamedTuple):
    """The milliseconds of a batch of one contender, by its number of events: the median of all runs."""

    label: str
    late_share: float
    ms: Mapping[int, float]

    @property
    def fixed_ms(self) -> float:
        return self.ms[min(self.ms)]

    @property
    def marginal_ms(self) -> float:
        """Milliseconds for a million events. NaN for fewer than two sizes."""
        if len(self.ms) < 2:
            return float("nan")
        small, large = sorted(self.ms)[-2:]
        return (self.ms[large] - self.ms[small]) / (large - small) * 1e6


def measure(
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
    curves: list[Curve] = []
    runs: list[dict[str, Any]] = []
    for share in LATE_SHARES:
        paths = {}
        for events in sizes:
            plan = EventPlan(events_per_batch=events, late_share=share, seed=seed)
            with console.status(f"generating {batches} files of {events:,} events"):
                paths[events] = write_batches(plan, batches, out / "data")
        console.print(f"{share:.0%} of the events are late")
        done = take_turns(settings, chosen, paths, out, console)
        measured = [(turn.contender, run) for turn, _, run in done if not turn.warm_up]
        curves += [Curve(c.label, share, times(measured, name, sizes)) for name, c in chosen.items()]
        runs += [{"late_share": share, **turn._asdict(), "load": load, **asdict(run)} for turn, load, run in done]
    found = [{**curve._asdict(), "fixed_ms": curve.fixed_ms, "marginal_ms": curve.marginal_ms} for curve in curves]
    bench.write_json(out / f"{STEM}.json", {**record, "curves": found, "runs": runs})
    title = replace(settings, events_per_batch=max(sizes)).headline.partition(", ")[2].replace("5 % late, ", "")
    chart(out / f"{STEM}.png", title, curves)
    console.print()
    console.print(table(title, curves))
    console.print(
        "milliseconds of a batch: median over the runs, without the first two batches of each. further million: what a "
        "million more events take, between the two largest sizes.",
        highlight=False,
    )
    console.print(CHECKPOINTS, highlight=False)
    console.print(f"written: {out / STEM}.json and .png", highlight=False)


def times(measured: Sequence[tuple[str, Run]], name: str, sizes: Sequence[int]) -> dict[int, float]:
    """Returns the milliseconds of a batch of each size."""
    return {
        events: statistics.median(
            1000 * events / run.steady_events_per_s for place, run in measured if place == key(name, events)
        )
        for events in sizes
    }


def table(title: str, curves: Sequence[Curve]) -> Table:
    from rich.table import Table

    shown = Table(title=title, title_justify="left")
    sizes = list(curves[0].ms)
    for column in ("contender", "late", *(f"{events:,}" for events in sizes), "further million"):
        shown.add_column(column, justify="left" if column == "contender" else "right")
    for curve in curves:
        cells = (f"{curve.ms[events]:,.0f}" for events in sizes)
        shown.add_row(curve.label, f"{curve.late_share:.0%}", *cells, f"{curve.marginal_ms:,.0f}")
    return shown


def chart(path: Path, title: str, curves: Sequence[Curve]) -> None:
    """Writes a PNG with a line for each contender: solid with late events, dashed without."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.5, 4.5), layout="constrained")
    colours = dict(zip(dict.fromkeys(curve.label for curve in curves), ("#4c78a8", "#9ecae9", "#e45756"), strict=False))
    for curve in curves:
        late = f", {curve.late_share:.0%} late" if curve.late_share else ", none late"
        style = "-o" if curve.late_share else "--o"
        colour = colours.get(curve.label, "#54a24b")
        axes.plot([*curve.ms], [*curve.ms.values()], style, color=colour, label=curve.label + late, markersize=4)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("events in a batch")
    axes.set_ylabel("milliseconds of a batch")
    axes.legend(fontsize=8)
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
