"""Functions for ``foreachBatch`` that write the result of a query to tables."""

from __future__ import annotations

from aion.sinks.merge import merge, merge_sql
from aion.sinks.split import split
from aion.sinks.upsert import upsert

__all__ = ["merge", "merge_sql", "split", "upsert"]


def __dir__() -> list[str]:
    """Returns what users call, and not the modules that do it."""
    return __all__
