"""Events in files, for clients and for the tests that start them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

Event = tuple[str, float, float]
"""A key, a time in seconds, and a value."""
DDL = "k string, ts timestamp, v double"
SCHEMA = pa.schema([("k", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("v", pa.float64())])


def put(folder: Path, batches: Iterable[Iterable[Event]]) -> None:
    """Writes a file, and so a batch, for each of ``batches``, behind those that are there."""
    inputs = folder / "in"
    inputs.mkdir(exist_ok=True)
    for batch in batches:
        number = len(list(inputs.iterdir()))
        keys, times, values = zip(*batch, strict=True)
        stamps = pa.array([round(time * 1e6) for time in times], pa.int64()).cast(SCHEMA.field("ts").type)
        written = folder / "being written"
        pq.write_table(pa.table([pa.array(keys), stamps, pa.array(map(float, values))], schema=SCHEMA), written)
        os.utime(written, (1_700_000_000 + number,) * 2)  # the source takes files in this order
        written.rename(inputs / f"{number:06d}.parquet")
