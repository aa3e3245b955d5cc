"""What the progress of a query says about its windows, and the log of a batch that dropped events or missed a bound."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Mapping
from typing import Any

from pyspark import SparkContext
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery

from aion.base.html import html_of
from aion.base.numbers import counted
from aion.core.life.actions import PaneKind
from aion.spark.session.counting import COUNTED, COUNTS, STALE
from aion.spark.session.sessions import application

log = logging.getLogger(__name__)
_NO_PANES = (PaneKind.DROPPED.value, PaneKind.RETRACTED.value)
DROPPED = "dropped_events"
_SUFFIX = 6


def observed(result: DataFrame, name: str) -> DataFrame:
    """Returns the result of an operator whose numbers are in the ``observedMetrics`` of Spark's progress.

    Their name there begins with ``name``, and is another one for each call: Spark refuses equal names with an error in
    which nobody would recognise two operators.
    """
    kind = F.col("kind")
    return result.observe(
        f"{name}-{uuid.uuid4().hex[:_SUFFIX]}",
        _sum(~kind.isin(*_NO_PANES, COUNTED), F.lit(1)).alias("panes"),
        _sum(kind == PaneKind.LATE.value, F.lit(1)).alias("late_panes"),
        _sum(kind == PaneKind.RETRACTED.value, F.lit(1)).alias("retracted"),
        _sum(kind == PaneKind.DROPPED.value, F.col("events")).alias(DROPPED),
        *(_sum((kind == COUNTED) & (F.col("reason") == count), F.col("events")).alias(count) for count in COUNTS),
    ).where(kind != COUNTED)


def _sum(which: Column, what: Column) -> Column:
    return F.coalesce(F.sum(F.when(which, what)), F.lit(0))


def log_batch(progress: Any) -> None:
    """Logs what each operator dropped in a batch, and which bound it missed, if any. ``progress``: of Spark's JVM."""
    metrics = progress.observedMetrics()
    names = metrics.keySet().iterator()
    while names.hasNext():
        name = names.next()
        row = metrics.get(name)
        if STALE not in list(row.schema().fieldNames()):
            continue
        said = []
        if dropped := row.getAs(DROPPED):
            said.append(f"dropped {counted(dropped, 'event')} (see aion.dropped)")
        if stale := row.getAs(STALE):
            said.append(f"ended {counted(stale, 'window')} that had been staler than trigger.bound")
        if said:
            log.info("%s: batch %d %s", name[: -_SUFFIX - 1], progress.batchId(), " and ".join(said))


class Progress(dict[str, dict[str, Any]]):
    """The numbers of each operator, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        return "".join(html_of(name, numbers) for name, numbers in self.items()) or html_of("no operator", {})


def progress(query: StreamingQuery) -> dict[str, dict[str, Any]]:
    """Returns the numbers of each operator of a query, by the operator's name.

    For example::

        aion.progress(query)["windowed"]["memory_bytes"]

    ``batch``: the last batch that Spark has reported, with what Spark's progress has of it. The others are of the state
    server on the driver's host, now: ``windows``, ``memory_bytes`` and ``disk_bytes`` (what is in both counts in both),
    ``shards``, the bounds of new windows (``bounds_us``), the ``coverage`` of bounds, and, if the state is behind a
    URI, the ``requests`` to it for the last batch. They are missing if there is no server on this host. See
    docs/operate/metrics.md.
    """
    found = Progress()
    for report in query.recentProgress:
        read = json.loads(report.json)
        for name, metrics in read.get("observedMetrics", {}).items():
            if STALE in (counts := _by_name(metrics)):
                found[name[: -_SUFFIX - 1]] = {"batch": read["batchId"], **counts}
    for name, state in kept(query).items():
        found.setdefault(name, {}).update({key: value for key, value in state.items() if key not in _TOTALS})
    return found


def _by_name(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns metrics by their names. Spark Connect reports them as a row with its schema."""
    if metrics.keys() != {"values", "schema"}:
        return metrics
    return dict(zip((field["name"] for field in metrics["schema"]["fields"]), metrics["values"], strict=True))


_TOTALS = ("commits", "restores", "counters", "largest_staleness", "requests_total")


def kept(query: StreamingQuery) -> Mapping[str, Mapping[str, Any]]:
    """What the state server of this host has of a query, by operator."""
    from aion.errors import ServerError
    from state_backends.server.client import StateClient  # only here: workers import this module, too

    session = getattr(query, "_session", None)  # of Spark Connect
    context = SparkContext._active_spark_context
    if session is not None:
        client = StateClient.find(application(session))
    else:
        client = None if context is None else StateClient.find(context.applicationId)
    if client is None:
        return {}
    try:
        kept: Mapping[str, Mapping[str, Any]] = client.stats()["queries"].get(str(query.id), {})
        return kept
    except ServerError:
        return {}
    finally:
        client.close()
