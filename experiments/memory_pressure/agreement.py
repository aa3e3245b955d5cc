"""Whether the last results of a cell are those of a batch computation over the same events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from experiments.memory_pressure.settings import shape_of
from experiments.workloads import load
from experiments.workloads.chaining import Results

if TYPE_CHECKING:
    import pandas as pd

LONGEST = 2
"""The windows that the longest window of a workload spans."""


def agreement(results: Path, data: Path, spec: Mapping[str, Any]) -> dict[str, Any]:
    """``agrees``: true, false, or null if there is nothing to compare; ``difference``: where the first one is.

    At the pace of real time a query is stopped after its last batch, so only windows are compared whose lateness ended.
    """
    if spec["source"] == "rate" or not data.exists() or not results.exists():
        return {"agrees": None, "difference": "there are no events or results to compare"}
    policy = spec["policy"] or {}
    if policy.get("lateness", {}).get("coverage") is not None:
        return {"agrees": None, "difference": "its bound was learnt, so that some late events were dropped"}
    workload, shape = load(spec["workload"]), shape_of(spec)
    batches = spec["warm_up"] + spec["measured"]
    wanted = workload.truth(_events(data, workload.streams, batches), shape)
    found = Results(results).read()
    last_us = None
    if spec["pace"] == "real":
        last_us = shape.start_us(batches - 2 - shape.past_windows - LONGEST)
    for name, rows in wanted.items():
        if last_us is not None:
            rows = rows[rows["window_start"] <= last_us]
        if name not in found:
            return {"agrees": False, "difference": f"no results of {name}"}
        there = found[name]
        there = there if last_us is None else there[there["window_start"] <= last_us]
        if difference := _difference(rows, there):
            return {"agrees": False, "difference": f"{name}: {difference}"}
    return {"agrees": True, "difference": None}


def _events(data: Path, streams: Iterable[str], batches: int) -> dict[str, pa.Table]:
    """All events without their padding, which no result depends on."""
    found = {}
    for stream in (data / name for name in streams):
        paths = [stream / f"batch-{batch:05d}.parquet" for batch in range(batches)]
        names = pq.read_schema(paths[0]).names
        tables = [pq.read_table(path, columns=[name for name in names if name != "pad"]) for path in paths]
        table = pa.concat_tables(tables)
        if "pad" in names:
            table = table.append_column("pad", pa.nulls(table.num_rows))
        found[stream.name] = table
    return found


def _difference(wanted: pd.DataFrame, found: pd.DataFrame) -> str | None:
    columns = sorted(wanted.columns)
    if missing := set(columns) - set(found.columns):
        return f"no column {', '.join(sorted(missing))}"
    numbers = [column for column in columns if wanted[column].dtype.kind == "f"]
    by = [column for column in columns if column not in numbers]
    one, other = (frame[columns].sort_values(by, ignore_index=True) for frame in (wanted, found))
    if len(one) != len(other):
        return f"{len(other):,} rows instead of {len(one):,}"
    for column in columns:
        a, b = (frame[column].to_numpy() for frame in (one, other))
        same = np.isclose(a.astype(float), b.astype(float), rtol=1e-9, atol=1e-9) if column in numbers else a == b
        if not np.all(same):
            return f"{column} differs in {int(np.sum(~np.asarray(same))):,} of {len(a):,} rows"
    return None
