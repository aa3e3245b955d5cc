"""Dropped rows as rows of a table of their own. Pure.

They have the query and the batch, and a batch that is written again replaces its own. So each is there once.
"""

from __future__ import annotations

import pyarrow as pa

from aion.sinks.marks import Mark
from aion.sinks.rows import TableChange

IGNORE = "ignore"
"""For ``dropped=``: nobody wants to know of them."""
QUERY, BATCH = "aion_query", "aion_batch"


def dropped_rows(rows: pa.Table, mark: Mark) -> TableChange:
    """Returns what a batch does to the table of dropped rows."""
    place = {QUERY: mark.history.query, BATCH: mark.batch}
    fields = [pa.field(QUERY, pa.string()), pa.field(BATCH, pa.int64())]
    gone = pa.Table.from_pylist([] if rows.num_rows else [place], pa.schema(fields))
    for number, field in enumerate(fields):
        rows = rows.add_column(number, field, pa.array([place[field.name]] * rows.num_rows, field.type))
    return TableChange((QUERY, BATCH), rows, gone, start=BATCH, single=False)


def left_out(table: str, rows: int, mark: Mark) -> str:
    """Returns a warning that a query drops events, and nobody keeps them."""
    return (
        f"{mark.history} has dropped events: {rows} rows of kind 'dropped' in batch {mark.batch}, the first ones that "
        f"this run did not write to table {table!r}; pass dropped='TABLE' to keep them in a table, or dropped='ignore'"
    )
