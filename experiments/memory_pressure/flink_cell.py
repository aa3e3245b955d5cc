"""The process of one cell of Flink: it starts Flink in a JVM, and turns its panes into results.

``python -m experiments.memory_pressure.flink_cell FOLDER`` reads and writes the files that a cell of Spark does
(:mod:`~experiments.memory_pressure.cell`). Only the workload ``average`` has a program for Flink.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.memory_pressure.settings import shape_of
from experiments.shared.flink import OPENED
from experiments.workloads.chaining import Results

PROGRAM = Path(__file__).with_name("FlinkAverage.java")
STATE_BACKENDS = {"flink-heap": "hashmap", "flink-rocksdb": "rocksdb"}


def write_events(data: Path, batches: int) -> None:
    """The events of the files as Flink's program reads them: their number, then each one's columns, big-endian."""
    for batch in range(batches):
        path = data / "flink" / f"batch-{batch:05d}.bin"
        if path.exists():
            continue
        path.parent.mkdir(exist_ok=True)
        table = pq.read_table(data / "numbers" / f"batch-{batch:05d}.parquet")
        pads = table["pad"].combine_chunks()
        width = len(pads[0].as_py())
        fields = [("ts", ">i8"), ("counter", ">i8"), ("value", ">i8"), ("pad", f"V{width}")]
        rows = np.zeros(table.num_rows, np.dtype(fields))
        rows["ts"] = table["ts"].cast(pa.int64()).to_numpy()
        for name in ("counter", "value"):
            rows[name] = table[name].to_numpy()
        rows["pad"] = np.frombuffer(pads.buffers()[2], np.dtype(f"V{width}"), table.num_rows)
        unfinished = path.with_suffix(f".{os.getpid()}")
        with unfinished.open("wb") as file:
            file.write(len(rows).to_bytes(4, "big"))
            file.write(rows.tobytes())
        unfinished.replace(path)


def run(folder: Path) -> None:
    from experiments.memory_pressure.cell import java_options

    spec: dict[str, Any] = json.loads((folder / "cell.json").read_text())
    shape = shape_of(spec)
    for name in ("rocksdb", "tmp", "checkpoints"):
        (folder / "work" / name).mkdir(parents=True, exist_ok=True)
    command = [
        *("java", f"-Xmx{spec['heap_bytes'] >> 20}m", *java_options(spec).split(), "-XX:+ExitOnOutOfMemoryError"),
        *(f"--add-opens={name}=ALL-UNNAMED" for name in OPENED),
        *("-cp", spec["classpath"], PROGRAM.stem, STATE_BACKENDS[spec["backend"]], str(folder)),
        *(str(Path(spec["data"]) / "flink"), str(spec["warm_up"] + spec["measured"]), str(shape.start_us(0) // 1_000)),
        *(str(shape.window_us // 1_000), str(shape.past_windows), str(shape.payload_bytes)),
        *(str(max(1 << 20, spec["native_bytes"])), spec["pace"]),
    ]
    subprocess.run(command, check=True)
    put_results(folder)
    (folder / "done.json").write_text("{}")


def put_results(folder: Path) -> None:
    """The last pane of each window, as the results of the workload."""
    import pandas as pd

    means: dict[int, float] = {}
    with (folder / "panes.csv").open() as panes:
        for start_ms, _, _, mean in csv.reader(panes):
            means[int(start_ms) * 1_000] = float(mean)
    Results(folder / "work" / "results").put(
        {("mean", start): pd.DataFrame({"mean": [mean]}) for start, mean in means.items()}
    )


if __name__ == "__main__":
    from experiments.memory_pressure.cell import end_with

    threading.Thread(target=end_with, args=(os.getppid(),), name="parent", daemon=True).start()
    place = Path(sys.argv[1]).absolute()
    try:
        run(place)
    except BaseException:
        (place / "error.txt").write_text(traceback.format_exc())
        sys.exit(1)
