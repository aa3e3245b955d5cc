"""What the driver looks at when a query starts, before its first batch: the place of the state, and what is there.

Spark tells listeners that a query starts, and waits for them, but takes no error from them. So ``start`` of pyspark's
writer is replaced (:func:`install`): when Spark's own returns, it raises what was found, and has stopped the query.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter

from aion.core.query.sink_notes import FOLDER, notes_of
from aion.errors import AionError
from aion.spark.session.checkpoint_files import CheckpointFiles
from aion.spark.session.partitions import rescaled, take_back
from aion.spark.session.plans import ROOT, Node, plan_of
from aion.spark.session.query_settings import BEGINS, ENDS, EVERY, QUIET, REFUSED, RESCALED
from aion.spark.session.rewound import complete_interrupted
from aion.spark.session.sessions import is_remote, master
from aion.spark.session.settings import of_queries
from aion.spark.session.undo import note_change
from aion.spark.start import connect, downstream, run_ends
from aion.spark.start.kept_state import Look, StartedOperator, check_names, settings_of

_METHODS = ("start", "toTable")
_MOST = 1000
log = logging.getLogger(__name__)


_operators: OrderedDict[tuple[str, int], StartedOperator] = OrderedDict()
"""By the calls of their roots."""
_refused: dict[str, AionError] = {}
"""Why queries cannot run, by their runs."""


def remember(result: DataFrame, operator: StartedOperator) -> None:
    """Notes the operator whose result this is, so that queries with it can be looked at when they start."""
    if is_remote(result.sparkSession):
        connect.remember(result, operator)
        return
    root = next(_roots(plan_of(result)))
    _operators[root] = operator
    if len(_operators) > _MOST:
        _operators.popitem(last=False)


def _roots(plan: Node) -> Iterator[tuple[str, int]]:
    """Yields the calls of all roots in a plan, the last one first."""
    return (node.function for node in plan if node.name == ROOT and node.function is not None)


def look(spark: SparkSession, execution: Any, plan: Node, run: str, checkpoint: str, conf: Any) -> None:
    """Looks at the operators of a query that starts. ``execution``: Spark's, and its ``plan``. ``conf``: of the
    query's own session.
    """
    there = [_operators[root] for root in _roots(plan) if root in _operators]
    files = CheckpointFiles(spark, checkpoint)
    complete_interrupted(files)
    if not there:
        return
    for key, value in (of_queries(spark) | downstream.settings(plan)).items():
        conf.set(key, value)
    take_back(files)
    batches = files.batches("commits")
    if (idle := rescaled(files, batches)) is not None:
        conf.set(RESCALED, json.dumps(idle))
        _tell_sink(spark, execution, idle)
    if (begins := files.first_batch(batches)) is not None:
        conf.set(BEGINS, str(begins))
    if (ends := run_ends.decide(execution, files, batches)) is not None:
        conf.set(ENDS, ends)
    conf.set(QUIET, run_ends.quiet(begins, ends))
    if (every_ms := run_ends.interval_ms(execution)) > 0:
        conf.set(EVERY, str(every_ms))
    query = execution.id().toString() if batches else None
    is_here = master(spark).startswith("local")
    try:
        check_names(there)
        downstream.check(plan, lambda call: _operators[call].config if call in _operators else None)
        last, names = max(batches, default=None), tuple(operator.config.name for operator in there)
        notes = notes_of(files.read(f"{FOLDER}/{name}") for name in files.names(FOLDER))
        for operator in there:
            seen = Look(operator, query, checkpoint, is_here, last, names, notes)()
            for key, value in settings_of(operator.config.name, seen).items():
                conf.set(key, value)
    except AionError as error:
        refuse(run, error, conf)


def _tell_sink(spark: SparkSession, execution: Any, idle: tuple[int, int]) -> None:
    """Gives Spark's sink for files the batches that it has not seen, without rows: it cannot be read with a gap."""
    sink = execution.sink()
    if sink.getClass().getSimpleName() != "FileStreamSink":
        return
    jvm: Any = spark._jvm
    nothing = spark._jsparkSession.createDataFrame(jvm.java.util.ArrayList(), execution.analyzedPlan().schema())
    for batch in range(idle[0], idle[1] + 1):
        sink.addBatch(batch, nothing)


def refuse(run: str, error: AionError, conf: Any) -> None:
    """Notes that a query cannot run, for ``start`` and for its tasks, which may begin before that returns.

    If there are several reasons, the first one is raised.
    """
    if run not in _refused:
        conf.set(REFUSED, json.dumps([type(error).__name__, str(error)]))
        _refused[run] = error


def install() -> None:
    """Replaces ``start`` and ``toTable`` of pyspark's writer. Does nothing if that is done."""
    for name in _METHODS:
        stock = getattr(DataStreamWriter, name)
        if not hasattr(stock, "__wrapped_by_aion__"):
            setattr(DataStreamWriter, name, _raising(stock))
            note_change(f"DataStreamWriter.{name}", partial(setattr, DataStreamWriter, name, stock))


def _raising(stock: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(stock)
    def start(self: DataStreamWriter, *arguments: Any, **named: Any) -> Any:
        query = stock(self, *arguments, **named)
        error = _refused.pop(str(query.runId), None)
        if error is not None:
            query.stop()
            raise error.with_traceback(None)  # where it was found is of no use to a user
        return query

    start.__wrapped_by_aion__ = True  # type: ignore[attr-defined]
    return start
