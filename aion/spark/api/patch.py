"""The patch by which ``df.groupBy(...).transformWithState*`` runs on Aion in a job that is otherwise not changed.

It replaces two methods of pyspark's ``GroupedData``: ``transformWithStateInPandas`` and ``transformWithState``. They
call pyspark's own methods unless the session has ``spark.aion.stateful.enabled=true`` and the DataFrame is a stream.
:func:`aion.unconfigure` puts the methods back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from pyspark.sql import DataFrame, GroupedData, SparkSession

from aion.spark.api.group_by import METHODS, Grouped
from aion.spark.session.plans import ROOT, plan_of
from aion.spark.session.settings import REQUIRED
from aion.spark.session.undo import note, note_change

ENABLED = "spark.aion.stateful.enabled"
log = logging.getLogger(__name__)


def install() -> None:
    """Installs the patch. Does nothing if it is installed already."""
    for name, stock in METHODS.items():
        if getattr(GroupedData, name) is stock:
            setattr(GroupedData, name, _replacement(name, stock))
            note_change(f"GroupedData.{name}", partial(setattr, GroupedData, name, stock))


def _replacement(name: str, stock: Callable[..., DataFrame]) -> Callable[..., DataFrame]:
    @wraps(stock)
    def transform(self: GroupedData, *arguments: Any, **named: Any) -> DataFrame:
        spark: SparkSession = self._df.sparkSession
        if not self._df.isStreaming or spark.conf.get(ENABLED, "false").lower() != "true":
            return stock(self, *arguments, **named)
        note(spark, REQUIRED, spark.conf.getAll)
        for key, value in REQUIRED.items():
            spark.conf.set(key, value)
        operator = _name(self._df)
        log.warning(
            "%s runs on Aion, as the operator %r, because %s is true; aion.unconfigure() undoes this",
            name, operator, ENABLED,
        )  # fmt: skip
        result: DataFrame = getattr(Grouped.of_spark(self, operator), name)(*arguments, **named)
        return result

    return transform


def _name(df: DataFrame) -> str:
    """Returns the name of an operator: its number among the stateful processors of the query, from the source on."""
    before = sum(node.name == ROOT for node in plan_of(df))
    return f"stateful-{before}" if before else "stateful"
