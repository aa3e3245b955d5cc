"""Flink's interval join as a contender of ``aion experiment joins``: its program (``FlinkJoin.java``), and a run."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.shared.flink import OPENED, FlinkError, class_path, printed

PROGRAM = Path(__file__).with_name("FlinkJoin.java")
BACKENDS = {"flink-heap": "hashmap", "flink-rocksdb": "rocksdb"}
CHECKPOINT_MS = 2_000
HEAP = "6g"
ROW = np.dtype([("side", "i1"), ("id", "<i8"), ("time", "<i8"), ("value", "<f8")])
SIDES = (("orders", "ordered", "price"), ("payments", "paid", "amount"))
END = 2
"""The side of a row that ends a batch."""
MOST_ROWS = (2**31 - 1) // ROW.itemsize
"""Java maps at most two gigabytes of a file."""


class Written(NamedTuple):
    """How many rows a file has, with those that end batches; how many of them are not measured; and events of both
    sides among the rest.
    """

    rows: int
    skipped: int
    measured: int


def write_rows(folder: Path, path: Path, batches: int, *, unmeasured: int) -> Written:
    """Writes the rows of both sides as Flink's program reads them, one batch after the other.

    Raises FlinkError if there are more than it can read.
    """
    parts, skipped, measured = [], 0, 0
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
        count = sum(map(len, parts[-3:]))
        skipped += count if batch < unmeasured else 0
        measured += 0 if batch < unmeasured else count - 1
    rows = np.concatenate(parts)
    if len(rows) > MOST_ROWS:
        raise FlinkError(f"{len(rows):,} rows of both sides: Flink's program reads at most {MOST_ROWS:,}")
    rows.tofile(path)
    return Written(len(rows), skipped, measured)


class FlinkJoin:
    """Flink's program, compiled once. ``jars``: a folder with them, or the wheel that has them. Raises FlinkError."""

    def __init__(self, jars: Path, work: Path) -> None:
        self._class_path = class_path(PROGRAM, jars, work)

    def run(self, contender: str, path: Path, written: Written, within_s: int, cores: int) -> tuple[float, int]:
        """Joins the rows of a file. Returns the seconds for those that are measured, and how many pairs were found."""
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="flink-") as folder:
            command = [
                *("java", f"-Xmx{HEAP}"),
                *(f"--add-opens={name}=ALL-UNNAMED" for name in OPENED),
                *("-cp", self._class_path, PROGRAM.stem, BACKENDS[contender], str(cores), str(path)),
                *(str(written.rows), str(written.skipped), str(within_s)),
                *(str(Path(folder) / "checkpoints"), str(CHECKPOINT_MS)),
            ]
            found = json.loads(next(line for line in printed(command).splitlines() if line.startswith("{")))
        return found["measured_s"], found["pairs"]
