"""What all sinks are: functions for ``foreachBatch`` that know which rows of a batch a table needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from aion.core.query.pane_parts import metadata_of_field
from aion.sinks.marks import Mark
from aion.sinks.rows import Change, Panes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True)
class Sink(ABC):
    """A function for ``foreachBatch``.

    ``key``: the key columns that the user names, if any. ``adopt``: the mark with which a table is taken over.
    """

    table: str
    key: tuple[str, ...] | None
    adopt: str | None

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Raises SchemaError if the rows do not fit into the table, SinkError if the batch does not follow its last."""
        from aion.sinks.frames import mark_of, panes_of

        mark = mark_of(batch, batch_id)
        panes = Panes.of([(field.name, field.metadata) for field in batch.schema], self.key)
        rows = panes_of(batch, (*panes.written, panes.seq), as_json=not self.nested)
        self.apply(panes.change(rows), mark)

    def write(self, rows: pa.Table, mark: Mark) -> None:
        """Applies the panes of a batch, as :class:`aion.LocalOperator` returns them. Raises what a call raises."""
        panes = Panes.of([(field.name, metadata_of_field(field)) for field in rows.schema], self.key)
        self.apply(panes.change(rows), mark)

    @property
    @abstractmethod
    def nested(self) -> bool:
        """Whether a column can hold lists, maps and structs. If not, they are written as JSON."""

    @abstractmethod
    def apply(self, change: Change, mark: Mark) -> None:
        """Changes the table, in one transaction, unless the mark says that it has the batch."""


def names(key: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns the key columns that a user names."""
    return (key,) if isinstance(key, str) else None if key is None else tuple(key)
