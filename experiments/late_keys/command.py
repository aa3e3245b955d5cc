"""The cost of one late event in windows of few and of many keys, and the size of a window that many batches feed.

The claims: the cost of a late event grows with the keys it touches, not with its window; and the partials of an open
window take at most about twice their compacted size, in memory and on disk, however many batches feed it. For
comparison it runs without compaction, too: then blocks stay as they came, and a late execution reads its whole window.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

MIB = 1 << 20
TWICE = 2.0
"""The most that a window may take, as a multiple of its compacted size."""
ALLOWED_GROWTH = 3.0
"""The most that the bytes read for one late event may grow from one window to the next larger one.

It is checked on the two largest windows. Small ones prove nothing: a window smaller than a block is read as a whole.
"""
PACKAGES = ("aion", "numpy", "pyarrow", "rocksdict")
BOTH = {True: "compacted", False: "as it came"}


def late_keys(
    keys: Annotated[str, typer.Option(help="Keys of the windows of partials.")] = "1000,100000,10000000",
    event_keys: Annotated[str, typer.Option(help="Keys of the windows of kept events; '' to leave them out.")] = (
        "1000,100000,1000000"
    ),
    runs: Annotated[int, typer.Option(min=1, help="Late events, each in a batch of its own.")] = 5,
    batches: Annotated[int, typer.Option(min=1, help="Batches that feed one window.")] = 1000,
    batch_events: Annotated[int, typer.Option(min=1, help="Events in each of these batches.")] = 1000,
    batch_keys: Annotated[int, typer.Option(min=1, help="Keys of these events.")] = 20_000,
    out: Annotated[
        Path, typer.Option(help="Folder for results, and for the state during the runs.", file_okay=False)
    ] = Path("out/late-keys"),
) -> None:
    """Bytes and time of one late event, by the keys of its window, and the size of a window of many batches."""
    # Here, not above: `aion --help` imports this module and needs none of it.
    from experiments.late_keys import runs as late_keys_runs
    from experiments.restore.command import numbers
    from experiments.shared import bench
    from experiments.shared.bench import wide_console

    console = wide_console()
    sizes = {"partials": numbers(keys), "events": numbers(event_keys) if event_keys.strip() else []}
    out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "experiment": "late-keys", "versions": bench.versions(PACKAGES), "machine": bench.machine()
    }  # fmt: skip
    late: list[dict[str, Any]] = []
    fed: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="work-", dir=out.absolute()) as work:
        for kind, counts in sizes.items():
            for count in counts:
                for compactions, how in BOTH.items():
                    with console.status(f"{kind}, {count:,} keys, {how}"):
                        folder = Path(work) / f"{kind}-{count}-{compactions}"
                        found = late_keys_runs.late_event(folder, kind, count, runs, compactions=compactions)
                    late.append({"kind": kind, "keys": count, "compactions": compactions, **found})
                    bench.write_json(out / "late-keys.json", {**record, "late": late, "fed": fed})
        console.print(late_table(late))
        for store in ("memory", "tiered"):
            for compactions, how in BOTH.items():
                with console.status(f"{batches:,} batches, {store}, {how}"):
                    folder = Path(work) / f"{store}-{compactions}"
                    figures = (batches, batch_events, batch_keys)
                    found = late_keys_runs.many_batches(folder, store, *figures, compactions=compactions)
                fed.append({"store": store, "compactions": compactions, "batches": batches, **found})
                bench.write_json(out / "late-keys.json", {**record, "late": late, "fed": fed})
    console.print(fed_table(fed))
    for line in verdicts(late, fed):
        console.print(line, highlight=False)
    console.print(f"written: {out / 'late-keys.json'}", highlight=False)


def late_table(late: Sequence[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table(title="one late event: medians", title_justify="left")
    for heading in ("window of", "blocks"):
        table.add_column(heading)
    for heading in ("keys", "window MiB", "bytes read", "blocks read", "execution ms", "batch ms"):
        table.add_column(heading, justify="right")
    for row in late:
        table.add_row(
            row["kind"], BOTH[row["compactions"]], f"{row['keys']:,}", f"{row['window_bytes'] / MIB:,.2f}",
            f"{row['bytes']:,.0f}", f"{row['blocks']:,.0f}", f"{row['seconds'] * 1e3:,.1f}",
            f"{row['batch_seconds'] * 1e3:,.1f}",
        )  # fmt: skip
    return table


def fed_table(fed: Sequence[dict[str, Any]]) -> Table:
    from rich.table import Table

    title = f"a window of {fed[0]['batches']:,} batches: its largest size, as a multiple of its compacted size"
    table = Table(title=title, title_justify="left")
    for heading in ("store", "blocks"):
        table.add_column(heading)
    for heading in ("number", "compacted KiB", "input KiB", "in memory", "on disk", "its folder", "rewritten", "s"):
        table.add_column(heading, justify="right")
    for row in fed:
        table.add_row(
            row["store"], BOTH[row["compactions"]], f"{row['blocks']:,}", f"{row['compacted_bytes'] / 1024:,.0f}",
            f"{row['came_bytes'] / 1024:,.0f}",
            *(f"{row[f'{name}_ratio']:.2f}" for name in ("memory", "disk", "folder")),
            f"{row['written_again']:.2f}", f"{row['seconds']:.1f}",
        )  # fmt: skip
    return table


def verdicts(late: Sequence[dict[str, Any]], fed: Sequence[dict[str, Any]]) -> list[str]:
    """The targets, and whether they were reached."""
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in late):
        rows = sorted((r for r in late if r["kind"] == kind and r["compactions"]), key=lambda r: int(r["keys"]))
        if len(rows) > 1:
            before, last = rows[-2:]
            growth = last["bytes"] / before["bytes"]
            held = _holds(growth <= ALLOWED_GROWTH)
            lines.append(
                f"{kind}: {last['keys'] / before['keys']:,.0f} times the keys: {growth:.2f} times the bytes read, "
                f"{last['seconds'] / before['seconds']:.2f} times the time; {last['bytes'] / last['window_bytes']:.2%} "
                f"of the window was read (target: at most {ALLOWED_GROWTH:g} times the bytes; {held})"
            )
    for row in fed:
        if row["compactions"]:
            most = max(row["memory_ratio"], row["disk_ratio"])
            lines.append(
                f"{row['store']}: {row['batches']:,} batches: in memory and on disk at most {most:.2f} times the "
                f"compacted size (target: at most {TWICE:g}; {_holds(most <= TWICE)})"
            )
    return lines


def _holds(does: bool) -> str:
    return "holds" if does else "does not hold"
