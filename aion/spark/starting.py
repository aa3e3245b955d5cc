"""What the driver looks at when a query starts, before its first batch: the place of the state, and what is there.

Spark tells listeners that a query starts, and waits for them, but takes no error from them. So ``start`` of pyspark's
writer is replaced (:func:`install`): when Spark's own returns, it raises what was found, and has stopped the query.
"""

from __future__ import annotations

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter

from aion.core.query.sink_notes import FOLDER, notes_of
from aion.errors import AionError
from aion.spark import remote_starts
from aion.spark.checkpoint_files import CheckpointFiles
from aion.spark.look import Look, Operator, check_names, settings_of
from aion.spark.partitions import rescaled, take_back
from aion.spark.query_settings import REFUSED, RESCALED
from aion.spark.sessions import analyzed, is_remote, master

_ROOT = re.compile(r"TransformWithStateInPySpark (\S+\(.*?\)#\d+)")
_METHODS = ("start", "toTable")
_MOST = 1000
log = logging.getLogger(__name__)


_operators: OrderedDict[str, Operator] = OrderedDict()
"""By how Spark's plans call their roots, which is another name for each call."""
_refused: dict[str, AionError] = {}
"""Why queries cannot run, by their runs."""


def remember(result: DataFrame, operator: Operator) -> None:
    """Notes the operator whose result this is, so that queries with it can be looked at when they start."""
    if is_remote(result.sparkSession):
        remote_starts.remember(result, operator)
        return
    found = _ROOT.search(analyzed(result))
    assert found is not None, "the result of a root has it in its plan"
    _operators[found[1]] = operator
    if len(_operators) > _MOST:
        _operators.popitem(last=False)


def look(spark: SparkSession, execution: Any, plan: str, run: str, checkpoint: str, conf: Any) -> None:
    """Looks at the operators of a query that starts. ``execution``: Spark's, and its ``plan`` as text. ``conf``: of the
    query's own session.
    """
    there = [_operators[name] for name in _ROOT.findall(plan) if name in _operators]
    if not there:
        return
    files = CheckpointFiles(spark, checkpoint)
    take_back(files)
    batches = files.batches("commits")
    if (idle := rescaled(files, batches)) is not None:
        conf.set(RESCALED, json.dumps(idle))
        _tell_sink(spark, execution, idle)
    query = execution.id().toString() if batches else None
    is_here = master(spark).startswith("local")
    try:
        check_names(there)
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
    """Notes that a query cannot run, for ``start`` and for its tasks, which may begin before that returns."""
    conf.set(REFUSED, json.dumps([type(error).__name__, str(error)]))
    _refused[run] = error


def install() -> None:
    """Replaces ``start`` and ``toTable`` of pyspark's writer. Does nothing if that is done."""
    for name in _METHODS:
        stock = getattr(DataStreamWriter, name)
        if not hasattr(stock, "__wrapped_by_aion__"):
            setattr(DataStreamWriter, name, _raising(stock))


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
