"""What the root of a join needs to know, and the children that pack the rows of its sides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from aion.core.join.plan import JoinPlan
from aion.spark.tasks.root_config import TaskConfig
from aion.spark.tasks.stateful_child import StatefulChild

SIDE = b"aion.side"
"""In the metadata of packed rows: which side they are of."""


def packed_in(frame: Any) -> Any:
    """Returns the packed rows in a frame. Behind a union, Spark gives its columns other names."""
    return frame.iloc[:, -1]


class JoinChild(StatefulChild):
    """Packs the rows of one side. ``side``: its number. ``names``: those that the columns get."""

    def __init__(self, operator: str, ids: tuple[int, ...], side: int, names: tuple[str, ...]) -> None:
        super().__init__(operator, ids, asks=side == 0)
        self._side, self._names = side, names

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        said = {SIDE: str(self._side)}
        named = (batch.rename_columns(self._names).replace_schema_metadata(said) for batch in batches)
        yield from super().__call__(named)


@dataclass(frozen=True, kw_only=True)
class JoinConfig(TaskConfig):
    """For :class:`aion.spark.tasks.join_root.JoinDefinition`."""

    plan: JoinPlan
