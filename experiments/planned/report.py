"""The report of `aion experiment planned`: tables, verdicts, a figure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from experiments.planned.settings import MODES, Settings
from experiments.shared import bench

Results = Mapping[str, Sequence[Mapping[str, Any]]]
COLOURS = {"hits": "#1f5fa8", "ahead": "#5a9bd4", "late": "#9ecae8", "misses": "#b2182b"}
WORDS = {"hits": "hit", "ahead": "read ahead", "late": "prestaged too late", "misses": "miss"}


@dataclass(frozen=True, slots=True)
class Check:
    """A requirement, what was found, and whether it holds."""

    what: str
    found: str
    holds: bool

    @property
    def words(self) -> str:
        return "holds" if self.holds else "does not hold"


def median(results: Results, mode: str, of: Callable[[Mapping[str, Any]], float]) -> float:
    return statistics.median(of(run) for run in results[mode])


def figure_of(results: Results, mode: str, name: str) -> float:
    """The median over runs of one figure."""
    return median(results, mode, lambda run: run[name])


def hit_share(run: Mapping[str, Any]) -> float:
    """The share of the blocks read that had been prestaged in time, without blocks that never left memory."""
    reads = run["hits"] + run["ahead"] + run["late"] + run["misses"]
    return float(run["hits"] / reads) if reads else 1.0


def checks(results: Results) -> list[Check]:
    panes = {run["panes"] for runs in results.values() for run in runs}
    share = {mode: median(results, mode, hit_share) for mode in MODES}
    took = {mode: figure_of(results, mode, "late_seconds") for mode in MODES}
    kept = min(run["staleness"]["kept"] for runs in results.values() for run in runs)
    return [
        Check("every mode yields the same panes", f"{len(panes)} different", len(panes) == 1),
        Check(
            "predictive prestaging has more hits than prestaging on the first late event",
            f"{share['predictive']:.1%} and {share['on_late_event']:.1%}",
            share["predictive"] > share["on_late_event"],
        ),
        Check(
            "late executions take less time with predictive prestaging than without prestaging",
            f"{took['predictive']:.2f} s and {took['none']:.2f} s",
            took["predictive"] < took["none"],
        ),
        Check("at least nine of ten windows keep the trigger's bound", f"{kept:.0%}", kept >= 0.9),
    ]


def tables(results: Results) -> list[Table]:
    of = partial(figure_of, results)

    def stale(mode: str, name: str) -> float:
        return median(results, mode, lambda run: run["staleness"][name])

    found = _table(
        "what reads found; medians over runs",
        (
            *("mode", "hits", "read ahead", "too late", "misses", "hit share", "waited, s", "late runs, s"),
            *("staged, MiB", "in vain, MiB"),
        ),
        [
            (
                mode,
                *(f"{of(mode, name):,.0f}" for name in WORDS),
                f"{median(results, mode, hit_share):.1%}",
                f"{of(mode, 'blocked_s'):.3f}",
                f"{of(mode, 'late_seconds'):.2f}",
                *(f"{of(mode, name) / 2**20:,.0f}" for name in ("staged_bytes", "vain_bytes")),
            )
            for mode in MODES
        ],
    )
    fresh = _table(
        "what the trigger did",
        ("mode", "late executions per window", "maximum staleness: mean", "largest", "bound kept"),
        [
            (
                mode,
                f"{of(mode, 'late_per_window'):.1f}",
                f"{stale(mode, 'mean'):.4f}",
                f"{stale(mode, 'largest'):.4f}",
                f"{stale(mode, 'kept'):.0%}",
            )
            for mode in MODES
        ],
    )
    judged = Table(title="requirements", title_justify="left")
    for heading in ("requirement", "found", "verdict"):
        judged.add_column(heading)
    for check in checks(results):
        colour = "green" if check.holds else "red"
        judged.add_row(check.what, check.found, f"[{colour}]{check.words}[/{colour}]")
    return [found, fresh, judged]


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def remarks(settings: Settings) -> str:
    """The explanation below the tables."""
    size = settings.events * settings.payload_bytes / 2**20
    late = settings.bound_s // 60
    return (
        f"{settings.windows} windows of a minute, {size:.1f} MiB each, kept for {late} minutes: about "
        f"{late * size:.0f} MiB of late windows with {settings.budget_bytes / 2**20:.0f} MiB of memory. Each window "
        f"has about {settings.late} late events, log-normal, with a median lateness of {settings.median_s:g} s; a "
        f"batch every {settings.batch_s} s; staleness bound {settings.staleness:g}. Figures count blocks; files may "
        "be in the page cache. predictive: stages the windows that the next batch is planned to execute. "
        "on_late_event: stages a window when its first late event comes. When memory is needed, prestaged blocks are "
        "evicted first."
    )


def write(out: Path, record: Mapping[str, Any], results: Results) -> list[Path]:
    """Writes all results and verdicts as JSON, and a figure."""
    judged = [{**asdict(check), "verdict": check.words} for check in checks(results)]
    paths = [out / "planned.json", out / "planned.png"]
    bench.write_json(paths[0], {**record, "checks": judged})
    chart(paths[1], results)
    return paths


def chart(path: Path, results: Results) -> None:
    """Draws what reads found, and how long late executions took, by mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained", width_ratios=(1.6, 1))
    begin = [0.0] * len(MODES)
    for name, words in WORDS.items():
        counts = [figure_of(results, mode, name) for mode in MODES]
        left.barh(range(len(MODES)), counts, left=begin, height=0.6, color=COLOURS[name], label=words)
        begin = [b + c for b, c in zip(begin, counts, strict=True)]
    for i, mode in enumerate(MODES):
        left.annotate(f" {median(results, mode, hit_share):.0%} hit", (begin[i], i), va="center", fontsize=8)
    left.set_yticks(range(len(MODES)), MODES)
    left.margins(x=0.15)
    left.set(xlabel="blocks read that had left memory")
    left.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=3)
    took = [figure_of(results, mode, "late_seconds") for mode in MODES]
    bars = right.barh(range(len(MODES)), took, height=0.6, color="#666666")
    right.bar_label(bars, labels=[f" {s:.2f} s" for s in took], fontsize=8)
    right.set_yticks([])
    right.margins(x=0.25)
    right.set(xlabel="seconds in late executions")
    for axes in (left, right):
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
