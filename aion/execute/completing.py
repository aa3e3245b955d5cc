"""Says of result rows how complete they are (docs/inside/lateness.md)."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from aion.aggregates.values import Ints, combined
from aion.base.row_hash import hash_rows
from aion.core.life.actions import Execute
from aion.core.operator.completeness import PaneFacts, rate
from aion.core.operator.operator import Operator
from aion.core.query.columns import COMPLETENESS_COLUMNS
from aion.core.query.plan import Plan

_SEED = 0x636F6D70  # the rows that are learnt from must not depend on how keys are spread over shards


def with_completeness(plan: Plan, operator: Operator, order: Execute, rows: pa.RecordBatch) -> pa.RecordBatch:
    """The rows of an execution, with the columns of :data:`COMPLETENESS_COLUMNS` if the plan has them."""
    if not plan.completeness or not rows.num_rows:
        return rows
    watermark_us = operator.watermark.at_us
    if operator.completeness is None or watermark_us is None:
        return rows
    start_us, end_us = (
        combined(rows.column(f"window_{edge}")).cast(pa.int64()).to_numpy() for edge in ("start", "end")
    )
    definition = plan.numbers_of(rows.column("window"), start_us)
    events, late_events = (rows.column(name).to_numpy() for name in ("events", "late_events"))
    facts = PaneFacts(_keys(plan, rows), definition, start_us, end_us, events, late_events)
    rated = rate(operator.completeness, operator.windows, watermark_us, order.kind, facts)
    for name, values in zip(COMPLETENESS_COLUMNS, rated, strict=True):
        known = pa.array(values, mask=np.isnan(values))
        rows = rows.set_column(rows.schema.get_field_index(name), name, known)
    return rows


def _keys(plan: Plan, rows: pa.RecordBatch) -> Ints:
    if not plan.key:
        return np.zeros(rows.num_rows, np.int64)
    hashes = hash_rows([combined(rows.column(name)) for name in plan.key], _SEED)
    return (hashes >> np.uint64(1)).astype(np.int64)
