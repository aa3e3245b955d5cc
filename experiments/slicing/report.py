"""The report of `aion experiment slicing`: verdicts on the targets, tables, the figure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from experiments.shared import bench
from experiments.slicing.runs import CONTENDERS, DELAY_US, FEW, FILL_S, Cell, Result, Settings

Results = Mapping[str, Sequence[tuple[Cell, Sequence[Result]]]]

# Million tuples/s of the Java original (Scotty, lazy) and of naive buckets in a similar benchmark, with one thread and
# no engine, by windows, without and with a session of 1 s. The paper's own figures were measured inside Flink.
ORIGINAL = {
    "Scotty, Java": {(1, False): 51, (20, False): 49, (100, False): 41, (1_000, False): 9.5,
                     (1, True): 26, (20, True): 28, (100, True): 25, (1_000, True): 8.7},
    "buckets, Java": {(1, False): 92, (20, False): 8.9, (100, False): 1.4, (1_000, False): 0.12},
}  # fmt: skip
ORIGINAL_AT_1000_PER_SECOND = 0.34
IN_FLINK = (
    "The paper, inside Flink: Scotty lazy 1.9 M/s, eager 8 % less, buckets orders of magnitude less, "
    "FlatFAT < 0.002 M/s"
)

COLOURS = {
    "aion": "#123f74", "standard": "#2f8f83", "lazy": "#1f7fc8", "eager": "#7cc0e8",
    "buckets": "#d1752f", "flatfat-batch": "#8f6bb3", "flatfat": "#5b3d78",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Check:
    """Events/s of LocalOperator in wall time, the target, and the rate of the original.

    ``by_processor``: events per second of processor time of all threads.
    """

    what: str
    measured: float
    by_processor: float
    at_least: float
    original: float

    @property
    def holds(self) -> bool:
        return self.measured >= self.at_least

    @property
    def words(self) -> str:
        return "holds" if self.holds else "does not hold"


def medians(found: Sequence[Result], seconds: str = "seconds") -> dict[str, float]:
    """Events/s by contender, in the order of the contenders."""
    return {
        name: statistics.median(run.events / getattr(run, seconds) for run in found if run.contender == name)
        for name in CONTENDERS
        if any(run.contender == name for run in found)
    }


def checks(results: Results) -> list[Check]:
    """A check for each target whose cell was measured."""
    at_least = {1: (50e6, 25e6), 20: (50e6, 25e6), 100: (40e6, 20e6), 1_000: (15e6, 8e6)}
    found = []
    for cell, runs in results.get("windows", []):
        if cell.windows in at_least:
            words = f"{cell.windows:,} window{'s' if cell.windows > 1 else ''}{', 1 s session' if cell.session else ''}"
            clock, processor = (medians(runs, which)["aion"] for which in ("seconds", "processor_seconds"))
            original = ORIGINAL["Scotty, Java"][cell.windows, cell.session] * 1e6
            found.append(Check(words, clock, processor, at_least[cell.windows][cell.session], original))
    return found


def tables(
    results: Results,
    settings: Settings,
    records: Mapping[str, Any] | None = None,
    operator: Sequence[Mapping[str, Any]] | None = None,
) -> Iterator[Table]:
    for leg, size in (("windows", settings.batch), ("batches", settings.small_batch)):
        by_windows = {(c.windows, c.session): medians(runs) for c, runs in results.get(leg, [])}
        for session in (False, True):
            columns = {f"{n:,}": by_windows[n, s] for n, s in by_windows if s is session}
            if columns:
                title = (
                    f"figure 5a: concurrent tumbling windows of 1 to 20 s{' and a session of 1 s' if session else ''}, "
                    f"batches of {size:,}"
                )
                beside = {
                    name: {f"{n:,}": of[n, s] * 1e6 for n, s in of if s is session} for name, of in ORIGINAL.items()
                }
                yield _rates_table(title, columns, {name: of for name, of in beside.items() if of})
    if "disorder" in results:
        columns = {f"{cell.out_of_order:.0%}": medians(runs) for cell, runs in results["disorder"]}
        what = f"{settings.concurrent} windows and a session, batches of {settings.batch:,}"
        title = f"figure 5b: events out of order; {what}"
        yield _rates_table(title, columns, {})
    if "rates" in results:
        columns = {
            f"{cell.rate:,}/s{', session' if cell.session else ''}": medians(runs) for cell, runs in results["rates"]
        }
        beside = {"Scotty, Java": {"1,000/s": ORIGINAL_AT_1000_PER_SECOND * 1e6}}
        title = f"{max(settings.windows):,} windows, by events per event-second, batches of {settings.batch:,}"
        yield _rates_table(title, columns, beside)
    if records is not None:
        yield from _record_tables(records)
    if operator is not None:
        yield _operator_table(operator)
    if judged := checks(results):
        yield _checks_table(judged)


def _rates_table(
    title: str, columns: Mapping[str, Mapping[str, float]], beside: Mapping[str, Mapping[str, float]]
) -> Table:
    table = Table(title=f"{title}; million events/s (wall time), medians", title_justify="left")
    table.add_column("contender", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for name, label in CONTENDERS.items():
        if any(name in of for of in columns.values()):
            table.add_row(label, *(_million(of.get(name)) for of in columns.values()))
    for label, of in beside.items():
        table.add_row(label, *(_million(of.get(heading)) for heading in columns), style="dim")
    return table


def _million(rate: float | None) -> str:
    if rate is None:
        return ""
    return f"{rate / 1e6:,.0f}" if rate >= 20e6 else f"{rate / 1e6:,.1f}" if rate >= 1e6 else f"{rate / 1e6:.3f}"


def _record_tables(records: Mapping[str, Any]) -> Iterator[Table]:
    for kind, of in records["storages"].items():
        table = Table(
            title=f"windows per record, kept in {kind}, {records['records']:,} records in a window: to read a value "
            f"takes {of['read_us']:.2g} µs, to write an aggregate {of['write_us']:.2g} µs, so {of['best']} buckets",
            title_justify="left",
        )
        table.add_column("design", no_wrap=True)
        for heading in ("µs per record", "combines", "writes"):
            table.add_column(heading, justify="right")
        for name, costs in of["designs"].items():
            chosen = " (chosen)" if costs["buckets"] == of["best"] else ""
            table.add_row(
                f"{name}{chosen}", f"{costs['us']:,.1f}", f"{costs['combines']:,.0f}", f"{costs['writes']:,.0f}"
            )
        if kind == "memory":
            table.add_row("LocalOperator, all at once, wall time", f"{records['operator_us']:,.2f}", "", "")
        yield table


def _operator_table(cases: Sequence[Mapping[str, Any]]) -> Table:
    title = "in the operator: time of eager and auto, divided by that of lazy (below 1 is faster)"
    table = Table(title=title, title_justify="left")
    table.add_column("case", no_wrap=True)
    for what in ("a pass", "a call"):
        for heading in (f"{what}: lazy, ms", "eager", "auto"):
            table.add_column(heading, justify="right")
    for case in cases:
        cells = []
        for what in ("pass", "call"):
            ratios = case[f"{what}_ratios"]
            cells += [f"{case[f'{what}_s']['lazy'] * 1e3:,.1f}", f"{ratios['eager']:.2f}", f"{ratios['auto']:.2f}"]
        table.add_row(case["label"], *cells)
    return table


def _checks_table(judged: Sequence[Check]) -> Table:
    title = "LocalOperator, memory_only: million events/s (wall time)"
    table = Table(title=title, title_justify="left")
    table.add_column("what", no_wrap=True)
    for heading in ("measured", "processor time", "target", "Java original", "verdict"):
        table.add_column(heading, justify="right", no_wrap=True)
    for check in judged:
        colour = "green" if check.holds else "red"
        table.add_row(
            check.what,
            _million(check.measured),
            _million(check.by_processor),
            f">= {check.at_least / 1e6:g}",
            f"{check.original / 1e6:g}",
            f"[{colour}]{check.words}[/{colour}]",
        )
    return table


def remarks(settings: Settings) -> str:
    """The explanations below the tables."""
    return "\n".join(
        [
            "events/s: events per second of wall time in process and advance, median of the runs. LocalOperator has "
            "several threads, so other load on the machine slows it down. processor time: events per second of "
            "processor time of all threads.",
            f"after each batch the watermark is {DELAY_US / 1e6:g} s behind the latest event; a sum of integers, no "
            "key; generating events and comparing panes is not timed.",
            f"baselines are measured for {settings.seconds:g} s per run, in one thread, with batches of at most "
            f"{settings.small_batch:,}. FlatFAT inserts events one by one. It is first filled with {FILL_S} s of "
            f"events, and gets batches of {FEW:,}; 'whole batches' merges a sorted batch instead.",
            "each contender runs once to warm up; a checksum compares the panes of that run with those of "
            "LocalOperator for the same batches.",
            "grey rows: the Java original in a similar benchmark, 20 % out of order; its rate of event time differs. "
            + IN_FLINK
            + ".",
        ]
    )


def write(out: Path, record: Mapping[str, Any], results: Results, settings: Settings) -> list[Path]:
    """Writes all runs and verdicts as JSON, and both figures in one PNG."""
    flat = {
        leg: [{"cell": asdict(c), "runs": [asdict(r) for r in runs]} for c, runs in of] for leg, of in results.items()
    }
    judged = [{**asdict(check), "verdict": check.words} for check in checks(results)]
    paths = [out / "slicing.json"]
    bench.write_json(paths[0], {**record, "checks": judged, "results": flat})
    if "windows" in results or "disorder" in results:
        paths.append(out / "slicing.png")
        chart(paths[-1], results, settings)
    return paths


class _Panel(NamedTuple):
    """``points``: events/s by contender, for each x. ``beside``: published rates of others, for each x."""

    title: str
    xlabel: str
    points: dict[float, dict[str, float]]
    beside: dict[str, dict[float, float]]


def chart(path: Path, results: Results, settings: Settings) -> None:
    """Draws events/s over the number of windows, without and with a session, and over the share out of order."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter

    panels: list[_Panel] = []
    for session in (False, True):
        points: dict[float, dict[str, float]] = {
            c.windows: medians(runs) for c, runs in results.get("windows", []) if c.session is session
        }
        beside: dict[str, dict[float, float]] = {
            n: {w: r * 1e6 for (w, s), r in of.items() if s is session} for n, of in ORIGINAL.items()
        }
        title = "tumbling windows of 1 to 20 s" + (", and a session" if session else "")
        panels.append(_Panel(title, "concurrent windows", points, {n: of for n, of in beside.items() if of}))
    points = {c.out_of_order * 100: medians(runs) for c, runs in results.get("disorder", [])}
    panels.append(_Panel(f"{settings.concurrent} windows and a session", "events out of order, %", points, {}))
    panels = [panel for panel in panels if panel.points]
    figure, all_axes = pyplot.subplots(
        1, len(panels), figsize=(4.3 * len(panels) + 1.6, 4.4), sharey=True, layout="constrained", squeeze=False
    )
    for axes, (title, label, points, beside) in zip(all_axes[0], panels, strict=True):
        for name, words in CONTENDERS.items():
            if not all(name in of for of in points.values()):
                continue
            axes.plot(
                list(points),
                [of[name] for of in points.values()],
                marker="o",
                markersize=4,
                color=COLOURS[name],
                label=words,
            )
        for (name, of), style in zip(beside.items(), ("--", ":"), strict=False):
            axes.plot(list(of), list(of.values()), color="#777777", linewidth=1.2, linestyle=style, label=name)
        axes.set(yscale="log", xlabel=label)
        axes.set_title(title, fontsize=9, loc="left")
        if label == "concurrent windows":
            axes.set_xscale("log")
            axes.set_xticks(list(points), [f"{n:,}" for n in points])
            axes.minorticks_off()
        axes.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:,.0f}"))
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0][0].set_ylabel("events/s (wall time), median")
    handles, labels = all_axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
    figure.suptitle(
        f"stream slicing, {settings.rate:,} events per event-second, batches of {settings.batch:,}",
        fontsize=10, x=0.01, ha="left",
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
