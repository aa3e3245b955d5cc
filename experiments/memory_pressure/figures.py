"""Figures 2 to 8 of the paper, drawn from the results of a sweep, as PNG files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.memory_pressure.findings import Result, by_past, medians
from experiments.memory_pressure.settings import FULL, PARTS

if TYPE_CHECKING:
    from matplotlib.artist import Artist

COLOURS = {
    "tiered": "#0072B2",
    "memory": "#E69F00",
    "rocksdb": "#009E73",
    "spark-state": "#CC79A7",
    "spark-list": "#D55E00",
    "flink-heap": "#56B4E9",
    "flink-rocksdb": "#8C6D31",
    "spark-window": "#7F7F7F",
}
"""The palette of Okabe and Ito: distinct for every kind of colour vision."""
MORE_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#7F7F7F",
    "#8C6D31",
    "#1B1B1B",
    "#B07AA1",
)

TITLES = {
    "2": "resident memory of the process tree",
    "3": "ingestion of normal events",
    "4": "ingestion of normal and late events, mean of the windows",
    "5": "processing of normal events",
    "6": "garbage collection",
    "7": "processing of normal and late events",
    "8": "parts of the policy",
}
SERIES = {
    "2": (("memory_mib", "total"), "MiB"),
    "3": (("ingestion", "normal"), "events/s"),
    "4": (("ingestion", "windows"), "events/s"),
    "5": (("processing", "normal"), "events/s"),
    "7": (("processing", "all"), "events/s"),
}
LOGARITHMIC = ("5", "7")


def draw_all(results: Sequence[Result], folder: Path) -> dict[str, Path]:
    """Draws the figures that have data. Returns their paths by number."""
    import matplotlib

    matplotlib.use("Agg")
    found = {}
    for number in TITLES:
        path = folder / f"figure-{number}.png"
        drawn = (
            draw_parts(results, path)
            if number == "8"
            else draw_garbage(results, path)
            if number == "6"
            else draw_boxes(results, number, path)
        )
        if drawn:
            found[number] = path
    return found


def draw_boxes(results: Sequence[Result], number: str, path: Path) -> bool:
    """A panel for each workload, with a box for each past window and backend: median, quartiles, minimum, maximum.

    Figure 2 has a band for each cell, from its floor to its limit.
    """
    (outer, inner), unit = SERIES[number]

    def panel(axes: Any, workload: str) -> bool:
        of_backends = {name: by_past(results, workload, name) for name in backends(results, workload)}
        pasts = sorted({past for of in of_backends.values() for past in of})
        width = 0.8 / max(1, len(of_backends))
        seen = False
        for i, (backend, of) in enumerate(of_backends.items()):
            offset = (i - (len(of_backends) - 1) / 2) * width
            values = {past: _series(of[past], outer, inner) for past in of}
            values = {past: series for past, series in values.items() if series}
            if values:
                seen = True
                _boxes(axes, values, pasts, offset, width, COLOURS[backend], backend)
            for past, result in of.items():
                if number == "2" and "spec" in result:
                    at, (floor, limit) = pasts.index(past) + offset, band(result)
                    axes.bar([at], [floor], width, color="#d9d9d9", zorder=0.5)
                    axes.hlines([limit], at - width / 2, at + width / 2, color="#1b1b1b", linewidth=1, linestyle="--")
                    if result["status"] in ("died", "failed"):
                        _cross(axes, at, limit, COLOURS[backend], result["status"])
        axes.set_xticks(range(len(pasts)), pasts)
        if number == "2":
            axes.plot([], [], "--", color="#1b1b1b", linewidth=1, label="limit")
            axes.plot([], [], "s", color="#d9d9d9", label="floor: without state")
            top = max((band(r)[1] for of in of_backends.values() for r in of.values() if "spec" in r), default=1.0)
            axes.set_ylim(0, top * 1.15)
        elif number in LOGARITHMIC:
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, None)
        return seen

    return _panels(results, path, panel, unit, "past windows")


def band(result: Result) -> tuple[float, float]:
    """The floor and the limit of a cell in MiB."""
    spec = result["spec"]
    return spec["floor_bytes"] / (1 << 20), spec["limit_bytes"] / (1 << 20)


def draw_garbage(results: Sequence[Result], path: Path) -> bool:
    """Bars with the share of time in garbage collection: the young generation below, the old one above."""

    def panel(axes: Any, workload: str) -> bool:
        names = backends(results, workload)
        of_backends = {name: by_past(results, workload, name) for name in names}
        pasts = sorted({past for of in of_backends.values() for past in of})
        width, seen = 0.8 / max(1, len(names)), False
        for i, (backend, of) in enumerate(of_backends.items()):
            offset = (i - (len(names) - 1) / 2) * width
            shares = {past: gc for past, r in of.items() if (gc := r.get("measured", {}).get("gc"))}
            seen = seen or bool(shares)
            at = [pasts.index(past) + offset for past in shares]
            young = [gc["young_share"] * 100 for gc in shares.values()]
            old = [gc["old_share"] * 100 for gc in shares.values()]
            axes.bar(at, young, width * 0.9, color=COLOURS[backend], label=backend)
            axes.bar(
                at, old, width * 0.9, bottom=young, color=COLOURS[backend], hatch="////", edgecolor="white", linewidth=0
            )
        axes.set_xticks(range(len(pasts)), pasts)
        return seen

    return _panels(results, path, panel, "% of the time (hatched: old generation)", "past windows")


def draw_parts(results: Sequence[Result], path: Path) -> bool:
    """Memory, ingestion and processing by past windows, a line for each variant of the policy."""
    from matplotlib.figure import Figure

    variants = (result for result in results if result["part"] != FULL and result["status"] == "done")
    workload = next((result["workload"] for result in variants), None)
    if workload is None:
        return False
    names = [FULL, *dict.fromkeys(result["part"] for result in results if result["part"] != FULL)]
    figure = Figure(figsize=(13, 4.2), dpi=120, layout="constrained")
    what = (("memory_mib", "total", "MiB"), ("ingestion", "all", "events/s"), ("processing", "all", "events/s"))
    for axes, (outer, inner, unit) in zip(figure.subplots(1, 3), what, strict=True):
        for i, name in enumerate(names):
            values = medians(by_past(results, workload, "tiered", name), outer, inner)
            paper = name == FULL or name in list(PARTS)[:3]
            axes.plot(
                list(values),
                list(values.values()),
                marker="o",
                markersize=4,
                linewidth=2 if paper else 1,
                linestyle="-" if paper else "--",
                color=MORE_COLOURS[i % len(MORE_COLOURS)],
                label=name,
            )
        axes.set(xlabel="past windows", ylabel=unit, title=outer.removesuffix("_mib"))
        axes.set_xticks(sorted({result["past_windows"] for result in results if result["workload"] == workload}))
        if outer == "processing":
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, None)
        plain(axes)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8)
    save(figure, path)
    return True


def backends(results: Sequence[Result], workload: str) -> list[str]:
    """The backends that ran with the full policy, in the order of the colours."""
    there = {result["backend"] for result in results if result["workload"] == workload and result["part"] == FULL}
    return [name for name in COLOURS if name in there]


def _series(result: Result, outer: str, inner: str) -> list[float]:
    found: list[float] = result.get("measured", {}).get(outer, {}).get(inner, [])
    return found


def _boxes(
    axes: Any,
    values: Mapping[int, Sequence[float]],
    pasts: Sequence[int],
    offset: float,
    width: float,
    colour: str,
    label: str,
) -> None:
    at = [pasts.index(past) + offset for past in values]
    boxes = axes.boxplot(
        list(values.values()),
        positions=at,
        widths=width * 0.75,
        whis=(0, 100),
        manage_ticks=False,
        patch_artist=True,
        medianprops={"color": "#1b1b1b"},
        whiskerprops={"color": colour},
        capprops={"color": colour},
    )
    for box in boxes["boxes"]:
        box.set(facecolor=colour, alpha=0.65, edgecolor=colour)
    axes.plot([], [], "s", color=colour, label=label)


def _cross(axes: Any, x: float, y: float, colour: str, word: str) -> None:
    axes.plot([x], [y], "x", color=colour, markersize=9, markeredgewidth=2.5)
    axes.annotate(word, (x, y), (0, 6), textcoords="offset points", ha="center", fontsize=8, color=colour)


def _panels(results: Sequence[Result], path: Path, panel: Callable[[Any, str], bool], ylabel: str, xlabel: str) -> bool:
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(result["workload"] for result in results))
    rows, columns = (len(workloads) + 1) // 2, min(2, len(workloads))
    figure = Figure(figsize=(6.5 * columns + 1.5, 3.6 * rows), dpi=120, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    seen = False
    handles: dict[str, Artist] = {}
    for workload, axes in zip(workloads, grid, strict=False):
        seen = panel(axes, workload) or seen
        axes.set(title=workload, xlabel=xlabel, ylabel=ylabel)
        plain(axes)
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    for axes in list(grid):
        axes.set_axis_off()
    if seen:
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False, fontsize=9)
        save(figure, path)
    return seen


def plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
