"""Panes as a query yields them, without a query."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pyarrow as pa

import aion
from aion.core.query.pane_columns import metadata_of, with_metadata
from aion.core.query.plan import make_plan, result_schema
from aion.sinks.marks import History, Mark, digest_of

MINUTE = 60_000_000
UTC = pa.timestamp("us", "UTC")
QUERY = History("query", "file:/checkpoint")


def at(batch: int, history: History = QUERY, run: str | None = None) -> Mark:
    return Mark(history, batch, run=None if run is None else digest_of(run))


EVENTS = pa.schema([("k", pa.string()), ("ts", UTC)])
PLAN = make_plan(
    EVENTS,
    key="k",
    time="ts",
    windows={name: aion.Tumbling("1 minute") for name in ("minute", "other")},
    aggregates=None,
    apply=lambda key, window, events: [],
    outputs="n long",
)


def panes(
    rows: Iterable[dict[str, Any]],
    *outputs: pa.Field,
    key: pa.DataType | None = None,
    single: bool = True,
    keyed: bool = True,
) -> pa.Table:
    """Rows of one-minute windows with ``k``, ``minute`` and the outputs (default: ``n``), each a pane of its own.

    Rows with the same ``pane_seq`` are one pane; without ``single`` there may be such.
    """
    fields = outputs or (pa.field("n", pa.int64()),)
    schema = result_schema([pa.field("k", key or pa.string())] if keyed else [], UTC, fields)
    plan = replace(PLAN, apply=None if single else PLAN.apply, key=PLAN.key if keyed else ())
    parts = metadata_of(plan, "minutes", 0) | {o.name: o.metadata for o in fields if o.metadata}
    schema = with_metadata(schema, parts)
    complete = []
    for number, row in enumerate(rows):
        start = row.pop("minute", 0) * MINUTE
        end = start + row.pop("length", 1) * MINUTE
        usual = {
            "window": "minute",
            "window_start": start,
            "window_end": end,
            "pane": 0,
            "kind": "on_time",
            "pane_seq": number,
        }
        complete.append(usual | {"events": 1, "late_events": 0} | row)
    return pa.Table.from_pylist(complete, schema)
