"""The pictures of the documents, drawn by what they show. ``python -m tests.pictures`` prints them all."""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import TopologicalSorter
from typing import Any

import numpy as np
import pyarrow as pa

import aion
from aion import aggregates as A
from aion.core.life import lifecycle
from aion.core.slicing.grid import SliceGrid
from aion.core.windows import Periodic
from state_backends.store import ledger
from tests.package.test_architecture import FILES, folder, layer, ours
from tests.package.test_architecture import imports as imported

MINUTE = 60_000_000
NOON = 12 * 60 * MINUTE


def policy(bound: str) -> dict[str, Any]:
    return {"lateness": {"initial_bound": bound, "coverage": None}, "trigger": {"kind": "every_batch"}}


def all_pictures() -> dict[str, str]:
    """Each as a block of a page has it, by name."""
    drawn = {
        "places of a block": ledger.diagram(),
        "life of a window": lifecycle.diagram(),
        "slices": slices(),
        "panes": panes(),
        "retraction": retraction(),
        "imports": imports(),
    }
    return {name: f"{text}\n" for name, text in drawn.items()}


NOT_DRAWN = ("aion", "state_backends", "state_backends.thresholds")
"""The packages themselves, and numbers that everything uses."""


def imports() -> str:
    """Which folder imports which, from the code, as a Mermaid graph; arrows that follow from others are left out."""
    direct: dict[str, set[str]] = {}
    layers: dict[str, int] = {}
    for module in FILES:
        box = _box(module)
        if box not in NOT_DRAWN:
            layers[box] = layer(module)
            others = {_box(m) for m in ours(imported(module, at_import_time=True))}
            direct.setdefault(box, set()).update(others - {box, *NOT_DRAWN})
    graph = {box: sorted(direct[box]) for box in sorted(direct)}
    order = sorted(TopologicalSorter(graph).static_order(), key=layers.__getitem__)
    reached: dict[str, set[str]] = {}
    for box in order:
        reached[box] = direct[box].union(*(reached[other] for other in direct[box]))
    order = [box for box in order if direct[box] or any(box in others for others in direct.values())]
    lines = ["graph BT"]
    lines += [f"    {box}[{box.replace('.', '/')}]" for box in order]
    for box in order:
        implied = set().union(*(reached[other] for other in direct[box]))
        lines += [f"    {box} --> {other}" for other in order if other in direct[box] - implied]
    return "\n".join(lines)


def _box(module: str) -> str:
    return "experiments" if module.startswith("experiments") else folder(module)


def slices(columns: int = 4) -> str:
    """Two definitions over 12 minutes, and the slices that they share; ``columns`` of text for a minute."""
    windows: Sequence[Periodic] = [aion.Tumbling("4 minutes"), aion.Sliding("6 minutes", "3 minutes")]
    titles = ["Tumbling(4 minutes)", "Sliding(6 minutes, 3 minutes)"]
    minutes, indent = 12, max(map(len, titles)) + 2
    grid = SliceGrid(windows, segmented=False)

    def line(title: str, spans: list[tuple[int, int]]) -> str:
        text = [" "] * (minutes * columns + 1)
        for start, end in spans:
            text[start * columns + 1 : end * columns] = "-" * ((end - start) * columns - 1)
            text[start * columns] = text[end * columns] = "|"
        return title.ljust(indent) + "".join(text).rstrip()

    lines = [" " * indent + "".join(f"{m:<{columns}}" for m in range(minutes + 1)).rstrip() + " minutes"]
    times = np.arange(minutes, dtype=np.int64) * MINUTE
    starts = np.unique(grid.starts(times)).tolist()
    places = {(n, begin) for n, window in enumerate(windows) for s in starts for begin in window.starts_covering(s)}
    for number, (window, title) in enumerate(zip(windows, titles, strict=True)):
        inside = sorted(
            (start // MINUTE, (start + window.size_us) // MINUTE)
            for which, start in places
            if which == number and start >= 0 and start + window.size_us <= minutes * MINUTE
        )
        rows: list[list[tuple[int, int]]] = []
        for span in inside:  # those that overlap go below each other
            row = next((row for row in rows if row[-1][1] <= span[0]), None)
            if row is None:
                rows.append(row := [])
            row.append(span)
        lines += [line(title if row is rows[0] else "", row) for row in rows]
    lines.append(line("slices", [(s // MINUTE, grid.end(s) // MINUTE) for s in starts]))
    return "\n".join(lines)


# What comes in each batch: the watermark under which it is worked on, and the events' times, in seconds after noon.
BATCHES: list[tuple[int | None, list[int]]] = [
    (None, [5, 20, 65]),
    (60, [70]),
    (70, [15, 30, 90]),
    (180, [40]),
    (360, [10, 361]),
]


def panes() -> str:
    """What a real operator yields for them."""
    lines = [f"{'watermark':<11}{'event times':<30}{'what comes out':<16}{'window':<15}{'n':<5}pane"]
    with aion.LocalOperator(
        windows=aion.Tumbling("1 minute"), time="ts", aggregates={"n": A.count()}, policy=policy("5 minutes")
    ) as operator:
        for watermark, seconds in BATCHES:
            at_us = None if watermark is None else NOON + watermark * 1_000_000
            rows = operator.process(_events(seconds), at_us).to_pylist()
            first = [_clock(watermark), " ".join(map(_clock, seconds))]
            for row in rows or [None]:
                lines.append((f"{first[0]:<11}{first[1]:<30}" + _row(row)).rstrip())
                first = ["", ""]
    return "\n".join(lines)


def _events(seconds: list[int]) -> pa.Table:
    return pa.table({"ts": pa.array([NOON + s * 1_000_000 for s in seconds], pa.timestamp("us", "UTC"))})


def _clock(seconds: int | None) -> str:
    return "" if seconds is None else f"{12 + seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _row(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    window = f"{row['window_start']:%H:%M}-{row['window_end']:%H:%M}"
    pane = "" if row["pane"] is None else row["pane"]
    return f"{row['kind']:<16}{window:<15}{row['n']:<5}{pane}"


def retraction() -> str:
    """A late event that joins two sessions."""
    with aion.LocalOperator(
        windows=aion.Session("5 minutes"), time="ts", key="user", aggregates={"n": A.count()}, policy=policy("1 hour")
    ) as operator:

        def process(*minutes: int) -> list[dict[str, Any]]:
            ts = pa.array([NOON + m * MINUTE for m in minutes], pa.timestamp("us", "UTC"))
            return operator.process(pa.table({"user": ["u"] * len(minutes), "ts": ts})).to_pylist()

        process(1, 3, 12)
        operator.advance(NOON + 18 * MINUTE)
        rows = process(7)
    lines = [
        ("late event at 12:07, session gap 5 minutes", "kind", "window_start", "window_end", "n"),
        *(
            (
                "(earlier: 12:01, 12:03 and 12:12)" if number == 0 else "",
                row["kind"],
                f"{row['window_start']:%H:%M}",
                f"{row['window_end']:%H:%M}",
                "null" if row["n"] is None else row["n"],
            )
            for number, row in enumerate(rows)
        ),
    ]
    return "\n".join(f"{a:<48}{b:<12}{c:<14}{d:<12}{e}" for a, b, c, d, e in lines)


if __name__ == "__main__":
    for name, text in all_pictures().items():
        print(f"-- {name}\n{text}")
