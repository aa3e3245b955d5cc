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
WORDS = {"with": "with prestaging", "without": "without", "apart": "without, blocks apart", "memory": "all in memory"}
COLOURS = {"with": "#1f5fa8", "without": "#b2182b", "apart": "#f4a582", "memory": "#777777"}
AT_LEAST, AT_MOST, TOGETHER = 10.0, {False: 1.5, True: 2.0}, 1.3
"""What is asked: without over with, and with over all in memory if the gap is long enough, on a slow disk and behind
S3; and blocks read apart over blocks read together.
"""
Place = tuple[str, float, str]
"""A disk, a gap in seconds, and a trigger."""


def seconds_of(cells: Sequence[Cell], pane: str) -> float | None:
    """Returns the median seconds of the executions of a batch, over all measured batches, or None."""
    found = [seconds for cell in cells for seconds in cell.seconds.get(pane, ())]
    return statistics.median(found) if found else None


def waited_s(cells: Sequence[Cell], pane: str) -> float:
    """Returns the median seconds that the executions of a batch waited for blocks. 0 if there were none."""
    found = [seconds for cell in cells for seconds in cell.waited_s.get(pane, ())]
    return statistics.median(found) if found else 0.0


def groups(cells: Sequence[Cell]) -> dict[Place, dict[str, list[Cell]]]:
    """The cells by place, then by mode."""
    found: dict[Place, dict[str, list[Cell]]] = {}
    for cell in cells:
        found.setdefault((cell.disk, cell.gap_s, cell.trigger), {}).setdefault(cell.mode, []).append(cell)
    return found


def foretold(modes: dict[str, list[Cell]], pane: str, gap_s: float) -> float | None:
    """Returns the seconds that a model gives for executions with prestaging: ``max(read - gap, 0) + CPU``.

    What is read first is staged first: windows on time, then final ones, then late ones. The reads are those of the
    runs without prestaging, and the CPU is that of the runs with everything in memory.
    """
    cpu_s, without = seconds_of(modes.get("memory", []), pane), modes.get("without", [])
    if cpu_s is None or not without:
        return None
    order = ("on_time", "final", "late")
    until_s = sum(waited_s(without, kind) for kind in order[: order.index(pane) + 1])
    return min(max(until_s - gap_s, 0.0), waited_s(without, pane)) + cpu_s


def ratio(cells: dict[str, list[Cell]], pane: str, over: str, under: str) -> float | None:
    """The seconds of one mode over those of another."""
    above, below = (seconds_of(cells.get(mode, []), pane) for mode in (over, under))
    return above / below if above is not None and below else None


def table(cells: Sequence[Cell]) -> Table:
    found = Table(title="Seconds of the executions of a batch, medians")
    numbers = (
        *(WORDS[mode] for mode in MODES),
        "model",
        "without / with",
        "apart / without",
        "with / memory",
        "resident",
    )
    for heading in ("disk", "gap", "late by", "panes", *numbers):
        found.add_column(heading, justify="right" if heading in numbers else "left")
    for (disk, gap_s, trigger), modes in groups(cells).items():
        for pane in PANES:
            if all(seconds_of(of, pane) is None for of in modes.values()):
                continue
            pairs = (("without", "with"), ("apart", "without"), ("with", "memory"))
            ratios = [ratio(modes, pane, *pair) for pair in pairs]
            found.add_row(
                disk, f"{gap_s:g} s", {"planned": "plan", "own": "its own event"}[trigger], pane.replace("_", " "),
                *(_number(seconds_of(modes.get(mode, []), pane)) for mode in MODES),
                _number(foretold(modes, pane, gap_s)),
                *("" if r is None else f"{r:.2f}" for r in ratios),
                _resident(modes.get("with", []), pane),
            )  # fmt: skip
    return found


def _number(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.4f}"


def _resident(cells: Sequence[Cell], pane: str) -> str:
    """The share of the bytes that was in memory when executions of this kind began. All runs count the same."""
    shares = [cell.resident[pane] for cell in cells if pane in cell.resident]
    return f"{statistics.mean(shares):.0%}" if shares else ""


def verdicts(cells: Sequence[Cell]) -> list[str]:
    """What was asked, and what was found. The same panes in every cell come first."""
    results = {(cell.panes, cell.checksum) for cell in cells}
    found = [f"all runs have the same panes: {'holds' if len(results) == 1 else 'DOES NOT HOLD'}"]
    for (disk, gap_s, trigger), modes in groups(cells).items():
        if disk == "fast disk":
            continue
        for pane in PANES:
            pays, near = ratio(modes, pane, "without", "with"), ratio(modes, pane, "with", "memory")
            apart = ratio(modes, pane, "apart", "without")
            place = f"{disk}, gap {gap_s:g} s, {trigger}, {pane}"
            if pays is None or near is None:
                continue
            if not gap_s or pane == "on_time":
                found.append(f"{place}: without is at least as long as with: {pays:.2f}, {_holds(pays >= 1)}")
            else:
                most = AT_MOST[disk.startswith("S3")]
                found.append(
                    f"{place}: without is at least {AT_LEAST:g} times with, which is at most {most:g} times memory: "
                    f"{pays:.1f} and {near:.2f}, {_holds(pays >= AT_LEAST and near <= most)}"
                )
            if apart is not None and not gap_s:
                words = f"blocks apart take at least {TOGETHER:g} times as long as blocks together"
                found.append(f"{place}: {words}: {apart:.1f}, {_holds(apart >= TOGETHER)}")
    return found


def _holds(what: bool) -> str:
    return "holds" if what else "does not hold"


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
            places = [number + 0.21 * (shift - 1.5) for number in range(len(grouped))]
            axis.bar(places, heights, 0.2, color=COLOURS[mode], label=WORDS[mode])
        ticks = [f"{disk}\ngap {gap:g} s\n{trigger}" for disk, gap, trigger in grouped]
        axis.set_xticks(range(len(grouped)), ticks, fontsize=7)
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
