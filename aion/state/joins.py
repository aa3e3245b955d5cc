"""The rows that a join keeps in one version of a shard."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from aion.base.identity import identify
from aion.core.join.plan import SIDES, JoinPlan
from aion.core.join.rows import GONE, MATCHED, JoinRows, SideRows
from aion.execute.joining import BOUNDS, SECRET
from aion.state.columns import conformed
from aion.state.filters import Asked
from state_backends.server.reading import VersionReader


def join_rows(plan: JoinPlan, reader: VersionReader, asked: Asked, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yields the rows that one which may still come could match or repeat, a page at a time.

    ``asked``: rows with a time in its stretch are wanted. ``schema``: of the answer.
    """
    snapshot = reader.manifest.snapshot
    own = schema.names[-4:]  # another version may have a column of the user with such a name
    lines, at_us = snapshot["lines_us"], snapshot["watermark_us"]
    # Earlier versions do not say the bounds. Each line is as far behind the watermark.
    bounds = snapshot.get(BOUNDS) or [0 if at_us is None else at_us - line for line in lines]
    gone_before = plan.needed_from([-bound for bound in bounds])  # if the watermark were 0
    hashes = None
    if asked.keys is not None:
        columns = [column.combine_chunks() for column in asked.keys.columns]
        hashes = identify(columns, bytes.fromhex(snapshot[SECRET]))[:, 0]
    for side, before_us in enumerate(plan.needed_from(lines)):
        stored = SideRows(plan, side, reader)
        first_us = max(before_us, asked.start_us)
        first, last = (int(us) // stored.bin_us for us in (first_us, asked.end_us))
        for batch in stored.pages.all(first, last, hashes):
            rows = JoinRows.stored(pa.Table.from_batches([batch]))
            wanted = (rows.time >= first_us) & (rows.time < asked.end_us) & ~rows.has(GONE)
            keys = [rows.table.column(name).combine_chunks().cast(schema.field(name).type) for name in plan.key]
            wanted &= asked.among(keys, len(rows))
            rows = rows.take(np.flatnonzero(wanted))
            if not len(rows):
                continue
            of_row = {name: rows.table.column(name).combine_chunks() for name in rows.table.column_names}
            matched = pa.array(rows.has(MATCHED)) if plan.outer[side] else None
            said = (
                pa.repeat(SIDES[side], len(rows)),
                pa.array(rows.time).cast(plan.timestamp),
                matched,
                pa.array(rows.time - gone_before[side] + 1).cast(plan.timestamp),
            )
            yield conformed(of_row | dict(zip(own, said, strict=True)), len(rows), schema)
