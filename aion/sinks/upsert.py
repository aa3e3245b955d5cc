"""``upsert``: keeps the newest result of each window in a table of a database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pyarrow as pa

from aion.sinks.database import TableName, is_empty, locked_mark, prepare, set_mark
from aion.sinks.marks import Mark, is_new
from aion.sinks.rows import change_of, identity_of, written_columns
from aion.sinks.uris import kind_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def upsert(uri: str, table: str, key: str | Sequence[str] | None = None, *, adopt: str | None = None) -> Upsert:
    """Returns a function for ``foreachBatch`` that keeps the newest result of each window in a table.

    ``uri``: ``sqlite:///PATH``, ``postgresql://USER@HOST/DATABASE`` or ``duckdb:///PATH``. ``table``: its name, or
    ``schema.table``. It is made if it is missing. ``key``: the key columns; by default those before ``window``. A row
    is found by the key, ``window``, ``window_start`` and ``window_end``; nulls are equal to each other. Retracted rows
    are deleted, and dropped rows are left out.

    A batch is one transaction, and changes nothing if it is run again. A batch that does not follow the one that the
    table has is refused, and the error says which value of ``adopt`` lets the query continue (docs/sinks.md). Raises
    ConfigError or MissingExtra.
    """
    TableName.of(table)
    return Upsert(
        kind_of(uri).resolve(uri), table, (key,) if isinstance(key, str) else None if key is None else tuple(key), adopt
    )


@dataclass(frozen=True)
class Upsert:
    """A function for ``foreachBatch``."""

    uri: str = field(repr=False)  # a password may be in it
    table: str
    key: tuple[str, ...] | None
    adopt: str | None

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Raises SchemaError if the rows do not fit into the table, SinkError if the batch does not follow its last."""
        from aion.sinks.frames import history_of, panes_of

        mark = Mark(history_of(batch), batch_id)
        identity_of(batch.columns, self.key)
        self.write(panes_of(batch, written_columns(batch.columns), json=not kind_of(self.uri).nested), mark)

    def write(self, panes: pa.Table, mark: Mark) -> None:
        """Applies the panes of a batch, in one transaction. Raises what a call raises."""
        panes = panes.select(written_columns(panes.column_names))
        change = change_of(panes, identity_of(panes.column_names, self.key))
        table = TableName.of(self.table)
        with kind_of(self.uri).open(self.uri) as database:
            before = locked_mark(database, table)
            prepare(database, table, change)
            if not is_new(self.table, before, is_empty(database, table), mark, self.adopt):
                return
            database.replace(table, change)
            set_mark(database, table, mark, before)
