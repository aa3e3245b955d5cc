"""Flink as a contender of ``aion experiment nexmark``: its program (``FlinkNexmark.java``), and a run of a query."""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from experiments.nexmark.events import AUCTION, BID, PERSON
from experiments.shared.flink import BACKENDS, CHECKPOINT_MS, FlinkError, class_path, found_by

PROGRAM = Path(__file__).with_name("FlinkNexmark.java")
EVENT = np.dtype([("kind", "i1"), ("auction", "<i8"), ("person", "<i8"), ("price", "<i8"), ("ts", "<i8")])
KINDS = {PERSON: 0, AUCTION: 1, BID: 2}
MOST_EVENTS = (2**31 - 1) // EVENT.itemsize
"""Java maps at most two gigabytes of a file."""
COLUMNS = {
    "q5": ("at", "most", "auctions"),
    "q7": ("window_start", "price"),
    "q8": ("window_start", "person", "opened"),
    "q11": ("window_start", "person", "n"),
    "q12": ("window_start", "person", "n"),
}


@dataclass(frozen=True, slots=True)
class FlinkRun:
    """What a run took, and the rows of its results."""

    steady_events_per_s: float
    wall_s: float
    rows: list[Mapping[str, Any]]


def write_events(table: pa.Table, path: Path) -> None:
    """Writes the events as Flink's program reads them. Raises FlinkError if there are more than it can read."""
    if table.num_rows > MOST_EVENTS:
        raise FlinkError(f"--events {table.num_rows}: Flink's program reads at most {MOST_EVENTS:,}")
    events = np.zeros(table.num_rows, EVENT)
    kinds = table.column("kind").combine_chunks()
    for kind, number in KINDS.items():
        events["kind"][pa.compute.equal(kinds, kind).to_numpy(zero_copy_only=False)] = number
    for name in ("auction", "person", "price"):
        events[name] = table.column(name).fill_null(-1).to_numpy()
    events["ts"] = table.column("ts").cast(pa.int64()).to_numpy()
    events.tofile(path)


def parsed(query: str, line: list[str]) -> dict[str, Any]:
    """A row of a query's results, with the columns and types of those of Spark."""
    row: dict[str, Any] = dict(zip(COLUMNS[query], line, strict=True))
    for name, value in row.items():
        if name == "auctions":
            row[name] = [int(auction) for auction in value.split(";")]
        elif name in ("at", "window_start"):
            unit = timedelta(milliseconds=1) if query == "q12" else timedelta(microseconds=1)  # the clock, or events
            row[name] = datetime(1970, 1, 1, tzinfo=UTC) + int(value) * unit
        else:
            row[name] = int(value)
    return row


class Flink:
    """Flink's program, compiled once. ``jars``: a folder with them, or the wheel that has them. Raises FlinkError."""

    def __init__(self, jars: Path, work: Path) -> None:
        self._class_path = class_path(PROGRAM, jars, work)

    def run(self, query: str, contender: str, events: Path, number: int, skipped: int, cores: int) -> FlinkRun:
        """One run over the ``number`` events of a file. The rate is that of the events after the ``skipped`` ones.

        It is measured until the last event was read and the last result was there.
        """
        with tempfile.TemporaryDirectory(dir=events.parent, prefix="flink-") as folder:
            results = Path(folder) / "results.csv"
            checkpoints = Path(folder) / "checkpoints"
            of_query = query, BACKENDS[contender], cores, events, number, skipped
            found = found_by(PROGRAM, self._class_path, (*of_query, results, checkpoints, CHECKPOINT_MS))
            with results.open() as file:
                rows: list[Mapping[str, Any]] = [parsed(query, line) for line in csv.reader(file)]
        if found["events"] != number:
            raise FlinkError(f"{query}: Flink has read {found['events']:,} of {number:,} events")
        return FlinkRun((number - skipped) / found["measured_s"], found["wall_s"], rows)
