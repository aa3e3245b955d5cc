"""The report of `aion experiment cleanup`: verdicts on the targets, tables, figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from experiments.cleanup.runs import HALF_A_POINT
from experiments.cleanup.settings import REAL
from experiments.shared import bench

if TYPE_CHECKING:
    from experiments.cleanup.settings import Settings

BYTES_AT_MOST = 1.15
CHANCE = 0.05
"""A share of runs counts as too small if the probability of such a small share by chance is at most this."""

Run = Mapping[str, Any]
Results = Mapping[str, Sequence[Run]]


@dataclass(frozen=True, slots=True)
class Check:
    """A measurement, its target, and whether it holds. ``by_chance``: chance could explain why it does not hold."""

    stream: str
    what: str
    measured: float
    wanted: str
    holds: bool
    by_chance: bool = False

    @property
    def words(self) -> str:
        return "holds" if self.holds else "below, by chance" if self.by_chance else "does not hold"


def checks(results: Results, settings: Settings) -> list[Check]:
    """The checks of all targets, for each stream that was run."""
    found: list[Check] = []
    for stream, runs in results.items():
        settled = [run.get("settled", run) for run in runs]
        if stream in REAL:
            found.append(bytes_check(stream, "all of it", settled[:1]))
            settled = settled[1:]
        met = [run["coverage"] >= settings.coverage for run in settled]
        what = "settled runs" if "settled" in runs[0] else "stretches" if stream in REAL else "runs"
        found.append(confidence_check(stream, f"{what} with enough coverage", met, settings.confidence))
        if "last_bound_covers" in runs[0]:
            truly = [run["last_bound_covers"] >= settings.coverage for run in runs]
            found.append(confidence_check(stream, "last bounds with enough true coverage", truly, settings.confidence))
        found.append(bytes_check(stream, f"median of {what}", settled))
        found += rolling_checks(stream, runs, settings.coverage)
    return found


def rolling_checks(stream: str, runs: Sequence[Run], coverage: float) -> list[Check]:
    """Whether the coverage over any 1,000 windows after the first 200 is within half a point, and its lowest value."""
    found = [run["rolling"] for run in runs if run["rolling"] is not None]
    if not found:
        return []
    within = statistics.mean(rolling["within"] for rolling in found)
    lowest, least = min(rolling["lowest"] for rolling in found), coverage - HALF_A_POINT
    return [
        Check(stream, "of any 1,000 windows, within half a point", within, "= 1", within == 1.0),
        Check(stream, "lowest coverage over 1,000 windows", lowest, f">= {least:.4g}", lowest >= least),
    ]


def confidence_check(stream: str, what: str, met: Sequence[bool], confidence: float) -> Check:
    """The share of runs that met the target, compared with the confidence; allows for chance with few runs."""
    from scipy.special import bdtr

    runs, kept = len(met), sum(met)
    least = next(k for k in range(runs + 1) if bdtr(k, runs, confidence) > CHANCE)
    wanted = f">= {confidence:g} (by chance {least}/{runs})"
    return Check(stream, f"{what}: {kept}/{runs}", kept / runs, wanted, kept >= confidence * runs, kept >= least)


def bytes_check(stream: str, what: str, runs: Sequence[Run]) -> Check:
    ratio = statistics.median(run["bytes_over_oracle"] for run in runs)
    return Check(stream, f"bytes kept / oracle's, {what}", ratio, f"<= {BYTES_AT_MOST:g}", ratio <= BYTES_AT_MOST)


def line(runs: Sequence[Run]) -> str:
    """All runs of a stream in one line."""
    coverage = [run["coverage"] for run in runs]
    learnt = [run["learnt_after_s"] / 3600 for run in runs if run["learnt_after_s"] is not None]
    seconds = statistics.median(run["seconds"] for run in runs)
    first = f"learnt after {statistics.median(learnt):.1f} h" if learnt else "nothing learnt"
    return (
        f"{len(runs)} runs: coverage {statistics.mean(coverage):.4f} ({min(coverage):.4f} to {max(coverage):.4f}), "
        f"{first}, restarts {sum(run['restarts'] for run in runs)}, {seconds:.2f} s per run"
    )


def choices(runs: Sequence[Run]) -> Iterator[tuple[str, list[float], list[float], list[float]]]:
    """For the learnt bound and each fixed one: name, coverages, bytes over the oracle's, bounds in seconds.

    A learnt bound varies, so its list of bounds is empty.
    """
    yield "learnt", [r["coverage"] for r in runs], [r["bytes_over_oracle"] for r in runs], []
    for part in ("settled", "unnoticed", "relearning"):
        parts = [run[part] for run in runs if part in run]
        if parts:
            yield f"  {part}", [p["coverage"] for p in parts], [p["bytes_over_oracle"] for p in parts], []
    for name in runs[0]["fixed"]:
        fixed = [run["fixed"][name] for run in runs]
        yield (
            name,
            [f["coverage"] for f in fixed],
            [f["bytes_over_oracle"] for f in fixed],
            [f["bound_s"] for f in fixed],
        )


def tables(results: Results, settings: Settings) -> list[Table]:
    """A table of all bounds of all streams, one of the coverage of stretches of windows, and one of the verdicts."""
    title = f"windows after the warm-up; target {settings.coverage:g} of late events"
    bounds = Table(title=title, title_justify="left")
    for heading in ("stream", "bound"):
        bounds.add_column(heading, no_wrap=True)
    for heading in ("minutes", "coverage", "lowest", "runs on target", "bytes / oracle's", "highest"):
        bounds.add_column(heading, justify="right")
    for stream, runs in results.items():
        shown = stream
        for name, coverage, bytes_, bound_s in choices(runs[1:] if stream in REAL else runs):
            met = sum(c >= settings.coverage for c in coverage)
            bounds.add_row(
                shown,
                name,
                f"{statistics.median(bound_s) / 60:,.1f}" if bound_s else "",
                f"{statistics.mean(coverage):.4f}",
                f"{min(coverage):.4f}",
                f"{met}/{len(coverage)}",
                f"{statistics.median(bytes_):.3f}",
                f"{max(bytes_):.3f}",
            )
            shown = ""
        bounds.add_section()
    verdicts = Table(title="targets", title_justify="left")
    for heading in ("stream", "what"):
        verdicts.add_column(heading, no_wrap=True)
    for heading in ("measured", "target", "verdict"):
        verdicts.add_column(heading, justify="right", no_wrap=True)
    for check in checks(results, settings):
        colour = "green" if check.holds else "yellow" if check.by_chance else "red"
        verdicts.add_row(
            check.stream, check.what, f"{check.measured:.4f}", check.wanted, f"[{colour}]{check.words}[/{colour}]"
        )
    return [bounds, rolling_table(results, settings), verdicts]


def rolling_table(results: Results, settings: Settings) -> Table:
    """The coverage of stretches of windows, over all runs of each stream."""
    title = f"any 1,000 windows in a row, after the first 200; asked {settings.coverage:g} of late events"
    table = Table(title=title, title_justify="left")
    table.add_column("stream", no_wrap=True)
    for heading in ("stretches", "within half a point", "oracle's", "not lower", "lowest", "highest"):
        table.add_column(heading, justify="right")
    table.add_column("bounds of the lowest")
    for stream, runs in results.items():
        found = [run["rolling"] for run in runs if run["rolling"] is not None]
        if not found:
            table.add_row(stream, "0")
            continue
        lowest = min(found, key=lambda rolling: rolling["lowest"])
        table.add_row(
            stream,
            f"{sum(rolling['stretches'] for rolling in found):,}",
            f"{statistics.mean(rolling['within'] for rolling in found):.1%}",
            f"{statistics.mean(rolling['oracle_within'] for rolling in found):.1%}",
            f"{statistics.mean(rolling['not_below'] for rolling in found):.1%}",
            f"{lowest['lowest']:.4f}",
            f"{max(rolling['highest'] for rolling in found):.4f}",
            ", ".join(lowest["lowest_reasons"]),
        )
    return table


def remarks(settings: Settings) -> str:
    """The explanations below the tables."""
    return "\n".join(
        [
            "coverage: the share of late events that came within their window's bound, for windows made after the "
            "warm-up. A run meets the target if its coverage is at least the target. A last bound has enough true "
            "coverage if the known distribution says so.",
            f"by chance: the fewest runs on target that would not be surprising (level {CHANCE:g}) if each run met the "
            f"target with probability {settings.confidence:g}.",
            "bytes: 100 bytes for each event, from its arrival (on-time events: from half a window before the window's "
            "end) until the window is purged; relative to an oracle that knows the distribution of each regime from "
            "the beginning.",
            "regime change: the median lateness grows fourfold. unnoticed: before the change is found; relearning: "
            "after that, until there is a new history; settled: the rest. No bound can cover what windows lose that "
            "were created before the change could be seen.",
            "bad source: in the middle, one of five sources becomes late and stays so.",
            "any 1,000 windows: also those with the conservative bound, before enough is known. They "
            "cover more than was asked: within half a point counts them as off, not lower does not. Only the first 200 "
            "windows are left out. oracle's: the same with the oracle's bounds.",
            "flights: real data, in windows of an hour by schedule. The truth is unknown; the oracle is the "
            "one fixed bound that would have been right for the stretch. The figure shows all of it. flights are those "
            "of New York in 2013, flights 2001 those of the United States in half a year.",
        ]
    )


def write(out: Path, record: Mapping[str, Any], results: Results, settings: Settings) -> list[Path]:
    """Writes all results and verdicts as JSON, and the figures as PNG.

    The figures: bounds over time, coverage against bytes, coverage of the last 1,000 windows over time.
    """
    judged = [{**asdict(check), "verdict": check.words} for check in checks(results, settings)]
    figures = ("cleanup-bounds.png", "cleanup-coverage.png", "cleanup-rolling.png")
    paths = [out / "cleanup.json", *(out / name for name in figures)]
    bench.write_json(paths[0], {**record, "checks": judged, "results": results})
    bounds_chart(paths[1], results, settings)
    coverage_chart(paths[2], results, settings)
    rolling_chart(paths[3], results, settings)
    return paths


def _panels(results: Results) -> tuple[Any, Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(4.2 * columns, 3.1 * rows), layout="constrained", squeeze=False
    )
    axes = list(grid.flat)
    for unused in axes[len(results) :]:
        unused.axis("off")
    for panel in axes[: len(results)]:
        panel.spines[["top", "right"]].set_visible(False)
    return pyplot, figure, axes


def _logarithmic(axis: Any) -> None:
    """Ticks at 1, 2 and 5, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def bounds_chart(path: Path, results: Results, settings: Settings) -> None:
    """Draws the bound of new windows over time, for the first run of each stream, and the oracle's."""
    pyplot, figure, axes = _panels(results)
    for panel, (stream, runs) in zip(axes, results.items(), strict=False):
        course = runs[0]["course"]
        minutes = [s / 60 for s in course["bound_s"]]
        panel.step(course["day"], minutes, where="post", color="#4c78a8", linewidth=1.4, label="learnt")
        oracle = [s / 60 for s in course["oracle_s"]]
        panel.step(course["day"], oracle, where="post", color="#1b1b1b", linewidth=1, linestyle="--", label="oracle")
        panel.set_yscale("log")
        _logarithmic(panel.yaxis)
        panel.set_title(stream, fontsize=9)
        panel.set_xlabel("days", fontsize=8)
        panel.tick_params(labelsize=8)
    axes[0].set_ylabel("bound, minutes", fontsize=8)
    axes[0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"bound of new windows; {settings.coverage:g} of late events", fontsize=9, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def rolling_chart(path: Path, results: Results, settings: Settings) -> None:
    """Draws the coverage of the last 1,000 windows over time, for the first run of each stream."""
    pyplot, figure, axes = _panels(results)
    asked = settings.coverage
    for panel, (stream, runs) in zip(axes, results.items(), strict=False):
        course = runs[0]["rolling_course"]
        panel.axhspan(asked - HALF_A_POINT, asked + HALF_A_POINT, color="#2a9d5c", alpha=0.15, linewidth=0)
        panel.axhline(asked, color="#1b1b1b", linewidth=1, linestyle="--")
        panel.plot(course["day"], course["coverage"], color="#4c78a8", linewidth=1.4)
        lowest = min([asked, *course["coverage"]])
        panel.set_ylim(max(0.0, min(asked - 4 * HALF_A_POINT, lowest - 0.005)), min(1.002, asked + 4 * HALF_A_POINT))
        panel.set_title(stream, fontsize=9)
        panel.set_xlabel("days", fontsize=8)
        panel.tick_params(labelsize=8)
    axes[0].set_ylabel("late events in time", fontsize=8)
    title = f"coverage of the last 1,000 windows; dashed: {asked:g} was asked; band: half a point"
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def coverage_chart(path: Path, results: Results, settings: Settings) -> None:
    """Draws lost late events against bytes kept: a dot per run for the learnt bound, other marks for fixed bounds."""
    pyplot, figure, axes = _panels(results)
    least = (1 - settings.coverage) / 30
    marks = ("s", "^", "v", "D")
    for panel, (stream, runs) in zip(axes, results.items(), strict=False):
        shown = runs[1:] if stream in REAL else runs
        for number, (name, coverage, bytes_, bound_s) in enumerate(
            choice for choice in choices(shown) if not choice[0].startswith(" ")
        ):
            lost = [max(1 - c, least) for c in coverage]
            style: dict[str, Any] = {"color": "#4c78a8", "marker": "o", "markersize": 3.5}
            if bound_s:
                style = {"color": "#b0743a", "marker": marks[number - 1], "markersize": 3.5, "alpha": 0.5}
            panel.plot(bytes_, lost, linestyle="", label=name, **style)
        panel.axhline(1 - settings.coverage, color="#c44", linewidth=1, linestyle="--")
        panel.axvline(BYTES_AT_MOST, color="#c44", linewidth=1, linestyle=":")
        panel.set(xscale="log", yscale="log")
        _logarithmic(panel.xaxis)
        panel.set_title(stream, fontsize=9)
        panel.set_xlabel("bytes kept / oracle's", fontsize=8)
        panel.tick_params(labelsize=8)
    axes[0].set_ylabel("late events lost", fontsize=8)
    axes[0].legend(frameon=False, fontsize=7)
    figure.suptitle("each mark is a run; below the dashed line it met the coverage", fontsize=9, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
