"""The report of `aion experiment prestage`: a table, verdicts, a figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from experiments.prestage.settings import MODES
from experiments.shared import bench

if TYPE_CHECKING:
    from experiments.prestage.runs import Cell

PANES = ("on_time", "late", "final")
WORDS = {"with": "with prestaging", "without": "without", "memory": "all in memory"}
COLOURS = {"with": "#1f5fa8", "without": "#b2182b", "memory": "#777777"}
AT_LEAST, AT_MOST = 10.0, {False: 1.5, True: 2.0}
"""Without over with, and with over all in memory if the gap is long enough: on a slow disk, and behind S3."""


def seconds_of(cells: Sequence[Cell], pane: str) -> float | None:
    """Returns the median seconds of the executions of a batch, over all measured batches, or None."""
    found = [seconds for cell in cells for seconds in cell.seconds.get(pane, ())]
    return statistics.median(found) if found else None


def groups(cells: Sequence[Cell]) -> dict[tuple[str, float], dict[str, list[Cell]]]:
    """The cells by disk and gap, then by mode."""
    found: dict[tuple[str, float], dict[str, list[Cell]]] = {}
    for cell in cells:
        found.setdefault((cell.disk, cell.gap_s), {}).setdefault(cell.mode, []).append(cell)
    return found


def ratio(cells: dict[str, list[Cell]], pane: str, over: str, under: str) -> float | None:
    """The seconds of one mode over those of another."""
    above, below = (seconds_of(cells.get(mode, []), pane) for mode in (over, under))
    return above / below if above is not None and below else None


def table(cells: Sequence[Cell]) -> Table:
    found = Table(title="Seconds of the executions of a batch, medians")
    for heading in (
        "disk",
        "gap",
        "panes",
        *(WORDS[mode] for mode in MODES),
        "without / with",
        "with / memory",
        "hits",
    ):
        found.add_column(heading, justify="left" if heading in ("disk", "panes") else "right")
    for (disk, gap_s), modes in groups(cells).items():
        for pane in PANES:
            if all(seconds_of(of, pane) is None for of in modes.values()):
                continue
            ratios = [ratio(modes, pane, "without", "with"), ratio(modes, pane, "with", "memory")]
            found.add_row(
                disk, f"{gap_s:g} s", pane.replace("_", " "),
                *(_number(seconds_of(modes.get(mode, []), pane)) for mode in MODES),
                *("" if r is None else f"{r:.2f}" for r in ratios),
                _hits(modes.get("with", [])),
            )  # fmt: skip
    return found


def _number(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.4f}"


def _hits(cells: Sequence[Cell]) -> str:
    """The share of the blocks that were in memory when they were read, of all panes together."""
    hits = sum(cell.hits for cell in cells)
    reads = hits + sum(cell.ahead + cell.misses for cell in cells)
    return f"{hits / reads:.0%}" if reads else ""


def verdicts(cells: Sequence[Cell]) -> list[str]:
    """What was asked, and what was found. The same panes in every cell come first."""
    results = {(cell.panes, cell.checksum) for cell in cells}
    found = [f"all runs have the same panes: {'holds' if len(results) == 1 else 'DOES NOT HOLD'}"]
    for (disk, gap_s), modes in groups(cells).items():
        for pane in ("late", "final"):
            pays, near = ratio(modes, pane, "without", "with"), ratio(modes, pane, "with", "memory")
            if disk == "fast disk" or not gap_s or pays is None or near is None:
                continue
            most = AT_MOST[disk.startswith("S3")]
            words = "holds" if pays >= AT_LEAST and near <= most else "does not hold"
            found.append(
                f"{disk}, gap {gap_s:g} s, {pane}: without is at least {AT_LEAST:g} times with, which is at most "
                f"{most:g} times memory: {pays:.1f} and {near:.2f}, {words}"
            )
    return found


def write(out: Path, record: dict[str, Any], cells: Sequence[Cell]) -> list[Path]:
    """Writes the record and the figure. Returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / "prestage.json", out / "prestage.png"]
    bench.write_json(paths[0], {**record, "cells": [asdict(cell) for cell in cells]})
    draw(paths[1], cells)
    return paths


def draw(path: Path, cells: Sequence[Cell]) -> None:
    """One panel for each kind of pane: seconds by disk and gap."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    grouped = groups(cells)
    panes = [pane for pane in PANES if any(pane in cell.seconds for cell in cells)]
    figure, axes = plt.subplots(
        1, max(len(panes), 1), figsize=(4.5 * max(len(panes), 1), 4), squeeze=False, sharey=True
    )
    for axis, pane in zip(axes[0], panes, strict=False):
        for shift, mode in enumerate(MODES):
            heights = [seconds_of(modes.get(mode, []), pane) or 0.0 for modes in grouped.values()]
            places = [number + 0.27 * (shift - 1) for number in range(len(grouped))]
            axis.bar(places, heights, 0.25, color=COLOURS[mode], label=WORDS[mode])
        axis.set_xticks(range(len(grouped)), [f"{disk}\ngap {gap:g} s" for disk, gap in grouped], fontsize=7)
        axis.set_yscale("log")
        axis.set_title(f"{pane.replace('_', ' ')} executions")
    # A bar of a logarithm needs a foot that is the same for all; and the words need room above it.
    highest = max(
        (seconds_of(of, pane) or 0.0 for modes in grouped.values() for of in modes.values() for pane in panes),
        default=1.0,
    )
    axes[0][0].set_ylim(1e-3, 5 * highest)
    axes[0][0].set_ylabel("seconds in a batch")
    axes[0][0].legend(fontsize=8, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
