"""The report of `aion experiment network`: tables, verdicts on the targets, the figure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from rich.console import Console
from rich.table import Table

from experiments.network.streams import AGGREGATES, CONTENDERS, Run
from experiments.shared import bench

if TYPE_CHECKING:
    from experiments.network.settings import Rate, Settings


class Paper(TypedDict):
    """Bytes and events/s by aggregate and contender."""

    events: int
    levels: int
    bytes: dict[str, dict[str, float]]
    events_per_s: dict[str, dict[str, str]]


# For 100 million events and five levels, including the hop from the sensors to the children (Disco section 4.2).
PAPER: Paper = {
    "events": 100_000_000,
    "levels": 5,
    "bytes": {
        "mean": {"central": 12.0e9, "distributed": 2.0e9},
        "median": {"central": 12.4e9, "distributed": 7.5e9},
    },
    # Events/s on nodes of 16 cores (section 4.1), as far as the paper gives numbers.
    "events_per_s": {
        "mean": {"central": "1,000,000", "distributed": "1,000,000 x n"},
        "median": {"central": "25,000", "distributed": "nearly linear in n"},
    },
}
AT_LEAST = {"mean": 6.0, "median": 1.5}
COLOURS = {"central": "#d1752f", "distributed": "#1f5fa8", "stock": "#777777"}


class Level(NamedTuple):
    """Bytes per event for one number of levels: central, distributed, and on the hop from the sensors."""

    levels: int
    central: float
    distributed: float
    from_sensors: float

    @property
    def ratio(self) -> float:
        return self.central / self.distributed

    @property
    def ratio_with_sensors(self) -> float:
        """The ratio as the paper counts it: with the hop from the sensors to the children, which both ways have."""
        return (self.central + self.from_sensors) / (self.distributed + self.from_sensors)


def by_level(runs: Sequence[Run], aggregate: str) -> list[Level]:
    """The numbers of levels that were run both ways. The sensors' hop counts as one hop of raw events."""
    mine = {(run.contender, run.levels): run for run in runs if run.aggregate == aggregate}
    found = []
    for levels in sorted({levels for _, levels in mine}):
        if ("central", levels) in mine and ("distributed", levels) in mine:
            central, distributed = mine["central", levels], mine["distributed", levels]
            sensors = central.hops[0].bytes / central.events
            found.append(Level(levels, central.bytes / central.events, distributed.bytes / distributed.events, sensors))
    return found


def paper_ratio(aggregate: str) -> float:
    figures = PAPER["bytes"][aggregate]
    return figures["central"] / figures["distributed"]


def bytes_table(runs: Sequence[Run], aggregate: str, events: int) -> Table:
    table = Table(
        title=f"figure 6, {aggregate}: bytes shuffled per event, sum over all hops ({events:,} events)",
        title_justify="left",
    )
    for heading in ("levels", "central", "Aion", "ratio", "ratio with sensors' hop", "paper, with sensors' hop"):
        table.add_column(heading, justify="right")
    for level in by_level(runs, aggregate):
        paper = f"{paper_ratio(aggregate):.2f}" if level.levels == PAPER["levels"] else ""
        figures = f"{level.central:.2f}", f"{level.distributed:.2f}", f"{level.ratio:.2f}"
        table.add_row(str(level.levels), *figures, f"{level.ratio_with_sensors:.2f}", paper)
    for run in runs:
        if (run.contender, run.aggregate) == ("stock", aggregate):
            table.add_row("1", "", f"{run.bytes / run.events:.2f}", "", "", "stock window().agg", style="dim")
    return table


class Check(NamedTuple):
    aggregate: str
    level: Level

    @property
    def holds(self) -> bool:
        return self.level.ratio >= AT_LEAST[self.aggregate]


def checks(runs: Sequence[Run]) -> list[Check]:
    """A check for each aggregate that was run with five levels."""
    return [
        Check(aggregate, level)
        for aggregate in AGGREGATES
        for level in by_level(runs, aggregate)
        if level.levels == PAPER["levels"]
    ]


def checks_table(judged: Sequence[Check]) -> Table:
    table = Table(title="bytes shuffled, central / Aion, five levels", title_justify="left")
    for heading in ("aggregate", "measured", "target", "verdict"):
        table.add_column(heading, justify="left" if heading == "aggregate" else "right")
    for check in judged:
        words = "[green]holds[/green]" if check.holds else "[red]does not hold[/red]"
        least = AT_LEAST[check.aggregate]
        table.add_row(check.aggregate, bench.beside(check.level.ratio, least), f">= {least:g}", words)
    return table


def median_rates(rates: Sequence[Rate], aggregate: str) -> dict[tuple[int, int, str], float]:
    """Median events/s by (cores, sources, contender), where all contenders were measured."""
    found: dict[tuple[int, int, str], list[float]] = {}
    for rate in rates:
        if rate.run.aggregate == aggregate:
            found.setdefault((rate.cores, rate.children, rate.run.contender), []).append(rate.run.events_per_s)
    return {
        (cores, children, name): statistics.median(values)
        for (cores, children, name), values in found.items()
        if all((cores, children, other) in found for other in CONTENDERS)
    }


def rates_table(rates: Sequence[Rate], aggregate: str) -> Table:
    table = Table(title=f"figure 5, {aggregate}: events/s over one hop to one root task", title_justify="left")
    for heading in ("cores", "sources", *CONTENDERS, "Aion / central", "Aion / stock"):
        table.add_column(heading, justify="right")
    found = median_rates(rates, aggregate)
    for cores, children in sorted({cell[:2] for cell in found}):
        each = {name: found[cores, children, name] for name in CONTENDERS}
        ratios = [f"{each['distributed'] / each[name]:.2f}" for name in ("central", "stock")]
        table.add_row(str(cores), str(children), *(f"{rate:,.0f}" for rate in each.values()), *ratios)
    paper = PAPER["events_per_s"][aggregate]
    table.add_row("the paper", "n nodes", *(paper.get(name, "") for name in CONTENDERS), style="dim")
    return table


def tables(settings: Settings, counted: Sequence[Run], rates: Sequence[Rate]) -> Iterator[Table]:
    for aggregate in AGGREGATES:
        if by_level(counted, aggregate):
            yield bytes_table(counted, aggregate, counted[0].events)
    if judged := checks(counted):
        yield checks_table(judged)
    for aggregate in AGGREGATES:
        if median_rates(rates, aggregate):
            yield rates_table(rates, aggregate)


def remarks(settings: Settings, counted: Sequence[Run], rates: Sequence[Rate]) -> str:
    lines = []
    if counted:
        lines += [
            f"levels: hops from {settings.children} children to one root; {settings.fan_in} nodes share a node of the "
            "next level. Bytes: written by Spark's map tasks (shuffleWriteBytes), with Spark's default compression; "
            f"values have {settings.decimals} decimals.",
            "with sensors' hop: as in the paper, plus the hop that brings each event from its sensor, both ways.",
            "stock: Spark combines partials before its shuffle, so it has one level. Its median sends a map of counts "
            "by value.",
        ]
    if rates:
        lines.append(
            "events/s: without the first batch. In the paper every source is a node of 16 cores. Here all sources and "
            "the root share the cores of one machine, so compare ratios, not rates."
        )
    return "\n".join(lines)


def save(out: Path, record: dict[str, Any], counted: Sequence[Run], rates: Sequence[Rate]) -> None:
    """Writes all results so far as JSON."""
    found = {
        "bytes": [run.to_json() for run in counted],
        "ratios": {
            aggregate: [
                {**level._asdict(), "ratio": level.ratio, "ratio_with_sensors": level.ratio_with_sensors}
                for level in by_level(counted, aggregate)
            ]
            for aggregate in AGGREGATES
        },
        "checks": [{"aggregate": c.aggregate, "ratio": c.level.ratio, "holds": c.holds} for c in checks(counted)],
        "rates": [{"cores": r.cores, "children": r.children, **asdict(r.run)} for r in rates],
    }
    bench.write_json(out / "network.json", {**record, **found})


def report(
    settings: Settings,
    counted: Sequence[Run],
    rates: Sequence[Rate],
    out: Path,
    record: dict[str, Any],
    console: Console,
) -> None:
    """Prints tables, and writes everything as JSON and the figures as one PNG."""
    save(out, record, counted, rates)
    draw(out / "network.png", settings, counted, rates)
    console.print()
    for table in tables(settings, counted, rates):
        console.print(table)
    console.print(remarks(settings, counted, rates), highlight=False)
    console.print(f"written: {out / 'network.json'} and .png", highlight=False, soft_wrap=True)


def draw(path: Path, settings: Settings, counted: Sequence[Run], rates: Sequence[Rate]) -> None:
    """Draws figure 6 above and figure 5 below. Leaves out what was not measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row, there in (("bytes", counted), ("rates", rates)) if there]
    if not rows:
        return
    figure, axes = pyplot.subplots(len(rows), 2, figsize=(10, 3.8 * len(rows)), layout="constrained", squeeze=False)
    for at, row in enumerate(rows):
        for axis, aggregate in zip(axes[at], AGGREGATES, strict=True):
            if row == "bytes" and (levels := by_level(counted, aggregate)):
                _draw_bytes(axis, levels, aggregate)
            elif row == "rates" and (found := median_rates(rates, aggregate)):
                _draw_rates(axis, found, aggregate)
            else:
                axis.set_visible(False)
            axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_bytes(axis: Any, levels: Sequence[Level], aggregate: str) -> None:
    at = [level.levels for level in levels]
    for name in ("central", "distributed"):
        axis.plot(at, [getattr(level, name) for level in levels], "o-", color=COLOURS[name], label=CONTENDERS[name])
    for level in levels:
        where = (level.levels, level.distributed)
        axis.annotate(f"{level.ratio:.3g}x", where, (0, 7), textcoords="offset points", ha="center", fontsize=8)
    if at[-1:] == [PAPER["levels"]]:
        ours, theirs = levels[-1].ratio_with_sensors, paper_ratio(aggregate)
        words = f"{at[-1]} levels, with\nthe sensors' hop: {ours:.2f}x\nthe paper: {theirs:.2f}x"
        axis.text(0.03, 0.8, words, transform=axis.transAxes, fontsize=8, va="top")
    axis.set_title(f"{aggregate}, 1 s tumbling (Disco, figure 6)", fontsize=10)
    axis.set_xlabel("levels (hops from a child to the root)")
    axis.set_ylabel("bytes shuffled per event")
    axis.set_xticks(at)
    axis.set_ylim(0, max(level.central for level in levels) * 1.12)
    axis.legend(frameon=False, fontsize=8, loc="upper left")


def _draw_rates(axis: Any, found: dict[tuple[int, int, str], float], aggregate: str) -> None:
    cells = sorted({cell[:2] for cell in found})
    width = 0.8 / len(CONTENDERS)
    for i, name in enumerate(CONTENDERS):
        places = [at + (i - 1) * width for at in range(len(cells))]
        axis.bar(places, [found[(*cell, name)] / 1e6 for cell in cells], width, color=COLOURS[name], label=name)
    axis.set_title(f"{aggregate}, one hop (Disco, figure 5)", fontsize=10)
    axis.set_xticks(range(len(cells)), [f"{children}\n{cores}" for cores, children in cells], fontsize=8)
    axis.set_xlabel("sources (above) and cores (below)")
    axis.set_ylabel("million events/s")
    axis.set_ylim(0, max(found.values()) / 1e6 * 1.3)
    axis.legend(frameon=False, fontsize=8, loc="upper left", ncols=3)
