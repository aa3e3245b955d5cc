"""What the progress of a query says about its windows, and the log of a batch that dropped events."""

from __future__ import annotations

import logging
import uuid
from typing import Any

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from aion.core.operator.actions import PaneKind

log = logging.getLogger(__name__)
_NO_PANES = (PaneKind.DROPPED.value, PaneKind.RETRACTED.value)
DROPPED = "dropped_events"


def observed(result: DataFrame, name: str) -> DataFrame:
    """Returns the result of an operator whose numbers are in the ``observedMetrics`` of Spark's progress.

    Their name there begins with ``name``, and is another one for each call: Spark refuses equal names with an error in
    which nobody would recognise two operators.
    """
    kind = F.col("kind")
    return result.observe(
        f"{name}-{uuid.uuid4().hex[:6]}",
        _sum(~kind.isin(*_NO_PANES), F.lit(1)).alias("panes"),
        _sum(kind == PaneKind.LATE.value, F.lit(1)).alias("late_panes"),
        _sum(kind == PaneKind.RETRACTED.value, F.lit(1)).alias("retracted"),
        _sum(kind == PaneKind.DROPPED.value, F.col("events")).alias(DROPPED),
    )


def _sum(which: Column, what: Column) -> Column:
    return F.coalesce(F.sum(F.when(which, what)), F.lit(0))


def log_drops(progress: Any) -> None:
    """Logs how many events each operator dropped in a batch, if any. ``progress``: of Spark's JVM."""
    metrics = progress.observedMetrics()
    names = metrics.keySet().iterator()
    while names.hasNext():
        name = names.next()
        row = metrics.get(name)
        fields = row.schema().fieldNames()
        if DROPPED in list(fields):
            dropped = row.getAs(DROPPED)
            if dropped:
                log.info("%s: batch %d dropped %d events; see aion.dropped", name, progress.batchId(), dropped)
