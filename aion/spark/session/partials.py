"""Lets Spark's own aggregate functions group the events of each source partition in the JVM, before they reach Python.

Spark has no call for an aggregation without a shuffle and without state. So the driver compiles a planning strategy
(``PartialAggregates.java``, with the compiler that Spark brings for its generated code), and adds it to those of the
session. It plans a marked node of a query as such an aggregation. If few rows come out of it, it leaves out the
function of Python above, too. Executors need nothing. A session to which it cannot be added groups events in Python,
and so does a session that loses it while a query runs.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import TimestampNTZType

from aion.core.ingest.grouped import GROUP, STATE, Grouped, why_not
from aion.core.ingest.packed import MAGIC, can_be_packed
from aion.core.query.plan import Plan
from aion.errors import ConfigError
from aion.spark.session.group_counter import GroupCounter
from aion.spark.session.query_settings import PAST, QUIET, STORED
from aion.spark.session.sessions import is_remote
from aion.spark.session.settings import JVM_PARTIALS

AUTO, OFF = "auto", "off"
_MARKER = "aion-partials"
_CLASS = "aion.PartialAggregates"
_MICROS = "event_us"
log = logging.getLogger(__name__)


def why_in_python(session: SparkSession, plan: Plan, *, drops_bad_texts: bool) -> str | None:
    """Says why Python groups the events, or returns None if Spark does. Raises ConfigError for an unknown setting."""
    asked = session.conf.get(JVM_PARTIALS, AUTO)
    if asked not in (AUTO, OFF):
        raise ConfigError(f"{JVM_PARTIALS}: {asked!r} is neither {AUTO!r} nor {OFF!r}")
    if asked == OFF:
        return f"{JVM_PARTIALS} is {OFF!r}"
    reason = why_not(plan, drops_bad_texts=drops_bad_texts)
    if reason is not None:
        return reason
    return _why_not_here(session)


def _why_not_here(session: SparkSession) -> str | None:
    """Adds the strategy to a session. Says why that is not possible, or returns None."""
    if is_remote(session):
        return said("the planning of Spark Connect's server cannot be extended")
    try:
        _add(session)
    except Exception as error:  # whatever a platform has changed or forbids
        first = str(error).strip().splitlines() or [type(error).__name__]
        return said(f"the planning of this Spark cannot be extended ({first[0]})")
    return None


@lru_cache(maxsize=16)
def said(reason: str) -> str:
    """Logs a reason that lies in the session, once, and returns it."""
    log.info("Python groups the events of each query, because %s", reason)
    return reason


def _add(session: SparkSession) -> None:
    """Adds the strategy to a session, beside those that it has. A copy that Spark makes of the session has it, too."""
    strategy = _strategy(session)
    methods = session._jsparkSession.experimental()
    existing = methods.extraStrategies()
    if not existing.contains(strategy):
        getattr(methods, "extraStrategies_$eq")(existing.appended(strategy))


_counters: list[GroupCounter] = []


def decide() -> None:
    """Lets each call decide after a batch of a query."""
    for counter in _counters:
        counter.decide()


_compiled: dict[str, Any] = {}
"""The strategy, by the application in whose JVM it is."""


def _strategy(session: SparkSession) -> Any:
    context = session.sparkContext
    if context.applicationId not in _compiled:
        jvm = context._jvm
        assert jvm is not None
        text = Path(__file__).with_name("PartialAggregates.java").read_text(encoding="utf-8")
        compiler = jvm.org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(jvm.org.apache.spark.util.Utils.getContextOrSparkClassLoader())
        words = {"MARKER": _MARKER, "PAST": PAST, "STORED": STORED, "QUIET": QUIET, "MAGIC": MAGIC.decode()}
        for word, meant in words.items():
            text = text.replace(f'"{word}', f'"{meant}')
        compiler.cook(text)
        nothing = [context._gateway.new_array(kind, 0) for kind in (jvm.java.lang.Class, jvm.java.lang.Object)]
        made = compiler.getClassLoader().loadClass(_CLASS).getConstructor(nothing[0])
        _compiled.clear()
        _compiled[context.applicationId] = made.newInstance(nothing[1])
    return _compiled[context.applicationId]


def grouped(
    rows: DataFrame,
    plan: Plan,
    name: str,
    *,
    shard: Column | None,
    flags: str | None,
    flagged: Mapping[int, int | None],
) -> tuple[DataFrame, GroupCounter]:
    """Returns rows that Spark groups when it plans a batch, and what tasks count. Where Spark does not group them, they
    only have more columns.

    ``rows``: the columns of the plan, ``column0``, ``column1``, ... ``name``: of the operator. ``shard``: the shard of
    a row by its key, to which its group goes if the function above is left out; without it, that function always stays.
    ``flags``: the column that says which rows no window takes. ``flagged``: the slices of these rows, by their flags.
    """
    how, columns, call = Grouped(plan), rows.columns, uuid.uuid4().hex
    _counters.append(counter := GroupCounter(rows.sparkSession.sparkContext, call, _strategy(rows.sparkSession)))
    rows = rows.select("*", _micros(rows, f"column{plan.schema.get_field_index(plan.time)}").alias(_MICROS))
    conditions = {} if flags is None else {f"{flags} = {flag}": at for flag, at in flagged.items()}
    for step in how.steps(_MICROS, conditions):
        rows = rows.select("*", *(F.expr(sql).alias(column) for column, sql in step.items()))
    metrics = [F.max(F.expr(each.sql)).alias(f"{GROUP}{number}") for number, each in enumerate(how.groups)]
    metrics += [F.expr(each.sql).alias(f"{STATE}{number}") for number, each in enumerate(how.aggregates)]
    if shard is not None and all(can_be_packed(each.type) for each in (*how.groups, *how.aggregates)):
        metrics.append(F.max(shard).alias("shard"))
    return rows.observe(":".join((_MARKER, str(len(columns)), call, name)), *metrics), counter


def _micros(rows: DataFrame, name: str) -> Column:
    """Returns a time as microseconds, as ``window`` has it. No function does that for a time without a zone."""
    from pyspark.sql.classic.column import Column as ClassicColumn  # only here: a client of Spark Connect lacks it

    jvm: Any = rows.sparkSession.sparkContext._jvm
    types, utils = jvm.org.apache.spark.sql.types.DataTypes, jvm.org.apache.spark.sql.classic.ExpressionUtils
    zoned = not isinstance(rows.schema[name].dataType, TimestampNTZType)
    conversion = jvm.org.apache.spark.sql.catalyst.expressions.PreciseTimestampConversion(
        utils.expression(rows[name]._jc), types.TimestampType if zoned else types.TimestampNTZType, types.LongType
    )
    return ClassicColumn(utils.column(conversion))
