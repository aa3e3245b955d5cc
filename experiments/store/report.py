"""The report of `aion experiment store`: verdicts on the targets, tables, figures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table

from experiments.shared import bench
from experiments.store.settings import MIB, Settings

RESIDENT_AT_MOST = 1.25
GROWTH_AT_MOST = 0.05
"""The most growth, as a share of the budget, at which we call memory flat."""
INGEST_AT_LEAST = 0.8
DISK_AT_LEAST = 0.6
PRESTAGED_AT_MOST = 1.15
PAST_AT_MOST = 1.10
BLOB_SIZES = ("1 MiB", "64 KiB")

Results = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]
"""What every measured run found, by leg and contender."""


@dataclass(frozen=True, slots=True)
class Check:
    """A ratio and its target. Without ``bound`` there is no target, only a measurement."""

    what: str
    measured: float
    sense: Literal["at most", "at least"] = "at most"
    bound: float | None = None

    @property
    def holds(self) -> bool | None:
        if self.bound is None:
            return None
        return self.measured <= self.bound if self.sense == "at most" else self.measured >= self.bound

    @property
    def words(self) -> str:
        return {None: "no target", True: "holds", False: "does not hold"}[self.holds]


def series(results: Results, leg: str, field: str) -> dict[str, list[float]]:
    """One figure per run, by contender. ``field``: a key, or two keys separated by a dot."""
    outer, _, inner = field.partition(".")
    return {
        contender: [float(run[outer][inner] if inner else run[outer]) for run in runs]
        for contender, runs in results.get(leg, {}).items()
        if runs
    }


def checks(results: Results, settings: Settings) -> list[Check]:
    """A check for each target that was measured. Ratios are of medians, but for memory the worst run counts."""
    found: list[Check] = []
    peaks, growths = (series(results, "ingest", f"memory.{f}_bytes") for f in ("peak", "growth"))
    budget = settings.budget_bytes
    if "tiered" in peaks:
        peak, growth = max(peaks["tiered"]) / budget, max(growths["tiered"]) / budget
        found += [
            Check("resident memory: peak / budget, worst run", peak, "at most", RESIDENT_AT_MOST),
            Check("flat: growth, 2nd to last quarter / budget, worst run", growth, "at most", GROWTH_AT_MOST),
        ]

    def ratio(leg: str, field: str, over: str, under: str, what: str, *bound: Any) -> None:
        figures = series(results, leg, field)
        if over in figures and under in figures:
            found.append(Check(what, statistics.median(figures[over]) / statistics.median(figures[under]), *bound))

    at_least: tuple[Any, ...] = ("at least", DISK_AT_LEAST)
    ratio("ingest", "bytes_per_s", "tiered", "memory", "ingestion: tiered / memory", "at least", INGEST_AT_LEAST)
    ratio("disk", "write_bytes_per_s", "p-bucket", "plain", "writing: p-bucket / plain file", *at_least)
    ratio("disk", "read_bytes_per_s", "p-bucket", "plain", "staging: p-bucket / plain file", *at_least)
    late_target: tuple[Any, ...] = ("at most", PRESTAGED_AT_MOST)
    ratio("late", "seconds", "prestaged", "memory", "late execution: prestaged / in memory", *late_target)
    ratio("late", "seconds", "unstaged", "memory", "late execution: without prestaging / in memory")
    for what, verb in (("write", "writing"), ("read", "reading")):
        for size in BLOB_SIZES:
            ratio("blobs", f"{what}_bytes_per_s.{size}", "blob-files", "sst", f"{verb} {size}: blob files / SST files")
    fewest, *more = settings.past_windows
    past, past_cpu = past_series(results), past_series(results, "cpu_seconds")

    def grown(values: Mapping[str, Sequence[float]], k: int) -> float:
        # Take the ratio within each run, whose batches ran close together in time; those of two runs did not.
        return statistics.median(a / b for a, b in zip(values[str(k)], values[str(fewest)], strict=True))

    if past:
        words = {k: f"on-time batch: {k:,} past windows / {fewest}" for k in more}
        found += [Check(words[k], grown(past, k), "at most", PAST_AT_MOST) for k in more]
        found += [Check(f"{words[k]}, processor time", grown(past_cpu, k)) for k in more]
    return found


def past_series(results: Results, field: str = "seconds") -> dict[str, list[float]]:
    """Seconds of an on-time batch, one figure per run, by number of past windows; or of another field."""
    runs = results.get("past", {}).get("all", [])
    return {k: [run[field][k] for run in runs] for k in (runs[0][field] if runs else {})}


def figures(results: Results) -> list[tuple[str, str, str, dict[str, list[float]]]]:
    """For each bar chart and table: a file stem, a title, a unit, and the figures by contender."""

    def scaled(values: Mapping[str, Sequence[float]], factor: float) -> dict[str, list[float]]:
        return {name: [v * factor for v in of] for name, of in values.items()}

    def of(leg: str, field: str, factor: float) -> dict[str, list[float]]:
        return scaled(series(results, leg, field), factor)

    past, past_io = (
        {f"{int(k):,} past windows": v for k, v in past_series(results, field).items()}
        for field in ("seconds", "io_seconds")
    )
    found = [
        ("memory", "resident memory above the baseline, peak", "MiB", of("ingest", "memory.peak_bytes", 1 / MIB)),
        ("ingest", "ingestion, including encoding and commits", "MiB/s", of("ingest", "bytes_per_s", 1 / MIB)),
        ("write", "writing, synced", "MiB/s", of("disk", "write_bytes_per_s", 1 / MIB)),
        ("read", "reading, without page cache", "MiB/s", of("disk", "read_bytes_per_s", 1 / MIB)),
        ("late", "a late execution", "ms", of("late", "seconds", 1e3)),
        ("past", "an on-time batch", "µs", scaled(past, 1e6)),
        ("past-io", "the I/O thread's work for an on-time batch, during or after it", "µs", scaled(past_io, 1e6)),
    ]
    for what, words in (("write", "writing"), ("read", "reading")):
        for size in BLOB_SIZES:
            values = of("blobs", f"{what}_bytes_per_s.{size}", 1 / MIB)
            found.append((f"blobs-{what}-{size.replace(' ', '')}", f"{words} values of {size}", "MiB/s", values))
    return [line for line in found if line[3]]


def figures_table(title: str, unit: str, values: Mapping[str, Sequence[float]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("contender", no_wrap=True)
    for heading in (f"median, {unit}", "lowest", "highest", "runs"):
        table.add_column(heading, justify="right")
    for name, summary in bench.summarise(values).items():
        cells = [f"{figure:,.1f}" for figure in (summary.median, summary.lowest, summary.highest)]
        table.add_row(name, *cells, str(summary.runs))
    return table


def checks_table(found: Sequence[Check]) -> Table:
    """Each ratio, its target, and whether it holds."""
    table = Table(title="ratios of the medians (on-time batches: median of each run's ratio)", title_justify="left")
    table.add_column("ratio", no_wrap=True)
    for heading in ("measured", "target", "verdict"):
        table.add_column(heading, justify="right", no_wrap=True)
    for check in found:
        sign = "<=" if check.sense == "at most" else ">="
        wanted = "" if check.bound is None else f"{sign} {check.bound:g}"
        colour = {None: "default", True: "green", False: "red"}[check.holds]
        table.add_row(check.what, f"{check.measured:.3f}", wanted, f"[{colour}]{check.words}[/{colour}]")
    return table


def write(out: Path, record: Mapping[str, Any], results: Results, settings: Settings) -> list[Path]:
    """Writes all results and verdicts as JSON, a bar chart for each figure, and memory over time."""
    judged = [{**asdict(check), "verdict": check.words} for check in checks(results, settings)]
    paths = [out / "store.json"]
    bench.write_json(paths[0], {**record, "checks": judged, "results": results})
    for stem, title, unit, values in figures(results):
        paths.append(out / f"store-{stem}.png")
        bench.bar_chart(paths[-1], title, {}, values, unit)
    tiered = [run["curve_mib"] for run in results.get("ingest", {}).get("tiered", [])]
    if tiered:
        paths.append(out / "store-memory-curve.png")
        memory_chart(paths[-1], tiered, settings.budget_bytes)
    return paths


def memory_chart(path: Path, curves: Sequence[Sequence[Sequence[float]]], budget_bytes: int) -> None:
    """Draws resident memory over the bytes appended, both in MiB, one line per run, with budget and target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.5, 3.6), layout="constrained")
    for curve in curves:
        axes.plot([x for x, _ in curve], [y for _, y in curve], color="#4c78a8", linewidth=1)
    budget_mib = budget_bytes / MIB
    axes.axhline(budget_mib, color="#1b1b1b", linewidth=1, label="budget")
    label = f"budget + {RESIDENT_AT_MOST - 1:.0%}"
    axes.axhline(RESIDENT_AT_MOST * budget_mib, color="#c44", linewidth=1, linestyle="--", label=label)
    axes.set(xlabel="MiB appended", ylabel="resident MiB above the baseline", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False, fontsize=8)
    figure.suptitle("tiered store, one line per run", fontsize=9, x=0.01, ha="left")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
