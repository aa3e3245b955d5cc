"""The report of the demo: whether the panes are right, a short table, and a figure.

It works on plain tables and arrays, without Spark, so that tests can compare wrong panes too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.table import Table

from aion.base.time import format_instant
from aion.plot import BLUE, GREEN, ORANGE, curve, scale

KINDS = ("on_time", "late", "final")
WINDOW = ("window_start_us", "window_end_us")
COMPLETENESS = ("completeness", "completeness_low")
SHOWN = 5  # how many differing windows of one kind are printed


@dataclass(frozen=True, slots=True)
class Sample:
    """The state's bytes, ``seconds`` after the queries started."""

    seconds: float
    m_bucket_bytes: int  # in memory
    p_bucket_bytes: int  # on disk

    def __str__(self) -> str:
        return f"{format_bytes(self.m_bucket_bytes)} in memory, {format_bytes(self.p_bucket_bytes)} on disk"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The last pane of every window, compared with the truth. If all is right, the four frames are empty."""

    query: str
    windows: int  # in the truth, one per key and window
    missing: pd.DataFrame  # windows of the truth without a pane
    extra: pd.DataFrame  # panes of windows that are not in the truth
    different: pd.DataFrame  # panes with wrong values; the columns of the right ones end in _truth
    duplicated: pd.DataFrame  # panes that came out more than once

    @property
    def faults(self) -> dict[str, pd.DataFrame]:
        sorts = ("missing", "extra", "different", "duplicated")
        return {sort: getattr(self, sort) for sort in sorts if len(getattr(self, sort))}

    @property
    def equal(self) -> bool:
        return not self.faults


@dataclass(frozen=True, slots=True)
class Outcome:
    """One query after the run: the operator's counters, its panes, and whether they are right."""

    name: str
    seconds: float
    counters: Mapping[str, Any]  # events, late_events, dropped, windows, executions; empty if unknown
    dropped: int  # events in the rows of kind "dropped"
    panes: Mapping[str, int]  # by kind
    comparison: Comparison
    rated: pd.DataFrame  # see rated


def compare(
    query: str, truth: pd.DataFrame, panes: pd.DataFrame, keys: Sequence[str], values: Sequence[str]
) -> Comparison:
    """Compare the last pane of every key and window with ``truth``, exactly.

    Both have the key columns, ``window_start_us``, ``window_end_us`` and the value columns; ``panes`` also has
    ``pane``. There is no tolerance: the demo's values are integers, quotients of exactly representable sums, and
    halves, so only one double is right. Nulls equal nulls.
    """
    by = [*keys, *WINDOW]
    numbered = [*by, "pane"]
    duplicated = panes[panes.duplicated(numbered, keep=False)].sort_values(numbered)
    last = panes.sort_values("pane", kind="stable").drop_duplicates(by, keep="last")[[*by, "pane", *values]]
    both = truth[[*by, *values]].merge(last, how="outer", on=by, suffixes=("_truth", ""), indicator="side")
    side = both.pop("side")
    matched = both[side == "both"]
    wrong = np.zeros(len(matched), dtype=bool)
    for name in values:
        ours, true = matched[name], matched[f"{name}_truth"]
        wrong |= ((ours != true) & ~(ours.isna() & true.isna())).to_numpy()
    truths = {f"{name}_truth": name for name in values}
    return Comparison(
        query=query,
        windows=len(truth),
        missing=both.loc[side == "left_only", [*by, *truths]].rename(columns=truths),
        extra=both.loc[side == "right_only", [*numbered, *values]],
        different=matched[wrong],
        duplicated=duplicated,
    )


def rated(panes: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """The panes that said how complete they are, except for final ones, which are complete, and what was true.

    ``truth``: the events of the pane over those of the last pane of its key and window. ``panes`` also has ``kind`` and
    ``events``.
    """
    by = [*keys, *WINDOW]
    last = panes.sort_values("pane", kind="stable").drop_duplicates(by, keep="last")[[*by, "events"]]
    both = panes.merge(last, on=by, suffixes=("", "_last"))
    both["truth"] = both["events"] / both["events_last"]
    said = both["completeness"].notna() & (both["kind"] != "final")
    return both.loc[said, [*COMPLETENESS, "truth"]].reset_index(drop=True)


def conclusion(comparison: Comparison, dropped: int = 0) -> list[str]:
    """One line if all panes are right, else the differences, with examples. ``dropped`` events are the likely cause."""
    if comparison.equal:
        return [f"{comparison.query}: the last panes of all {comparison.windows:,} windows equal the truth"]
    lines = [f"{comparison.query}: does NOT equal the truth ({comparison.windows:,} windows)"]
    for sort, frame in comparison.faults.items():
        lines.append(f"  {len(frame):,} {sort}")
        lines += [f"    {_row(row)}" for row in frame.head(SHOWN).to_dict("records")]
        if len(frame) > SHOWN:
            lines.append("    ...")
    if dropped:
        lines.append(f"  {dropped:,} events came after their window's bound: see lateness in the policy")
    return lines


def _row(row: Mapping[Any, Any]) -> str:
    """``dest=ATL 2013-04-01T10:00:00Z flights=3 flights_truth=4``."""
    start = format_instant(int(row["window_start_us"]))
    keys_and_values = [f"{name}={value}" for name, value in row.items() if name not in WINDOW]
    return " ".join([start, *keys_and_values])


def format_bytes(size: float) -> str:
    """``1536`` -> ``"1.5 KiB"``."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} GiB"


def summary(outcomes: Sequence[Outcome], samples: Sequence[Sample], peak_m_bucket_bytes: int) -> Table:
    """The final table, with a column for each query. The queries share one server, so the bytes are of both."""
    table = Table(title="late flights, one-hour windows", title_justify="left")
    table.add_column("")
    for outcome in outcomes:
        table.add_column(outcome.name, justify="right")

    def counted(label: str, *path: str) -> None:
        cells = []
        for outcome in outcomes:
            value: Any = outcome.counters
            for name in path:
                value = value.get(name) if isinstance(value, Mapping) else None
            cells.append("–" if value is None else f"{value:,}")
        table.add_row(label, *cells)

    counted("events", "events")
    counted("late events", "late_events")
    counted("dropped", "dropped")
    counted("windows, counted per shard", "windows")
    for kind in KINDS:
        counted(f"executions {kind}", "executions", kind)
    for kind in KINDS:
        table.add_row(f"panes {kind}", *(f"{outcome.panes.get(kind, 0):,}" for outcome in outcomes))
    table.add_row(
        "last panes equal the truth",
        *(f"{o.comparison.windows:,} of {o.comparison.windows:,}" if o.comparison.equal else "NO" for o in outcomes),
    )
    said = [_said(outcome.rated) for outcome in outcomes]
    for label in said[0] if said else ():
        table.add_row(label, *(cells[label] for cells in said))
    table.add_row("seconds", *(f"{outcome.seconds:,.1f}" for outcome in outcomes), end_section=True)
    shared = (
        ("peak m-bucket bytes", peak_m_bucket_bytes),
        ("peak p-bucket bytes", max((s.p_bucket_bytes for s in samples), default=0)),
    )
    for label, size in shared:
        table.add_row(f"{label} (both queries)", format_bytes(size))
    return table


def _said(rows: pd.DataFrame) -> dict[str, str]:
    """Rows of the final table. ``rows``: see :func:`rated`."""
    some, none = _missing(rows), rows[rows["completeness"] >= 1]
    error = (some["completeness"] - some["truth"]).mean()
    return {
        "panes that say events are missing": f"{len(some):,}",
        "  at or above completeness_low": f"{_covered(some):.1%}" if len(some) else "–",
        "  mean error of completeness": f"{error:+.4f}" if len(some) else "–",
        "panes that say no event is missing": f"{len(none):,}",
        "  right": f"{(none['truth'] >= 1).mean():.2%}" if len(none) else "–",
    }


def _missing(rows: pd.DataFrame) -> pd.DataFrame:
    """The panes that say that events are missing. Of windows that are over, panes say 1, which is no estimate."""
    return rows[rows["completeness"] < 1]


def _covered(rows: pd.DataFrame) -> float:
    return float((rows["truth"] >= rows["completeness_low"] - 1e-9).mean())


# -- the figure ---------------------------------------------------------------------------------------

MINUTE_US = 60_000_000
PARTS, FEWEST_IN_PART = 8, 30  # of the panes in the figure of completeness


def draw(
    path: Path,
    lateness_us: np.ndarray,
    seen_us: np.ndarray,
    samples: Sequence[Sample],
    panes: Mapping[str, Mapping[str, int]],
    rows: Mapping[str, pd.DataFrame],
) -> None:
    """Write the figure: lateness of the flights, bytes per tier over time, panes per kind and query, completeness.

    ``lateness_us``: departure minus the end of the flight's window. ``seen_us``: the watermark of the flight's batch
    minus that end. Both are of all flights, and negative for those in time. ``rows``: of each query, see :func:`rated`.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9.6), dpi=120, layout="constrained")
    lateness, tiers, kinds, completeness = figure.subplots(2, 2).flat
    for axes in (lateness, tiers, kinds, completeness):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    _draw_lateness(lateness, lateness_us, seen_us)
    _draw_bytes(tiers, samples)
    _draw_panes(kinds, panes)
    _draw_completeness(completeness, rows)
    figure.savefig(path)


def _draw_lateness(axes: Any, lateness_us: np.ndarray, seen_us: np.ndarray) -> None:
    """The share of flights that are later than x, on two logarithmic axes, which show a heavy tail."""
    curves = (
        (lateness_us, BLUE, "at departure"),
        (seen_us, ORANGE, "by the watermark,\nwhich moves once per file"),
    )
    for late_us, colour, label in curves:
        # If the watermark just reaches a window's end, lateness is 0, which has no logarithm.
        late = np.sort(late_us[late_us >= 0]).clip(MINUTE_US / 2) / MINUTE_US
        share = np.arange(len(late), 0, -1) / max(1, len(late_us))
        curve(axes, late, share, colour, f"{label}: {share.max(initial=0):.1%}")
    late = lateness_us[lateness_us >= 0] / MINUTE_US
    for percent, words in ((50, "half of the late ones: under"), (99, "99 %: under"), (100, "the latest:")):
        if not len(late):
            break
        at = float(np.percentile(late, percent))
        share = (late >= at).sum() / len(lateness_us)
        axes.plot(at, share, "o", color=BLUE, markersize=5)
        axes.annotate(f"{words} {_minutes(at)}", (at, share), xytext=(6, 4), textcoords="offset points", fontsize=9)
    axes.set_xlim(1, 14_400)  # up to ten days: room for the labels beside the tail
    scale(axes, len(lateness_us), "How late flights are: departure after their window's end", "flights")


def _draw_bytes(axes: Any, samples: Sequence[Sample]) -> None:
    """Bytes per tier over time. The budget limits the bytes in memory; at the end both are zero."""
    seconds = [sample.seconds for sample in samples]
    tiers = (
        ("m_bucket_bytes", BLUE, "m-buckets, in memory"),
        ("p_bucket_bytes", ORANGE, "p-buckets, in RocksDB"),
    )
    sizes = {name: np.array([getattr(sample, name) for sample in samples], dtype=float) for name, _, _ in tiers}
    most = max(values.max(initial=1.0) for values in sizes.values())
    unit, scale = ("KiB", 1 << 10) if most < 1 << 20 else ("MiB", 1 << 20)
    for name, colour, label in tiers:
        axes.plot(seconds, sizes[name] / scale, color=colour, linewidth=2, label=label)
        axes.fill_between(seconds, sizes[name] / scale, color=colour, alpha=0.12, linewidth=0)
    axes.set(title="State per tier over time", xlabel="seconds since the start", ylabel=f"bytes in {unit}")
    axes.set_xlim(left=0)
    axes.set_ylim(0, most / scale * 1.2)  # room for the legend above the lines
    axes.legend(loc="upper center", ncols=2, frameon=False, fontsize=9)


def _draw_panes(axes: Any, panes: Mapping[str, Mapping[str, int]]) -> None:
    width = 0.8 / max(1, len(panes))
    for number, ((name, kinds), colour) in enumerate(zip(panes.items(), (BLUE, GREEN, ORANGE), strict=False)):
        at = np.arange(len(KINDS)) + (number - (len(panes) - 1) / 2) * width
        counts = [kinds.get(kind, 0) for kind in KINDS]
        bars = axes.bar(at, counts, width * 0.94, color=colour, label=name.replace("_", " "))
        axes.bar_label(bars, [f"{count:,}" for count in counts], fontsize=9, padding=2)
    # Late and final panes are a few per cent of the on-time ones. On a linear axis they would hardly show.
    axes.set_yscale("symlog", linthresh=1)
    most = max((count for kinds in panes.values() for count in kinds.values()), default=1)
    axes.set_ylim(0, most * 4)  # room for the numbers on the bars
    axes.yaxis.set_major_formatter(lambda count, _: f"{count:,.0f}")
    axes.set_xticks(range(len(KINDS)), [kind.replace("_", " ") for kind in KINDS])
    axes.set(title="Panes per kind", ylabel="panes")
    axes.legend(loc="best", frameon=False, fontsize=9)


def _draw_completeness(axes: Any, rows: Mapping[str, pd.DataFrame]) -> None:
    """What panes said that said events were missing, and what was true: means over panes that said nearly the same.

    Below each mean there is a mark for the mean of ``completeness_low``. A good estimate lies on the diagonal.
    """
    axes.axline((0, 0), (1, 1), color="#999999", linewidth=1)
    shown = [1.0]
    for (name, every), colour in zip(rows.items(), (BLUE, GREEN, ORANGE), strict=False):
        frame = _missing(every)
        if not len(frame):
            continue
        label = f"{name.replace('_', ' ')}: {_covered(frame):.1%} at or above completeness_low"
        said = frame.sort_values("completeness", kind="stable")
        parts = np.array_split(np.arange(len(said)), min(PARTS, max(1, len(said) // FEWEST_IN_PART)))
        means = [said.iloc[part].mean() for part in parts]
        at, truth, low = (
            np.array([mean[column] for mean in means]) for column in ("completeness", "truth", COMPLETENESS[1])
        )
        axes.plot(at, truth, "o", color=colour, markersize=6, label=label)
        axes.plot(at, low, "_", color=colour, markersize=12, markeredgewidth=2)
        axes.vlines(at, low, truth, color=colour, alpha=0.3, linewidth=1)
        shown += at.tolist()
    axes.set(
        title="How complete panes are that say events are missing",
        xlabel="completeness, as the pane says",
        ylabel="its share of the events at last",
    )
    # What panes say is in a narrow range, because the watermark moves a week at a time. What is true is not.
    margin = max(0.005, 0.05 * (1 - min(shown)))
    axes.set_xlim(min(shown) - margin, 1 + margin)
    axes.set_ylim(0, 1.45)  # room for the legend above the marks
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.xaxis.set_major_formatter(lambda share, _: f"{share * 100:.3g} %")
    axes.yaxis.set_major_formatter(lambda share, _: f"{share * 100:.0f} %")
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        axes.plot([], [], "_", color="#555555", markersize=12, markeredgewidth=2, label="completeness_low")
        axes.legend(loc="upper left", frameon=False, fontsize=9)
    else:
        axes.text(0.5, 0.5, "no pane says it yet:\ntoo few windows have closed", ha="center", transform=axes.transAxes)


def _minutes(minutes: float) -> str:
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
