"""Flink's interval join as a contender of ``aion experiment joins``: its program (``FlinkJoin.java``), and a run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.shared.flink import BACKENDS, CHECKPOINT_MS, FlinkError, class_path, found_by

PROGRAM = Path(__file__).with_name("FlinkJoin.java")
ROW = np.dtype([("side", "i1"), ("id", "<i8"), ("time", "<i8"), ("value", "<f8")])
SIDES = (("orders", "ordered", "price"), ("payments", "paid", "amount"))
END = 2
"""The side of a row that ends a batch."""
MOST_ROWS = (2**31 - 1) // ROW.itemsize
"""Java maps at most two gigabytes of a file."""


class Written(NamedTuple):
    """What a file has. ``rows``: with those that end batches. ``skipped``: the first of them, which are not measured.
    ``events``: the rows of both sides.
    """

    rows: int
    skipped: int
    events: int


def write_rows(folder: Path, path: Path, batches: int, *, unmeasured: int) -> Written:
    """Writes the rows of both sides as Flink's program reads them, one batch after the other.

    Raises FlinkError if there are more than it can read.
    """
    parts, skipped = [], 0
    for batch in range(batches):
        latest = []
        for side, (name, time, value) in enumerate(SIDES):
            table = pq.read_table(folder / name / f"{batch:04d}.parquet")
            rows = np.zeros(table.num_rows, ROW)
            rows["side"], rows["id"], rows["value"] = side, table["id"].to_numpy(), table[value].to_numpy()
            rows["time"] = table[time].cast(pa.int64()).to_numpy()
            latest.append(int(rows["time"].max(initial=0)))
            parts.append(rows)
        end = np.zeros(1, ROW)
        end["side"], end["time"] = END, min(latest)
        parts.append(end)
        skipped += sum(map(len, parts[-3:])) if batch < unmeasured else 0
    rows = np.concatenate(parts)
    if len(rows) > MOST_ROWS:
        raise FlinkError(f"{len(rows):,} rows of both sides: Flink's program reads at most {MOST_ROWS:,}")
    rows.tofile(path)
    return Written(len(rows), skipped, len(rows) - batches)


class FlinkJoin:
    """Flink's program, compiled once. ``jars``: a folder with them, or the wheel that has them. Raises FlinkError."""

    def __init__(self, jars: Path, work: Path) -> None:
        self._class_path = class_path(PROGRAM, jars, work)

    def run(self, contender: str, path: Path, written: Written, within_s: int, cores: int) -> tuple[float, int]:
        """Joins the rows of a file. Returns the seconds for those that are measured, and how many pairs were found.

        Raises FlinkError if it has not read all rows.
        """
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="flink-") as folder:
            checkpoints = Path(folder) / "checkpoints"
            counts = written.rows, written.skipped, within_s
            arguments = (BACKENDS[contender], cores, path, *counts, checkpoints, CHECKPOINT_MS)
            found = found_by(PROGRAM, self._class_path, arguments)
        if found["rows"] != written.events:
            raise FlinkError(f"Flink has read {found['rows']:,} of {written.events:,} rows")
        return found["measured_s"], found["pairs"]
