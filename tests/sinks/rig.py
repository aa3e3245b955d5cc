"""Panes as a query yields them, without a query."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from aion.core.query.plan import result_schema
from aion.sinks.marks import History, Mark

MINUTE = 60_000_000
UTC = pa.timestamp("us", "UTC")
QUERY = History("query", "file:/checkpoint")


def at(batch: int, history: History = QUERY) -> Mark:
    return Mark(history, batch)


def panes(rows: Iterable[dict[str, Any]], *outputs: pa.Field, key: pa.DataType | None = None) -> pa.Table:
    """Rows of one-minute windows with ``k``, ``minute`` and the outputs (default: ``n``)."""
    fields = outputs or (pa.field("n", pa.int64()),)
    schema = result_schema([pa.field("k", key or pa.string())], UTC, fields)
    schema = pa.schema([next((o for o in fields if o.name == f.name), f) for f in schema])  # with its metadata
    complete = []
    for row in rows:
        start = row.pop("minute", 0) * MINUTE
        end = start + row.pop("length", 1) * MINUTE
        usual = {"window": "minute", "window_start": start, "window_end": end, "pane": 0, "kind": "on_time"}
        complete.append(usual | {"events": 1, "late_events": 0} | row)
    return pa.Table.from_pylist(complete, schema)
