"""The pictures of the documents, drawn by what they show.

``python -m tests.pictures`` prints those of the pages, and writes the one of the README.
"""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import aion
from aion import aggregates as A
from aion.core.life import lifecycle
from aion.core.periodic import Periodic
from aion.core.slicing.grid import SliceGrid
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
        "places of a block": places(),
        "life of a window": life(),
        "slices": slices(),
        "panes": panes(),
        "retraction": retraction(),
        "imports": imports(),
    }
    return {name: f"{text}\n" for name, text in drawn.items()}


def places() -> str:
    """The table of :mod:`state_backends.store.ledger`, as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", "    [*] --> memory"]
    lines += [f"    {src} --> {dst}: {move}" for (src, move), dst in ledger.TRANSITIONS.items() if move != "purge"]
    lines += ["    note right of both: purge leads from every place to purged"]
    return "\n".join(lines)


def life() -> str:
    """The table of :mod:`aion.core.life.lifecycle`, as a Mermaid state diagram."""
    moves = [f"    {status} --> {after}: {happening}" for (status, happening), after in lifecycle.TRANSITIONS.items()]
    first, last = lifecycle.Status.ACTIVE, lifecycle.Status.PURGED
    return "\n".join(["stateDiagram-v2", f"    [*] --> {first}", *moves, f"    {last} --> [*]"])


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
    places = {(n, begin) for n, window in enumerate(windows) for s in starts for begin, _ in window.covering(s)}
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


# -- the picture of the README ------------------------------------------------------------------------

README_PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "aion.svg"
WIDTH = 420
"""The width of a phone: letters have their own size there, and GitHub makes no picture larger than it is."""
LETTERS = 'font-family="Helvetica, Arial, sans-serif" font-size="14" fill="#24292f"'
IN_TIME, LATE = "#1f5fa8", "#bc4c00"
ON_TIME = [("12:00:05", 1), ("12:00:20", 2), ("12:00:50", 1)]
"""When cars passed in a minute, and how many; these come in time."""
COMES_LATE = ("12:00:40", 2)


def late_event() -> str:
    """A row of results before and after a late event, by a real operator, as SVG."""
    before, after = _rows_around_a_late_event()
    kept, (when, cars) = _clock(before["closes"]), COMES_LATE
    lines = [
        '<text x="14" y="26" font-weight="bold">Cars from 12:00 to 12:01</text>',
        *(_car(60 + 100 * place, 62, at, n, IN_TIME) for place, (at, n) in enumerate(ON_TIME)),
        '<text x="14" y="122">At 12:01 the minute is over. The row comes out:</text>',
        _shown(136, before, "#ddf4ff", IN_TIME),
        f'<text x="14" y="212" font-weight="bold" fill="{LATE}">At 12:03 an event comes late</text>',
        _car(60, 246, when, cars, LATE),
        '<text x="118" y="243">Its minute is over, but Aion</text>',
        f'<text x="118" y="262">has kept it (here until {kept}).</text>',
        f'<text x="14" y="304">So the row comes out again, {before["cars"]} + {cars} = {after["cars"]}:</text>',
        _shown(318, after, "#fff1e5", LATE),
        f'<text x="14" y="392" fill="#57606a">Plain Spark drops the event: the row stays {before["cars"]}.</text>',
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="408" viewBox="0 0 {WIDTH} 408" role="img"'
    label = f"A row of results goes from {before['cars']} to {after['cars']} because a late event came."
    frame = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="407" rx="10" fill="#ffffff" stroke="#d0d7de"/>'
    return "\n".join(
        [f'{head} {LETTERS} aria-label="{label}">', *(f"  {line}" for line in [frame, *lines]), "</svg>\n"]
    )


def _rows_around_a_late_event() -> list[dict[str, Any]]:
    """The row of the window when it is over, and when the late event has come."""
    rows = []
    with aion.LocalOperator(
        windows=aion.Tumbling("1 minute"), time="ts", aggregates={"cars": A.sum("cars")}, policy=policy("5 minutes")
    ) as operator:
        for watermark, events in [(None, ON_TIME), (60, []), (180, [COMES_LATE])]:
            times = _events([_seconds(at) for at, _ in events])
            table = times.append_column("cars", pa.array([n for _, n in events], pa.int64()))
            rows += operator.process(table, None if watermark is None else NOON + watermark * 1_000_000).to_pylist()
    assert [row["kind"] for row in rows] == ["on_time", "late"]
    for row in rows:
        row["closes"] = int(row["closes_at"].timestamp()) - NOON // 1_000_000
    return rows


def _seconds(clock: str) -> int:
    """The seconds after noon."""
    hours, minutes, seconds = map(int, clock.split(":"))
    return (hours - 12) * 3600 + minutes * 60 + seconds


def _car(x: int, y: int, at: str, n: int, colour: str) -> str:
    circle = f'<circle cx="{x}" cy="{y}" r="15" fill="{colour}"/>'
    number = f'<text x="{x}" y="{y + 5}" text-anchor="middle" font-weight="bold" fill="#ffffff">{n}</text>'
    return f'{circle}{number}<text x="{x}" y="{y + 32}" text-anchor="middle" fill="{colour}">{at}</text>'


def _shown(y: int, row: dict[str, Any], fill: str, colour: str) -> str:
    window = f"{row['window_start']:%H:%M}-{row['window_end']:%H:%M}"
    box = f'<rect x="14" y="{y}" width="{WIDTH - 28}" height="40" rx="6" fill="{fill}" stroke="{colour}"/>'
    words = f'<text x="28" y="{y + 25}">{window}</text><text x="150" y="{y + 25}">{row["kind"]}</text>'
    bold = f'<text x="260" y="{y + 26}">cars <tspan font-weight="bold" font-size="18">{row["cars"]}</tspan></text>'
    return box + words + bold


if __name__ == "__main__":
    for name, text in all_pictures().items():
        print(f"-- {name}\n{text}")
    README_PICTURE.write_text(late_event(), encoding="utf-8")
