"""Sends the panes of each batch to one function, and the dropped rows to another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BatchFunction = Callable[["DataFrame", int], Any]


def split(*, panes: BatchFunction, dropped: BatchFunction) -> BatchFunction:
    """Returns a function for ``foreachBatch`` that calls two functions with each batch.

    For example::

        write = aion.sinks.split(panes=aion.sinks.upsert("sqlite:///tolls.db", "tolls"), dropped=keep)
        query = result.writeStream.foreachBatch(write).start()

    ``panes`` gets the rows of :func:`aion.panes`, and ``dropped`` those of :func:`aion.dropped`. Both get the number of
    the batch. The batch is computed once, whatever the functions do with it. If one raises, the batch fails, and Spark
    runs it again with both.
    """
    return _Split(panes, dropped)


@dataclass(frozen=True)
class _Split:
    panes: BatchFunction
    dropped: BatchFunction

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        from aion.sinks.frames import computed
        from aion.spark.api.stream import dropped, panes

        with computed(batch) as rows:
            self.panes(panes(rows), batch_id)
            self.dropped(dropped(rows), batch_id)
